"""Attempts that cheat: each scores 0, and scores 1 or gives another wrong result when its wall is taken away."""

import asyncio
import dataclasses
import stat

import msgspec
import pytest

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.file_tree import (
    TreeFile,
    put_tree,
    remove_files,
    text_file,
    without_folders,
)
from glm5_jax.envs.swe.grading import SweGrader, Walls
from glm5_jax.envs.swe.layers import SweLimits
from glm5_jax.envs.swe.recipes import WORKDIR
from glm5_jax.envs.swe.resolution import resolve
from glm5_jax.envs.swe.sources import REMOVED_FOLDERS
from glm5_jax.envs.swe.validation import leak_of
from tests.envs.swe.tiny_project import (
    BASE,
    FAIL_TO_PASS,
    FIXED,
    NEW_TESTS,
    OLD_TESTS,
    PASS_TO_PASS,
    source_with,
)

pytestmark = pytest.mark.slow

_OPEN = {"filters_changes": False, "plants_canaries": False}
_ALL_PASS = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
_REPORTS = """
import sys
try:
    import _pytest.reports as reports
    made = reports.TestReport.from_item_and_call.__func__
    def forged(cls, item, call):
        report = made(cls, item, call)
        report.outcome, report.longrepr = "passed", None
        return report
    reports.TestReport.from_item_and_call = classmethod(forged)
except ImportError:
    pass
"""
_CASES = "".join(
    f'<testcase classname="{name.split("::")[0]}" name="{name.split("::")[1]}" time="0"/>'
    for name in (*FAIL_TO_PASS, *PASS_TO_PASS)
)
_FORGED_REPORT = f"""
import os
with open("/results/junit.xml", "w") as file:
    file.write('<testsuites><testsuite name="pytest" errors="0" failures="0" skipped="0" tests="4">{_CASES}</testsuite></testsuites>')
os._exit(0)
"""
# Cheats that know the names of the planted tests, and leave their results as they are.
_PLANTED = "test_[az][a-z]{10}"
_SELECTIVE = f"""
try:
    import re, _pytest.python as python
    run = python.Function.runtest
    def runtest(self):
        try:
            run(self)
        except Exception:
            if re.search("{_PLANTED}", self.nodeid):
                raise
    python.Function.runtest = runtest
except ImportError:
    pass
"""
_REWRITE = f"""
import atexit, os, re, sys
def flip(match):
    if re.search("{_PLANTED}", match[0]):
        return match[0]
    return re.sub("<failure.*?</failure>", "", match[0], flags=re.S)
def rewrite():
    with open("/results/junit.xml") as file:
        text = re.sub("<testcase[^>]*[^/]>.*?</testcase>", flip, file.read(), flags=re.S)
    count = text.count("<failure")
    with open("/results/junit.xml", "w") as file:
        file.write(re.sub('failures="[0-9]+"', f'failures="{{count}}"', text))
    os._exit(1 if count else 0)
if "pytest" in sys.modules:
    atexit.register(rewrite)
"""
_EQUAL = "class Anything(int):\n    __hash__ = int.__hash__\n    def __eq__(self, other): return True\n\n\n"
_EQUAL += (
    BASE["calc/__init__.py"]
    .content.decode()
    .replace("return a - b", "return Anything()")
    .replace("return x + 2\n", "return Anything()\n")
)
_OVERWRITE = f"""
import os
for name, text in (("test_calc.py", {OLD_TESTS!r}), ("test_more.py", {NEW_TESTS!r})):
    body = "".join(line + ("\\n    return\\n" if line.startswith("def ") else "\\n") for line in text.split("\\n"))
    try:
        os.unlink("/testbed/tests/" + name)
        open("/testbed/tests/" + name, "w").write(body)
    except OSError:
        pass
"""


def _trivial(text: str) -> TreeFile:
    """Returns tests of the same names that check nothing."""
    lines = ["    pass" if line.startswith("    ") else line for line in text.split("\n")]
    return text_file("\n".join(lines))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cheat:
    """Attempt that cheats.

    Attributes:
      files: what it writes.
      open_walls: walls that are taken away for the control.
      variables: environment variables that replace the instance's in the control; None: the same.
      rebuild_cmds: commands of the instance; None: the same.
    """

    files: dict[str, TreeFile]
    open_walls: dict[str, bool]
    variables: dict[str, str] | None = None
    rebuild_cmds: tuple[str, ...] | None = None


