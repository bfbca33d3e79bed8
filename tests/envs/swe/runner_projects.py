"""Small projects for each test runner, with the statuses that their tests have by construction.

`make_reports.py` runs them and keeps what the runners wrote in `reports/`. `$OUT` is a folder for report files.
"""

import dataclasses
from collections.abc import Mapping

PASS, FAIL, SKIP = "pass", "fail", "skip"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Project:
    """Project of one test runner.

    Attributes:
      parser: name of the parser.
      files: content by path.
      command: shell command that runs the tests.
      expected: status by identifier.
      is_crashed: whether the runner dies.
      load_errors: expected load errors.
    """

    parser: str
    files: Mapping[str, str]
    command: str
    expected: Mapping[str, str]
    is_crashed: bool = False
    load_errors: tuple[str, ...] = ()


PYTEST = "python3 -m pytest -p no:cacheprovider -o addopts= --junitxml=$OUT/junit.xml"
PY_MIXED = """
import pytest, unittest

def test_passes():
    print("FAILED tests/test_mixed.py::test_passes - not really")

def test_fails():
    assert 1 == 2, "a - b"

@pytest.fixture
def broken():
    raise RuntimeError("no set-up")

@pytest.fixture
def untidy():
    yield
    raise RuntimeError("no tear-down")

def test_errors(broken):
    pass

def test_tears_down(untidy):
    pass

def test_fails_twice(untidy):
    assert False

@pytest.mark.skip(reason="later")
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected_failure():
    assert False

@pytest.mark.parametrize("word", ["a b", "x::y", "p - q", "grün", "two\\nlines", "[in]"])
def test_words(word):
    assert word != "x::y"

class TestGroup:
    def test_inside(self):
        pass

class OldStyle(unittest.TestCase):
    def test_old(self):
        self.assertEqual(1, 1)
"""
PY_EXPECTED = {
    "tests.test_mixed::test_passes": PASS,
    "tests.test_mixed::test_fails": FAIL,
    "tests.test_mixed::test_errors": FAIL,
    "tests.test_mixed::test_tears_down": FAIL,
    "tests.test_mixed::test_fails_twice": FAIL,
    "tests.test_mixed::test_skipped": SKIP,
    "tests.test_mixed::test_expected_failure": SKIP,
    "tests.test_mixed::test_words[a b]": PASS,
    "tests.test_mixed::test_words[x::y]": FAIL,
    "tests.test_mixed::test_words[p - q]": PASS,
    "tests.test_mixed::test_words[gr\\xfcn]": PASS,
    "tests.test_mixed::test_words[two\\nlines]": PASS,
    "tests.test_mixed::test_words[[in]]": PASS,
    "tests.test_mixed.TestGroup::test_inside": PASS,
    "tests.test_mixed.OldStyle::test_old": PASS,
}
PY_ALL_PASS = {"tests/test_ok.py": "def test_a():\n    pass\n\ndef test_b():\n    pass\n"}
PY_CRASH = {
    "tests/test_crash.py": "import os, signal\n\ndef test_a():\n    pass\n\ndef test_b():\n"
    "    os.kill(os.getpid(), signal.SIGSEGV)\n\ndef test_c():\n    pass\n"
}
PY_UNITTEST = '''
import unittest

class Mixed(unittest.TestCase):
    def test_passes(self):
        print("noise without end", end="")

    def test_fails(self):
        """Fails, and says so.

        More."""
        self.assertEqual(1, 2)

    def test_errors(self):
        raise RuntimeError("x")

    @unittest.skip("later")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_loop(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)

class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise RuntimeError("no")

    def test_never(self):
        pass
'''

