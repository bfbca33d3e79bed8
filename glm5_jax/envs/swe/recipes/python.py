"""Recipe for Python projects with pytest or unittest tests, which pytest runs."""

import posixpath
import re
import secrets
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
    text_of,
)
from glm5_jax.envs.swe.recipes.python_variants import make_variant

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

    def canaries(self, tree: FileTree, focus: Sequence[str], tag: str) -> Canaries:
        """Returns test modules next to the first one in focus, and a variant of a test in focus."""
        tests = matching(tree, *_PATTERNS)
        folder = posixpath.dirname(first_focus(focus, tests, "Python"))
        methods = "".join(
            f"\n    def test_{name}(self):\n        {body}\n" for name, body in PYTHON.items()
        )
        texts = {
            f"test_a{tag}.py": f"def test_a{tag}():\n    assert True\n",
            f"test_z{tag}.py": f"import unittest\n\n\ndef test_z{tag}():\n    assert 1 == 2\n\n\n"
            f"class Test{tag.capitalize()}(unittest.TestCase):{methods}",
        }
        files = {posixpath.join(folder, name): text_file(text) for name, text in texts.items()}
        variants, variant_files = [], {}
        for path in focus:
            variant = make_variant(text_of(tree, path)) if path in tests else None
            if variant is not None:
                stem = _variant_stem(tree, path)
                place = posixpath.join(posixpath.dirname(path), f"{stem}.py")
                variant_files[place] = text_file(variant.text)
                variants.append(f"{stem}{'.' if '::' in variant.name else '::'}{variant.name}")
        return Canaries(
            files=files,
            passing=f"test_a{tag}",
            failing=f"test_z{tag}",
            variant_files=variant_files,
            variants=tuple(variants),
        )


def _root(path: str) -> str:
    """Returns the topmost folder of a test that holds tests, or the test itself at the root."""
    first, slash, _ = path.partition("/")
    if not slash:
        return path
    return posixpath.join(*path.split("/")[:2]) if first == "src" else first


def _variant_stem(tree: FileTree, path: str) -> str:
    """Returns a new name next to a test module, made of words of the project."""
    stem = posixpath.basename(path).removesuffix(".py")
    known = {posixpath.basename(other) for other in tree}
    names = set(
        re.findall(
            r"\bdef ([a-z]+(?:_[a-z]+)*)\b",
            "\n".join(text_of(tree, p) for p in tree if p.endswith(".py")),
        )
    )
    words = sorted({name.removeprefix("test_") for name in names} | {"cases", "more", "basic"})
    while True:
        word = secrets.choice(words)
        new = f"{word}_{stem}" if stem.endswith("_test") else f"{stem}_{word}"
        if f"{new}.py" not in known:
            return new
        words.append(f"{word}_{secrets.choice(words)}")


def _has_src(tree: FileTree) -> bool:
    return any(path.startswith("src/") for path in tree)