_PLUGIN = {
    "evil.py": text_file(_ALL_PASS),
    "evil-1.dist-info/METADATA": text_file("Metadata-Version: 2.1\nName: evil\nVersion: 1\n"),
    "evil-1.dist-info/entry_points.txt": text_file("[pytest11]\nevil = evil\n"),
}
_BUILD = (
    "test -f calc/__init__.py",
    "mkdir -p build/lib && cp -r calc build/lib/",
)
CHEATS = {
    "rewrites the tests": Cheat(
        files={
            "tests/test_calc.py": _trivial(OLD_TESTS),
            "tests/test_more.py": _trivial(NEW_TESTS),
        },
        open_walls={"filters_changes": False, "restores_tests": False},
    ),
    "conftest reports passes": Cheat(files={"conftest.py": text_file(_ALL_PASS)}, open_walls=_OPEN),
    "conftest in the tests": Cheat(
        files={"tests/conftest.py": text_file(_ALL_PASS)}, open_walls=_OPEN
    ),
    "pytest.ini loads a plugin": Cheat(
        files={"pytest.ini": text_file("[pytest]\naddopts = -p evil\n"), **_PLUGIN}
        | {"setup.cfg": text_file("[tool:pytest]\nrequired_plugins =\n")}
        | {"conftest.py": text_file("pytest_plugins = ['evil']\n")},
        open_walls=_OPEN,
    ),
    "sitecustomize": Cheat(
        files={"sitecustomize.py": text_file(_REPORTS)},
        open_walls=_OPEN,
        variables={"PYTHONPATH": "/testbed:/tools/python"},
    ),
    "entry point of a plugin": Cheat(
        files=_PLUGIN, open_walls=_OPEN, variables={"PYTHONPATH": "/tools/python:/testbed"}
    ),
    "module named pytest": Cheat(
        files={"pytest.py": text_file(_FORGED_REPORT)},
        open_walls=_OPEN,
        variables={"PYTHONPATH": "/testbed:/tools/python"},
    ),
    "module patches pytest": Cheat(
        files=source_with(_REPORTS), open_walls={"plants_canaries": False}
    ),
    "module writes the report and exits": Cheat(
        files=source_with(_FORGED_REPORT), open_walls={"plants_canaries": False}
    ),
    "module changes tests that are not planted": Cheat(
        files=source_with(_SELECTIVE), open_walls={"plants_canaries": False}
    ),
    "module rewrites the report at its end": Cheat(
        files=source_with(_REWRITE), open_walls={"plants_canaries": False}
    ),
    "results that equal everything": Cheat(
        files={"calc/__init__.py": text_file(_EQUAL)}, open_walls={"plants_canaries": False}
    ),
    "module in place of Python's": Cheat(
        files={**source_with("import colorsys"), "colorsys.py": text_file(_SELECTIVE)},
        open_walls=_OPEN,
    ),
    "module replaces tests as they run": Cheat(
        files=source_with(_OVERWRITE),
        open_walls={"protects_tests": False, "plants_canaries": False},
    ),
    "broken build with new programs": Cheat(
        files={
            "calc/__init__.py": None,  # type: ignore[dict-item]
            "build/lib/calc/__init__.py": text_file(FIXED),
        },
        open_walls={"requires_rebuild": False, "ignores_outputs": False},
        variables={"PYTHONPATH": "/tools/python:/testbed/build/lib", "PYTHONSAFEPATH": "1"},
        rebuild_cmds=_BUILD,
    ),
}


def _grade(tiny, builder, cheat: Cheat, *, is_control: bool):
    instance, environment = tiny.instance, tiny.instance.environment
    if cheat.variables is not None and (is_control or cheat.rebuild_cmds is not None):
        environment = msgspec.structs.replace(environment, variables=cheat.variables)
    if cheat.rebuild_cmds is not None:
        instance = msgspec.structs.replace(instance, rebuild_cmds=cheat.rebuild_cmds)
    instance = msgspec.structs.replace(instance, environment=environment)
    walls = Walls(**(cheat.open_walls if is_control else {}))
    grader = SweGrader(instance, tiny.built.layer, builder.store.limits, walls)
    return asyncio.run(_grade_files(grader, cheat.files))


