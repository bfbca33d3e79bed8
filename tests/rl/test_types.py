"""Tasks, attempts and rewards reject invalid values."""

import pytest

from glm5_jax.rl.types import Attempt, Reward, Task, reward_without_verifier


def test_rejects_invalid_tasks_attempts_and_rewards():
    with pytest.raises(ValueError, match="task 'a' has no message"):
        Task(id="a", kind="math", messages=())
    with pytest.raises(
        ValueError, match="finish_reason is 'done'; use one of stop, length, failed"
    ):
        Attempt(messages=(), finish_reason="done")
    with pytest.raises(ValueError, match="reward's value is nan; it must be finite"):
        Reward(float("nan"))
    with pytest.raises(ValueError, match="reward's judge is inf"):
        Reward(0.0, {"rules": None, "judge": float("inf")})


def test_reply_is_last_message_of_policy():
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    call = {"role": "assistant", "content": None, "tool_calls": []}
    tool = {"role": "tool", "content": "5"}
    assert Attempt(messages=(call, tool, answer)).reply == "4"
    assert Attempt(messages=(answer, call)).reply == ""
    assert Attempt(messages=()).reply == Attempt(messages=(tool,)).reply == ""


def test_rewards_unfinished_attempt_without_verifier():
    messages = ({"role": "assistant", "content": "4"},)
    assert reward_without_verifier(Attempt(messages=messages)) is None
    assert reward_without_verifier(Attempt(messages=messages, finish_reason="failed")) == Reward(
        None, error="the environment failed"
    )
    assert reward_without_verifier(
        Attempt(messages=messages, finish_reason="failed", error="no engine")
    ) == Reward(None, error="no engine")
    truncated = Reward(0.0, {"right": 0.0}, "the attempt was cut off")
    assert (
        reward_without_verifier(Attempt(messages=messages, finish_reason="length"), {"right": 0.0})
        == truncated
    )
    assert reward_without_verifier(Attempt(messages=messages, error="no such call")) == Reward(
        0.0, error="no such call"
    )
