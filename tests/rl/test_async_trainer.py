"""The asynchronous trainer beside a buffer and an engine of its own process (`InProcessOrchestrator`), without orchestrator, gateway and
services: test_async_trainer_orchestrator.py has those."""

import dataclasses
import itertools

import pytest

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
from tests.rl.small_stage import COMMON, TOKENIZER, likes_low_bytes, same, shared, weights

TASKS = [
    Task(id=f"t{i}", kind="math", messages=({"role": "user", "content": f"{i}?"},))
    for i in range(8)
]
STEPS = 4
SHARED = COMMON | dict(
    schedule=dataclasses.replace(COMMON["schedule"], total_steps=STEPS),
    train=TrainConfig(eval_interval=0, save_interval=STEPS // 2),
    rollout=dataclasses.replace(COMMON["rollout"], prompts=3),
    # Which attempts are sampled beside each other changes no bit.
    engine=dataclasses.replace(COMMON["engine"], batch_invariant=True),
    evaluation=EvaluationConfig(tasks=0),
    mismatch=MismatchConfig(attempts=0),
)
# Of the report, what is to be seen of an asynchronous run.
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
    "Busy intervals of each program",
)


class Together(InProcessOrchestrator):
    """As it is, with what was asked of it; it gives the engine weights too."""

    blockers = ("the service is gone",)

    def __init__(self, config, tasks=TASKS, verify=likes_low_bytes):
        super().__init__(
            config,
            TaskSuite(tasks=small_stage.InTurn(tasks), held_out={}, verify=verify),
            TOKENIZER,
        )
        self.pushed, self.begun, self.ages = [], [], []

    def push(self, *said, rewind=False):
        if isinstance(said[0], int):
            return super().push(*said)
        self.pushed.append((said[1], rewind))
        pushed = self.pusher.push(*said, rewind=rewind)
        return dataclasses.replace(pushed, sent_bytes=7)

    def begin(self, step, version, checksum):
        self.begun.append((step, version))
        super().begin(step, version, checksum)

    def take(self, step, seconds):
        found = super().take(step, seconds)
        self.ages.append(max(group.staleness for group in found))
        return found

    def evaluate(self, count):
        return {"math": {"reward": count / 8, "count": count, "failed": 0}}


