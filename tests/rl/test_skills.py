"""Every skill of every checkpoint: each measured as its own stage would."""

import dataclasses

import pytest

from glm5_jax.core.metrics_log import column, read
from glm5_jax.rl.skills import skill_matrix
from glm5_jax.rl.stage import World
from tests.rl.test_stage import (  # noqa: F401
    TASKS,
    InTurn,
    config,
    likes_low_bytes,
    saved,
    stage_of,
    tokenizer,
)


def test_each_skill_after_each_stage(config, tmp_path):  # noqa: F811
    kinds = {"math": TASKS[::2], "code": TASKS[1::2]}
    world = World(InTurn(), kinds, likes_low_bytes)
    start = saved(config, tmp_path / "start", 1)
    learning = dataclasses.replace(config, checkpoint=start)
    stage_of(learning, tmp_path / "rl", world).run()
    found = skill_matrix(config, world, {"sft": start, "rl": str(tmp_path / "rl")})
    rows = read(tmp_path / "rl")
    for kind in kinds:
        first, last = (column(rows, f"held_out/{kind}")[1][i] for i in (0, -1))
        assert found[kind] == {"sft": pytest.approx(first), "rl": pytest.approx(last)}
    assert found["math"]["sft"] != found["math"]["rl"]
    with pytest.raises(ValueError, match="nowhere"):
        skill_matrix(config, world, {"rl": str(tmp_path / "nowhere")})
