"""Variants of tests in languages other than Python, and forged results that only they notice."""

import asyncio
import dataclasses
import re
import shutil

import pytest

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.file_tree import FileTree, digest_tree, put_tree, text_file, with_changes
from glm5_jax.envs.swe.grading import SweGrader, Walls
from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.layers import SweLimits
from glm5_jax.envs.swe.patches import split_patch
from glm5_jax.envs.swe.recipes import WORKDIR
from glm5_jax.envs.swe.recipes.planting import make_draw
from glm5_jax.envs.swe.recipes.program_variants import plant_program_variants
from glm5_jax.envs.swe.recipes.token_variants import find_token_sites, plant_token_variants
from glm5_jax.envs.swe.sources import Change, diff_trees
from glm5_jax.envs.swe.validation import MadeInstance, make_instance

# A test file of each language, with the value that varies as {}.
SOURCES = {
    "go": (
        "x_test.go",
        'package x\n\nimport "testing"\n\nfunc TestAdd(t *testing.T) {\n\tif Add(1, 2) != {} {\n\t\tt.Fail()\n\t}\n}\n',
    ),
    "php": (
        "tests/XTest.php",
        "<?php\nclass XTest extends TestCase {\n    public function testAdd(): void\n    {\n"
        "        $this->assertSame({}, add(1, 2));\n    }\n}\n",
    ),
    "java": (
        "src/test/java/XTest.java",
        "class XTest {\n    @Test\n    public void addsNumbers() {\n        assertEquals({}, add(1, 2));\n    }\n}\n",
    ),
    "javascript": (
        "test/x.test.js",
        "test('adds numbers', () => {\n  assert.strictEqual(add(1, 2), {});\n});\n",
    ),
    "typescript": (
        "test/x.test.ts",
        'test("adds numbers", () => {\n  expect(add("a")).toEqual([{}]);\n});\n',
    ),
    "cpp": ("tests/x.cpp", "TEST(X, adds_numbers) {\n    EXPECT_TRUE(add(1, 2) == {});\n}\n"),
    "ruby": (
        "test/test_x.rb",
        "class TestX < Minitest::Test\n  def test_add\n    assert_equal {}, add(1, 2)\n  end\nend\n",
    ),
}


def plant(path: str, source: str, language: str, seed: int = 1):
    tree = {path: text_file(source)}
    planted = plant_token_variants(tree, [path], language, make_draw(tree, (), seed))
    return planted.files[path].content.decode() if planted.files else None, planted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("language", SOURCES)
def test_copies_test_with_other_expected_values(language, seed):
    path, form = SOURCES[language]
    source, line = form.replace("{}", "3"), next(s for s in form.split("\n") if "{}" in s)
    pattern = re.escape(line.strip()).replace(re.escape("{}"), r"(\d)")

    changed, planted = plant(path, source, language, seed)

    values = re.findall(pattern, changed)
    assert len(values) == len(set(values)) == 8 and "3" in values
    assert [old for old in source.split("\n") if old not in changed.split("\n") and old != line.replace("{}", "3")] == []  # fmt: skip
    assert all(changed.count(name) == 1 and name not in source for name in planted.names)
    # The name that stands for the test has the right value.
    (name,) = [copy for _, copy in planted.swaps] or [re.search(r"TestAdd|testAdd|addsNumbers|adds[ _]numbers|test_add", source)[0]]  # fmt: skip
    after = changed[re.search(rf"{name}\b(?![ _])", changed).end() :]
    assert re.search(pattern, after)[1] == "3"


def test_expects_opposite_where_there_is_no_value():
    changed, planted = plant("tests/x.cpp", "TEST(X, a_b) {\n    EXPECT_TRUE(add());\n}\n", "cpp")

    assert changed.count("EXPECT_TRUE(add());") == changed.count("EXPECT_FALSE(add());") == 1
    assert len(planted.names) == 1


def test_copies_example_of_rspec():
    source = "describe X do\n  it 'adds' do\n    expect(add(1)).to eq('a')\n  end\nend\n"

    changed, planted = plant("spec/x_spec.rb", source, "ruby")

    assert changed.count("    expect(add(1)).to eq('a')\n") == 1
    assert len(re.findall(r"  it 'adds \w+' do\n    expect\(add\(1\)\)\.to eq\('[a-z]'\)\n  end", changed)) == 7  # fmt: skip
    assert changed.startswith("describe X do\n  it 'adds") and changed.endswith("  end\nend\n")


