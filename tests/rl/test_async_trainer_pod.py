"""The asynchronous trainer as several processes: one asks the orchestrator, all learn what one process would."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.client import ServerError
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.parallel import multihost
from glm5_jax.rl.trainers.async_trainer import AsyncRlTrainer
from glm5_jax.rl.trajectory import BatchGroup, Trajectory, summarize_records
from glm5_jax.rl.types import Reward
from glm5_jax.rl.weights.pusher import PushResult
from glm5_jax.runtime.http_server import find_free_port
from glm5_jax.training import report
from glm5_jax.training.experiment import MeshConfig
from glm5_jax.training.metrics import TrainingStopped
from tests.contracts.source_tree import ROOT
from tests.rl.test_async_trainer import SHARED, config_of, schedule_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEVICES, STEPS = 4, 4
UNCACHED = {
    "JAX_ENABLE_COMPILATION_CACHE": "false"
}  # pallas_kernels.compat.disable_mesh_program_cache says why


class Recorded:
    """An orchestrator whose groups are made up, the same each time, and what takes weights. ends: the step at which it is gone."""

    blockers = ()
    counts = {"attempts/ended": 16, "attempts/failed": 4, "groups/failed": 1}

    def __init__(self, ends=STEPS):
        self.ends, self.asked, self.pushed = ends, [], []

    def begin(self, step, version, checksum):
        self.asked.append("begin")

    def take(self, step, seconds):
        assert jax.process_index() == 0
        if step == self.ends:
            raise ServerError("no server answers")
        draw = np.random.default_rng(step)

        def member(order, place):
            ids, name = draw.integers(15, 60, 20 + 3 * place), f"{order}-{place}"
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
            reward = Reward(float(draw.random()))
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

        found = []
        for order in range(3 * step, 3 * step + 3):
            members = tuple(member(order, place) for place in range(4))
            worth = tuple(own.reward.value for own in members)
            found.append(
                BatchGroup(
                    group_id=str(order),
                    task="math",
                    number=0,
                    order=order,
                    members=members,
                    baseline=worth,
                    staleness=0,
                )
            )
        return found

    def mark_trained(self, step):
        self.asked.append(f"trained {step}")

    def push(self, *said, rewind=False):
        if isinstance(said[0], int):
            self.asked.append(f"version {said[0]}")
            return None
        self.pushed.append(said[1])
        return PushResult(
            version=said[1], checksum="", sent_bytes=7, full_bytes=7, duration_s=0.0, acks=()
        )

    def evaluate(self, count):
        assert jax.process_index() == 0
        return {"math": {"reward": count / 8, "count": count, "failed": 0}}


def train(workdir, ends=STEPS):
    """What each process does."""
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
    orchestrator = Recorded(ends)
    try:
        AsyncRlTrainer(config, workdir, orchestrator, orchestrator).run()
    except TrainingStopped as error:
        print("stopped:", error)
    assert orchestrator.pushed == list(range(min(ends, STEPS) + 1)), "all push"
    assert bool(orchestrator.asked) == (jax.process_index() == 0), "one asks"
    multihost.any_process(False)


def processes(count, workdir, ends=STEPS):
    """Their outputs."""
    code = "import sys\nimport jax\n"
    if count > 1:
        code += f"jax.distributed.initialize('localhost:{find_free_port()}', {count}, int(sys.argv[1]))\n"
    code += f"from tests.rl.test_async_trainer_pod import train\ntrain({str(workdir)!r}, {ends})\n"
    flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
    started = [
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
    outputs = [process.communicate(timeout=400)[0] for process in started]
    for process, output in zip(started, outputs):
        assert process.returncode == 0, output
    return outputs


def test_two_processes_learn_what_one_does(tmp_path):
    for count in (1, 2):
        processes(count, tmp_path / str(count))
    one, two = (read(tmp_path / str(count)) for count in (1, 2))
    assert column(one, "group/order") == column(two, "group/order")
    for name in ("reward/mean", "loss/rl", "policy/entropy", "grad_norm/adamw"):
        found = [column(rows, name) for rows in (one, two)]
        assert found[0][0] == list(range(1, STEPS + 1))
        np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-5, atol=1e-7)
    entropy = column(one, "policy/entropy")[1]
    assert entropy[0] != entropy[-1], "it has learnt something"
    assert column(two, "held_out/math") == ([2, 4], [0.5, 0.5])
    assert column(two, "rollout/environment_errors")[1] == [0.25] * STEPS
    assert column(two, "dropped/failed")[1] == [1.0] * STEPS


def test_what_the_orchestrator_cannot_do_ends_all(tmp_path):
    outputs = processes(2, tmp_path / "run", ends=2)
    assert all("stopped:" in out and "no server answers" in out for out in outputs)
