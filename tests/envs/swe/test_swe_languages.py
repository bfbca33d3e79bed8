"""Builds, runs and grades a real project of each language, from its archive and without a model or a network."""

import asyncio
import shutil

import pytest

from glm5_jax.envs.swe.recipes import detect_language
from glm5_jax.envs.swe.sources import make_tree
from glm5_jax.envs.swe.validation import make_instance
from tests.envs.swe.fixture_projects import PROJECTS

# Number of tests in FAIL_TO_PASS, and the smallest number in PASS_TO_PASS.
COUNTS = {
    "python": (3, 59),
    "c": (2, 176),
    "cpp": (1, 104),
    "go": (1, 250),
    "java": (1, 100),
    "javascript": (8, 300),
    "typescript": (1, 100),
    "php": (23, 900),
    "ruby": (1, 600),
}


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

    async def make():
        change = await project.change()
        return await make_instance(project.draft(change), change, builder)

    made = asyncio.run(make())
    if made.instance is None and "node_modules" in str(made.invalid_reason):
        pytest.skip(made.invalid_reason)

    assert made.invalid_reason is None
    num_fixed, min_kept = COUNTS[language]
    assert len(made.instance.FAIL_TO_PASS) == num_fixed
    assert len(made.instance.PASS_TO_PASS) >= min_kept
    assert [made.gradings[name].reward for name in ("gold", "empty", "last_hunk")] == [1, 0, 0]
