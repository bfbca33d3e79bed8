import asyncio
import os

import pytest

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.layers import HOST_LAYER, LayerStore, npm_versions, tools_layer
from glm5_jax.envs.swe.recipes import RecipeError

_DEAD = 2**22 + 1  # above the kernel's largest process number


def test_makes_layer_of_equal_inputs_once(isolation, tmp_path):
    store, calls = LayerStore(tmp_path), []

    async def fill(box: Sandbox) -> list[int]:
        calls.append(1)
        await box.put("/srv/x", b"content", user="root")
        return [len(calls)]

    async def run():
        first, again = await asyncio.gather(*(store.layer(HOST_LAYER, "a", fill) for _ in range(2)))
        other = await LayerStore(tmp_path).layer(HOST_LAYER, "b", fill)
        async with Sandbox(store.limits.sandbox(again.layer)) as box:
            return first, again, other, await box.get("/srv/x", 100)

    first, again, other, content = asyncio.run(run())
    assert first == again == store.find(first.digest, HOST_LAYER)
    assert (first.record, other.record, content) == ([1], [2], b"content")
    assert store.find("sha256:0", HOST_LAYER) is None


def test_leaves_no_layer_after_failure(isolation, tmp_path):
    store = LayerStore(tmp_path)

    async def fill(box: Sandbox) -> None:
        raise RecipeError("the build failed")

    with pytest.raises(RecipeError):
        asyncio.run(store.layer(HOST_LAYER, "a", fill))

    assert not list(tmp_path.iterdir())


def test_removes_what_killed_builder_left(tmp_path):
    for pid in (_DEAD, os.getpid()):
        (tmp_path / f".sha256-abc.{pid}" / "layer").mkdir(parents=True)

    LayerStore(tmp_path)

    assert [path.suffix for path in tmp_path.iterdir()] == [f".{os.getpid()}"]


def test_needs_node_modules_for_javascript(tmp_path):
    with pytest.raises(RecipeError, match="node_modules is None"):
        asyncio.run(tools_layer(LayerStore(tmp_path), "javascript"))


def test_reads_versions_of_node_packages(tmp_path):
    for name in ("mocha", "@types/node"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "package.json").write_text('{"version": "1.2.3"}')

    assert npm_versions(tmp_path) == {"@types/node": "1.2.3", "mocha": "1.2.3"}
