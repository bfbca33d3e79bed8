"""Projects of the test runners of PHP."""

from tests.envs.swe.runners.project import FAIL, PASS, SKIP, Project, make_project

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
PROJECTS: dict[str, Project] = {
    "phpunit": make_project("phpunit", {"tests/MixedTest.php": PHP_TEST}, PHPUNIT, PHP_EXPECTED),
    "phpunit-crash": make_project(
        "phpunit", {"tests/CrashTest.php": PHP_CRASH}, f"{PHPUNIT} --testdox", {}, is_crashed=True
    ),
    "phpunit-none": make_project("phpunit", {"tests/x.txt": ""}, PHPUNIT, {}),
}