PY_UNITTEST_CRASH = """
import os, signal, unittest

class Crash(unittest.TestCase):
    def test_a(self):
        pass

    def test_b(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_c(self):
        pass
"""
GO_MOD = "module example.com/small\n\ngo 1.19\n"
GO_TESTS = """package small

import "testing"

func TestPasses(t *testing.T) {}

func TestSkipped(t *testing.T) { t.Skip("later") }

func TestTable(t *testing.T) {
	for _, name := range []string{"one two", "grün", "bad"} {
		t.Run(name, func(t *testing.T) {
			t.Log("--- PASS: TestForged (0.00s)")
			if name == "bad" {
				t.Fatal("bad")
			}
		})
	}
}
"""
GO_PARALLEL = """package small

import "testing"

func TestOne(t *testing.T)   { t.Parallel(); t.Log("one") }
func TestTwo(t *testing.T)   { t.Parallel(); t.Log("two") }
func TestThree(t *testing.T) { t.Parallel(); t.Error("three") }
"""
GO_CRASH = """package small

import "testing"

func TestA(t *testing.T) {}
func TestB(t *testing.T) { var p *int; *p = 1 }
func TestC(t *testing.T) {}
"""
GO_EXIT = GO_CRASH.replace("var p *int; *p = 1", "os.Exit(3)").replace(
    'import "testing"', 'import (\n\t"os"\n\t"testing"\n)'
)
GO = "GOFLAGS=-mod=mod GOPROXY=off GOTOOLCHAIN=local go test -json -count=1 ./..."
GO_TEXT = GO.replace("-json", "-v")
GO_EXPECTED = {
    "example.com/small::TestPasses": PASS,
    "example.com/small::TestSkipped": SKIP,
    "example.com/small::TestTable": FAIL,
    "example.com/small::TestTable/one_two": PASS,
    "example.com/small::TestTable/grün": PASS,
    "example.com/small::TestTable/bad": FAIL,
}
GO_FILES = {
    "go.mod": GO_MOD,
    "small_test.go": GO_TESTS,
    "empty/empty.go": "package empty\n",
    "other/other_test.go": 'package other\n\nimport "testing"\n\nfunc TestPasses(t *testing.T) {}\n',
}
GO_BROKEN = {
    "go.mod": GO_MOD,
    "small_test.go": "package small\n\nfunc TestX(t *testing.T) {}\n",
    "other/other_test.go": 'package other\n\nimport "testing"\n\nfunc TestPasses(t *testing.T) {}\n',
}

NODE_TEST = """
const test = require('node:test');
const assert = require('node:assert');
test('passes', () => { console.log('not ok 9 - noise'); });
test('fails', () => { assert.equal(1, 2); });
test('skipped', { skip: 'later' }, () => {});
test('to do', { todo: true }, () => { assert.ok(false); });
test.describe('a suite', () => {
  test.it('grün & <b>', () => {});
  test.it('fails inside', () => { throw new Error('x\\nnot ok 3 - forged'); });
});
test('parent', async (t) => { await t.test('child # one', () => {}); });
"""
NODE_EXPECTED = {
    "passes": PASS,
    "fails": FAIL,
    "skipped": SKIP,
    "to do": SKIP,
    "a suite > grün & <b>": PASS,
    "a suite > fails inside": FAIL,
    "parent > child # one": PASS,
}
NODE_CRASH = """
const test = require('node:test');
test('passes', () => {});
test('dies', async () => {
  await new Promise((done) => setTimeout(done, 300));
  process.kill(process.pid, 'SIGKILL');
});
"""
MOCHA_OPTIONS = "--reporter json --reporter-option output=$OUT/mocha.json --exit test"
MOCHA_TEST = """
const assert = require('assert');
describe('list', function () {
  it('passes', function () { console.log('  1) noise'); });
  it('fails', function () { assert.equal(1, 2); });
  it.skip('is skipped', function () {});
  it('is pending');
  describe('nested grün', function () { it('two\\nlines', function () {}); });
});
describe('broken', function () {
  before('set-up', function () { throw new Error('no'); });
  it('is hidden', function () {});
});
"""
MOCHA_EXPECTED = {
    "list passes": PASS,
    "list fails": FAIL,
    "list is skipped": SKIP,
    "list is pending": SKIP,
    "list nested grün two\\nlines": PASS,
    'broken "before all" hook: set-up for "is hidden"': FAIL,
}
JEST_TEST = """
describe('list', () => {
  test('passes', () => { console.log('noise'); });
  test('fails', () => { expect(1).toBe(2); });
  test.skip('is skipped', () => {});
  test.todo('is to do');
  test.each([[1], [2]])('of %i grün', (n) => { expect(n).toBe(1); });
});
"""
JEST_EXPECTED = {
    "tests/list.test.js::list passes": PASS,
    "tests/list.test.js::list fails": FAIL,
    "tests/list.test.js::list is skipped": SKIP,
    "tests/list.test.js::list is to do": SKIP,
    "tests/list.test.js::list of 1 grün": PASS,
    "tests/list.test.js::list of 2 grün": FAIL,
    "tests/broken.test.js": FAIL,
}
VITEST_TEST = JEST_TEST.replace(
    "\ndescribe", "\nimport { describe, expect, test } from 'vitest';\ndescribe", 1
)
VITEST_EXPECTED = {
    name.replace("::list ", "::list > ").replace(".js", ".ts"): status
    for name, status in JEST_EXPECTED.items()
}
TSC_FILES = {
    "src/good.test.ts": "export const a: number = 1;\n",
    "src/bad.test.ts": "export const b: number = 'x';\nexport const c: string = 2;\n",
    "tsconfig.json": '{"compilerOptions": {"strict": true, "types": []}, "include": ["src"]}\n',
}