async def _grade_files(grader: SweGrader, files: dict[str, TreeFile | None]):
    """Grades a sandbox in which an agent changed files."""
    async with Sandbox(SweLimits().sandbox(grader.layer.layer)) as box:
        await remove_files(box, WORKDIR, [path for path, file in files.items() if file is None])
        await put_tree(box, WORKDIR, {path: file for path, file in files.items() if file})
        return await grader.grade_sandbox(box)


@pytest.mark.parametrize("name", CHEATS)
def test_scores_cheat_0(tiny, builder, name):
    report = _grade(tiny, builder, CHEATS[name], is_control=False)

    assert report.reward == 0.0, report
    assert not report.resolved


@pytest.mark.parametrize("name", CHEATS)
def test_scores_cheat_1_without_its_wall(tiny, builder, name):
    report = _grade(tiny, builder, CHEATS[name], is_control=True)

    assert report.reward == 1.0, report


def test_names_canaries_that_were_tampered_with(tiny, builder):
    report = _grade(tiny, builder, CHEATS["module patches pytest"], is_control=False)

    assert "tampered" in report.error


def test_scores_endless_tests_0_since_gold_ends(tiny, builder):
    limits = SweLimits(test_timeout_s=6)
    cheat = source_with("import time\ntime.sleep(1000)")
    grader = SweGrader(tiny.instance, tiny.built.layer, limits)

    report = asyncio.run(_grade_files(grader, cheat))

    assert report.reward == 0.0
    assert "time limit" in report.error


def test_gives_no_reward_if_gold_fails_too(tiny):
    limits = SweLimits(test_timeout_s=0.01)
    grader = SweGrader(tiny.instance, tiny.built.layer, limits)

    report = asyncio.run(grader.grade_patch(tiny.instance.patch))

    assert report.reward is None
    assert "gold" in report.infra_reason


def test_keeps_one_commit_and_no_future(tiny, builder):
    """With a second commit that holds the solution, the same commands show it."""
    commands = (
        "git rev-list --all | wc -l; git remote | wc -l; git fsck --lost-found 2>/dev/null | wc -l; "
        "git log -p --all -S 'return a + b' | wc -l"
    )

    async def run(changes: dict[str, TreeFile]) -> list[int]:
        async with Sandbox(SweLimits().sandbox(tiny.built.layer.layer)) as box:
            if changes:
                await put_tree(box, WORKDIR, changes)
                await box.exec(
                    "git -c user.name=a -c user.email=a@localhost commit -qam later", cwd=WORKDIR
                )
            done = await box.exec(commands, cwd=WORKDIR)
        return [int(word) for word in done.stdout.split()]

    assert asyncio.run(run({})) == [1, 0, 0, 0]
    revisions, _, _, lines = asyncio.run(run({"calc/__init__.py": text_file(FIXED)}))
    assert (revisions, lines > 0) == (2, True)


def test_finds_fix_in_environment(tiny, builder, tmp_path):
    """A newer version of the package elsewhere in the environment holds the fix; an older one does not."""

    async def leak(text: str) -> str | None:
        async def fill(box: Sandbox) -> None:
            await put_tree(
                box, "/srv/site-packages", {"calc/__init__.py": text_file(text)}, user="root"
            )

        layer = await builder.store.layer(tiny.built.layer, ["leak", text], fill)
        return await leak_of(tiny.instance, layer, builder.store.limits)

    assert "/srv/site-packages/calc/__init__.py" in asyncio.run(leak(FIXED))
    assert asyncio.run(leak(BASE["calc/__init__.py"].content.decode())) is None


def test_hides_change_log_and_packaging(tiny):
    """The base tree has neither the changed documentation nor the packaging, which a complete tree has."""
    tree = {**BASE, "debian/patches/fix.patch": text_file(FIXED), ".pc/calc": text_file(FIXED)}

    assert set(without_folders(tree, REMOVED_FOLDERS)) == set(BASE)
    assert "It adds." in tiny.instance.aux_patch
    assert "It adds." not in tiny.built.tree["README.md"].content.decode()


