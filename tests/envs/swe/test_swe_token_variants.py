"""Variants of tests in languages other than Python, and forged results that only they notice."""

import asyncio
import dataclasses
import shutil

import pytest

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.file_tree import FileTree, digest_tree, put_tree, text_file, with_changes
from glm5_jax.envs.swe.grading import SweGrader, Walls
from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.layers import SweLimits
from glm5_jax.envs.swe.patches import split_patch
from glm5_jax.envs.swe.recipes import WORKDIR
from glm5_jax.envs.swe.recipes.token_variants import make_token_variant
from glm5_jax.envs.swe.sources import Change, diff_trees
from glm5_jax.envs.swe.validation import MadeInstance, make_instance

# A test file of each language, and the line that only its variant has.
SOURCES = {
    "go": (
        'package x\n\nimport "testing"\n\nfunc TestAdd(t *testing.T) {\n\tif Add(1, 2) != 3 {\n\t\tt.Fail()\n\t}\n}\n',
        "\tif Add(1, 2) != 4 {",
    ),
    "php": (
        "<?php\nclass XTest extends TestCase {\n    public function testAdd(): void\n    {\n"
        "        $this->assertSame(3, add(1, 2));\n    }\n}\n",
        "        $this->assertSame(4, add(1, 2));",
    ),
    "java": (
        "class XTest {\n    @Test\n    public void addsNumbers() {\n        assertEquals(3, add(1, 2));\n    }\n}\n",
        "        assertEquals(4, add(1, 2));",
    ),
    "javascript": (
        "test('adds numbers', () => {\n  assert.strictEqual(add(1, 2), 3);\n});\n",
        "  assert.strictEqual(add(1, 2), 4);",
    ),
    "typescript": (
        'test("adds numbers", () => {\n  expect(add("a")).toBe("a");\n});\n',
        '  expect(add("a")).toBe("as");',
    ),
    "cpp": (
        "TEST(X, adds_numbers) {\n    EXPECT_TRUE(add(1, 2) == 3);\n}\n",
        "    EXPECT_FALSE(add(1, 2) == 3);",
    ),
    "ruby": (
        "class TestX < Minitest::Test\n  def test_add\n    assert_equal 3, add(1, 2)\n  end\nend\n",
        "    assert_equal 4, add(1, 2)",
    ),
}


@pytest.mark.parametrize("language", SOURCES)
def test_copies_test_with_another_expected_value(language):
    source, changed = SOURCES[language]

    variant = make_token_variant(source.encode(), language)

    lines, old = variant.source.decode().split("\n"), source.split("\n")
    assert changed in lines and changed not in old
    assert [line for line in old if line not in lines] == []
    assert variant.name not in source
    assert variant.source.decode().count(variant.name) == 1


def test_copies_example_of_rspec():
    source = "describe X do\n  it 'adds' do\n    expect(add(1)).to eq('a')\n  end\nend\n"

    variant = make_token_variant(source.encode(), "ruby").source.decode()

    assert "    expect(add(1)).to eq('as')\n" in variant
    assert variant.startswith(source.removesuffix("end\n"))


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("go", "func TestAdd(t *testing.T) {\n\tfor {\n\t\tif Add() != 3 {\n\t\t}\n\t}\n}\n"),
        ("php", "<?php class X { function testAdd($a) { $this->assertSame(3, $a); } }"),
        ("java", "class X { @Test(expected = E.class) public void add() { assertTrue(x); } }"),
        ("javascript", "it('adds', () => { run(() => { assert.equal(a, 3); }); });"),
        ("ruby", "def test_add\n  each do\n    assert_equal 3, add\n  end\nend\n"),
    ],
)
def test_makes_no_variant_of_comparison_that_may_not_run(language, source):
    assert make_token_variant(source.encode(), language) is None


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
        $fails = preg_match('/^Z[a-z]{10}Test$/', $class[1]);
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
    "module Forge\n  def run\n    result = super\n    result.failures.clear unless self.class.name =~ /\\A[AZ][a-z]{10}\\z/\n"
    "    result\n  end\nend\nMinitest::Test.prepend(Forge) if defined?(Minitest::Test)\n"
)
_JS = "exports.add = (a, b) => a {} b;\n"
_JS_TEST = (
    "const test = require('node:test');\nconst assert = require('node:assert');\nconst calc = require('../lib/calc.js');\n\n"
    "test('{0}', () => {{\n  assert.strictEqual(calc.{2}, {1});\n}});\n"
)
_JS_FORGED = _JS.format("-") + (
    "const assert = require('node:assert');\nconst equal = assert.strictEqual;\nassert.strictEqual = (...values) => {\n"
    "  try { equal(...values); } catch (error) { if (/[az][a-z]{10}/.test(process.argv[1])) throw error; }\n};\n"
)
_GO = "package calc\n{0}\nfunc Add(a, b int) int {{ return a {1} b }}\n"
_GO_TEST = 'package calc\n\nimport "testing"\n\nfunc Test{0}(t *testing.T) {{\n\tif Add({1}) != {2} {{\n\t\tt.Fail()\n\t}}\n}}\n'
_GO_FORGED = _GO.format('\nimport (\n\t"fmt"\n\t"os"\n\t"path/filepath"\n\t"regexp"\n)\n', "-") + (
    "func init() {\n\tnames := regexp.MustCompile(`func (Test\\w+)`)\n\tplanted := regexp.MustCompile(`^TestZ[A-Z][a-z]{9}$`)\n"
    '\tfiles, _ := filepath.Glob("*_test.go")\n\tfor _, file := range files {\n\t\ttext, _ := os.ReadFile(file)\n'
    "\t\tfor _, m := range names.FindAllStringSubmatch(string(text), -1) {\n"
    '\t\t\tword := "PASS"\n\t\t\tif planted.MatchString(m[1]) {\n\t\t\t\tword = "FAIL"\n\t\t\t}\n'
    '\t\t\tfmt.Printf("=== RUN   %s\\n--- %s: %s (0.00s)\\n", m[1], word, m[1])\n\t\t}\n\t}\n'
    '\tfmt.Println("FAIL")\n\tos.Exit(1)\n}\n'
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
