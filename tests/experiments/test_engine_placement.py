"""On-policy stages whose engines run in processes of their own train as with the engine in the trainer's process."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from experiments import distill, rl_agentic, rl_general, rl_reasoning
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.envs.reasoning.task_file import TaskFile
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.config import EvaluationConfig, Teacher
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.cluster import ENGINE, GATEWAY, ORCHESTRATOR, TASK, TRAIN, ClusterConfig
from glm5_jax.rl.programs.on_policy import IN_PROCESS, SEPARATE
from glm5_jax.rl.programs.program import ProgramConfig
from glm5_jax.rl.programs.run_key import KEY_FILE
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.runtime.http_server import ListenConfig
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.loop import TrainConfig
from tests.contracts.source_tree import ROOT
from tests.rl import fleet
from tests.rl.small_stage import (
    COMMON,
    all_equal,
    final_weights,
    shared_train_step,
    train_on_one_device,
)

STEPS = 3
MODULES = {"rl_reasoning": rl_reasoning, "rl_general": rl_general, "distill": distill}
TASKS = """
def tasks():
    for number in range(12):
        yield {"question": f"NAME {number}?"}


def verify(task, attempt):
    text = attempt.reply.encode()
    return sum(byte < 64 for byte in text) / max(len(text), 1)
"""


SEPARATELY = {"engine_placement": SEPARATE, "mismatch": MismatchConfig(attempts=0)}


def separate(config):
    """Returns a config with its engines in processes of their own."""
    return dataclasses.replace(config, **SEPARATELY)


def save_policy(folder, seed):
    """Writes random weights, and returns their folder."""
    params = glm5.init_params(COMMON["model"], jax.random.key(seed))
    save_hf(params, folder, cfg=COMMON["model"], tokenizer=Tokenizer.load("bytes"))
    return str(folder)


@pytest.fixture
def shares(tmp_path):
    """Returns two sets of tasks, of which the first has twice the weight."""
    files = [tmp_path / f"{name}.py" for name in ("words", "math")]
    for file in files:
        file.write_text(TASKS.replace("NAME", file.stem))
    words, math = map(str, files)
    return TaskFile(file=words, weight=2.0), TaskFile(file=math, held_out_fraction=0.2)


@pytest.fixture
def common(tmp_path, monkeypatch):
    """Returns the fields of a small stage that trains on one device, and whose engines have one too."""
    train_on_one_device(monkeypatch)
    monkeypatch.setattr(
        servers, "make_mesh", lambda axes: make_mesh(axes, devices=jax.devices()[:1])
    )
    return COMMON | dict(
        checkpoint=save_policy(tmp_path / "policy", 0),
        tokenizer="bytes",
        schedule=dataclasses.replace(COMMON["schedule"], total_steps=STEPS),
        train=TrainConfig(eval_interval=0, save_interval=0),
        rollout=dataclasses.replace(COMMON["rollout"], prompts=3, max_turns=1),
        engine=dataclasses.replace(COMMON["engine"], batch_invariant=True, max_length=64),
        mismatch=MismatchConfig(attempts=0),
        cluster=ClusterConfig(warm=False, grace_s=5.0),
    )


@pytest.fixture
def reasoning(common, shares):
    return rl_reasoning.ReasoningConfig(
        name="reasoning", tasks=shares, evaluation=EvaluationConfig(tasks=2), **common
    )


@pytest.fixture
def distillation(common, shares, tmp_path):
    """Returns a distillation whose tasks have one teacher each."""
    teachers = [
        Teacher(checkpoint=save_policy(tmp_path / o, i), origin=o)
        for i, o in ((1, "sft"), (2, "reasoning"))
    ]
    return distill.DistillConfig(
        name="distill",
        objective="teachers",
        teachers=tuple(teachers),
        sft=shares[:1],
        reasoning=shares[1:],
        evaluation=EvaluationConfig(tasks=0),
        **common | {"rollout": dataclasses.replace(common["rollout"], prompts=12, group=1)},
    )


def train_in_process(config, workdir):
    config.make_stage(workdir, step_maker=shared_train_step).run()
    return final_weights(workdir)


def train_separately(config, workdir):
    """Runs all programs of a run in this process, each with its own server, and returns the final weights."""
    config = separate(config)

    def program(role, **fields):
        listen = ListenConfig(port=0, api_key_file=KEY_FILE)
        program_config = ProgramConfig(role=role, listen=listen, **fields)
        return dataclasses.replace(config, program=program_config)

    with contextlib.ExitStack() as stack:

        def start(role, **fields):
            server = servers.SERVERS[role](program(role, **fields), workdir)
            return stack.enter_context(server.running()), server

        engines, _ = start(ENGINE)
        gateway, _ = start(GATEWAY, engines=engines)
        orchestrator, _ = start(ORCHESTRATOR, gateway=gateway)
        for number in range(len(config.task_shares)):
            _, service = start(TASK, number=number, orchestrator=orchestrator)
            fleet.until(lambda: service.is_registered)  # noqa: B023
        trainer = program(TRAIN, orchestrator=orchestrator, engines=engines)
        trainer.make_stage(workdir, step_maker=shared_train_step).run()
    return final_weights(workdir)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trains_equal_weights_in_both_placements(reasoning, tmp_path):
    weights = train_in_process(reasoning, tmp_path / "in_process")
    assert all_equal(weights, train_separately(reasoning, tmp_path / "separate"))
    start = final_weights(reasoning.checkpoint)
    assert not all_equal(weights, start)
    rows = {name: read(tmp_path / name) for name in ("in_process", "separate")}
    for name in ("loss/rl", "reward/mean", "policy/staleness"):
        (steps, values), other = (column(rows[place], name) for place in rows)
        assert steps == other[0] == list(range(1, STEPS + 1))
        assert values == pytest.approx(other[1], rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_distils_equal_weights_in_both_placements(distillation, tmp_path):
    """In one placement both teachers stay in memory, in the other one at a time."""
    weights = train_in_process(distillation, tmp_path / "in_process")
    one_at_a_time = dataclasses.replace(distillation, max_loaded_teachers=1)
    assert all_equal(weights, train_separately(one_at_a_time, tmp_path / "separate"))
    swapped = [
        dataclasses.replace(t, origin=o.origin)
        for t, o in zip(distillation.teachers, distillation.teachers[::-1])
    ]
    other = dataclasses.replace(distillation, teachers=tuple(swapped))
    assert not all_equal(weights, train_in_process(other, tmp_path / "other"))
    losses = [
        column(read(tmp_path / name), "loss/ref_kl")[1] for name in ("in_process", "separate")
    ]
    assert len(losses[0]) == STEPS and losses[0] == losses[1] and np.isfinite(losses[0]).all()


@pytest.mark.parametrize("name", MODULES)
def test_lists_roles_of_separate_engines(name):
    module = MODULES[name]
    recipe, tiny = module.get_config("glm5"), module.get_config("tiny")
    roles = {role.name: role for role in module.roles(recipe, ["--workdir=DIR"])}
    services = [role for role in roles if role.startswith("task-")]
    assert [*roles] == ["engine", "gateway", "orchestrator", *services, "train"]
    assert len(services) == len(recipe.task_shares) and roles["train"].hosts == 256
    assert recipe.max_staleness == 0 and recipe.max_processes is None
    assert recipe.cluster == rl_agentic.get_config("glm5").cluster
    assert not module.roles(tiny, []) and not tiny.programs() and tiny.max_processes == 1
    assert len(module.roles(separate(tiny), [])) == 4 + len(tiny.task_shares)


def test_starts_separate_engines_by_flag():
    flags = separate(rl_reasoning.get_config("tiny")).programs()
    assert f"--experiment={ROOT}/experiments/rl_reasoning.py:tiny" in flags
    assert "--experiment.engine_placement=separate" in flags


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"engine_placement": "elsewhere"},
            "engine_placement is 'elsewhere'; use in_process or separate",
        ),
        (
            {"engine_placement": SEPARATE},
            "mismatch.attempts is 4; remote engines return only log-probs",
        ),
        (
            SEPARATELY | {"partial_credit": True},
            "partial_credit is true",
        ),
        (
            SEPARATELY | {"tasks": (TaskFile(file="a task.py"),)},
            "name is 'a task'; use up to 64 letters",
        ),
    ],
)
def test_rejects_unsuitable_placement(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(rl_reasoning.get_config("tiny"), **changes)
    assert rl_reasoning.get_config("tiny").engine_placement == IN_PROCESS


def test_rejects_reward_model_in_other_process():
    config = separate(rl_general.get_config("tiny"))
    with pytest.raises(ValueError, match="reward_model is 'DIR', which is scored on the trainer's"):
        dataclasses.replace(config, reward_model="DIR")


def test_limits_rate_of_each_service(common, shares, tmp_path):
    config = rl_reasoning.ReasoningConfig(name="rates", tasks=shares, rates=(None, 0.5), **common)
    rates = []
    for number in range(2):
        program = ProgramConfig(role=TASK, number=number, orchestrator="http://localhost:1")
        service = servers.SERVERS[TASK](dataclasses.replace(config, program=program), tmp_path)
        rates.append(service.config.rate)
    assert rates == [None, 0.5]
    with pytest.raises(ValueError, match="rates is .1.0,.; give one for each of words, math"):
        dataclasses.replace(config, rates=(1.0,))
