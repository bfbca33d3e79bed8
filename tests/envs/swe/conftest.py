"""Fixtures of tests that build and grade in sandboxes."""

import asyncio
import os
import pathlib

import pytest

from glm5_jax.envs.swe.builder import RuleBuilder
from glm5_jax.envs.swe.layers import LayerStore, SweLimits
from glm5_jax.envs.swe.validation import MadeInstance, make_instance
from tests.envs.swe.tiny_project import draft_of, make_tiny_change

NODE_MODULES = "GLM5_JAX_NODE_MODULES"


@pytest.fixture(scope="session")
def builder(tmp_path_factory, _isolation) -> RuleBuilder:
    """Returns a builder with a store of the session."""
    if _isolation is not None or os.getuid() != 0:
        pytest.skip(
            _isolation or "any other user's sandboxes have one user, so tests are not protected"
        )
    store = LayerStore(tmp_path_factory.mktemp("layers"), SweLimits(test_timeout_s=600))
    folder = os.environ.get(NODE_MODULES)
    return RuleBuilder(store, pathlib.Path(folder) if folder else None)


@pytest.fixture(scope="session")
def tiny(builder) -> MadeInstance:
    """Returns the instance of the tiny project, built, run and graded."""

    async def make() -> MadeInstance:
        change = await make_tiny_change()
        return await make_instance(draft_of(change), change, builder)

    return asyncio.run(make())
