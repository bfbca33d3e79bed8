"""Demands that are made up: what is asked is what is checked, and can be kept."""

import asyncio
import itertools

import pytest

from glm5_jax.envs.instructions.generated_tasks import WORDS, ConstraintTaskConfig, tasks
from glm5_jax.envs.instructions.ifeval import Instructions, instructions, tasks as shipped
from glm5_jax.rl.types import Attempt

CONFIG = ConstraintTaskConfig(size=400, max_constraints=3, held_out_fraction=0.2)


def willing(task):
    """A reply that does as the sentences say, which it reads as a person would."""
    asked = task.messages[-1]["content"]
    said = [word for word in WORDS if f'Say "{word}".' in asked]
    count = next(
        (n for n in range(20, 0, -1) if f"at least {n} words" in asked),
        next((n - 1 for n in range(1, 21) if f"fewer than {n} words" in asked), 3),
    )
    return " ".join([*said, *["Ay"] * (count - len(said))])


def test_all_demands_of_a_task_can_be_kept_together():
    kinds = set()
    for task in tasks(CONFIG):
        demands = instructions(task.data)
        kinds |= {demand.kind for demand in demands}
        assert all(demand.is_followed(willing(task)) for demand in demands), task.messages
        assert 1 <= len(demands) <= 3 and task.thinking is False
    assert len(kinds) == 4


def test_who_does_as_asked_is_worth_one_and_who_says_nothing_nothing_each_time():
    def worth(task, *messages, **ended):
        attempt = Attempt(messages=messages, **ended)
        found = [asyncio.run(Instructions()(task, attempt)) for _ in range(2)]
        assert found[0] == found[1]
        return found[0].value

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
def test_each_demand_can_be_broken(demand, reply):
    found = [task for task in tasks(CONFIG) if demand in task.messages[-1]["content"]]
    assert found
    for task in found:
        assert not all(one.is_followed(reply) for one in instructions(task.data))


def test_the_sides_are_apart_and_tasks_depend_on_config_and_number_alone():
    sides = [list(tasks(CONFIG, evaluation=side)) for side in (False, True)]
    said = [{task.messages[0]["content"] + task.id for task in side} for side in sides]
    assert all(sides) and not said[0] & said[1]
    longer = ConstraintTaskConfig(size=800, max_constraints=3, held_out_fraction=0.2)
    assert list(tasks(longer))[: len(sides[0])] == sides[0]
    other = ConstraintTaskConfig(size=400, max_constraints=3, seed=1, held_out_fraction=0.2)
    assert [t.data for t in tasks(other)] != [t.data for t in sides[0]]


def test_long_speeches_are_left_out():
    short = list(tasks(ConstraintTaskConfig(size=400, max_characters=60)))
    whole = {task.id: task for task in tasks(ConstraintTaskConfig(size=400))}
    assert 0 < len(short) < len(whole) and all(whole[task.id] == task for task in short)


@pytest.mark.parametrize("most", [0, 4])
def test_numbers_out_of_range_are_refused(most):
    with pytest.raises(ValueError, match=f"max_constraints is {most}; it must be from 1 to 3"):
        ConstraintTaskConfig(max_constraints=most)