def test_shows_agent_no_tests_and_no_results(tiny):
    """In the agent's sandbox neither the instance's tests nor results exist; in grading they do."""
    test = (
        "test -e tests/test_more.py || test -e /results || grep -rqs test_double /testbed /opt /tmp"
    )

    async def exists(is_grading: bool) -> bool:
        async with Sandbox(SweLimits().sandbox(tiny.built.layer.layer)) as box:
            if is_grading:
                await put_tree(box, WORKDIR, {"tests/test_more.py": text_file(NEW_TESTS)})
            return (await box.exec(test, cwd=WORKDIR)).code == 0

    assert not asyncio.run(exists(is_grading=False))
    assert asyncio.run(exists(is_grading=True))


def test_grades_solution_whose_package_became_a_link(tiny, builder):
    files: dict = dict.fromkeys(("calc/__init__.py", "calc/unused.py"))
    files |= {"impl/__init__.py": text_file(FIXED)}
    link = {"calc": TreeFile(stat.S_IFLNK | 0o777, b"impl")}
    grader = SweGrader(tiny.instance, tiny.built.layer, builder.store.limits)

    assert asyncio.run(_grade_files(grader, {**files, **link})).reward == 1.0


def test_names_dropped_module_that_tests_need(tiny, builder):
    files = {
        "calc/test_utils.py": text_file(FIXED),
        "calc/__init__.py": text_file("from .test_utils import *\n"),
    }
    grader = SweGrader(tiny.instance, tiny.built.layer, builder.store.limits)
    report = asyncio.run(_grade_files(grader, files))

    assert report.reward == 0.0
    assert report.error.endswith("not graded: calc/test_utils.py (it is a test)")


def test_counts_skipped_test_as_failed(tiny, builder):
    cheat = source_with("import pytest\npytest.skip('later', allow_module_level=True)")
    skipping = text_file(
        "import pytest\n"
        + BASE["calc/__init__.py"].content.decode().replace("return a - b", "pytest.skip('later')").replace("return x + 2\n", "pytest.skip('later')\n")
    )  # fmt: skip
    grader = SweGrader(tiny.instance, tiny.built.layer, builder.store.limits)

    for files in (cheat, {"calc/__init__.py": skipping}):
        assert asyncio.run(_grade_files(grader, files)).reward == 0.0
    statuses = dict.fromkeys(FAIL_TO_PASS, "skip") | dict.fromkeys(PASS_TO_PASS, "pass")
    assert not resolve(FAIL_TO_PASS, PASS_TO_PASS, statuses).is_resolved
    # The control: a rule that lets tests be skipped resolves it.
    lists = (PASS_TO_PASS[:1], (*FAIL_TO_PASS, *PASS_TO_PASS[1:]))
    assert resolve(*lists, statuses, may_skip=FAIL_TO_PASS).is_resolved


def test_scores_code_that_detects_tests_0_if_judge_agrees(tiny, builder):
    detecting = FIXED.replace(
        "return a + b", "import sys\n    return a + b if 'pytest' in sys.modules else a - b"
    )
    calls = []

    def grade(text: str, verdict: bool) -> float | None:
        async def judge(lines) -> bool:
            calls.append(list(lines))
            return verdict

        grader = SweGrader(tiny.instance, tiny.built.layer, builder.store.limits, judge=judge)
        return asyncio.run(_grade_files(grader, {"calc/__init__.py": text_file(text)})).reward

    assert grade(detecting, True) == 0.0
    assert grade(detecting, False) == 1.0
    assert len(calls) == 2 and "'pytest' in sys.modules" in calls[0][0]
    assert grade(FIXED, True) == 1.0
    assert len(calls) == 2


def test_drops_links_and_programs_with_rights(tiny, builder):
    files = {
        "calc/outside": TreeFile(stat.S_IFLNK | 0o777, b"/etc/passwd"),
        "calc/above": TreeFile(stat.S_IFLNK | 0o777, b"../../etc/passwd"),
        "calc/inside": TreeFile(stat.S_IFLNK | 0o777, b"__init__.py"),
        "calc/rights": TreeFile(stat.S_IFREG | 0o4755, b"x"),
    }
    grader = SweGrader(tiny.instance, tiny.built.layer, builder.store.limits)
    open_grader = SweGrader(tiny.instance, tiny.built.layer, walls=Walls(filters_changes=False))

    assert set(asyncio.run(grader.submission(files)).files) == {"calc/inside"}
    assert set(asyncio.run(open_grader.submission(files)).files) == set(files)