@pytest.fixture
def quick(one_device, tmp_path):
    """The tokenizer's folder; stages train on one device and write no page."""
    TOKENIZER.save(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def schedule_of(count):
    return dataclasses.replace(COMMON["schedule"], total_steps=count)


def config_of(tokenizer, **changes):
    return AsyncRlConfig(name="async", tokenizer=tokenizer, **SHARED | changes)


def run(config, workdir, orchestrator=None, pusher=None):
    orchestrator = orchestrator or Together(config)
    AsyncRlTrainer(config, workdir, orchestrator, pusher or orchestrator, step_maker=shared).run()
    return orchestrator


@pytest.mark.slow
def test_without_staleness_it_is_the_synchronous_trainer_bit_by_bit(quick, tmp_path):
    suite = TaskSuite(tasks=small_stage.InTurn(TASKS), held_out={}, verify=likes_low_bytes)
    config = RlConfig(name="sync", tokenizer=quick, **SHARED)
    SyncRlTrainer(config, tmp_path / "sync", suite, TASKS, step_maker=shared).run()
    orchestrator = run(config_of(quick, max_staleness=0, reset_optimizer=False), tmp_path / "async")
    found = weights(tmp_path / "async")
    assert same(found, weights(tmp_path / "sync"))
    first = weights(tmp_path / "async" / "checkpoints" / str(STEPS // 2))
    assert not same(found, first)  # they have moved
    assert orchestrator.ages == [0] * STEPS
    assert orchestrator.pushed == [(0, True), *((step, False) for step in range(1, STEPS + 1))]
    stale = run(config_of(quick, max_staleness=1, reset_optimizer=False), tmp_path / "stale")
    assert max(stale.ages) == 1 and not same(found, weights(tmp_path / "stale"))


@pytest.mark.slow
def test_moments_begin_anew_behind_each_push(quick, tmp_path):
    changes = {"schedule": schedule_of(4), "push_every": 2}
    for name, new in (("kept", False), ("new", True)):
        config = config_of(quick, max_staleness=2, reset_optimizer=new, **changes)
        orchestrator = run(config, tmp_path / name)
        assert [version for version, _ in orchestrator.pushed] == [0, 2, 4]
        rows = read(tmp_path / name)
        assert column(rows, "push/bytes") == ([2, 4], [7, 7])
        steps, ages = column(rows, "policy/staleness")
        assert steps == [1, 2, 3, 4] and ages == orchestrator.ages and max(ages) <= 2
        told = {
            "entropy",
            "clip_frac_low",
            "clip_frac_high",
            "ratio",
            "abs_logratio",
            "staleness_mean",
            "version_span",
        }
        assert all(column(rows, f"policy/{name}")[0] == steps for name in told)
    assert not same(weights(tmp_path / "kept"), weights(tmp_path / "new"))


def test_a_trainer_that_was_stopped_goes_on_with_the_same_orchestrator(quick, tmp_path):
    config = config_of(quick, max_staleness=0)
    run(config, tmp_path / "whole")
    half = dataclasses.replace(config.train, steps=2)
    orchestrator = run(dataclasses.replace(config, train=half), tmp_path / "parts")
    run(config, tmp_path / "parts", orchestrator)
    assert orchestrator.begun == [(0, 0), (2, 2)] and orchestrator.pushed[3] == (2, True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


@pytest.mark.parametrize(
    ("method", "value", "why"),
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
def test_what_the_orchestrator_cannot_do_ends_the_run_in_words(quick, tmp_path, method, value, why):
    def fails(*said):
        if isinstance(value, Exception):
            raise value
        return value

    config = config_of(quick, batch_timeout_s=3.0)
    orchestrator = Together(config)
    setattr(orchestrator, method, fails)
    with pytest.raises(TrainingStopped, match=why):
        run(config, tmp_path / "run", orchestrator)


@pytest.mark.parametrize("refused, tries", [(True, 1), (False, 4)])
def test_weights_that_no_engine_takes_end_the_run_in_words(quick, tmp_path, refused, tries):
    """At once if an engine refuses them; one that is not there may come."""
    asked = []

    class Nowhere:
        def push(self, params, version, rewind=False):
            asked.append((version, rewind))
            raise PushFailed("no engine has taken version 0", refused)

    config = config_of(quick, batch_timeout_s=0.35, refresh_interval_s=0.1)
    with pytest.raises(TrainingStopped, match="no engine has taken version 0"):
        run(config, tmp_path / "run", pusher=Nowhere())
    assert asked == [(0, True)] * tries


def test_engines_that_start_with_the_trainer_are_waited_for(quick, tmp_path):
    class Late(Together):
        tries = 0

        def push(self, *said, rewind=False):
            self.tries += 1
            if self.tries < 3:
                raise PushFailed("no engine has taken version 0")
            return super().push(*said, rewind=rewind)

    schedule = schedule_of(2)
    config = config_of(quick, schedule=schedule, refresh_interval_s=0.1)
    orchestrator = run(config, tmp_path / "run", Late(config))
    assert orchestrator.tries > 3 and [version for version, _ in orchestrator.pushed] == [0, 1, 2]


class Outage(Together):
    """An engine that some pushes do not reach, by their number, and that is started anew before a batch of some steps: it
    serves nobody until it has the weights. waits: seconds that the trainer has waited for batches."""

    def __init__(self, config, unreached=(), anew=()):
        super().__init__(config)
        self.unreached, self.anew = unreached, set(anew)
        self.tried, self.waits, self.given = 0, [], None

    def push(self, *said, rewind=False):
        if not isinstance(said[0], int):
            self.tried, self.given = self.tried + 1, None
            if self.tried in self.unreached:
                raise PushFailed("no engine has taken it: all are gone")
            self.given = said[1]
        return super().push(*said, rewind=rewind)

    def refresh(self, params, version):
        return None if self.given is not None else self.push(params, version, rewind=True)

    def take(self, step, seconds):
        self.waits.append(seconds)
        if step in self.anew:
            self.anew.discard(step)
            self.given = None
        return None if self.given is None else super().take(step, seconds)


@pytest.mark.slow
def test_engines_that_no_push_has_reached_get_the_weights_while_a_batch_is_waited_for(
    quick, tmp_path
):
    """Without staleness no batch would ever come; once they have them it is the one that would have come anyway."""
    changes = {"schedule": schedule_of(4), "max_staleness": 0}
    config = config_of(quick, refresh_interval_s=2.0, batch_timeout_s=5.0, **changes)
    run(config, tmp_path / "whole")
    orchestrator = run(config, tmp_path / "run", Outage(config, unreached=(3, 4, 6)))
    assert [version for version, _ in orchestrator.pushed] == [0, 1, 2, 3, 4]
    assert orchestrator.waits == [2, 2, 2, 2, 1, 2, 2] and orchestrator.ages == [0] * 4
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))
    orchestrator = Outage(config, unreached=range(3, 9))
    with pytest.raises(TrainingStopped, match="no batch has arrived within 5 s"):
        run(config, tmp_path / "gone", orchestrator)
    assert orchestrator.waits == [2, 2, 2, 2, 1] and orchestrator.tried == 5


def test_engines_that_were_started_anew_do_not_wait_for_the_next_push(quick, tmp_path):
    schedule = schedule_of(4)
    config = config_of(quick, push_every=2, max_staleness=2, schedule=schedule)
    orchestrator = run(config, tmp_path / "run", Outage(config, anew=(2, 3)))
    # As those of version 2 are nowhere any more by step 3, all get what there is.
    assert orchestrator.pushed == [(0, True), (2, False), (2, True), (3, True), (4, False)]
    assert orchestrator.buffer.version == 4 and max(orchestrator.ages) <= 2


def test_held_out_tasks_are_the_orchestrator_s(quick, tmp_path):
    train = TrainConfig(steps=2, eval_interval=1, save_interval=0)
    config = config_of(quick, train=train, evaluation=EvaluationConfig(tasks=4))
    run(config, tmp_path / "run")
    assert column(read(tmp_path / "run"), "held_out/math") == ([1, 2], [0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "why"),
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
def test_a_config_that_cannot_be_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        config_of("bytes", **changes)


def test_a_batch_of_which_nothing_is_left_is_a_step_without_a_gradient(quick, tmp_path):
    class Same(Together):
        def take(self, step, seconds):
            groups = super().take(step, seconds)
            return [dataclasses.replace(group, baseline=(1.0,) * 4) for group in groups]

    schedule = schedule_of(2)
    config = config_of(
        quick, credit=CreditConfig(drop_zero_variance_groups=True), schedule=schedule
    )
    run(config, tmp_path / "run", Same(config))
    steps, norms = column(read(tmp_path / "run"), "grad_norm/muon")
    assert steps == [1, 2] and norms == [0, 0]
    assert column(read(tmp_path / "run"), "rollout/zero_variance_groups")[1] == [1, 1]


def test_logs_share_of_members_that_used_tools(quick, tmp_path):
    class Calling(Together):
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

    config = config_of(quick, schedule=schedule_of(2))
    run(config, tmp_path / "run", Calling(config))
    assert column(read(tmp_path / "run"), "rollout/used_tools")[1] == [0.25, 0.25]


def run_with_failures(tokenizer, workdir):
    """Four steps of two kinds of tasks, where of each group one attempt fails and the orchestrator has dropped some."""
    config = config_of(tokenizer, schedule=schedule_of(4))
    judged = itertools.count()

    async def fails_at_times(task, attempt):
        if next(judged) % 4 == 0:
            return Reward(None, error="the sandbox is gone")
        return await likes_low_bytes(task, attempt)

    kinds = [
        dataclasses.replace(task, kind=("math", "words")[i % 2]) for i, task in enumerate(TASKS)
    ]
    orchestrator = Together(config, kinds, fails_at_times)
    take = orchestrator.take

    def dropping(step, seconds):
        found = take(step, seconds)
        orchestrator.counts |= {"groups/stale": step, "groups/cancelled": 1}
        return found

    orchestrator.take = dropping
    run(config, workdir, orchestrator)


def test_logs_what_the_orchestrator_has_counted(quick, tmp_path):
    run_with_failures(quick, tmp_path / "run")
    rows = read(tmp_path / "run")
    steps = [1, 2, 3, 4]
    failed = column(rows, "rollout/environment_errors")
    assert failed[0][0] == 1 and set(failed[1]) == {0.25}
    assert column(rows, "rollout/padded") == (steps, [0.25] * 4)
    assert column(rows, "dropped/stale") == (steps, [0, 1, 2, 3])
    assert column(rows, "dropped/cancelled") == (steps, [1] * 4)
    assert column(rows, "dropped/failed") == column(rows, "dropped/rolled_back") == (steps, [0] * 4)


@pytest.mark.slow
def test_report_shows_what_the_orchestrator_has_counted_and_how_each_task_fares(quick, tmp_path):
    run_with_failures(quick, tmp_path / "run")
    page = write_page(tmp_path / "run").read_text()
    for chart in CHARTS:
        assert f">{chart}</text>" in page, chart
    lines = "math words clip_frac_low clip_frac_high masked staleness_mean environment_errors padded stale cancelled"
    for line in lines.split():
        assert f">{line}</text>" in page, line
    [trainer] = read_utilization(tmp_path / "run")
    assert f">train {trainer.pid}</text>" in page
    shares = "".join(f"<td>{share:.0%}</td>" for share in (trainer.busy, 1 - trainer.busy))
    assert "<td>busy</td><td>idle</td>" in page and shares in page
