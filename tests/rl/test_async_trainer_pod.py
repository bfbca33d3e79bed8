"""The asynchronous trainer as several processes: one calls the orchestrator, and the result is that of one process."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.client import ServerError
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model import glm5
from glm5_jax.parallel import multihost
from glm5_jax.rl.config import Teacher
from glm5_jax.rl.trainers.async_trainer import AsyncRlTrainer
from glm5_jax.rl.trajectory import BatchGroup, Trajectory, summarize_records
from glm5_jax.rl.types import Reward
from glm5_jax.rl.weights.pusher import PushResult
from glm5_jax.runtime.http_server import find_free_port
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import report
from glm5_jax.training.experiment import MeshConfig
from glm5_jax.training.metrics import TrainingStopped
from tests.contracts.source_tree import ROOT
from tests.rl.test_async_trainer import SHARED, config_of, schedule_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEVICES, STEPS = 4, 4
# See pallas_kernels.compat.disable_mesh_program_cache for the reason.
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


class RecordingOrchestrator:
    """Orchestrator with the same random groups in every run, and pusher of weights.

    Attributes:
      ends: step at which the orchestrator is unreachable.
      calls: calls so far.
      pushed: versions of the pushes so far.
    """

    blockers = ()
    counts = {"attempts/ended": 16, "attempts/failed": 4, "groups/failed": 1}

    def __init__(self, ends=STEPS):
        self.ends, self.calls, self.pushed = ends, [], []

    def begin(self, step, version, checksum):
        self.calls.append("begin")

    def take(self, step, seconds):
        assert jax.process_index() == 0
        if step == self.ends:
            raise ServerError("no server answers")
        rng = np.random.default_rng(step)

        def member(order, index):
            ids, name = rng.integers(15, 60, 20 + 3 * index), f"{order}-{index}"
            mask = np.arange(len(ids)) >= 8
            logp = np.where(mask, -5.0, np.nan)
            record = TokenRecord(
                token_ids=ids,
                loss_mask=mask,
                rollout_logp=logp,
                weight_version=np.where(mask, step, -1),
                group_id=str(order),
                rollout_id=name,
            )
            reward = Reward(float(rng.random()))
            return Trajectory(
                rollout_id=name,
                group_id=str(order),
                task="math",
                number=0,
                reward=reward,
                summary=summarize_records((record,)),
                records=(record,),
                metrics={},
                duration_s=0.1,
            )

        groups = []
        for order in range(3 * step, 3 * step + 3):
            members = tuple(member(order, index) for index in range(4))
            baseline = tuple(m.reward.value for m in members)
            groups.append(
                BatchGroup(
                    group_id=str(order),
                    task="math",
                    number=0,
                    order=order,
                    members=members,
                    baseline=baseline,
                    staleness=0,
                )
            )
        return groups

    def mark_trained(self, step):
        self.calls.append(f"trained {step}")

    def push(self, *arguments, rewind=False):
        if isinstance(arguments[0], int):
            self.calls.append(f"version {arguments[0]}")
            return None
        self.pushed.append(arguments[1])
        return PushResult(
            version=arguments[1], checksum="", sent_bytes=7, full_bytes=7, duration_s=0.0, acks=()
        )

    def evaluate(self, count, **options):
        assert jax.process_index() == 0
        return {"math": {"reward": count / 8, "count": count, "failed": 0}}


def train(workdir, ends=STEPS, teacher=None):
    """Runs the trainer in each process. teacher: checkpoint to distil from; None: it trains on rewards."""
    report.write_page = lambda workdir: None
    policy = SHARED["policy"]
    config = config_of(
        "bytes",
        policy=dataclasses.replace(policy, correction="unclipped"),
        schedule=schedule_of(STEPS),
        train=dataclasses.replace(SHARED["train"], eval_interval=2),
        evaluation=dataclasses.replace(SHARED["evaluation"], tasks=4),
        mesh=MeshConfig(fsdp=DEVICES),
    )
    if teacher is not None:
        teachers = (Teacher(checkpoint=teacher),)
        config = dataclasses.replace(config, objective="teachers", teachers=teachers)
    orchestrator = RecordingOrchestrator(ends)
    try:
        AsyncRlTrainer(config, workdir, orchestrator, orchestrator).run()
    except TrainingStopped as error:
        print("stopped:", error)
    assert orchestrator.pushed == list(range(min(ends, STEPS) + 1)), "every process pushes"
    assert bool(orchestrator.calls) == (jax.process_index() == 0), (
        "one process calls the orchestrator"
    )
    multihost.any_process(False)


def run_processes(count, call):
    """Runs a call, code of Python, in `count` processes, and returns their outputs."""
    code = "import sys\nimport jax\n"
    if count > 1:
        code += f"jax.distributed.initialize('localhost:{find_free_port()}', {count}, int(sys.argv[1]))\n"
    code += f"{call}\n"
    flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i)],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}"} | UNCACHED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    outputs = [process.communicate(timeout=400)[0] for process in children]
    for process, output in zip(children, outputs):
        assert process.returncode == 0, output
    return outputs


def training(workdir, ends=STEPS, teacher=None):
    """Returns the code that trains in a workdir."""
    imported = "from tests.rl.test_async_trainer_pod import train"
    return f"{imported}\ntrain({str(workdir)!r}, {ends}, {teacher!r})"


def test_two_processes_train_like_one(tmp_path):
    for count in (1, 2):
        run_processes(count, training(tmp_path / str(count)))
    one, two = (read(tmp_path / str(count)) for count in (1, 2))
    assert column(one, "group/order") == column(two, "group/order")
    for name in ("reward/mean", "loss/rl", "policy/entropy", "grad_norm/adamw"):
        columns = [column(rows, name) for rows in (one, two)]
        assert columns[0][0] == list(range(1, STEPS + 1))
        np.testing.assert_allclose(columns[1][1], columns[0][1], rtol=2e-5, atol=1e-7)
    entropy = column(one, "policy/entropy")[1]
    assert entropy[0] != entropy[-1], "the policy has changed"
    assert column(two, "held_out/math") == ([2, 4], [0.5, 0.5])
    assert column(two, "rollout/environment_errors")[1] == [0.25] * STEPS
    assert column(two, "dropped/failed")[1] == [1.0] * STEPS


def test_two_processes_distil_like_one(tmp_path):
    """The teacher scores the rows of all processes, and every process has all log-probs."""
    params = glm5.init_params(SHARED["model"], jax.random.key(3))
    save_hf(params, tmp_path / "teacher", cfg=SHARED["model"], tokenizer=Tokenizer.load("bytes"))
    for count in (1, 2):
        run_processes(count, training(tmp_path / str(count), teacher=str(tmp_path / "teacher")))
    one, two = (column(read(tmp_path / str(count)), "loss/ref_kl") for count in (1, 2))
    assert one[0] == two[0] == list(range(1, STEPS + 1))
    assert one[1][0] != 0
    # Muon scales each update to a fixed size, so that rounding grows: with the teacher's weights changed by 1e-6, the loss
    # of step 2 changes by 2e-3, and that of step 3 by 2e-2.
    np.testing.assert_allclose(two[1][:2], one[1][:2], rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(two[1], one[1], rtol=2e-2)


def test_failure_of_orchestrator_ends_all_processes(tmp_path):
    outputs = run_processes(2, training(tmp_path / "run", ends=2))
    assert all("stopped:" in out and "no server answers" in out for out in outputs)
