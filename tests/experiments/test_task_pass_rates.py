"""Pass rates of a policy on tasks, written by the command and read by the difficulty filter."""

import dataclasses
import json
import re

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
from tests.agents.scripted import ScriptedServer
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


def save_policy(folder, digits):
    """Writes a checkpoint that answers any sum with one of these digits: only the last token decides on the next."""
    tokenizer = Tokenizer.load("bytes")
    params = glm5.params_of(glm5.Glm5(MODEL, rngs=nnx.Rngs(0)))
    layers = params["dense_layers"]
    layers["attn"]["o"] = jnp.zeros_like(layers["attn"]["o"])
    layers["mlp"]["down"] = jnp.zeros_like(layers["mlp"]["down"])
    question = [{"role": "user", "content": "1+1?"}]
    end = render_chat(question, tokenizer, enable_thinking=False).ids[-1]
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


def verdicts(workdir, checkpoint=None, **fields):
    flags_by_name = FIELDS | {"checkpoint": checkpoint} | fields
    set_flags = {name: value for name, value in flags_by_name.items() if value is not None}
    flags = [f"--experiment.{name}={value}" for name, value in set_flags.items()]
    spec = f"--experiment={ROOT}/experiments/task_pass_rates.py:addition"
    return launch.main(["run", spec, *flags, f"--workdir={workdir}"])


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("student"), [5])


@pytest.mark.slow
def test_pass_rates_of_two_policies_select_tasks(tmp_path, student, capsys):
    """The student always answers 5, the teacher any digit. Tasks remain that only the teacher solves at times."""
    teacher = save_policy(tmp_path / "teacher", range(10))
    for name, checkpoint in (("own", student), ("other", teacher)):
        assert verdicts(tmp_path / name, checkpoint) == 0
        assert f"verdicts            {tmp_path / name}" in capsys.readouterr().out
    student_file, teacher_file = (tmp_path / name / "verdicts.jsonl" for name in ("own", "other"))
    answers = {task.id: int(task.data["answer"]) for task in tasks(SUMS)}
    verdicts_of_task = read_verdicts(student_file)
    assert verdicts_of_task == {t: (16 * (answer == 5), 16) for t, answer in answers.items()}
    assert {*answers.values()} > {5} and max(answers.values()) > 9
    config = dataclasses.replace(
        rl_reasoning.addition(),
        tasks=(TaskWeight(SUMS),),
        verdicts=str(student_file),
        stronger_verdicts=str(teacher_file),
    )
    stage = config.make_stage(tmp_path / "run")
    drawn = {task.id for task in stage.suite.tasks.draw(200)}
    stage.close()
    at_times = {t for t, rate in read_verdicts(teacher_file).items() if 0 < rate.rate < 1}
    assert drawn == {t for t in at_times if answers[t] != 5} and drawn
    assert all(answers[t] < 10 for t in at_times)
    output = capsys.readouterr().out
    assert "too_easy" in output and "unsolved" in output


@pytest.mark.slow
def test_resumes_stopped_run_and_refuses_another(tmp_path, student, capsys, monkeypatch):
    sample, calls = Rollouts.sample, []

    def fake_sample(self, part, *args, **more):
        calls.append([task.id for task in part])
        if len(calls) == 2:
            raise OSError("the power is gone")
        return sample(self, part, *args, **more)

    monkeypatch.setattr(Rollouts, "sample", fake_sample)
    workdir = tmp_path / "run"
    assert verdicts(workdir, student) == 2 and "the power is gone" in capsys.readouterr().err
    first = (workdir / "verdicts.jsonl").read_text()
    assert [json.loads(line)["task"] for line in first.splitlines()] == calls[0]
    with open(workdir / "verdicts.jsonl", "a") as file:
        file.write('{"task": "')  # killed as it wrote
    assert verdicts(workdir, student) == 0
    complete = (workdir / "verdicts.jsonl").read_text()
    assert complete.startswith(first) and calls[2] == calls[1]
    known = [task.id for task in tasks(SUMS)]
    assert [json.loads(line)["task"] for line in complete.splitlines()] == known
    assert verdicts(workdir, student) == 0 and (workdir / "verdicts.jsonl").read_text() == complete
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
    assert "endpoint.base_url None; give one policy" in capsys.readouterr().err


def test_attempts_tasks_at_chat_server(tmp_path, capsys):
    """The server's model adds right if the first number is odd."""

    def add(messages):
        first, second = map(int, re.findall(r"\d+", messages[-1]["content"]))
        return str(first + second if first % 2 else first + second + 1)

    known = {task.id: task for task in tasks(SUMS)}
    server = ScriptedServer(add)
    with server.running() as url:
        fields = {"endpoint.base_url": url, "rollout.group": 2, "length": 128}
        fields |= {"engine.max_length": 128}
        assert verdicts(tmp_path / "other", **fields) == 0, capsys.readouterr().err
    assert len(server.paths) == 2 * len(known)
    _, options = server.scripted.requests[0]
    assert (options["temperature"], options["max_tokens"]) == (1.0, 4)
    verdict_of = read_verdicts(tmp_path / "other" / "verdicts.jsonl")
    numbers = {name: re.findall(r"\d+", t.messages[-1]["content"]) for name, t in known.items()}
    assert verdict_of == {name: (2 * (int(a) % 2), 2) for name, (a, _) in numbers.items()}
    assert 0 < sum(passes for passes, _ in verdict_of.values()) < 2 * len(known)


def test_failing_chat_server_leaves_no_verdicts(tmp_path, capsys):
    with ScriptedServer(lambda messages: "").running() as url:
        pass
    assert verdicts(tmp_path / "other", **{"endpoint.base_url": url}) == 2
    assert "no attempt could be judged: ServerError: no server answers" in capsys.readouterr().err
    assert not (tmp_path / "other" / "verdicts.jsonl").exists()


@pytest.mark.slow
def test_environment_failure_counts_as_no_try(tmp_path, student, capsys, monkeypatch):
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
