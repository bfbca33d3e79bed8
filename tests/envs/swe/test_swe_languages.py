"""Builds, runs and grades a real project of each language, from its archive and without a model or a network.

The machine needs Debian's packages that the recipes name, and for JavaScript and TypeScript a folder in which npm installed
mocha, vitest and rimraf 3, as the variable GLM5_JAX_NODE_MODULES. Projects that lack something are skipped.
"""

import asyncio
import re
import shutil

import pytest

from glm5_jax.envs.swe.file_tree import text_file
from glm5_jax.envs.swe.grading import SweGrader, Walls
from glm5_jax.envs.swe.instance import AttemptReport
from glm5_jax.envs.swe.recipes import detect_language
from glm5_jax.envs.swe.sources import diff_trees, make_tree
from glm5_jax.envs.swe.validation import MadeInstance, make_instance
from tests.envs.swe.fixture_projects import PROJECTS, SPECIAL, FixtureProject

_LACKS = re.compile("packages are missing|node_modules is")
# Number of tests in FAIL_TO_PASS, and the smallest number in PASS_TO_PASS.
COUNTS = {
    "python": (3, 59),
    "c": (1, 175),
    "cpp": (1, 104),
    "go": (22, 290),
    "java": (7, 140),
    "javascript": (10, 300),
    "typescript": (5, 120),
    "php": (33, 900),
    "ruby": (8, 600),
}


def _make(builder, project: FixtureProject) -> MadeInstance:
    async def make() -> MadeInstance:
        change = await project.change()
        return await make_instance(project.draft(change), change, builder)

    return asyncio.run(make())


@pytest.mark.parametrize("language", PROJECTS)
def test_detects_language_of_project(language):
    _, solved = PROJECTS[language].trees

    tree = asyncio.run(make_tree(type(solved)(archive=solved.archive)))

    assert detect_language(tree) == language


@pytest.mark.slow
@pytest.mark.parametrize("language", PROJECTS)
def test_makes_valid_instance_of_project(builder, language):
    project = PROJECTS[language]
    missing = [name for name in project.programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")

    result = _make(builder, project)
    if result.instance is None and _LACKS.search(result.invalid_reason):
        pytest.skip(result.invalid_reason)

    assert result.invalid_reason is None
    num_fixed, min_kept = COUNTS[language]
    assert len(result.instance.FAIL_TO_PASS) == num_fixed
    assert len(result.instance.PASS_TO_PASS) >= min_kept
    assert [result.gradings[name].reward for name in ("gold", "empty", "last_hunk")] == [1, 0, 0]


@pytest.mark.slow
def test_labels_instance_whose_last_hunk_is_not_checked(builder):
    if shutil.which("ninja") is None:
        pytest.skip("ninja is not installed")

    result = _make(builder, SPECIAL["last hunk frees memory"])

    assert result.invalid_reason is None
    assert result.instance.labels == {"checks_last_hunk": False}


@pytest.mark.slow
def test_notices_library_that_prints_results(builder):
    """A constructor in the library prints results in each program of tests, and ends it; canaries are linked to it too."""
    if shutil.which("ninja") is None:
        pytest.skip("ninja is not installed")
    result = _make(builder, PROJECTS["c"])
    instance, base = result.instance, result.built.tree["cJSON.c"].content.decode()
    names = [
        name.split("::")
        for name in (*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS)
        if not name.startswith("ctest::")
    ]
    lines = "".join(f'puts("/testbed/{file}:1:{name}:PASS");' for file, name in names)
    forged = (
        "#include <stdio.h>\n#include <unistd.h>\n__attribute__((constructor)) static void start(void) {"
        f'{lines}puts("\\n-----------------------\\n{len(names)} Tests 0 Failures 0 Ignored \\nOK");'
        "fflush(stdout); _exit(0); }\n"
    )
    patch = asyncio.run(
        diff_trees({"cJSON.c": text_file(base)}, {"cJSON.c": text_file(base + forged)})
    )

    def grade(walls: Walls) -> AttemptReport:
        grader = SweGrader(instance, result.built.layer, builder.store.limits, walls)
        return asyncio.run(grader.grade_patch(patch))

    assert "tampered" in grade(Walls()).error
    assert grade(Walls(plants_canaries=False)).reward == 1.0
