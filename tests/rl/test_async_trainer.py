"""The asynchronous trainer with a buffer and an engine in its process (`InProcessOrchestrator`).

test_async_trainer_orchestrator.py tests it with orchestrator, gateway and services.
"""

import dataclasses
import itertools
import signal

import pytest

from glm5_jax.checkpoint.store import latest_step
from glm5_jax.inference.client import ServerError
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.algorithm.credit import CreditConfig
from glm5_jax.rl.config import EvaluationConfig, RlConfig
from glm5_jax.rl.trainers.async_trainer import AsyncRlConfig, AsyncRlTrainer
from glm5_jax.rl.trainers.in_process import InProcessOrchestrator
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Reward, Task
from glm5_jax.rl.weights.pusher import PushFailed
from glm5_jax.runtime.utilization import read_utilization
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.metrics import TrainingStopped
from glm5_jax.training.report import write_page
from tests.rl import small_stage
from tests.rl.small_stage import (
    COMMON,
    TOKENIZER,
    all_equal,
    final_weights,
    reward_low_bytes,
    shared_train_step,
)

TASKS = [
    Task(id=f"t{i}", kind="math", messages=({"role": "user", "content": f"{i}?"},))
    for i in range(8)
]
STEPS = 4
SHARED = COMMON | dict(
    schedule=dataclasses.replace(COMMON["schedule"], total_steps=STEPS),
    train=TrainConfig(eval_interval=0, save_interval=STEPS // 2),
    rollout=dataclasses.replace(COMMON["rollout"], prompts=3),
    # Results do not depend on the attempts that are sampled in the same batch.
    engine=dataclasses.replace(COMMON["engine"], batch_invariant=True),
    evaluation=EvaluationConfig(tasks=0),
    mismatch=MismatchConfig(attempts=0),
)
# Charts that the report of an asynchronous run must show.
CHARTS = (
    "Reward",
    "Entropy, nats per token",
    "Share of tokens masked",
    "Share of tokens trained on",
    "Staleness, steps",
    "Tasks, shares of attempts",
    "Tokens per attempt",
    "Seconds per attempt",
    "Attempts and groups, shares",
    "Groups dropped per batch",
    "Seconds per step",
)


class RecordingOrchestrator(InProcessOrchestrator):
    """Orchestrator that records its calls, and pushes weights to its engine.

    Attributes:
      pushed: (version, rewind) of each push.
      starts: (step, version) of each start of a trainer.
      ages: largest staleness of each batch.
    """

    blockers = ("the service is gone",)

    def __init__(self, config, tasks=TASKS, verify=reward_low_bytes):
        super().__init__(
            config,
            TaskSuite(tasks=small_stage.SequentialTasks(tasks), held_out={}, verify=verify),
            TOKENIZER,
        )
        self.pushed, self.starts, self.ages = [], [], []

    def push(self, *arguments, rewind=False):
        if isinstance(arguments[0], int):
            return super().push(*arguments)
        self.pushed.append((arguments[1], rewind))
        pushed = self.pusher.push(*arguments, rewind=rewind)
        return dataclasses.replace(pushed, sent_bytes=7)

    def begin(self, step, version, checksum):
        self.starts.append((step, version))
        super().begin(step, version, checksum)

    def take(self, step, seconds):
        groups = super().take(step, seconds)
        self.ages.append(max(group.staleness for group in groups))
        return groups

    def evaluate(self, count, *, wait_s, **options):
        self.evaluation = options
        return {"math": {"reward": count / 8, "count": count, "failed": 0}}


@pytest.fixture
def tokenizer_folder(one_device, tmp_path):
    """Returns the tokenizer's folder; stages train on one device without a report page."""
    TOKENIZER.save(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def schedule_of(count):
    """Returns the schedule of a run of `count` steps."""
    return dataclasses.replace(COMMON["schedule"], total_steps=count)


def config_of(tokenizer, **changes):
    return AsyncRlConfig(name="async", tokenizer=tokenizer, **SHARED | changes)


def run(config, workdir, orchestrator=None, pusher=None):
    """Runs the trainer, and returns its orchestrator."""
    orchestrator = orchestrator or RecordingOrchestrator(config)
    AsyncRlTrainer(
        config, workdir, orchestrator, pusher or orchestrator, step_maker=shared_train_step
    ).run()
    return orchestrator


@pytest.mark.slow
def test_equals_sync_trainer_without_staleness(tokenizer_folder, tmp_path):
    suite = TaskSuite(
        tasks=small_stage.SequentialTasks(TASKS), held_out={}, verify=reward_low_bytes
    )
    config = RlConfig(name="sync", tokenizer=tokenizer_folder, **SHARED)
    SyncRlTrainer(config, tmp_path / "sync", suite, TASKS, step_maker=shared_train_step).run()
    orchestrator = run(
        config_of(tokenizer_folder, max_staleness=0, reset_optimizer=False), tmp_path / "async"
    )
    result = final_weights(tmp_path / "async")
    assert all_equal(result, final_weights(tmp_path / "sync"))
    halfway = final_weights(tmp_path / "async" / "checkpoints" / str(STEPS // 2))
    assert not all_equal(result, halfway)
    assert orchestrator.ages == [0] * STEPS
    assert orchestrator.pushed == [(0, True), *((step, False) for step in range(1, STEPS + 1))]
    stale = run(
        config_of(tokenizer_folder, max_staleness=1, reset_optimizer=False), tmp_path / "stale"
    )
    assert max(stale.ages) == 1 and not all_equal(result, final_weights(tmp_path / "stale"))


@pytest.mark.slow
def test_resets_moments_after_each_push(tokenizer_folder, tmp_path):
    changes = {"schedule": schedule_of(4), "push_every": 2}
    for name, should_reset in (("continued", False), ("reset", True)):
        config = config_of(
            tokenizer_folder, max_staleness=2, reset_optimizer=should_reset, **changes
        )
        orchestrator = run(config, tmp_path / name)
        assert [version for version, _ in orchestrator.pushed] == [0, 2, 4]
        rows = read(tmp_path / name)
        assert column(rows, "push/bytes") == ([2, 4], [7, 7])
        steps, ages = column(rows, "policy/staleness")
        assert steps == [1, 2, 3, 4] and ages == orchestrator.ages and max(ages) <= 2
        metrics = {
            "entropy",
            "clip_frac_low",
            "clip_frac_high",
            "ratio",
            "abs_logratio",
            "staleness_mean",
            "version_span",
        }
        assert all(column(rows, f"policy/{name}")[0] == steps for name in metrics)
    assert not all_equal(final_weights(tmp_path / "continued"), final_weights(tmp_path / "reset"))


@pytest.mark.slow
def test_stopped_trainer_resumes_with_same_orchestrator(tokenizer_folder, tmp_path):
    config = config_of(tokenizer_folder, max_staleness=0)
    run(config, tmp_path / "whole")
    half = dataclasses.replace(config.train, steps=2)
    orchestrator = run(dataclasses.replace(config, train=half), tmp_path / "parts")
    run(config, tmp_path / "parts", orchestrator)
    assert orchestrator.starts == [(0, 0), (2, 2)] and orchestrator.pushed[3] == (2, True)
    assert all_equal(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("take", None, "no batch has arrived within 3 s: the service is gone"),
        ("take", ServerError("no server answers"), "no server answers"),
        (
            "mark_trained",
            ServerError("the orchestrator is ending", 503),
            "the orchestrator is ending",
        ),
        ("begin", ServerError("push the weights first", 409), "push the weights first"),
    ],
)
def test_failure_of_orchestrator_ends_run_with_message(
    tokenizer_folder, tmp_path, method, value, message
):
    def fail(*arguments):
        if isinstance(value, Exception):
            raise value
        return value

    config = config_of(tokenizer_folder, batch_timeout_s=3.0)
    orchestrator = RecordingOrchestrator(config)
    setattr(orchestrator, method, fail)
    with pytest.raises(TrainingStopped, match=message):
        run(config, tmp_path / "run", orchestrator)


@pytest.mark.parametrize("is_refused, num_tries", [(True, 1), (False, 4)])
def test_push_without_any_engine_ends_run_with_message(
    tokenizer_folder, tmp_path, is_refused, num_tries
):
    """The run ends at once if an engine refuses the weights, because only an unreachable engine may still start."""
    attempts = []

    class FailingPusher:
        def push(self, params, version, rewind=False):
            attempts.append((version, rewind))
            raise PushFailed("no engine has taken version 0", is_refused)

    config = config_of(tokenizer_folder, batch_timeout_s=0.35, refresh_interval_s=0.1)
    with pytest.raises(TrainingStopped, match="no engine has taken version 0"):
        run(config, tmp_path / "run", pusher=FailingPusher())
    assert attempts == [(0, True)] * num_tries


def test_waits_for_engines_that_start_late(tokenizer_folder, tmp_path):
    class LateEngine(RecordingOrchestrator):
        tries = 0

        def push(self, *arguments, rewind=False):
            self.tries += 1
            if self.tries < 3:
                raise PushFailed("no engine has taken version 0")
            return super().push(*arguments, rewind=rewind)

    schedule = schedule_of(2)
    config = config_of(tokenizer_folder, schedule=schedule, refresh_interval_s=0.1)
    orchestrator = run(config, tmp_path / "run", LateEngine(config))
    assert orchestrator.tries > 3 and [version for version, _ in orchestrator.pushed] == [0, 1, 2]


def test_stop_ends_wait_for_engines(tokenizer_folder, tmp_path):
    attempts = []

    class FailingPusher:
        def push(self, params, version, rewind=False):
            attempts.append(version)
            signal.raise_signal(signal.SIGTERM)
            raise PushFailed("no engine has taken version 0")

    config = config_of(tokenizer_folder)
    orchestrator = run(config, tmp_path / "run", pusher=FailingPusher())
    assert attempts == [0] and orchestrator.starts == []
    assert latest_step(tmp_path / "run") is None


def test_stop_saves_step_without_push(tokenizer_folder, tmp_path):
    class StoppedAfterStep(RecordingOrchestrator):
        def mark_trained(self, step):
            super().mark_trained(step)
            signal.raise_signal(signal.SIGTERM)

    config = config_of(tokenizer_folder)
    orchestrator = run(config, tmp_path / "run", StoppedAfterStep(config))
    assert orchestrator.pushed == [(0, True)] and latest_step(tmp_path / "run") == 1


def test_stop_ends_evaluation(tokenizer_folder, tmp_path):
    class SlowEvaluation(RecordingOrchestrator):
        def evaluate(self, count, **options):
            signal.raise_signal(signal.SIGTERM)

    train = TrainConfig(steps=2, eval_interval=1, save_interval=0)
    config = config_of(tokenizer_folder, train=train, evaluation=EvaluationConfig(tasks=4))
    run(config, tmp_path / "run", SlowEvaluation(config))
    assert latest_step(tmp_path / "run") == 1
    assert column(read(tmp_path / "run"), "held_out/math") == ([], [])


class UnreliableEngine(RecordingOrchestrator):
    """Engine that misses some pushes, and restarts before some batches.

    It serves nothing until it has the weights.

    unreached: numbers of the pushes that it misses.
    restarts: steps before whose batch it restarts.

    Attributes:
      num_pushes: number of pushes so far.
      waits: timeouts of the requests for batches, in seconds.
      engine_version: version of the engine's weights; None: none.
    """

    def __init__(self, config, unreached=(), restarts=()):
        super().__init__(config)
        self.unreached, self.restarts = unreached, set(restarts)
        self.num_pushes, self.waits, self.engine_version = 0, [], None

    def push(self, *arguments, rewind=False):
        if not isinstance(arguments[0], int):
            self.num_pushes, self.engine_version = self.num_pushes + 1, None
            if self.num_pushes in self.unreached:
                raise PushFailed("no engine has taken it: all are gone")
            self.engine_version = arguments[1]
        return super().push(*arguments, rewind=rewind)

    def refresh(self, params, version):
        return None if self.engine_version is not None else self.push(params, version, rewind=True)

    def take(self, step, seconds):
        self.waits.append(seconds)
        if step in self.restarts:
            self.restarts.discard(step)
            self.engine_version = None
        return None if self.engine_version is None else super().take(step, seconds)


@pytest.mark.slow
def test_refreshes_engines_while_it_waits_for_batch(tokenizer_folder, tmp_path):
    """Without staleness no batch would ever arrive; after the refresh the batch is that of an undisturbed run."""
    changes = {"schedule": schedule_of(4), "max_staleness": 0}
    config = config_of(tokenizer_folder, refresh_interval_s=2.0, batch_timeout_s=5.0, **changes)
    run(config, tmp_path / "whole")
    orchestrator = run(config, tmp_path / "run", UnreliableEngine(config, unreached=(3, 4, 6)))
    assert [version for version, _ in orchestrator.pushed] == [0, 1, 2, 3, 4]
    assert orchestrator.waits == [2, 2, 2, 2, 1, 2, 2] and orchestrator.ages == [0] * 4
    assert all_equal(final_weights(tmp_path / "whole"), final_weights(tmp_path / "run"))
    orchestrator = UnreliableEngine(config, unreached=range(3, 9))
    with pytest.raises(TrainingStopped, match="no batch has arrived within 5 s"):
        run(config, tmp_path / "gone", orchestrator)
    assert orchestrator.waits == [2, 2, 2, 2, 1] and orchestrator.num_pushes == 5


def test_refreshes_restarted_engines_before_next_push(tokenizer_folder, tmp_path):
    schedule = schedule_of(4)
    config = config_of(tokenizer_folder, push_every=2, max_staleness=2, schedule=schedule)
    orchestrator = run(config, tmp_path / "run", UnreliableEngine(config, restarts=(2, 3)))
    # No engine has version 2 any more by step 3, so that all get the newest weights.
    assert orchestrator.pushed == [(0, True), (2, False), (2, True), (3, True), (4, False)]
    assert orchestrator.buffer.version == 4 and max(orchestrator.ages) <= 2


def test_orchestrator_evaluates_held_out_tasks(tokenizer_folder, tmp_path):
    train = TrainConfig(steps=2, eval_interval=1, save_interval=0)
    evaluation = EvaluationConfig(tasks=4, group=2, temperature=0.6)
    orchestrator = run(
        config_of(tokenizer_folder, train=train, evaluation=evaluation), tmp_path / "run"
    )
    assert orchestrator.evaluation == {"group": 2, "temperature": 0.6, "top_p": 0.95}
    assert column(read(tmp_path / "run"), "held_out/math") == ([1, 2], [0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be above 0"),
        ({"group": 0}, "group 0 and temperature 1.0; use at least 0, 1 and 0"),
    ],
)
def test_rejects_invalid_evaluation(changes, message):
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"push_every": 4, "max_staleness": 2}, "use at least 3"),
        ({"push_every": 0}, "push_every is 0"),
        ({"batch_timeout_s": 0.0}, "batch_timeout_s is 0"),
        ({"refresh_interval_s": -1.0}, "refresh_interval_s is -1"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_running": 0}, "max_running is 0"),
        ({"credit": CreditConfig(kl_target="reference")}, "no teachers|give teachers"),
    ],
)
def test_rejects_invalid_config(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of("bytes", **changes)


def test_empty_batch_is_step_without_gradient(tokenizer_folder, tmp_path):
    class EqualRewards(RecordingOrchestrator):
        def take(self, step, seconds):
            groups = super().take(step, seconds)
            return [dataclasses.replace(group, baseline=(1.0,) * 4) for group in groups]

    schedule = schedule_of(2)
    config = config_of(
        tokenizer_folder, credit=CreditConfig(drop_zero_variance_groups=True), schedule=schedule
    )
    run(config, tmp_path / "run", EqualRewards(config))
    steps, norms = column(read(tmp_path / "run"), "grad_norm/muon")
    assert steps == [1, 2] and norms == [0, 0]
    assert column(read(tmp_path / "run"), "rollout/zero_variance_groups")[1] == [1, 1]


def test_logs_share_of_members_that_used_tools(tokenizer_folder, tmp_path):
    class ToolUsers(RecordingOrchestrator):
        def take(self, step, seconds):
            groups = super().take(step, seconds)
            return [
                dataclasses.replace(
                    group,
                    members=tuple(
                        dataclasses.replace(member, has_used_tools=i == 0)
                        for i, member in enumerate(group.members)
                    ),
                )
                for group in groups
            ]

    config = config_of(tokenizer_folder, schedule=schedule_of(2))
    run(config, tmp_path / "run", ToolUsers(config))
    assert column(read(tmp_path / "run"), "rollout/used_tools")[1] == [0.25, 0.25]


def run_with_failures(tokenizer, workdir):
    """Runs four steps with two kinds of tasks.

    One attempt of each group fails, and the orchestrator reports dropped groups.
    """
    config = config_of(tokenizer, schedule=schedule_of(4))
    num_judged = itertools.count()

    async def fail_first_of_four(task, attempt):
        if next(num_judged) % 4 == 0:
            return Reward(None, error="the sandbox is gone")
        return await reward_low_bytes(task, attempt)

    kinds = [
        dataclasses.replace(task, kind=("math", "words")[i % 2]) for i, task in enumerate(TASKS)
    ]
    orchestrator = RecordingOrchestrator(config, kinds, fail_first_of_four)
    take = orchestrator.take

    def take_with_counts(step, seconds):
        groups = take(step, seconds)
        orchestrator.counts |= {"groups/stale": step, "groups/cancelled": 1}
        return groups

    orchestrator.take = take_with_counts
    run(config, workdir, orchestrator)


def test_logs_counts_of_orchestrator(tokenizer_folder, tmp_path):
    run_with_failures(tokenizer_folder, tmp_path / "run")
    rows = read(tmp_path / "run")
    steps = [1, 2, 3, 4]
    failed = column(rows, "rollout/environment_errors")
    assert failed[0][0] == 1 and set(failed[1]) == {0.25}
    assert column(rows, "rollout/padded") == (steps, [0.25] * 4)
    assert column(rows, "dropped/stale") == (steps, [0, 1, 2, 3])
    assert column(rows, "dropped/cancelled") == (steps, [1] * 4)
    assert column(rows, "dropped/failed") == column(rows, "dropped/rolled_back") == (steps, [0] * 4)


@pytest.mark.slow
def test_report_shows_counts_of_orchestrator_and_tasks(tokenizer_folder, tmp_path):
    run_with_failures(tokenizer_folder, tmp_path / "run")
    page = write_page(tmp_path / "run").read_text()
    for chart in CHARTS:
        assert f'"title":"{chart}"' in page, chart
    lines = "math words clip_frac_low clip_frac_high masked staleness_mean environment_errors padded stale cancelled"
    for line in lines.split():
        assert f'"name":"{line}"' in page, line
    [trainer] = read_utilization(tmp_path / "run")
    assert ">Busy intervals of each program</text>" in page
    assert f">train {trainer.pid}</text>" in page
    shares = "".join(f"<td>{share:.0%}</td>" for share in (trainer.busy, 1 - trainer.busy))
    assert "<td>busy</td><td>idle</td>" in page and shares in page
