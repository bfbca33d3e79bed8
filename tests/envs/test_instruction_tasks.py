"""Generated constraints: the checked constraints are those of the text, and can be followed."""

import asyncio
import itertools

import pytest

from glm5_jax.envs.instructions.generated_tasks import WORDS, ConstraintTaskConfig, tasks
from glm5_jax.envs.instructions.ifeval import Instructions, instructions, tasks as shipped
from glm5_jax.rl.types import Attempt

CONFIG = ConstraintTaskConfig(size=400, max_constraints=3, held_out_fraction=0.2)


def willing(task):
    """Returns a reply that follows the sentences of the task, read as a person would read them."""
    text = task.messages[-1]["content"]
    required = [word for word in WORDS if f'Say "{word}".' in text]
    count = next(
        (n for n in range(20, 0, -1) if f"at least {n} words" in text),
        next((n - 1 for n in range(1, 21) if f"fewer than {n} words" in text), 3),
    )
    return " ".join([*required, *["Ay"] * (count - len(required))])


def test_all_constraints_of_task_can_be_followed():
    kinds = set()
    for task in tasks(CONFIG):
        demands = instructions(task.data)
        kinds |= {demand.kind for demand in demands}
        assert all(demand.is_followed(willing(task)) for demand in demands), task.messages
        assert 1 <= len(demands) <= 3 and task.thinking is False
    assert len(kinds) == 4


def test_rewards_only_replies_that_follow_constraints():
    def worth(task, *messages, **ended):
        attempt = Attempt(messages=messages, **ended)
        rewards = [asyncio.run(Instructions()(task, attempt)) for _ in range(2)]
        assert rewards[0] == rewards[1]
        return rewards[0].value

    for task in tasks(CONFIG):
        reply = {"role": "assistant", "content": willing(task)}
        assert worth(task, reply) == 1
        thought = reply | {"content": "", "reasoning_content": reply["content"]}
        nothing = [(), (thought,), (reply, reply | {"content": None}), (reply | {"role": "tool"},)]
        assert not any(worth(task, *messages) for messages in nothing)
        assert worth(task, reply, finish_reason="length") == worth(task, reply, error="x") == 0
    for task in itertools.chain(tasks(CONFIG), shipped()):
        assert worth(task, {"role": "assistant", "content": " \n"}) == 0


@pytest.mark.parametrize(
    ("demand", "reply"),
    [
        ("Use no commas.", "Ay, Ay"),
        ("Use fewer than 5 words.", "Ay Ay Ay Ay Ay"),
        ("Use at least 5 words.", "Ay Ay Ay Ay"),
        ('Say "my".', "Ay"),
        ('Do not say "my".', "Ay My"),
    ],
)
def test_each_constraint_can_be_broken(demand, reply):
    matching = [task for task in tasks(CONFIG) if demand in task.messages[-1]["content"]]
    assert matching
    for task in matching:
        assert not all(one.is_followed(reply) for one in instructions(task.data))


def test_splits_are_disjoint_and_tasks_reproducible():
    sides = [list(tasks(CONFIG, evaluation=side)) for side in (False, True)]
    texts = [{task.messages[0]["content"] + task.id for task in side} for side in sides]
    assert all(sides) and not texts[0] & texts[1]
    longer = ConstraintTaskConfig(size=800, max_constraints=3, held_out_fraction=0.2)
    assert list(tasks(longer))[: len(sides[0])] == sides[0]
    other = ConstraintTaskConfig(size=400, max_constraints=3, seed=1, held_out_fraction=0.2)
    assert [t.data for t in tasks(other)] != [t.data for t in sides[0]]


def test_leaves_out_long_speeches():
    short = list(tasks(ConstraintTaskConfig(size=400, max_characters=60)))
    all_tasks = {task.id: task for task in tasks(ConstraintTaskConfig(size=400))}
    assert 0 < len(short) < len(all_tasks) and all(all_tasks[task.id] == task for task in short)


@pytest.mark.parametrize("max_constraints", [0, 4])
def test_rejects_numbers_out_of_range(max_constraints):
    with pytest.raises(
        ValueError, match=f"max_constraints is {max_constraints}; it must be from 1 to 3"
    ):
        ConstraintTaskConfig(max_constraints=max_constraints)
