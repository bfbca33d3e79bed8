"""Rollouts: the records hold exactly the sampled tokens, with the log-probs that the trainer computes."""

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
QUESTION = ({"role": "user", "content": "2+3?"},)
PLAIN, WITH_TOOL = (
    Task(id="t", kind="math", messages=QUESTION),
    Task(id="t", kind="tir", messages=QUESTION, tools=(ADD,)),
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


def rollouts(inference_engine=None, temperature=1.3, tools=None, top_p=1.0, **options):
    """Returns the rollouts of an engine."""
    options = dict(max_tokens=9, group=3, max_turns=4) | options
    return Rollouts(
        inference_engine or engine(),
        TOKENIZER,
        RolloutConfig(**options),
        temperature,
        tools,
        top_p=top_p,
    )


def test_recorded_log_probs_equal_trainer_log_probs():
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
            is_truncated = record.token_ids[-1] not in ENDS.values()
            assert attempt.finish_reason == ("length" if is_truncated else "stop")
            assert record.status == ("truncated" if is_truncated else "completed")
            assert attempt.num_sampled_tokens == count
        assert len({tuple(record.token_ids) for record in group.records}) == 3


def test_samples_only_likeliest_tokens_of_top_p():
    def ids(**options):
        [group] = rollouts(**options).sample([PLAIN], 1)
        return {tuple(record.token_ids.tolist()) for record in group.records}

    assert ids(top_p=1e-6) == ids(temperature=0) and len(ids()) == 3


def test_seed_determines_samples():
    def ids(seed):
        [group] = rollouts().sample([PLAIN], seed)
        return [record.token_ids.tolist() for record in group.records]

    assert ids(1) == ids(1) != ids(2)


def test_task_overrides_thinking_mode():
    tasks = [
        dataclasses.replace(PLAIN, id=str(mode), thinking=mode) for mode in (None, True, False)
    ]
    for default in (True, False):
        groups = rollouts(thinking=default).sample(tasks, 0)
        for group, thinks in zip(groups, (default, True, False), strict=True):
            prompt = render_chat(QUESTION, TOKENIZER, enable_thinking=thinks).ids
            assert group.records[0].token_ids[: len(prompt)].tolist() == prompt
            assert bool(group.attempts[0].messages[0].get("reasoning_content")) == thinks


class ScriptedEngine:
    """Engine whose replies do not depend on the prompts.

    scripts: replies of each attempt, in their order.

    Attributes:
      prompts: prompts of each request.
    """

    max_length = 400

    def __init__(self, *scripts):
        self.scripts, self.prompts = scripts, []

    def generate(self, prompts, samplings, should_stop):
        self.prompts.append([list(ids) for ids in prompts])
        replies = [script.pop(0) for script in self.scripts if script][: len(prompts)]
        return [
            Completion(ids, [-0.5] * len(ids), [3] * len(ids), [], reason, None, 0)
            for ids, reason in replies
        ]


def reply_of(text, end=None):
    """Returns (ids, finish reason) of a reply; end: name of its stop token."""
    ids = TOKENIZER.encode(text, parse_special=True)
    return (ids + [ENDS[end]], "stop") if end else (ids, "length")


def call(a, b):
    """Returns the text of a call of the tool `add`."""
    arguments = f"<arg_key>a</arg_key><arg_value>{a}</arg_value><arg_key>b</arg_key><arg_value>{b}</arg_value>"
    return f"<tool_call>add{arguments}</tool_call>"


async def add_numbers(task, tool_call):
    await asyncio.sleep(0)
    return json.dumps(tool_call.arguments["a"] + tool_call.arguments["b"])


def test_inserts_tool_results_between_replies():
    two_calls = f"Both.</think>{call(2, 3)}{call(5, 5)}"
    scripted = ScriptedEngine(
        [reply_of(two_calls, "<|observation|>"), reply_of("So.</think>5", "<|user|>")],
        [reply_of("No.</think>6", "<|user|>")],
    )
    [group] = rollouts(scripted, tools=add_numbers, group=2).sample([WITH_TOOL], 0)
    first, second = group.attempts
    assert [m["role"] for m in first.messages] == ["assistant", "tool", "tool", "assistant"]
    assert [m["content"] for m in first.messages[1:3]] == ["5", "10"]
    assert (first.reply, first.finish_reason) == ("5", "stop") and second.reply == "6"
    record = group.records[0]
    text = TOKENIZER.decode(record.token_ids)
    rendered = render_chat(
        [*QUESTION, *first.messages], TOKENIZER, tools=[ADD], clear_thinking=False, close=True
    )
    assert text == rendered.text and record.token_ids.tolist() == rendered.ids
    assert first.num_sampled_tokens == record.loss_mask.sum()
    # The loss mask equals that of an SFT sample of the same chat, and each token counts once.
    assert record.loss_mask.tolist() == rendered.loss_mask
    start, end = np.flatnonzero(np.diff(record.loss_mask))[1:] + 1
    assert TOKENIZER.decode(record.token_ids[start:end]) == (
        "<tool_response>5</tool_response><tool_response>10</tool_response><|assistant|><think>"
    )
    assert scripted.prompts[1] == [record.token_ids[:end].tolist()]


def test_omits_tool_result_that_leaves_no_room():
    async def repeat_words(task, tool_call):
        return "x " * tool_call.arguments["a"]

    def attempt(words):
        scripted = ScriptedEngine(
            [
                reply_of(f"A.</think>{call(words, 0)}", "<|observation|>"),
                reply_of("B.</think>", "<|user|>"),
            ]
        )
        [group] = rollouts(scripted, tools=repeat_words, group=1).sample([WITH_TOOL], 0)
        return group.attempts[0], group.records[0]

    complete, record = attempt(10)
    assert complete.finish_reason == "stop" and len(record) < ScriptedEngine.max_length
    truncated, record = attempt(400)
    assert truncated.finish_reason == "length" and len(record) < ScriptedEngine.max_length
    assert record.loss_mask[-1] == 1


def test_finish_reasons_of_attempts():
    async def fail(task, tool_call):
        raise ToolError("it is down")

    async def hang(task, tool_call):
        await asyncio.sleep(30)

    unknown_call = "<tool_call>divide</tool_call>"
    cases = [
        ([reply_of("It is", None)], {}, "length", ""),
        ([reply_of(f"A.</think>{unknown_call}", "<|observation|>")], {}, "stop", "divide"),
        # A complete call is answered after any end marker.
        (
            [reply_of(f"A.</think>{call(1, 1)}", "<|user|>"), reply_of("B.</think>2", "<|user|>")],
            {},
            "stop",
            "",
        ),
        ([reply_of("A.</think>x", "<|observation|>")], {}, "stop", ""),
        ([reply_of(f"A.</think>{call(1, 1)}", "<|observation|>")], {"max_turns": 1}, "length", ""),
        (
            [reply_of(f"A.</think>{call(1, 1)}", "<|observation|>")],
            {"tools": fail},
            "failed",
            "it is down",
        ),
        (
            [reply_of(f"A.</think>{call(1, 1)}", "<|observation|>")],
            {"tools": hang, "tool_timeout_s": 0.05},
            "failed",
            "TimeoutError",
        ),
    ]
    for script, options, reason, error in cases:
        options = dict(tools=add_numbers) | options
        [group] = rollouts(ScriptedEngine(script), group=1, **options).sample([WITH_TOOL], 0)
        [attempt] = group.attempts
        assert attempt.finish_reason == reason, (script, attempt)
        assert error in attempt.error
        status = {"length": "truncated", "stop": "completed", "failed": "failed"}[reason]
        assert group.records[0].status == status


def test_call_without_tools_is_plain_text():
    """No tool answers it, and the environment has not failed."""
    scripted = ScriptedEngine([reply_of(f"A.</think>So.{call(1, 1)}", "<|observation|>")])
    [group] = rollouts(scripted, group=1).sample([PLAIN], 0)
    [attempt] = group.attempts
    content = f"So.{call(1, 1)}"
    assert (attempt.finish_reason, attempt.error, attempt.reply) == ("stop", "", content)


def test_truncates_attempt_without_room_for_reply():
    scripted = ScriptedEngine([reply_of(f"{'a ' * 300}</think>{call(1, 1)}", "<|observation|>")])
    [group] = rollouts(scripted, tools=add_numbers, group=1).sample([WITH_TOOL], 0)
    assert group.attempts[0].finish_reason == "length" and not any(scripted.prompts[1:])


def test_rejects_tasks_that_cannot_be_attempted():
    config = RolloutConfig()
    with pytest.raises(ValueError, match="task 't' offers tools, and nobody answers"):
        check_task(WITH_TOOL, TOKENIZER, config, 64, None)
    long = Task(id="long", kind="math", messages=({"role": "user", "content": "word " * 200},))
    with pytest.raises(ValueError, match="task 'long' has a prompt of .* tokens; at most 63"):
        check_task(long, TOKENIZER, config, 64, None)
    check_task(PLAIN, TOKENIZER, config, 64, None)
    with pytest.raises(ValueError, match="group is 0; it must be positive"):
        RolloutConfig(group=0)