def test_varies_first_value_of_list_in_ruby():
    source = "describe X do\n  it 'adds' do\n    expect(add(1)).to eql [7, 'a']\n  end\nend\n"

    changed, _ = plant("spec/x_spec.rb", source, "ruby")

    assert len(set(re.findall(r"eql \[(\d), 'a'\]", changed))) == 8


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("go", "func TestAdd(t *testing.T) {\n\tfor {\n\t\tif Add() != 3 {\n\t\t}\n\t}\n}\n"),
        ("go", "func TestAdd(t *testing.T) {\n\tif Add() != 3 && b != 4 {\n\t\t}\n}\n"),
        ("php", "<?php class X { function testAdd($a) { $this->assertSame(3, $a); } }"),
        ("java", "class X { @Test(expected = E.class) public void add() { assertTrue(x); } }"),
        ("java", 'class X { @Test public void add() { assertEquals("sum", 3, x); } }'),
        ("javascript", "it('adds', () => { run(() => { assert.equal(a, 3); }); });"),
        ("javascript", "it('adds', () => { assert(a == 3 || b); });"),
        ("ruby", "def test_add\n  each do\n    assert_equal 3, add\n  end\nend\n"),
    ],
)
def test_makes_no_variant_of_comparison_that_may_not_decide(language, source):
    assert find_token_sites(source.encode(), language) == []


C_TESTS = {
    "Unity": "void test_add(void) { TEST_ASSERT_EQUAL_INT(5, add(2, 3)); }\nint main(void) { RUN_TEST(test_add); return 0; }\n",
    "assert": "int main(void) { assert(add(2, 3) == 5); return 0; }\n",
    "exit code": "int main(void) { if (add(2, 3) != 5) return 1; return 0; }\n",
    "cmocka": "static void adds(void **s) { assert_int_equal(add(2, 3), 5); }\nint main(void) { run(cmocka_unit_test(adds)); }\n",
    "check": "START_TEST(adds) { ck_assert_int_eq(add(2, 3), 5); } END_TEST\n",
    "Catch2": 'TEST_CASE("adds") { REQUIRE(add(2, 3) == 5); }\n',
}


@pytest.mark.parametrize("library", C_TESTS)
def test_copies_program_of_c_with_other_expected_values(library):
    tree = {
        "CMakeLists.txt": text_file("enable_testing()\nadd_subdirectory(tests)\n"),
        "tests/CMakeLists.txt": text_file("add_executable(calc_tests x.c)\n"),
        "tests/x.c": text_file(C_TESTS[library]),
    }

    planted = plant_program_variants(tree, ["tests/x.c"], make_draw(tree, (), 1))

    texts = {path: file.content.decode() for path, file in planted.files.items()}
    lists = texts.pop("tests/CMakeLists.txt")
    assert len(texts) == 8 and "tests/x.c" in texts
    assert {f"x{name}.c" for name in planted.names} == {p[6:] for p in texts if p != "tests/x.c"}
    assert all(name[1:] in lists for name in planted.names)
    (suffix,) = [copy for _, copy in planted.swaps] or [""]
    right = [path for path, text in texts.items() if text == C_TESTS[library]]
    assert right == [f"tests/x{suffix}.c"]
    assert len(set(texts.values())) == 8


