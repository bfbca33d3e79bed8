"""Tests of the evaluation of a served model on a file of questions."""

import asyncio
import dataclasses
import json

import pytest

from experiments import evaluate
from glm5_jax.inference.client import ServerError
from tests.agents.scripted import Scripted

ROWS = [
    {"id": "sum", "question": "1+1?", "answer": "2"},
    {"id": "gas", "question": "Which gas?", "choices": ["neon", "air"], "answer": "A"},
]


class ScriptedClient(Scripted):
    """Scripted model with a context of `length` tokens."""

    length: int

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def context_length(self):
        return self.length


def answer(messages):
    return "\\boxed{2}" if "1+1" in messages[-1]["content"] else "\\boxed{B}"


def prepare(tmp_path, replies, rows=ROWS, temperature=0.5, length=4096, thinking=True, **fields):
    """Returns an evaluation in tmp_path/out and its scripted client."""
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = evaluate.QuestionsConfig(file=str(file), **fields)
    changes = dict(base_url="http://127.0.0.1:9", temperature=temperature, thinking=thinking)
    endpoint = dataclasses.replace(config.endpoint, **changes)
    config = dataclasses.replace(config, endpoint=endpoint)
    client = ScriptedClient(replies)
    client.length = length
    evaluation = evaluate.make_questions(config, tmp_path / "out")
    return dataclasses.replace(evaluation, connect=lambda: client), client


def test_writes_rewards_and_replies_of_all_attempts(tmp_path, capsys):
    evaluation, client = prepare(tmp_path, answer, attempts=2)
    asyncio.run(evaluation.run())
    results = evaluation.results()
    assert {key: result["reward"] for key, result in results.items()} == {
        ("sum", 0): 1.0,
        ("sum", 1): 1.0,
        ("gas", 0): 0.0,
        ("gas", 1): 0.0,
    }
    assert results["gas", 0]["reply"] == "\\boxed{B}"
    for _, fields in client.requests:
        assert fields["temperature"] == 0.5
        assert fields["max_tokens"] < 4096, "the server's context limits the reply"
    evaluate.show_questions(evaluation)
    shown = capsys.readouterr().out
    assert "math" in shown and "1.000" in shown and "0.500" in shown


def test_default_sampling_is_that_of_paper(tmp_path):
    """GLM-5 6.1: temperature 1, top_p 0.95, 131,072 new tokens."""
    temperature = evaluate.QuestionsConfig().endpoint.temperature
    evaluation, client = prepare(tmp_path, answer, temperature=temperature, length=202_752)
    asyncio.run(evaluation.run())
    wanted = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 131_072}
    for _, fields in client.requests:
        assert {name: fields[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("thinking", "options"), [(True, None), (False, {"enable_thinking": False})]
)
def test_requests_replies_without_thinking(thinking, options, tmp_path):
    evaluation, client = prepare(tmp_path, answer, thinking=thinking)
    asyncio.run(evaluation.run())
    assert [fields.get("chat_template_kwargs") for _, fields in client.requests] == 2 * [options]


def test_tells_flag_if_replies_have_no_text(tmp_path, capsys):
    evaluation, _ = prepare(tmp_path, lambda messages: "")
    asyncio.run(evaluation.run())
    evaluate.show_questions(evaluation)
    shown = capsys.readouterr().out
    assert "2 of 2 replies have no text" in shown
    assert "--experiment.endpoint.thinking=False" in shown


def test_repeats_only_attempts_without_reward(tmp_path):
    def fail_once(messages):
        return ServerError("down") if "gas" in messages[-1]["content"] else answer(messages)

    evaluation, _ = prepare(tmp_path, fail_once)
    asyncio.run(evaluation.run())
    assert evaluation.results()["gas", 0]["reward"] is None
    with evaluation.results_file.open("a") as file:
        file.write('{"task": "gas", "atte')  # killed while it wrote
    evaluation, client = prepare(tmp_path, answer)
    asyncio.run(evaluation.run())
    assert len(client.requests) == 1
    assert evaluation.results()["gas", 0]["reward"] == 0.0


def test_keeps_error_with_half_of_surrogate_pair(tmp_path):
    """A server in JavaScript may quote a prompt that is cut within an emoji."""

    def fail_once(messages):
        return ServerError("bad \ud83d") if "gas" in messages[-1]["content"] else answer(messages)

    evaluation, _ = prepare(tmp_path, fail_once)
    asyncio.run(evaluation.run())
    results = evaluation.results()
    assert results["gas", 0]["error"] == "ServerError: bad ?"
    assert results["sum", 0]["reward"] == 1.0


def test_stops_if_server_is_down(tmp_path):
    rows = [{"question": f"{n}?", "answer": "1"} for n in range(100)]
    evaluation, client = prepare(tmp_path, lambda _: ServerError("no route"), rows, concurrency=1)
    with pytest.raises(ServerError, match="20 attempts in a row .*no route"):
        asyncio.run(evaluation.run())
    assert len(client.requests) == 20


def test_refuses_folder_of_other_questions(tmp_path):
    prepare(tmp_path, answer)
    with pytest.raises(ValueError, match="has results with file"):
        prepare(tmp_path, answer, ROWS[:1])


@pytest.mark.parametrize("field", ["attempts", "concurrency"])
def test_rejects_count_that_is_not_positive(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        evaluate.QuestionsConfig(**{field: 0})


def test_names_missing_flags(tmp_path):
    with pytest.raises(ValueError, match="--experiment.file="):
        evaluate.make_questions(evaluate.QuestionsConfig(), tmp_path)
    with pytest.raises(ValueError, match="--experiment.endpoint.base_url="):
        evaluate.make_questions(evaluate.QuestionsConfig(file="a.jsonl"), tmp_path)
