"""Attempts: the tokens that were sampled and nothing else is learnt from, with the log-probs that the learner has."""

import asyncio
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import Completion, EngineConfig
from glm5_jax.model import glm5
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.rollouts.rollout import RolloutConfig, Rollouts, ToolError, check_task
from glm5_jax.rl.types import Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.gradients import score_function
from glm5_jax.training.step_config import StepConfig
from tests.model.small import one_layer

TOKENIZER = Tokenizer.default()
ENDS = {name: TOKENIZER.special_ids[name] for name in ("<|user|>", "<|observation|>")}
CFG = one_layer(vocab_size=TOKENIZER.vocab_size, eos_token_id=tuple(ENDS.values()))
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKED = ({"role": "user", "content": "2+3?"},)
PLAIN, WITH_TOOL = (
    Task(id="t", kind="math", messages=ASKED),
    Task(id="t", kind="tir", messages=ASKED, tools=(ADD,)),
)


@functools.cache
def model():
    return glm5.Glm5(CFG, rngs=nnx.Rngs(0))


def engine():
    return Engine(
        model(),
        TOKENIZER,
        EngineConfig(max_num_seqs=4, max_length=64, page_size=8, prefill_chunk=64, seed=1),
    )


def rollouts(made=None, temperature=1.3, tools=None, **options):
    options = dict(max_tokens=9, group=3, max_turns=4) | options
    return Rollouts(made or engine(), TOKENIZER, RolloutConfig(**options), temperature, tools)


def test_what_is_recorded_is_what_the_learner_computes():
    tasks = [PLAIN, Task(id="u", kind="math", messages=({"role": "user", "content": "Why?"},))]
    groups = rollouts().sample(tasks, seed=7, name="5-")
    assert [group.task for group in groups] == tasks
    records = [record for group in groups for record in group.records]
    assert [record.rollout_id for record in records] == [
        f"5-{i}-{j}" for i in (0, 1) for j in range(3)
    ]
    batch, _ = pack_records(records, 64, 1, ("token_ids", "loss_mask", "rollout_logp"))
    score = score_function(CFG, StepConfig(mtp_steps=0), temperature=1.3)
    logp = np.asarray(jax.jit(score)(glm5.params_of(model()), batch))
    trained = batch["loss_mask"] == 1
    np.testing.assert_allclose(logp[trained], batch["rollout_logp"][trained], atol=1e-5)
    for group in groups:
        prompt = render_chat(group.task.messages, TOKENIZER).ids
        for record, attempt in zip(group.records, group.attempts):
            count = len(record) - len(prompt)
            assert record.token_ids[: len(prompt)].tolist() == prompt and 1 <= count <= 9
            assert record.loss_mask.tolist() == [0] * len(prompt) + [1] * count
            assert (record.weight_version == np.where(record.loss_mask == 1, 0, -1)).all()
            cut = record.token_ids[-1] not in ENDS.values()
            assert attempt.finish_reason == ("length" if cut else "stop")
            assert record.status == ("truncated" if cut else "completed")
            assert attempt.num_sampled_tokens == count
        assert len({tuple(record.token_ids) for record in group.records}) == 3


def test_the_same_seed_samples_the_same_and_another_does_not():
    def ids(seed):
        [group] = rollouts().sample([PLAIN], seed)
        return [record.token_ids.tolist() for record in group.records]

    assert ids(1) == ids(1) != ids(2)


def test_a_task_may_say_whether_its_replies_are_reasoned():
    tasks = [dataclasses.replace(PLAIN, id=str(own), thinking=own) for own in (None, True, False)]
    for own in (True, False):
        groups = rollouts(thinking=own).sample(tasks, 0)
        for group, thinks in zip(groups, (own, True, False), strict=True):
            prompt = render_chat(ASKED, TOKENIZER, enable_thinking=thinks).ids
            assert group.records[0].token_ids[: len(prompt)].tolist() == prompt
            assert bool(group.attempts[0].messages[0].get("reasoning_content")) == thinks


class Scripted:
    """Says one thing after the other, whatever it is asked; each script is an attempt's."""

    max_length = 400

    def __init__(self, *scripts):
        self.scripts, self.asked = scripts, []

    def generate(self, prompts, samplings):
        self.asked.append([list(ids) for ids in prompts])
        said = [script.pop(0) for script in self.scripts if script][: len(prompts)]
        return [
            Completion(ids, [-0.5] * len(ids), [3] * len(ids), [], reason, None, 0)
            for ids, reason in said
        ]


def said(text, end=None):
    ids = TOKENIZER.encode(text, parse_special=True)
    return (ids + [ENDS[end]], "stop") if end else (ids, "length")


def call(a, b):
    arguments = f"<arg_key>a</arg_key><arg_value>{a}</arg_value><arg_key>b</arg_key><arg_value>{b}</arg_value>"
    return f"<tool_call>add{arguments}</tool_call>"


async def adds(task, made):
    await asyncio.sleep(0)
    return json.dumps(made.arguments["a"] + made.arguments["b"])


