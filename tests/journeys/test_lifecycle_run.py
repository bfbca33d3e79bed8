"""One command from random weights to a distilled assistant: a few steps of every stage, with a kill in between."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import time

import pytest

from experiments import distill, lifecycle, rl_agentic, rl_general, rl_reasoning
from glm5_jax.envs.instructions.generated_tasks import ConstraintTaskConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.trainers.skill_matrix import FORM_KIND
from glm5_jax.training.lifecycle_report import SKILLS
from tests.conftest import FAST_COMPILE
from tests.contracts.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LIFE = lifecycle.get_config("tiny,each")
STAGES = [f.name for f in dataclasses.fields(LIFE) if getattr(LIFE, f.name) is not None]
RL = [name for name in STAGES if isinstance(getattr(LIFE, name), rl_reasoning.RlConfig)]
KILLED = "rl_general"
STEPS = dict.fromkeys(STAGES, 2) | {KILLED: 5}


def fewer(config):
    """Returns the fields of a stage that trains on attempts: few tasks of each kind, and short attempts."""
    fields = {
        "rollout.prompts": 4,
        "rollout.group": 1 if isinstance(config, distill.DistillConfig) else 2,
        "rollout.max_tokens": 8,
        "rows": 8,
        "engine.max_num_seqs": 8,
        "engine.prefill_chunk": 256,
        "evaluation.tasks": 2,
        # A policy of a few steps gets no answer right.
        "credit.drop_zero_variance_groups": False,
    }
    for name in ("tasks", *distill.ORIGINS):
        shares = getattr(config, name, ())
        if shares:
            fields[name] = [small(share) for share in shares]
    return fields


def small(share):
    if isinstance(share, rl_general.GeneralTaskWeight):
        part = {"demands": ConstraintTaskConfig(size=200, max_characters=60, held_out_fraction=0.2)}
    else:
        part = {"tasks": dataclasses.replace(share.tasks, size=60, held_out_fraction=0.2)}
    return dataclasses.asdict(dataclasses.replace(share, **part))


def flags():
    all_fields = {}
    for name in STAGES:
        config = getattr(LIFE, name)
        fields = {
            "train.steps": STEPS[name],
            "train.eval_interval": 0,
            "train.save_interval": 1,
            "model.num_hidden_layers": 2,
        }
        if name in RL:
            fields |= fewer(config)
        else:
            fields |= {"train.baseline_tokens": 2**12, "train.eval_batches": 1}
        if isinstance(config, rl_agentic.AgenticConfig):
            fields |= {"max_running": 4, "cluster.grace_s": 5.0}
        all_fields |= {f"{name}.{field}": value for field, value in fields.items()}
    return [f"--experiment.{name}={value}" for name, value in all_fields.items()]


def start(env, workdir, log):
    """Starts the command, with its output in a file."""
    words = [f"--experiment={ROOT}/experiments/lifecycle.py:tiny,each", *flags()]
    command = [sys.executable, "-m", "launch.run", *words, f"--workdir={workdir}"]
    with open(log, "w") as out:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)


def test_killed_lifecycle_completes_with_skills_and_budget(plain_env, tmp_path):
    env = plain_env | {"XLA_FLAGS": FAST_COMPILE, "PYTHONUNBUFFERED": "1"}
    workdir, log = tmp_path / "life", tmp_path / "told.txt"
    first = start(env, workdir, log)
    until = time.monotonic() + 1500
    while not (workdir / KILLED / "checkpoints" / "1").exists():
        assert first.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
        time.sleep(0.1)
    first.kill()
    first.wait()
    out = log.read_text()
    ended = STAGES[: STAGES.index(KILLED)]
    assert "time budget         45:30, on two CPU cores: pretrain 2:45" in out
    assert out.count("all stages ") == len(ended)
    before = {name: (workdir / name / "metrics.jsonl").read_text() for name in ended}

    code = start(env, workdir, log).wait(timeout=1500)
    out = log.read_text()
    assert code == 0, out[-4000:]
    # Complete stages are not trained again, and the killed one resumes.
    assert before == {name: (workdir / name / "metrics.jsonl").read_text() for name in ended}
    assert re.search("rl_general:tiny: .* resuming at step [1-4] in", out)
    for name in STAGES:
        steps, losses = column(read(workdir / name), "loss/total")
        assert steps == [*range(1, STEPS[name] + 1)] and all(map(math.isfinite, losses)), name
        config = json.loads((workdir / name / "config.json").read_text())
        place = STAGES.index(name)
        checkpoint = None if place == 0 else str(workdir / STAGES[place - 1])
        assert config["checkpoint"] == checkpoint

    skills = json.loads((workdir / SKILLS).read_text())
    stages_with_skills = ["sft", *RL]
    assert len(skills["rewards"]) == 7 and {*skills["rewards"]} == {*skills["samples"]}
    assert sum(name.startswith(FORM_KIND) for name in skills["rewards"]) == 2
    page = (workdir / "report" / "index.html").read_text()
    assert "<h2>Skills</h2>" in page and all(f">{name}<" in page for name in STAGES)
    for skill, rewards in skills["rewards"].items():
        assert sorted(rewards) == sorted(stages_with_skills), skill
        assert all(0 <= reward <= 1 for reward in rewards.values())
        line = " -> ".join(f"{reward:.2f}" for reward in rewards.values())
        shown = skills["samples"][skill]
        assert {*shown} == {"prompt", *stages_with_skills} and shown["prompt"]
        assert f"\n{skill}: {line}\n  {shown['prompt']}\n  {shown['distill']}" in out
        assert skill in page
    chats = (workdir / "sft" / "samples" / f"{STEPS['sft']}.txt").read_text()
    assert chats.count("<|assistant|>") >= 4 and "husband" in chats
    assert out.count("all stages ") == len(STAGES)
    assert " of 4:00, " in out.splitlines()[-2]
