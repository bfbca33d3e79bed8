"""Tasks, attempts and rewards refuse what cannot be."""

import pytest

from glm5_jax.rl.types import Attempt, Reward, Task, settled


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="task 'a' has no message"):
        Task("a", "math", ())
    with pytest.raises(
        ValueError, match="finish_reason is 'done'; use one of stop, length, failed"
    ):
        Attempt((), "done")
    with pytest.raises(ValueError, match="reward's value is nan; it must be finite"):
        Reward(float("nan"))
    with pytest.raises(ValueError, match="reward's judge is inf"):
        Reward(0.0, {"rules": None, "judge": float("inf")})


def test_the_reply_is_the_last_that_the_policy_said():
    said = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    call = {"role": "assistant", "content": None, "tool_calls": []}
    tool = {"role": "tool", "content": "5"}
    assert Attempt((call, tool, said)).reply == "4"
    assert Attempt((said, call)).reply == ""
    assert Attempt(()).reply == Attempt((tool,)).reply == ""


def test_what_an_attempt_is_worth_however_it_ended():
    said = ({"role": "assistant", "content": "4"},)
    assert settled(Attempt(said)) is None
    assert settled(Attempt(said, "failed")) == Reward(None, error="the environment failed")
    assert settled(Attempt(said, "failed", "no engine")) == Reward(None, error="no engine")
    cut = Reward(0.0, {"right": 0.0}, "the attempt was cut off")
    assert settled(Attempt(said, "length"), {"right": 0.0}) == cut
    assert settled(Attempt(said, error="no such call")) == Reward(0.0, error="no such call")