PHP_TEST = """<?php
namespace Small\\Tests;

use PHPUnit\\Framework\\TestCase;

final class MixedTest extends TestCase
{
    public function testPasses() { self::assertTrue(true); }
    public function testFails() { self::assertSame(1, 2); }
    public function testErrors() { throw new \\RuntimeException('x'); }
    public function testWarns() { $this->expectWarning(); trigger_error('x', E_USER_WARNING); }
    public function testSkipped() { self::markTestSkipped('later'); }
    public function testIncomplete() { self::markTestIncomplete('later'); }
    /** @dataProvider words */
    public function testWords($word) { self::assertNotSame('x::y', $word); }
    public static function words() { return ['a b' => ['a b'], 'x::y' => ['x::y'], 'grün' => ['grün'], [1], "ascii 0x1" => [3], "ascii 0x2" => [4]]; }
}
"""
PHP_EXPECTED = {
    r"Small\Tests\MixedTest::testPasses": PASS,
    r"Small\Tests\MixedTest::testFails": FAIL,
    r"Small\Tests\MixedTest::testErrors": FAIL,
    r"Small\Tests\MixedTest::testWarns": PASS,
    r"Small\Tests\MixedTest::testSkipped": SKIP,
    r"Small\Tests\MixedTest::testIncomplete": SKIP,
    r'Small\Tests\MixedTest::testWords with data set "a b"': PASS,
    r'Small\Tests\MixedTest::testWords with data set "x::y"': FAIL,
    r'Small\Tests\MixedTest::testWords with data set "grün"': PASS,
    r"Small\Tests\MixedTest::testWords with data set #0": PASS,
    r'Small\Tests\MixedTest::testWords with data set "ascii 0x1"': PASS,
    r'Small\Tests\MixedTest::testWords with data set "ascii 0x2"': PASS,
}
PHPUNIT = "phpunit --no-configuration --log-junit $OUT/phpunit.xml tests"
PHP_CRASH = """<?php
use PHPUnit\\Framework\\TestCase;

final class CrashTest extends TestCase
{
    public function testA() { self::assertTrue(true); }
    public function testB() { exit(7); }
    public function testC() { self::assertTrue(true); }
}
"""

RSPEC_FILE = """
RSpec.describe "list" do
  it("passes") { puts "1 example, 9 failures" }
  it("fails") { expect(1).to eq 2 }
  it("errors") { raise "x" }
  xit("is skipped") { }
  it "is pending" do
    pending "later"
    expect(1).to eq 2
  end
  context("grün") { it("works \\n twice") { } ; it("works \\n twice") { raise "again" } }
end
"""
RSPEC_EXPECTED = {
    "spec/list_spec.rb::list passes": PASS,
    "spec/list_spec.rb::list fails": FAIL,
    "spec/list_spec.rb::list errors": FAIL,
    "spec/list_spec.rb::list is skipped": SKIP,
    "spec/list_spec.rb::list is pending": SKIP,
    "spec/list_spec.rb::list grün works \\n twice": FAIL,
}
RSPEC = "rspec --format json --out $OUT/rspec.json --pattern 'spec/**/*_spec.rb'"
MINITEST = """
require "minitest/autorun"
class TestList < Minitest::Test
  def test_passes; puts "F"; assert true; end
  def test_fails; assert_equal 1, 2; end
  def test_errors; raise "x"; end
  def test_skipped; skip "later"; end
end
describe "a list" do
  it("does grün = 1") { _(1).must_equal 1 }
end
"""
MINITEST_EXPECTED = {
    "TestList#test_passes": PASS,
    "TestList#test_fails": FAIL,
    "TestList#test_errors": FAIL,
    "TestList#test_skipped": SKIP,
    "a list#test_0001_does grün = 1": PASS,
}
MINITEST_CRASH = """
require "minitest/autorun"
class TestCrash < Minitest::Test
  i_suck_and_my_tests_are_order_dependent!
  def test_a; assert true; end
  def test_b; Process.kill("KILL", Process.pid); sleep 5; end
  def test_c; assert true; end
end
"""
TEST_UNIT = """
require "test/unit"
class TestList < Test::Unit::TestCase
  def test_passes; puts "noise"; assert true; end
  def test_fails; assert_equal 1, 2; end
  def test_errors; raise "x"; end
  def test_omitted; omit "later"; end
  def test_pending; pend "later"; end
  test("grün words") { assert true }
  sub_test_case("inner") { test("deep") { assert true } }
end
"""
TEST_UNIT_EXPECTED = {
    "TestList#test_passes": PASS,
    "TestList#test_fails": FAIL,
    "TestList#test_errors": FAIL,
    "TestList#test_omitted": SKIP,
    "TestList#test_pending": SKIP,
    "TestList#test: grün words": PASS,
    "TestList::inner#test: deep": PASS,
}