def test_tools_answer_between_replies():
    two = f"Both.</think>{call(2, 3)}{call(5, 5)}"
    scripted = Scripted(
        [said(two, "<|observation|>"), said("So.</think>5", "<|user|>")],
        [said("No.</think>6", "<|user|>")],
    )
    [group] = rollouts(scripted, tools=adds, group=2).sample([WITH_TOOL], 0)
    first, second = group.attempts
    assert [m["role"] for m in first.messages] == ["assistant", "tool", "tool", "assistant"]
    assert [m["content"] for m in first.messages[1:3]] == ["5", "10"]
    assert (first.reply, first.finish_reason) == ("5", "stop") and second.reply == "6"
    record = group.records[0]
    text = TOKENIZER.decode(record.token_ids)
    whole = render_chat(
        [*ASKED, *first.messages], TOKENIZER, tools=[ADD], clear_thinking=False, close=True
    )
    assert text == whole.text and record.token_ids.tolist() == whole.ids
    assert first.num_sampled_tokens == record.loss_mask.sum()
    # Learnt is what a sample of SFT would teach of the same chat, each token once.
    assert record.loss_mask.tolist() == whole.loss_mask
    start, end = np.flatnonzero(np.diff(record.loss_mask))[1:] + 1
    assert TOKENIZER.decode(record.token_ids[start:end]) == (
        "<tool_response>5</tool_response><tool_response>10</tool_response><|assistant|><think>"
    )
    assert scripted.asked[1] == [record.token_ids[:end].tolist()]


def test_an_answer_that_leaves_no_room_is_left_out():
    async def talks(task, made):
        return "x " * made.arguments["a"]

    def attempt(words):
        scripted = Scripted(
            [said(f"A.</think>{call(words, 0)}", "<|observation|>"), said("B.</think>", "<|user|>")]
        )
        [group] = rollouts(scripted, tools=talks, group=1).sample([WITH_TOOL], 0)
        return group.attempts[0], group.records[0]

    fits, record = attempt(10)
    assert fits.finish_reason == "stop" and len(record) < Scripted.max_length
    cut, record = attempt(400)
    assert cut.finish_reason == "length" and len(record) < Scripted.max_length
    assert record.loss_mask[-1] == 1


def test_what_ends_an_attempt():
    async def breaks(task, made):
        raise ToolError("it is down")

    async def hangs(task, made):
        await asyncio.sleep(30)

    wrong = "<tool_call>divide</tool_call>"
    cases = [
        ([said("It is", None)], {}, "length", ""),
        ([said(f"A.</think>{wrong}", "<|observation|>")], {}, "stop", "divide"),
        # A whole call is answered whatever marker follows it.
        (
            [said(f"A.</think>{call(1, 1)}", "<|user|>"), said("B.</think>2", "<|user|>")],
            {},
            "stop",
            "",
        ),
        ([said("A.</think>x", "<|observation|>")], {}, "stop", ""),
        ([said(f"A.</think>{call(1, 1)}", "<|observation|>")], {"max_turns": 1}, "length", ""),
        (
            [said(f"A.</think>{call(1, 1)}", "<|observation|>")],
            {"tools": breaks},
            "failed",
            "it is down",
        ),
        (
            [said(f"A.</think>{call(1, 1)}", "<|observation|>")],
            {"tools": hangs, "tool_timeout_s": 0.05},
            "failed",
            "TimeoutError",
        ),
    ]
    for script, options, reason, error in cases:
        options = dict(tools=adds) | options
        [group] = rollouts(Scripted(script), group=1, **options).sample([WITH_TOOL], 0)
        [attempt] = group.attempts
        assert attempt.finish_reason == reason, (script, attempt)
        assert error in attempt.error
        status = {"length": "truncated", "stop": "completed", "failed": "failed"}[reason]
        assert group.records[0].status == status


def test_without_tools_a_call_is_what_was_said():
    """Nobody answers it, and it is no failure of the environment."""
    scripted = Scripted([said(f"A.</think>So.{call(1, 1)}", "<|observation|>")])
    [group] = rollouts(scripted, group=1).sample([PLAIN], 0)
    [attempt] = group.attempts
    said_text = f"So.{call(1, 1)}"
    assert (attempt.finish_reason, attempt.error, attempt.reply) == ("stop", "", said_text)


def test_without_room_for_a_reply_an_attempt_is_cut_off():
    scripted = Scripted([said(f"{'a ' * 300}</think>{call(1, 1)}", "<|observation|>")])
    [group] = rollouts(scripted, tools=adds, group=1).sample([WITH_TOOL], 0)
    assert group.attempts[0].finish_reason == "length" and not any(scripted.asked[1:])


def test_tasks_that_cannot_be_attempted_are_refused():
    config = RolloutConfig()
    with pytest.raises(ValueError, match="task 't' offers tools, and nobody answers"):
        check_task(WITH_TOOL, TOKENIZER, config, 64, None)
    long = Task(id="long", kind="math", messages=({"role": "user", "content": "word " * 200},))
    with pytest.raises(ValueError, match="task 'long' has a prompt of .* tokens; at most 63"):
        check_task(long, TOKENIZER, config, 64, None)
    check_task(PLAIN, TOKENIZER, config, 64, None)
    with pytest.raises(ValueError, match="group is 0; it must be positive"):
        RolloutConfig(group=0)
