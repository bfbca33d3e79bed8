"""Defines a made-up Python project with two bugs, its solution, and attempts at it."""

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile, digest_tree, text_file, with_changes
from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.patches import split_patch
from glm5_jax.envs.swe.sources import Change, diff_trees

FILLER = "".join(f"\n\ndef step_{n}(x):\n    return x + {n}\n" for n in range(4))
BUGGY = f"def add(a, b):\n    return a - b\n{FILLER}\n\ndef double(x):\n    return x + 2\n"
FIXED = BUGGY.replace("return a - b", "return a + b").replace("return x + 2\n", "return 2 * x\n")
FIXED = FIXED.replace("def step_2(x):\n    return 2 * x", "def step_2(x):\n    return x + 2")
OLD_TESTS = (
    "import calc\n\n\ndef test_step():\n    assert calc.step_1(1) == 2\n\n\n"
    "def test_zero():\n    assert calc.add(3, 0) == 3\n"
)
NEW_TESTS = (
    "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n\n\n"
    "def test_double():\n    assert calc.double(5) == 10\n"
)
BASE = {
    "calc/__init__.py": text_file(BUGGY),
    "calc/unused.py": text_file("x = 1\n"),
    "pyproject.toml": text_file('[project]\nname = "calc"\nversion = "1"\n'),
    "README.md": text_file("# calc\n"),
    "tests/test_calc.py": text_file(OLD_TESTS),
}
SOLVED = with_changes(
    BASE,
    {
        "calc/__init__.py": text_file(FIXED),
        "README.md": text_file("# calc\n\nIt adds.\n"),
        "tests/test_more.py": text_file(NEW_TESTS),
    },
)
FAIL_TO_PASS = ("tests.test_more::test_add", "tests.test_more::test_double")
PASS_TO_PASS = ("tests.test_calc::test_step", "tests.test_calc::test_zero")


async def make_tiny_change(solved: FileTree = SOLVED) -> Change:
    """Returns the change that fixes both bugs, or another one."""
    parts = split_patch(await diff_trees(BASE, solved))
    return Change(base=BASE, base_commit=digest_tree(BASE), parts=parts)


def draft_of(change: Change) -> SweInstance:
    """Returns the instance without commands and lists."""
    return SweInstance(
        instance_id="tiny-1",
        repo="calc",
        base_commit=change.base_commit,
        language="python",
        license="MIT",
        problem_statement="add and double are wrong.",
        patch=change.parts.code,
        test_patch=change.parts.test,
        aux_patch=change.parts.aux,
    )


def source_with(code: str) -> dict[str, TreeFile]:
    """Returns the change of an attempt that keeps the bugs and adds code to the module."""
    return {"calc/__init__.py": text_file(f"{code}\n\n{BUGGY}")}