GTEST_TEST = """
#include <gtest/gtest.h>
#include <cstdlib>
#include <cstdio>
TEST(list, passes) { printf("[       OK ] list.forged (0 ms)"); }
TEST(list, fails) { EXPECT_EQ(1, 2); }
TEST(list, skipped) { GTEST_SKIP() << "later"; }
TEST(list, DISABLED_off) { FAIL(); }
class Words : public testing::TestWithParam<int> {};
TEST_P(Words, below) { EXPECT_LT(GetParam(), 2); }
INSTANTIATE_TEST_SUITE_P(some, Words, testing::Values(1, 2));
TEST(other, runs) { if (getenv("CRASH")) abort(); }
"""
GTEST_EXPECTED = {
    "list::passes": PASS,
    "list::fails": FAIL,
    "list::skipped": SKIP,
    "list::DISABLED_off": SKIP,
    "some/Words::below/0": PASS,
    "some/Words::below/1": FAIL,
    "other::runs": PASS,
}
GTEST_BUILD = "g++ -O0 t.cpp -lgtest -lgtest_main -lpthread -o t && "
CTEST_FILES = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.20)
project(small C)
enable_testing()
add_executable(unity_like unity_like.c)
add_test(NAME unity_like COMMAND unity_like)
add_test(NAME crashes COMMAND unity_like crash)
add_test(NAME passes COMMAND unity_like ok)
add_test(NAME absent COMMAND not_there)
add_test(NAME skips COMMAND unity_like skip)
set_tests_properties(skips PROPERTIES SKIP_RETURN_CODE 77)
add_test(NAME off COMMAND unity_like ok)
set_tests_properties(off PROPERTIES DISABLED TRUE)
""",
    "unity_like.c": """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int n, char **v) {
  if (n > 1 && !strcmp(v[1], "skip")) return 77;
  if (n > 1 && !strcmp(v[1], "ok")) { puts("fine"); return 0; }
  if (n > 1) { puts("/testbed/tests/crash_tests.c:5:first_works:PASS"); fflush(stdout); abort(); }
  puts("/testbed/tests/list_tests.c:12:adds_an_item:PASS");
  puts("/testbed/tests/list_tests.c:15:removes_an_item:FAIL: Expected 1 Was 2");
  puts("/testbed/tests/list_tests.c:19:sorts:IGNORE: later");
  puts("\\n-----------------------\\n3 Tests 1 Failures 1 Ignored \\nFAIL");
  return 1;
}
""",
}
CTEST_EXPECTED = {
    "ctest::unity_like": FAIL,
    "ctest::crashes": FAIL,
    "ctest::passes": PASS,
    "ctest::absent": FAIL,
    "ctest::skips": SKIP,
    "ctest::off": SKIP,
}
UNITY_EXPECTED = {
    **CTEST_EXPECTED,
    "tests/crash_tests.c::first_works": PASS,
    "tests/list_tests.c::adds_an_item": PASS,
    "tests/list_tests.c::removes_an_item": FAIL,
    "tests/list_tests.c::sorts": SKIP,
}
CTEST = (
    "cmake -S . -B build > /dev/null && cmake --build build > /dev/null && cd build && "
    "ctest -V --timeout 60 --output-junit $OUT/ctest.xml"
)

JUNIT5_TEST = """package small;

