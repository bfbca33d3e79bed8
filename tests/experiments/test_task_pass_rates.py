"""What a policy makes of tasks, as a command writes it and difficulty reads it."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from flax import nnx

from experiments import rl_reasoning
from experiments.rl_reasoning import TaskWeight
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.envs.reasoning.difficulty import read_verdicts
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.model import glm5
from glm5_jax.rl.rollouts.rollout import Rollouts
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from launch import run as launch
from tests.contracts.source_tree import ROOT
from tests.model.small import one_layer

MODEL = one_layer(
    vocab_size=292,
    hidden_size=64,
    max_position_embeddings=128,
    model_type="glm4_moe_lite",
    tie_word_embeddings=False,
)
SUMS = TaskConfig(kind="addition", size=30, digits=1)
FIELDS = {
    "tasks": [dataclasses.asdict(TaskWeight(SUMS))],
    "rollout.prompts": 8,
    "rollout.group": 16,
    "engine.max_num_seqs": 8,
    "engine.prefill_chunk": 128,
}


def says(folder, digits):
    """A checkpoint that answers any sum with one of these digits: the last token alone decides on the next."""
    tokenizer = Tokenizer.load("bytes")
    params = glm5.params_of(glm5.Glm5(MODEL, rngs=nnx.Rngs(0)))
    layers = params["dense_layers"]
    layers["attn"]["o"] = jnp.zeros_like(layers["attn"]["o"])
    layers["mlp"]["down"] = jnp.zeros_like(layers["mlp"]["down"])
    asked = [{"role": "user", "content": "1+1?"}]
    end = render_chat(asked, tokenizer, enable_thinking=False).ids[-1]
    written = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    embed, head = (jnp.zeros(params[n]["weight"].shape) for n in ("embed", "lm_head"))
    [stop, *_] = tokenizer.eos_ids
    for place, token in enumerate([end, *written]):
        embed = embed.at[token, place].set(1.0)
        for following in [written[i] for i in digits] if token == end else [stop]:
            head = head.at[place, following].set(100.0)
    params["embed"]["weight"], params["lm_head"]["weight"] = embed, head
    save_hf(params, folder, cfg=MODEL, tokenizer=tokenizer)
    return folder


def verdicts(workdir, checkpoint, **fields):
    given = FIELDS | {"checkpoint": checkpoint} | fields
    flags = [f"--experiment.{name}={value}" for name, value in given.items()]
    spec = f"--experiment={ROOT}/experiments/task_pass_rates.py:addition"
    return launch.main(["run", spec, *flags, f"--workdir={workdir}"])


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return says(tmp_path_factory.mktemp("student"), [5])


@pytest.mark.slow
def test_what_two_policies_make_of_tasks_chooses_what_is_learnt(tmp_path, student, capsys):
    """One always says 5, the other any digit: left is what one never solves and the other at times."""
    teacher = says(tmp_path / "teacher", range(10))
    for name, checkpoint in (("own", student), ("other", teacher)):
        assert verdicts(tmp_path / name, checkpoint) == 0
        assert f"verdicts            {tmp_path / name}" in capsys.readouterr().out
    own, other = (tmp_path / name / "verdicts.jsonl" for name in ("own", "other"))
    answers = {task.id: int(task.data["answer"]) for task in tasks(SUMS)}
    found = read_verdicts(own)
    assert found == {t: (16 * (answer == 5), 16) for t, answer in answers.items()}
    assert {*answers.values()} > {5} and max(answers.values()) > 9
    config = dataclasses.replace(
        rl_reasoning.addition(),
        tasks=(TaskWeight(SUMS),),
        verdicts=str(own),
        stronger_verdicts=str(other),
    )
    stage = config.make_stage(tmp_path / "run")
    kept = {task.id for task in stage.suite.tasks.draw(200)}
    stage.close()
    at_times = {t for t, found in read_verdicts(other).items() if 0 < found.rate < 1}
    assert kept == {t for t in at_times if answers[t] != 5} and kept
    assert all(answers[t] < 10 for t in at_times)
    told = capsys.readouterr().out
    assert "too_easy" in told and "unsolved" in told


@pytest.mark.slow
def test_what_was_stopped_goes_on_and_what_is_another_run_is_refused(
    tmp_path, student, capsys, monkeypatch
):
    sample, asked = Rollouts.sample, []

    def counted(self, part, *args, **more):
        asked.append([task.id for task in part])
        if len(asked) == 2:
            raise OSError("the power is gone")
        return sample(self, part, *args, **more)

    monkeypatch.setattr(Rollouts, "sample", counted)
    workdir = tmp_path / "run"
    assert verdicts(workdir, student) == 2 and "the power is gone" in capsys.readouterr().err
    first = (workdir / "verdicts.jsonl").read_text()
    assert [json.loads(line)["task"] for line in first.splitlines()] == asked[0]
    with open(workdir / "verdicts.jsonl", "a") as file:
        file.write('{"task": "')  # killed as it wrote
    assert verdicts(workdir, student) == 0
    whole = (workdir / "verdicts.jsonl").read_text()
    assert whole.startswith(first) and asked[2] == asked[1]
    known = [task.id for task in tasks(SUMS)]
    assert [json.loads(line)["task"] for line in whole.splitlines()] == known
    assert verdicts(workdir, student) == 0 and (workdir / "verdicts.jsonl").read_text() == whole
    capsys.readouterr()
    for fields, words in (
        ({"rollout.group": 4}, "rollout.group was 16, is 4"),
        ({"verdicts": "x", "stronger_verdicts": "x"}, "leave it to rl_reasoning.py"),
        ({"checkpoint": tmp_path / "nowhere"}, "nowhere"),
    ):
        assert verdicts(workdir, fields.pop("checkpoint", student), **fields) == 2
        assert words in capsys.readouterr().err
    spec = f"--experiment={ROOT}/experiments/task_pass_rates.py:addition"
    assert launch.main(["run", spec, f"--workdir={tmp_path / 'none'}"]) == 2
    assert "no policy attempts the tasks" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_environment_failed_is_no_try(tmp_path, student, capsys, monkeypatch):
    judge = rl_reasoning.Verifiers.__call__
    failing = {task.id for task in list(tasks(SUMS))[:3]}

    async def at_times(self, task, attempt):
        if task.id in failing:
            return rl_reasoning.Reward(None, error="no sandbox")
        return await judge(self, task, attempt)

    monkeypatch.setattr(rl_reasoning.Verifiers, "__call__", at_times)
    assert verdicts(tmp_path, student) == 0
    assert "3 tasks could not be judged" in capsys.readouterr().out
    assert not failing & read_verdicts(tmp_path / "verdicts.jsonl").keys()
    failing.pop()
    assert verdicts(tmp_path, student) == 0
    assert "2 tasks could not be judged" in capsys.readouterr().out