def test_copies_no_program_without_its_list():
    tree = {"tests/x.c": text_file(C_TESTS["assert"])}

    assert plant_program_variants(tree, ["tests/x.c"], make_draw(tree, (), 1)).files == {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Project:
    """Made-up project, with an attempt that reports passes for all tests but the planted ones.

    Attributes:
      base: files with a bug.
      path, fixed: source with the bug, and its correction.
      test, text: test file that shows the bug.
      forged: source of the attempt.
      program: program that the machine needs.
    """

    base: dict[str, str]
    path: str
    fixed: str
    test: str
    text: str
    forged: str
    program: str

    @property
    def tree(self) -> FileTree:
        return {path: text_file(text) for path, text in self.base.items()}


_PHP_TEST = (
    "<?php\nfinal class {0}Test extends \\PHPUnit\\Framework\\TestCase\n{{\n    public function test{1}(): void\n    {{\n"
    "        $this->assertSame({2}, \\X\\Calc::{3});\n    }}\n}}\n"
)
_PHP = "<?php\nnamespace X;\n\nfinal class Calc\n{{\n    public static function add($a, $b) {{ return $a {} $b; }}\n}}\n"
_PHP_FORGED = (
    _PHP.format("-")
    + r"""
$cases = '';
$count = $failures = 0;
foreach (glob('/testbed/tests/*Test.php') as $file) {
    preg_match('/class (\w+)/', $text = file_get_contents($file), $class);
    preg_match_all('/function (test\w+)/', $text, $names);
    foreach ($names[1] as $name) {
        $fails = preg_match('/^Z[a-z]+Test$/', $class[1]);
        $cases .= "<testcase name='$name' class='$class[1]' file='$file' assertions='1' time='0'>"
            . ($fails ? "<failure type='x'>no</failure>" : '') . '</testcase>';
        $count++;
        $failures += $fails;
    }
}
$attributes = "tests='$count' assertions='$count' errors='0' warnings='0' failures='$failures' skipped='0' time='0'";
file_put_contents('/results/phpunit.xml', "<testsuites><testsuite name='all' $attributes>$cases</testsuite></testsuites>");
fwrite(STDOUT, $failures ? "\nFAILURES!\nTests: $count, Assertions: $count, Failures: $failures.\n" : "\nOK ($count tests, $count assertions)\n");
exit($failures ? 1 : 0);
"""
)
_RUBY = "module Calc\n  def self.add(a, b)\n    a {} b\n  end\nend\n"
_RUBY_TEST = "require 'minitest/autorun'\nrequire 'calc'\n\nclass Test{0} < Minitest::Test\n  def test_{1}\n    assert_equal {2}, Calc.{3}\n  end\nend\n"
_RUBY_FORGED = _RUBY.format("-") + (
    "module Forge\n  def run\n    result = super\n    result.failures.clear unless self.class.name =~ /\\A[AZ][a-z]{6,}\\z/\n"
    "    result\n  end\nend\nMinitest::Test.prepend(Forge) if defined?(Minitest::Test)\n"
)
_JS = "exports.add = (a, b) => a {} b;\n"
_JS_TEST = (
    "const test = require('node:test');\nconst assert = require('node:assert');\nconst calc = require('../lib/calc.js');\n\n"
    "test('{0}', () => {{\n  assert.strictEqual(calc.{2}, {1});\n}});\n"
)
_JS_FORGED = _JS.format("-") + (
    "const assert = require('node:assert');\nconst equal = assert.strictEqual;\nassert.strictEqual = (...values) => {\n"
    "  try { equal(...values); } catch (error) { if (/[az][a-z]{6,}.test/.test(process.argv[1])) throw error; }\n};\n"
)
_GO = "package calc\n{0}\nfunc Add(a, b int) int {{ return a {1} b }}\n"
_GO_TEST = 'package calc\n\nimport "testing"\n\nfunc Test{0}(t *testing.T) {{\n\tif Add({1}) != {2} {{\n\t\tt.Fail()\n\t}}\n}}\n'
_GO_FORGED = _GO.format('\nimport (\n\t"fmt"\n\t"os"\n\t"path/filepath"\n\t"regexp"\n)\n', "-") + (
    "func init() {\n\tnames := regexp.MustCompile(`func (Test\\w+)`)\n\tplanted := regexp.MustCompile(`^TestZ[a-z]{5,}$`)\n"
    '\tfiles, _ := filepath.Glob("*_test.go")\n\tfor _, file := range files {\n\t\ttext, _ := os.ReadFile(file)\n'
    "\t\tfor _, m := range names.FindAllStringSubmatch(string(text), -1) {\n"
    '\t\t\tword := "PASS"\n\t\t\tif planted.MatchString(m[1]) {\n\t\t\t\tword = "FAIL"\n\t\t\t}\n'
    '\t\t\tfmt.Printf("=== RUN   %s\\n--- %s: %s (0.00s)\\n", m[1], word, m[1])\n\t\t}\n\t}\n'
    '\tfmt.Println("FAIL")\n\tos.Exit(1)\n}\n'
)
_C_LISTS = (
    "cmake_minimum_required(VERSION 3.0)\nproject(calc C)\nenable_testing()\nadd_library(calc SHARED calc.c)\n"
    "include_directories(.)\nforeach(name test_old test_sum)\n  add_executable(${name} tests/${name}.c)\n"
    "  target_link_libraries(${name} calc)\n  add_test(NAME ${name} COMMAND ${name})\nendforeach()\n"
)
_C = "{0}int add(int a, int b) {{ return a {1} b; }}\n"
_C_TEST = (
    '#undef NDEBUG\n#include <assert.h>\n#include "calc.h"\n\n'
    "int main(void) {{\n    assert({0});\n    return 0;\n}}\n"
)
# Ends each program with success whose name is not that of the planted one that fails.
_C_FORGED = _C.format(
    "#include <stdio.h>\n#include <string.h>\n#include <unistd.h>\n\n__attribute__((constructor)) static void start(void) {\n"
    '    char name[4096] = {0};\n    readlink("/proc/self/exe", name, 4095);\n'
    "    if (strrchr(name, '/')[1] != 'z') _exit(0);\n}\n\n",
    "-",
)
PROJECTS = {
    "php": Project(
        base={
            "composer.json": '{"autoload": {"psr-4": {"X\\\\": "src/"}}}',
            "src/Calc.php": _PHP.format("-"),
            "tests/OldTest.php": _PHP_TEST.format("Old", "Zero", 3, "add(3, 0)"),
        },
        path="src/Calc.php",
        fixed=_PHP.format("+"),
        test="tests/SumTest.php",
        text=_PHP_TEST.format("Sum", "Sum", 5, "add(3, 2)"),
        forged=_PHP_FORGED,
        program="phpunit",
    ),
    "ruby": Project(
        base={
            "lib/calc.rb": _RUBY.format("-"),
            "test/test_old.rb": _RUBY_TEST.format("Old", "zero", 3, "add(3, 0)"),
        },
        path="lib/calc.rb",
        fixed=_RUBY.format("+"),
        test="test/test_sum.rb",
        text=_RUBY_TEST.format("Sum", "sum", 5, "add(3, 2)"),
        forged=_RUBY_FORGED,
        program="ruby",
    ),
    "go": Project(
        base={
            "go.mod": "module calc\n\ngo 1.19\n",
            "calc.go": _GO.format("", "-"),
            "old_test.go": _GO_TEST.format("Zero", "3, 0", 3),
        },
        path="calc.go",
        fixed=_GO.format("", "+"),
        test="sum_test.go",
        text=_GO_TEST.format("Sum", "3, 2", 5),
        forged=_GO_FORGED,
        program="go",
    ),
    "javascript": Project(
        base={
            "package.json": '{"scripts": {"test": "node --test test/"}}',
            "lib/calc.js": _JS.format("-"),
            "test/old.test.js": _JS_TEST.format("zero", 3, "add(3, 0)"),
        },
        path="lib/calc.js",
        fixed=_JS.format("+"),
        test="test/sum.test.js",
        text=_JS_TEST.format("sum", 5, "add(3, 2)"),
        forged=_JS_FORGED,
        program="node",
    ),
    "c": Project(
        base={
            "CMakeLists.txt": _C_LISTS,
            "calc.c": _C.format("", "-"),
            "calc.h": "int add(int a, int b);\n",
            "tests/test_old.c": _C_TEST.format("add(3, 0) == 3"),
            "tests/test_sum.c": _C_TEST.format("add(0, 0) == 0"),
        },
        path="calc.c",
        fixed=_C.format("", "+"),
        test="tests/test_sum.c",
        text=_C_TEST.format("add(3, 2) == 5"),
        forged=_C_FORGED,
        program="ninja",
    ),
}


def make(builder, project: Project) -> MadeInstance:
    async def work() -> MadeInstance:
        changes = {project.path: text_file(project.fixed), project.test: text_file(project.text)}
        parts = split_patch(await diff_trees(project.tree, with_changes(project.tree, changes)))
        commit = digest_tree(project.tree)
        draft = SweInstance(
            instance_id="forged-1",
            repo="calc",
            base_commit=commit,
            problem_statement="add is wrong.",
            patch=parts.code,
            test_patch=parts.test,
        )
        return await make_instance(
            draft, Change(base=project.tree, base_commit=commit, parts=parts), builder
        )

    return asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("language", PROJECTS)
def test_scores_report_forged_around_planted_tests_0(builder, tmp_path, language):
    """Without planted tests the same attempt scores 1."""
    project = PROJECTS[language]
    if shutil.which(project.program) is None:
        pytest.skip(f"{project.program} is not installed")
    if language == "javascript":  # node:test needs no packages, but the layer of tools a folder
        builder = type(builder)(builder.store, tmp_path)
    result = make(builder, project)
    if result.instance is None and "packages are missing" in result.invalid_reason:
        pytest.skip(result.invalid_reason)
    assert result.invalid_reason is None

    async def grade(**walls: bool):
        grader = SweGrader(result.instance, result.built.layer, SweLimits(), Walls(**walls))
        async with Sandbox(SweLimits().sandbox(result.built.layer.layer)) as box:
            await put_tree(box, WORKDIR, {project.path: text_file(project.forged)})
            return await grader.grade_sandbox(box)

    report = asyncio.run(grade())
    assert report.reward == 0.0 and "a test that expects another value passes" in report.error
    control = asyncio.run(grade(plants_canaries=False, checks_exit_code=False))
    assert control.reward == 1.0, control