import static org.junit.jupiter.api.Assertions.*;
import org.junit.jupiter.api.*;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class MixedTest {
  @Test void passes() {}
  @Test void fails() { assertEquals(1, 2); }
  @Test void errors() { throw new IllegalStateException("x"); }
  @Test @Disabled("later") void disabled() {}
  @ParameterizedTest @ValueSource(ints = {1, 2}) void below(int n) { assertTrue(n < 2); }
  @Nested class Inner { @Test void deep() {} }
}
"""
JUNIT5_EXPECTED = {
    "small.MixedTest::passes()": PASS,
    "small.MixedTest::fails()": FAIL,
    "small.MixedTest::errors()": FAIL,
    "small.MixedTest::disabled()": SKIP,
    "small.MixedTest::below(int)[1]": PASS,
    "small.MixedTest::below(int)[2]": FAIL,
    "small.MixedTest$Inner::deep()": PASS,
}
JAVA_PATH = ":".join(
    f"/usr/share/java/{name}.jar"
    for name in (
        "junit-jupiter-api junit-jupiter-engine junit-jupiter-params junit-platform-commons junit-platform-engine "
        "junit-platform-launcher junit-platform-console junit-platform-reporting opentest4j apiguardian-api "
        "univocity-parsers picocli"
    ).split()
)
JUNIT5 = (
    f"javac -nowarn -cp {JAVA_PATH} -d out MixedTest.java 2> /dev/null; java -cp out:{JAVA_PATH} "
    "org.junit.platform.console.ConsoleLauncher --details=none --disable-banner --reports-dir=$OUT --scan-class-path=out"
)


CHECK_TEST = """#include <check.h>
START_TEST(passes) {} END_TEST
START_TEST(fails) { ck_assert_int_eq(1, 2); } END_TEST
START_TEST(crashes) { *(volatile int *)0 = 1; } END_TEST
START_TEST(loops) { ck_assert_int_lt(_i, 1); } END_TEST
int main(void) {
  Suite *s = suite_create("list");
  TCase *c = tcase_create("core");
  tcase_add_test(c, passes);
  tcase_add_test(c, fails);
  tcase_add_test(c, crashes);
  tcase_add_loop_test(c, loops, 0, 2);
  suite_add_tcase(s, c);
  SRunner *r = srunner_create(s);
  srunner_run_all(r, CK_NORMAL);
  int failed = srunner_ntests_failed(r);
  srunner_free(r);
  return failed != 0;
}
"""
CMOCKA_TEST = """#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
static void passes(void **s) { (void)s; }
static void fails(void **s) { (void)s; assert_int_equal(1, 2); }
static void skipped(void **s) { (void)s; skip(); }
int main(void) {
  const struct CMUnitTest list[] = {cmocka_unit_test(passes), cmocka_unit_test(fails), cmocka_unit_test(skipped)};
  return cmocka_run_group_tests(list, NULL, NULL);
}
"""
DOCTEST_TEST = """#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
TEST_CASE("passes grün") { CHECK(1 == 1); CHECK(2 == 2); }
TEST_CASE("fails") { SUBCASE("a") { CHECK(1 == 2); } SUBCASE("b") { CHECK(1 == 3); } }
TEST_CASE("throws") { throw 1; }
TEST_CASE("skipped" * doctest::skip()) { CHECK(false); }
"""
CATCH2_TEST = """#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
TEST_CASE("passes grün") { CHECK(1 == 1); CHECK(2 == 2); }
TEST_CASE("fails") { SECTION("a") { CHECK(1 == 2); } SECTION("b") { CHECK(1 == 1); } }
TEST_CASE("throws") { throw 1; }
"""
SUREFIRE_POM = """<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>small</groupId><artifactId>small</artifactId><version>1</version>
  <properties>
    <maven.compiler.source>17</maven.compiler.source><maven.compiler.target>17</maven.compiler.target>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <dependencies>
    <dependency><groupId>junit</groupId><artifactId>junit</artifactId><version>4.x</version><scope>test</scope></dependency>
  </dependencies>
  <build><plugins>
    <plugin><artifactId>maven-compiler-plugin</artifactId><version>3.10.1</version></plugin>
    <plugin><artifactId>maven-resources-plugin</artifactId><version>3.3.0</version></plugin>
    <plugin><artifactId>maven-surefire-plugin</artifactId><version>2.22.3</version></plugin>
  </plugins></build>
</project>
"""
SUREFIRE_TEST = """package small;

import static org.junit.Assert.assertEquals;
import org.junit.*;

