"""Recipe for Python projects with pytest or unittest tests, which pytest runs."""

import posixpath
from collections.abc import Sequence

from glm5_jax.envs.swe.file_tree import FileTree, text_file
from glm5_jax.envs.swe.recipes.failing_assertions import PYTHON
from glm5_jax.envs.swe.recipes.plan import (
    RESULTS,
    WORKDIR,
    Canaries,
    ProjectPlan,
    RecipeError,
    first_focus,
    matching,
)
from glm5_jax.envs.swe.recipes.planting import CanaryDraw, plant_variants
from glm5_jax.envs.swe.recipes.python_variants import find_python_sites

PYTEST_FOLDER = "/tools/python"  # pytest and what it needs, in the layer of tools
_PATTERNS = ("test_*.py", "*_test.py")


class PythonRecipe:
    """Recipe of Python: no installation, sources on PYTHONPATH, pytest with a JUnit report."""

    name = "python-pytest/1"
    language = "python"
    build_folders: tuple[str, ...] = ("build/", ".eggs/")

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project. Compiled extensions are built in place."""
        tests = matching(tree, *_PATTERNS)
        if not tests:
            raise RecipeError("the project has no test_*.py and no *_test.py; leave it out")
        roots = sorted({_root(path) for path in tests})
        # Files, not folders: pytest then runs them in this order.
        names = " -o ".join(f"-name '{pattern}'" for pattern in _PATTERNS)
        find = f"$(find {' '.join(roots)} \\( {names} \\) -type f | LC_ALL=C sort"
        pytest = (
            f"python3 -m pytest -q -p no:cacheprovider -o addopts= --junitxml={RESULTS}/junit.xml"
        )
        builds = bool(matching(tree, "*.pyx", "*module.c")) and "setup.py" in tree
        build = ("python3 setup.py -q build_ext --inplace",) if builds else ()
        return ProjectPlan(
            recipe=self.name,
            log_parser="pytest",
            test_cmds=(f"{pytest} {find})",),
            shuffled_cmds=(f"{pytest} {find} -r)",),
            setup_cmds=build,
            rebuild_cmds=build,
            apt=("python3",),
            variables={
                # Without PYTHONSAFEPATH a pytest.py of the project would run instead of pytest.
                "PYTHONSAFEPATH": "1",
                "PYTHONPATH": ":".join(
                    [PYTEST_FOLDER, *([f"{WORKDIR}/src"] if _has_src(tree) else []), WORKDIR]
                ),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONNOUSERSITE": "1",  # a build script could write modules into the home folder
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            per_test_cmd="python3 -m pytest -q -p no:cacheprovider -o addopts= {name}",
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns test modules next to the first one in focus, and a variant of a test in focus."""
        tests = matching(tree, *_PATTERNS)
        folder = posixpath.dirname(first_focus(focus, tests, "Python"))
        passing, failing = (f"test_{draw.word(letter)}" for letter in "az")
        methods = "".join(
            f"\n    def test_{name}(self):\n        {body}\n"
            for name, body in draw.statements(PYTHON).items()
        )
        one, two = draw.random.sample(range(1000), 2)
        texts = {
            f"{passing}.py": f"def {passing}():\n    assert {one} == {one}\n",
            f"{failing}.py": f"import unittest\n\n\ndef {failing}():\n    assert {one} == {two}\n\n\n"
            f"class Test{draw.word().capitalize()}(unittest.TestCase):{methods}",
        }
        files = {posixpath.join(folder, name): text_file(text) for name, text in texts.items()}
        focused = [path for path in focus if path in tests]
        variants = plant_variants(tree, focused, draw, find_python_sites)
        return Canaries(
            files=files,
            passing=passing,
            failing=failing,
            variant_files=variants.files,
            variants=variants.names,
            swaps=variants.swaps,
        )


def _root(path: str) -> str:
    """Returns the topmost folder of a test that holds tests, or the test itself at the root."""
    first, slash, _ = path.partition("/")
    if not slash:
        return path
    return posixpath.join(*path.split("/")[:2]) if first == "src" else first


def _has_src(tree: FileTree) -> bool:
    return any(path.startswith("src/") for path in tree)
