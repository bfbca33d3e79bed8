"""Every skill of every checkpoint: each measured as its own stage would."""

import dataclasses

import pytest

from glm5_jax.core.metrics_log import column, read
from glm5_jax.rl.skills import in_both_modes, skill_matrix, well_formed
from glm5_jax.rl.stage import World
from glm5_jax.rl.types import Attempt
from tests.rl.test_stage import (  # noqa: F401
    TASKS,
    InTurn,
    config,
    likes_low_bytes,
    quick,
    saved,
    stage_of,
    tokenizer,
)


def test_each_skill_after_each_stage(quick, tmp_path):  # noqa: F811
    kinds = {"math": TASKS[::2], "code": TASKS[1::2]}
    world = World(InTurn(), kinds, likes_low_bytes)
    start = saved(quick, tmp_path / "start", 1)
    learning = dataclasses.replace(quick, checkpoint=start)
    stage_of(learning, tmp_path / "rl", world).run()
    found = skill_matrix(quick, world, {"sft": start, "rl": str(tmp_path / "rl")})
    rows = read(tmp_path / "rl")
    for kind in kinds:
        first, last = (column(rows, f"held_out/{kind}")[1][i] for i in (0, -1))
        assert found.rewards[kind] == {"sft": pytest.approx(first), "rl": pytest.approx(last)}
    assert found.rewards["math"]["sft"] != found.rewards["math"]["rl"]
    assert list(found.rewards) == [*kinds, "form with thinking", "form without"]
    for kind, own in found.samples.items():
        asked = (TASKS[1] if kind == "code" else TASKS[0]).messages[-1]["content"]
        assert own["asked"] == asked and list(own) == ["asked", "sft", "rl"]
    with pytest.raises(ValueError, match="nowhere"):
        skill_matrix(quick, world, {"rl": str(tmp_path / "nowhere")})


def test_a_reply_is_well_formed_if_it_ends_and_thinks_where_it_is_asked_to():
    modes = in_both_modes(TASKS[:1])
    [thinking], [plain] = modes["form with thinking"], modes["form without"]

    def formed(task, content="4", reasoning="two and two", finish_reason="stop"):
        said = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        return well_formed(task, Attempt((said,), finish_reason)).value

    assert (formed(thinking), formed(plain)) == (1, 0)
    assert (formed(thinking, reasoning=None), formed(plain, reasoning=None)) == (0, 1)
    for wrong in ({"content": " "}, {"content": "4</think>"}, {"finish_reason": "length"}):
        assert formed(thinking, **wrong) == 0
        assert formed(plain, **{"reasoning": None} | wrong) == 0
    assert well_formed(plain, Attempt((), "length")).value == 0