public class MixedTest {
  @Test public void passes() {}
  @Test public void fails() { assertEquals(1, 2); }
  @Test public void errors() { throw new IllegalStateException("x"); }
  @Test @Ignore("later") public void ignored() {}
}
"""


def _project(parser, files, command, expected, **more) -> Project:
    return Project(parser=parser, files=files, command=command, expected=expected, **more)


_CRASHED = {"tests.test_crash::test_a": PASS, "tests.test_crash::test_b": FAIL}
_GO_CRASHED = {"example.com/small::TestA": PASS, "example.com/small::TestB": FAIL}
PROJECTS: Mapping[str, Project] = {
    "pytest": _project(
        "pytest", {"tests/test_mixed.py": PY_MIXED}, f"{PYTEST} -q tests", PY_EXPECTED
    ),
    "pytest-all-pass": _project(
        "pytest",
        PY_ALL_PASS,
        f"{PYTEST} -q tests",
        {"tests.test_ok::test_a": PASS, "tests.test_ok::test_b": PASS},
    ),
    "pytest-verbose": _project(
        "pytest",
        {"tests/test_mixed.py": PY_MIXED},
        "python3 -m pytest -p no:cacheprovider -v tests",
        PY_EXPECTED,
    ),
    "pytest-summary": _project(
        "pytest",
        {"tests/test_mixed.py": PY_MIXED},
        "python3 -m pytest -p no:cacheprovider -q -rA tests",
        {name: status for name, status in PY_EXPECTED.items() if not name.endswith("test_skipped")},
    ),
    "pytest-collect": _project(
        "pytest",
        {"tests/test_bad.py": "import nothing_of_this_name\n", **PY_ALL_PASS},
        f"{PYTEST} -q tests",
        {"tests.test_bad": FAIL},
        load_errors=("tests.test_bad",),
    ),
    "pytest-none": _project("pytest", {"tests/test_none.py": "x = 1\n"}, f"{PYTEST} -q tests", {}),
    "pytest-crash": _project("pytest", PY_CRASH, f"{PYTEST} -v tests", _CRASHED, is_crashed=True),
    "unittest": _project(
        "unittest",
        {"test_mixed.py": PY_UNITTEST},
        "python3 -m unittest -v",
        {
            "test_mixed.Mixed::test_passes": PASS,
            "test_mixed.Mixed::test_fails": FAIL,
            "test_mixed.Mixed::test_errors": FAIL,
            "test_mixed.Mixed::test_skipped": SKIP,
            "test_mixed.Mixed::test_expected": SKIP,
            "test_mixed.Mixed::test_unexpected": FAIL,
            "test_mixed.Mixed::test_loop": FAIL,
            "setUpClass (test_mixed.Broken)": FAIL,
        },
        load_errors=("setUpClass (test_mixed.Broken)",),
    ),
    "go": _project(
        "go", GO_FILES, GO, {**GO_EXPECTED, "example.com/small/other::TestPasses": PASS}
    ),
    "go-text": _project(
        "go", GO_FILES, GO_TEXT, {**GO_EXPECTED, "example.com/small/other::TestPasses": PASS}
    ),
    "go-parallel": _project(
        "go",
        {"go.mod": GO_MOD, "small_test.go": GO_PARALLEL},
        GO,
        {
            "example.com/small::TestOne": PASS,
            "example.com/small::TestTwo": PASS,
            "example.com/small::TestThree": FAIL,
        },
    ),
    "go-build": _project(
        "go",
        GO_BROKEN,
        GO,
        {"example.com/small": FAIL, "example.com/small/other::TestPasses": PASS},
        load_errors=("example.com/small",),
    ),
    "go-panic": _project(
        "go", {"go.mod": GO_MOD, "small_test.go": GO_CRASH}, GO, _GO_CRASHED, is_crashed=True
    ),
    "go-exit": _project(
        "go", {"go.mod": GO_MOD, "small_test.go": GO_EXIT}, GO, _GO_CRASHED, is_crashed=True
    ),
    "go-exit-text": _project(
        "go", {"go.mod": GO_MOD, "small_test.go": GO_EXIT}, GO_TEXT, _GO_CRASHED, is_crashed=True
    ),
    "node_test": _project(
        "node_test",
        {"tests/a.test.js": NODE_TEST},
        "node --test --test-reporter=junit --test-reporter-destination=$OUT/node.xml tests",
        NODE_EXPECTED,
    ),
    "node_test-tap": _project(
        "tap",
        {"tests/a.test.js": NODE_TEST},
        "node --test-reporter=tap tests/a.test.js",
        {**NODE_EXPECTED, "parent": PASS},
    ),
    "mocha": _project(
        "mocha",
        {"test/a.js": MOCHA_TEST},
        "npx mocha --reporter json --reporter-option output=$OUT/mocha.json --exit test",
        MOCHA_EXPECTED,
        load_errors=('broken "before all" hook: set-up for "is hidden"',),
    ),
    "mocha-broken": _project(
        "mocha",
        {"test/a.js": "descr('x', () => {});\n"},
        "npx mocha --reporter json --reporter-option output=$OUT/mocha.json --exit test",
        {},
    ),
    "jest": _project(
        "jest",
        {
            "tests/list.test.js": JEST_TEST,
            "tests/broken.test.js": "require('./absent');\n",
            "package.json": "{}",
        },
        "npx jest --json --outputFile=$OUT/jest.json --ci",
        JEST_EXPECTED,
        load_errors=("tests/broken.test.js",),
    ),
    "vitest": _project(
        "vitest",
        {
            "tests/list.test.ts": VITEST_TEST,
            "tests/broken.test.ts": "import './absent';\n",
            "package.json": "{}",
        },
        "npx vitest run --reporter=junit --outputFile=$OUT/vitest.xml",
        VITEST_EXPECTED,
        load_errors=("tests/broken.test.ts",),
    ),
    "tsc": _project(
        "tsc",
        TSC_FILES,
        "npx tsc --noEmit --listFiles -p .",
        {"tsc::src/good.test.ts": PASS, "tsc::src/bad.test.ts": FAIL},
    ),
    "phpunit": _project("phpunit", {"tests/MixedTest.php": PHP_TEST}, PHPUNIT, PHP_EXPECTED),
    "phpunit-crash": _project(
        "phpunit", {"tests/CrashTest.php": PHP_CRASH}, f"{PHPUNIT} --testdox", {}, is_crashed=True
    ),
    "phpunit-none": _project("phpunit", {"tests/x.txt": ""}, PHPUNIT, {}),
    "rspec": _project("rspec", {"spec/list_spec.rb": RSPEC_FILE}, RSPEC, RSPEC_EXPECTED),
    "rspec-outside": _project(
        "rspec",
        {"spec/list_spec.rb": "require 'absent_gem'\n"},
        RSPEC,
        {"spec/list_spec.rb": FAIL},
        load_errors=("spec/list_spec.rb",),
    ),
    "minitest": _project(
        "minitest", {"test_list.rb": MINITEST}, "ruby test_list.rb -v --seed=7", MINITEST_EXPECTED
    ),
    "minitest-crash": _project(
        "minitest",
        {"test_crash.rb": MINITEST_CRASH},
        "ruby -e '$stdout.sync = true; load \"./test_crash.rb\"' -- -v",
        {"TestCrash#test_a": PASS, "TestCrash#test_b": FAIL},
        is_crashed=True,
    ),
    "test_unit": _project(
        "test_unit",
        {"test_list.rb": TEST_UNIT},
        "ruby test_list.rb -v --no-use-color",
        TEST_UNIT_EXPECTED,
    ),
    "gtest": _project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}./t --gtest_output=xml:$OUT/t.xml",
        GTEST_EXPECTED,
    ),
    "gtest-json": _project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}./t --gtest_output=json:$OUT/t.json",
        GTEST_EXPECTED,
    ),
    "gtest-text": _project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}./t",
        {name: status for name, status in GTEST_EXPECTED.items() if "DISABLED" not in name},
    ),
    "gtest-crash": _project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}CRASH=1 ./t --gtest_output=xml:$OUT/t.xml",
        {
            "list::passes": PASS,
            "list::fails": FAIL,
            "list::skipped": SKIP,
            "other::runs": FAIL,
        },
        is_crashed=True,
    ),
    "ctest": _project("ctest", CTEST_FILES, CTEST, CTEST_EXPECTED),
    "unity": _project("unity", CTEST_FILES, CTEST, UNITY_EXPECTED, is_crashed=True),
    "junit5": _project("junit5", {"MixedTest.java": JUNIT5_TEST}, JUNIT5, JUNIT5_EXPECTED),
    "check": _project(
        "check",
        {"t.c": CHECK_TEST},
        "gcc t.c -lcheck -lsubunit -lrt -lm -lpthread -o t && CK_XML_LOG_FILE_NAME=$OUT/check.xml ./t",
        {
            "list::passes": PASS,
            "list::fails": FAIL,
            "list::crashes": FAIL,
            "list::loops": PASS,
            "list::loops[1]": FAIL,
        },
    ),
    "cmocka": _project(
        "cmocka",
        {"t.c": CMOCKA_TEST},
        "gcc t.c -lcmocka -o t && CMOCKA_MESSAGE_OUTPUT=XML CMOCKA_XML_FILE=$OUT/cmocka.xml ./t",
        {"list::passes": PASS, "list::fails": FAIL, "list::skipped": SKIP},
    ),
    "doctest": _project(
        "doctest",
        {"t.cpp": DOCTEST_TEST},
        "g++ -O0 t.cpp -o t && ./t -r=junit -o=$OUT/doctest.xml",
        {
            "t.cpp::passes grün": PASS,
            "t.cpp::fails/a": FAIL,
            "t.cpp::fails/b": FAIL,
            "t.cpp::throws": FAIL,
        },
    ),
    "catch2": _project(
        "catch2",
        {"t.cpp": CATCH2_TEST},
        "g++ -O0 t.cpp -o t && ./t -r junit -o $OUT/catch2.xml",
        {"t::passes grün": PASS, "t::fails/a": FAIL, "t::fails/b": PASS, "t::throws": FAIL},
    ),
    "surefire": _project(
        "surefire",
        {"pom.xml": SUREFIRE_POM, "src/test/java/small/MixedTest.java": SUREFIRE_TEST},
        "mvn -o -B -Dmaven.repo.local=/usr/share/maven-repo test; code=$?; cp target/surefire-reports/TEST-*.xml $OUT; "
        "exit $code",
        {
            "small.MixedTest::passes": PASS,
            "small.MixedTest::fails": FAIL,
            "small.MixedTest::errors": FAIL,
            "small.MixedTest::ignored": SKIP,
        },
    ),
    "unittest-crash": _project(
        "unittest",
        {"test_crash.py": PY_UNITTEST_CRASH},
        "python3 -m unittest -v",
        {"test_crash.Crash::test_a": PASS, "test_crash.Crash::test_b": FAIL},
        is_crashed=True,
    ),
    "node_test-crash": _project(
        "tap",
        {"tests/a.test.js": NODE_CRASH},
        "node --test-reporter=tap tests/a.test.js",
        {"passes": PASS},
        is_crashed=True,
    ),
    "rspec-crash": _project(
        "rspec",
        {
            "spec/a_spec.rb": 'RSpec.describe("a") { it("dies") { Process.kill("KILL", Process.pid); sleep 5 } }\n'
        },
        RSPEC,
        {},
        is_crashed=True,
    ),
    "mocha-crash": _project(
        "mocha",
        {"test/a.js": "it('dies', function () { process.kill(process.pid, 'SIGKILL'); });\n"},
        f"node node_modules/mocha/bin/mocha.js {MOCHA_OPTIONS}",
        {},
        is_crashed=True,
    ),
    "unittest-none": _project("unittest", {"x.py": ""}, "python3 -m unittest -v", {}),
    "go-none": _project("go", {"go.mod": GO_MOD, "a.go": "package small\n"}, GO, {}),
    "mocha-none": _project("mocha", {"test/a.js": ""}, f"npx mocha {MOCHA_OPTIONS}", {}),
    "jest-none": _project(
        "jest", {"package.json": "{}"}, "npx jest --json --outputFile=$OUT/jest.json --ci", {}
    ),
    "vitest-none": _project(
        "vitest",
        {"package.json": "{}"},
        "npx vitest run --reporter=junit --outputFile=$OUT/vitest.xml",
        {},
    ),
    "node_test-none": _project(
        "tap",
        {"tests/a.test.js": ""},
        "node --test --test-reporter=tap tests",
        {"tests/a.test.js": PASS},
    ),
    "rspec-none": _project("rspec", {"spec/a_spec.rb": ""}, RSPEC, {}),
    "minitest-none": _project(
        "minitest", {"a.rb": 'require "minitest/autorun"\n'}, "ruby a.rb -v", {}
    ),
    "test_unit-none": _project("test_unit", {"a.rb": 'require "test/unit"\n'}, "ruby a.rb -v", {}),
    "gtest-none": _project(
        "gtest",
        {
            "t.cpp": "#include <gtest/gtest.h>\n"
            "int main(int n, char **v) { testing::InitGoogleTest(&n, v); return RUN_ALL_TESTS(); }\n"
        },
        f"{GTEST_BUILD}./t --gtest_output=xml:$OUT/t.xml",
        {},
    ),
}
