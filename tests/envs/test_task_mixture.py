"""Kinds of accepted tasks keep their shares, and a restored mixture continues like the saved one."""

import json
from collections import Counter

import numpy as np
import pytest

from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.rl.orchestrator.fair_share import FairShare, shuffled_indices
from glm5_jax.rl.types import Task

WEIGHTS = {"math": 2.0, "code": 1.0, "tir": 1.0}


def some(kind, count=7):
    message = {"role": "user", "content": "?"}
    return [Task(id=f"{kind}-{i}", kind=kind, messages=(message,)) for i in range(count)]


def mixture(weights=WEIGHTS, **options):
    return TaskMixture({kind: some(kind) for kind in weights}, weights, **options)


def run(mixed, steps, accepts, late=0):
    """Draws `steps` tasks, each reported `late` draws later, and accepted with the probability of its kind."""
    rng, waiting, drawn = np.random.default_rng(0), [], []
    for _ in range(steps):
        [task] = mixed.draw()
        drawn.append(task)
        waiting.append(task)
        if len(waiting) > late:
            done = waiting.pop(0)
            (mixed.accept if rng.random() < accepts[done.kind] else mixed.drop)(done)
    return drawn


def test_draws_kinds_by_weight_if_all_are_accepted():
    kinds = [task.kind for task in run(mixture(), 40, dict.fromkeys(WEIGHTS, 1.0))]
    assert kinds[:8] == ["code", "math", "tir", "math"] * 2
    assert Counter(kinds) == {"math": 20, "code": 10, "tir": 10}


def test_draws_in_order_of_orchestrator():
    """Seeds follow from the order, so that stages train alike with the engine here and in other processes."""
    group, weights = 4, {"words": 2.0, "math": 1.0, "code": 0.3}
    mixed, queue = mixture(weights), FairShare()
    for name, weight in weights.items():
        queue.set(name, weight)
    accepted, numbers = Counter(), Counter()
    for _ in range(30):
        tasks = mixed.draw(3)
        for task in tasks:
            name = queue.next_task(accepted, weights)
            epoch, place = divmod(numbers[name], len(some(name)))
            numbers[name] += 1
            assert task == some(name)[shuffled_indices(0, name, epoch, len(some(name)))[place]]
            queue.start(name, group)
        for task in tasks:
            mixed.accept(task)
            queue.finish(task.kind, group, True)
            accepted[task.kind] += group


@pytest.mark.parametrize("late", [0, 16])
def test_accepted_tasks_keep_shares_despite_drops(late):
    mixed = mixture()
    drawn = Counter(
        task.kind for task in run(mixed, 1500, {"math": 0.9, "code": 0.4, "tir": 0.6}, late)
    )
    shares = mixed.shares()
    assert {kind: round(share, 2) for kind, share in shares.items()} == {
        kind: pytest.approx(weight / 4, abs=0.02) for kind, weight in WEIGHTS.items()
    }
    assert drawn["code"] > 1.2 * drawn["tir"], "more are dropped, so more are drawn"


def test_kind_that_is_never_accepted_does_not_block_others():
    mixed = mixture({"math": 1.0, "code": 1.0, "tir": 2.0}, max_overdraw=1.5)
    drawn = Counter(task.kind for task in run(mixed, 400, {"math": 1.0, "code": 0.0, "tir": 1.0}))
    assert drawn["code"] == pytest.approx(400 * 1.5 / 4, abs=2)
    assert mixed.shares() == {
        "math": pytest.approx(1 / 3, abs=0.01),
        "code": 0,
        "tir": pytest.approx(2 / 3, abs=0.01),
    }


def test_draws_same_tasks_in_one_call_and_in_many():
    at_once = mixture().draw(20)
    one_by_one = mixture()
    assert at_once == [one_by_one.draw()[0] for _ in range(20)]


def test_every_epoch_has_all_tasks_shuffled():
    tasks = mixture({"math": 1.0}).draw(21)
    epochs = [[task.id for task in tasks[i : i + 7]] for i in (0, 7, 14)]
    assert all(sorted(epoch) == [task.id for task in some("math")] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tasks == mixture({"math": 1.0}).draw(21) != mixture({"math": 1.0}, seed=1).draw(21)


def test_restored_mixture_draws_same_tasks():
    accepts = {"math": 0.9, "code": 0.4, "tir": 0.6}
    saved = mixture()
    run(saved, 33, accepts, late=5)
    state = json.loads(json.dumps(saved.state()))
    restored = mixture()
    restored.restore(state)
    assert restored.state() == state
    assert run(restored, 60, accepts) == run(saved, 60, accepts)
    assert restored.shares() == saved.shares()


def test_running_groups_count_until_dropped():
    mixed = mixture({"math": 1.0, "code": 1.0})
    first = mixed.draw(4)
    assert mixed.shares() == {"math": 0, "code": 0}
    mixed.drop_waiting()
    with pytest.raises(ValueError, match="no group of task 'code-.' is on its way"):
        mixed.accept(first[0])
    assert Counter(task.kind for task in mixed.draw(2)) == {"math": 1, "code": 1}


def test_rejects_repeated_or_unknown_report():
    mixed = mixture()
    [task] = mixed.draw()
    mixed.accept(task)
    for unknown in (task, some("poem")[0]):
        with pytest.raises(ValueError, match="report each once"):
            mixed.drop(unknown)


def test_rejects_state_of_other_tasks():
    state = mixture().state()
    others = {kind: some(kind, 7 if kind == "math" else 8) for kind in WEIGHTS}
    for other in (mixture(seed=1), TaskMixture(others, WEIGHTS), mixture({"math": 1.0})):
        with pytest.raises(ValueError, match="give the tasks that it was saved with"):
            other.restore(state)
    mixture({"math": 1.0, "code": 1.0, "tir": 5.0}).restore(state)


@pytest.mark.parametrize(
    ("tasks", "weights", "options", "why"),
    [
        ({}, {}, {}, "there are tasks of"),
        ({"a": some("a")}, {"b": 1.0}, {}, r"tasks of \['a'\] and weights of \['b'\]"),
        ({"a": some("a")}, {"a": 0.0}, {}, "the weight of 'a' is 0.0"),
        ({"a": some("a")}, {"a": float("nan")}, {}, "the weight of 'a' is nan"),
        ({"a": []}, {"a": 1.0}, {}, "there is no task of 'a'"),
        ({"a": some("a"), "b": some("a")}, {"a": 1.0, "b": 1.0}, {}, "two tasks have the same id"),
        ({"a": some("a")}, {"a": 1.0}, {"max_overdraw": 0.5}, "max_overdraw is 0.5"),
    ],
)
def test_rejects_invalid_mixture(tasks, weights, options, why):
    with pytest.raises(ValueError, match=why):
        TaskMixture(tasks, weights, **options)
