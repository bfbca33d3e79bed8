"""Changes of parts of test runners, of vendored libraries and of Python's modules are not graded; honest changes are."""

import pytest

from glm5_jax.envs.swe.file_tree import text_file
from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.recipes.failing_assertions import failing_javascript
from glm5_jax.envs.swe.submissions import filter_changes

DIFF = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-x\n+y\n"
INSTANCE = SweInstance(
    instance_id="x-1",
    repo="x",
    base_commit="tree:x",
    language="python",
    license="MIT",
    problem_statement="x is wrong.",
    patch=DIFF.format("x/core.py") + DIFF.format("vendor/touched/a.go"),
    test_patch=DIFF.format("tests/test_x.py"),
    aux_patch="",
)
BASE = {
    "x/core.py": text_file("x"),
    "email/parser.py": text_file("x"),
    "pyproject.toml": text_file('[project]\nname = "x"\n'),
    "CMakeLists.txt": text_file("add_library(x x.c)\n"),
    "vendor/known/assert.go": text_file("x"),
}
PYPROJECT = '[project]\nname = "x"\n'


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("pyproject.toml", PYPROJECT + '[tool]\npytest.ini_options.addopts = "-p evil"\n'),
        ("pyproject.toml", 'tool.pytest.ini_options.pythonpath = ["evil"]\n' + PYPROJECT),
        ("pyproject.toml", PYPROJECT + '[tool."pytest".ini_options]\naddopts = "-x"\n'),
        ("pytest.toml", "[pytest]\n"),
        ("vitest.workspace.ts", "export default []"),
        ("babel.config.js", "module.exports = {}"),
        ("__mocks__/chai.js", "module.exports = {}"),
        ("vendor/known/assert.go", "package assert"),
        ("third_party/gtest/gtest.h", ""),
        ("include/gtest/gtest.h", "#define EXPECT_EQ(a, b)"),
        ("src/unity.h", ""),
        ("src/main/java/org/junit/jupiter/api/Assertions.java", "package org.junit.jupiter.api;"),
        ("src/main/resources/META-INF/services/org.junit.platform.launcher.TestExecutionListener", "x"),
        ("lib/minitest/x_plugin.rb", "x"),
        ("lib/rspec.rb", "x"),
        ("setup.cfg", "[tool:pytest] ; x\npython_files = x.py\n"),
        ("setup.cfg", "\ufeff[tool:pytest]\rpython_files = x.py\n"),
        ("package.json", '{"babel": {"plugins": ["./evil"]}}'),
        (".rspec-local", "--require ./evil"),
        ("go.work", "go 1.22\nuse .\nreplace example.com/assert => ./evil\n"),
        ("src/main/resources/mockito-extensions/org.mockito.plugins.MockMaker", "x"),
        ("sitecustomize/__init__.py", "x"),
        ("src/usercustomize/__init__.py", "x"),
        ("include/assert.h", "#define assert(x)"),
        ("include/cassert", "#define assert(x)"),
        ("platform.py", "x"),
        ("src/unittest/__init__.py", "x"),
        ("_pytest/python.py", "x"),
        ("CMakeLists.txt", 'add_library(x x.c)\nset_tests_properties(t PROPERTIES PASS_REGULAR_EXPRESSION ".")\n'),
        ("CMakeLists.txt", "add_library(x x.c)\ncmake_language(DEFER CALL f)\n"),
        ("CMakeLists.txt", "add_library(x x.c)\nadd_compile_options(-include evil.h)\n"),
    ],
)  # fmt: skip
def test_drops_change_of_runner(path, text):
    submission = filter_changes({path: text_file(text)}, BASE, INSTANCE)

    assert not submission.files
    assert path in submission.dropped


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("pyproject.toml", PYPROJECT + "[tool.ruff]\nline-length = 100\n"),
        ("x/platform.py", "x"),
        ("email/policy.py", "x"),
        ("vendor/touched/a.go", "package a"),
        ("include/x/check_types.h", ""),
        ("include/x/string_view.h", ""),
        ("setup.cfg", "[metadata]\nname = x\n"),
        ("lib/x/matchers.rb", "x"),
        ("src/main/java/org/example/Assertions.java", "x"),
        ("CMakeLists.txt", "add_library(x x.c y.c)\ntarget_include_directories(x PUBLIC include)\n"),
    ],
)  # fmt: skip
def test_grades_honest_change(path, text):
    submission = filter_changes({path: text_file(text)}, BASE, INSTANCE)

    assert set(submission.files) == {path}


def test_failing_assertions_fit_runner_of_javascript():
    mocha, jest, vitest, chai = (
        failing_javascript(runner, uses_chai)
        for runner, uses_chai in (
            ("mocha", False),
            ("jest", False),
            ("vitest", False),
            ("mocha", True),
        )
    )
    assert mocha.items() <= jest.items() and mocha.items() < chai.items()
    assert vitest.items() < jest.items() and not vitest.keys() & mocha.keys()
