import pytest

from glm5_jax.envs.swe.arms import time_limit
from glm5_jax.envs.swe.builder import check_packages
from glm5_jax.envs.swe.file_tree import text_file
from glm5_jax.envs.swe.layers import SweLimits
from glm5_jax.envs.swe.recipes import (
    ProjectPlan,
    RecipeError,
    detect_language,
    detect_recipe,
    find_recipe,
)
from glm5_jax.envs.swe.recipes.planting import make_draw

TREES = {
    "python": {"x/__init__.py": "x = 1", "tests/test_x.py": "def test_x(): pass"},
    "c": {
        "CMakeLists.txt": "option(X_TEST on)\noption(WERROR on)\nadd_library(x x.c)",
        "x.c": "int x;",
        "tests/CMakeLists.txt": "add_executable(t t.c)",
        "tests/t.c": "RUN_TEST(a);",
    },
    "cpp": {
        "CMakeLists.txt": "",
        "include/x/y": "",
        "tests/CMakeLists.txt": "add_executable(other o.cpp)\nadd_executable(all\n  u.cpp\n  t.cpp)",
        "tests/t.cpp": "#include <gtest/gtest.h>",
    },
    "go": {"go.mod": "module x\n\ngo 1.19\n", "x.go": "package x", "x_test.go": "package x_test\n"},
    "java": {
        "pom.xml": "<project><artifactId>x</artifactId></project>",
        "src/main/java/x/X.java": "package x; class X {}",
        "src/test/java/x/XTest.java": "package x;\nimport org.junit.jupiter.api.Test;\n",
    },
    "javascript": {
        "package.json": '{"scripts": {"test": "mocha test/*-test.js"}, "devDependencies": {"mocha": "9"}}',
        "lib/x.js": "x = 1",
        "test/x-test.js": "it()",
    },
    "typescript": {
        "package.json": '{"name": "x", "exports": {".": {"source": "./src/x.ts"}}}',
        "src/x.ts": "export const x = 1",
        "src/x.test.ts": "import { x } from 'x'",
    },
    "php": {
        "composer.json": r'{"autoload": {"psr-4": {"X\\": "src/"}}}',
        "src/X.php": "<?php class X {}",
        "tests/XTest.php": "<?php",
    },
    "ruby": {"lib/x.rb": "module X; end", "spec/x_spec.rb": "describe"},
}
TREES = {
    language: {path: text_file(text) for path, text in tree.items()}
    for language, tree in TREES.items()
}
FOCUS = {
    "python": "tests/test_x.py",
    "c": "tests/t.c",
    "cpp": "tests/t.cpp",
    "go": "x_test.go",
    "java": "src/test/java/x/XTest.java",
    "javascript": "test/x-test.js",
    "typescript": "src/x.test.ts",
    "php": "tests/XTest.php",
    "ruby": "spec/x_spec.rb",
}


@pytest.mark.parametrize("language", TREES)
def test_plans_project_of_language(language):
    tree = TREES[language]
    recipe = detect_recipe(tree)

    plan = recipe.plan(tree, [FOCUS[language]])

    assert detect_language(tree) == recipe.language == language
    assert find_recipe(plan.recipe) is recipe
    assert plan.test_cmds != plan.shuffled_cmds or plan.log_parser == "mocha"
    assert any("/results" in command for command in plan.test_cmds)


@pytest.mark.parametrize("language", TREES)
def test_plants_canaries_next_to_focus(language):
    tree = TREES[language]
    recipe = detect_recipe(tree)

    draws = [make_draw(tree, (), seed) for seed in (1, 2)]
    canaries, others = (recipe.canaries(tree, [FOCUS[language]], draw) for draw in draws)

    folder = FOCUS[language].rpartition("/")[0]
    planted = [path for path in canaries.files if not path.startswith(".swe/")]
    assert planted and all(path.rpartition("/")[0] == folder for path in planted)
    assert canaries.passing != canaries.failing
    # Neither names nor contents are the same twice.
    assert {canaries.passing, canaries.failing}.isdisjoint({others.passing, others.failing})
    first, second = ({file.content for file in c.files.values()} for c in (canaries, others))
    assert first != second and set(canaries.files) & set(others.files) <= {"tests/CMakeLists.txt"}


def test_turns_test_options_on_and_warnings_off():
    plan = detect_recipe(TREES["c"]).plan(TREES["c"], [])

    assert "-DX_TEST=ON" in plan.rebuild_cmds[0] and "-DWERROR=OFF" in plan.rebuild_cmds[0]
    assert plan.log_parser == "unity"


def test_adds_canary_to_program_of_focus():
    canaries = detect_recipe(TREES["cpp"]).canaries(
        TREES["cpp"], ["tests/t.cpp"], make_draw(TREES["cpp"], (), 1)
    )

    (source,) = [path for path in canaries.files if path.endswith(".cpp")]
    line = f"target_sources(all PRIVATE {source.removeprefix('tests/')})"
    assert line in canaries.files["tests/CMakeLists.txt"].content.decode()


def test_rejects_project_without_recipe():
    with pytest.raises(RecipeError, match="no sources"):
        detect_recipe({"a.txt": text_file("x")})
    with pytest.raises(RecipeError, match="no test_"):
        detect_recipe({"a.py": text_file("x")}).plan({"a.py": text_file("x")}, [])
    with pytest.raises(RecipeError, match="vendor"):
        tree = {**TREES["go"], "go.mod": text_file("module x\nrequire example.org/y v1.2.3\n")}
        detect_recipe(tree).plan(tree, [])
    with pytest.raises(RecipeError, match="is not known"):
        find_recipe("x/1")


def test_names_packages_that_are_missing():
    plan = ProjectPlan(
        recipe="x", log_parser="x", test_cmds=(), shuffled_cmds=(), apt=("no-such-package",)
    )
    with pytest.raises(
        RecipeError, match="apt-get install --no-install-recommends no-such-package"
    ):
        check_packages(plan)


def test_limits_time_by_gold_and_slow_test_arm():
    assert time_limit({}) == 60
    assert time_limit({"gold_median": 45.0, "test": 10.0}) == 180
    assert time_limit({"gold_median": 45.0, "test": 178.0}) == 267


def test_rejects_limits_out_of_range():
    with pytest.raises(ValueError, match="cpus is 0"):
        SweLimits(cpus=0)
