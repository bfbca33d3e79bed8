"""Two hundred chats with tools, by a policy that also writes malformed calls and invalid text.

The sampled tokens are the trained tokens, byte for byte, with the log-probs that the trainer computes.
"""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.model import glm5
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.algorithm.credit import CreditConfig, assign_credit
from glm5_jax.rl.rollouts.rollout import RolloutConfig, Rollouts, ToolError
from glm5_jax.rl.trainers.sync_trainer import TaskSuite, batch_metrics, judge
from glm5_jax.rl.types import Reward, Task
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.gradients import score_function
from glm5_jax.training.step_config import StepConfig
from tests.model.small import one_layer
from tests.text.random_chats import Chats

pytestmark = pytest.mark.slow
LOOK = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"k": {"type": "string"}}}},
}
QUESTION = {"role": "user", "content": "?"}
# The merges contain text that the policy samples byte by byte. Encoding its text again gives other tokens.
TOKENIZER = Tokenizer.train(
    [render_chat([QUESTION], tools=[LOOK]).text * 3, "ttt\ntt\nccc\ncc\n777\n77\n" * 99], 480
)
SINGLE = {TOKENIZER.bytes_of(i): i for i in range(TOKENIZER.vocab_size)}
# Relative frequencies of the next token. Some sequences of bytes are invalid text: two bytes that start a
# character, and one that ends it.
TRANSITIONS = {
    "<think>": {b"t": 6, b"\xc3": 1, "</think>": 3, "<tool_call>": 0.3},
    b"t": {b"t": 4, b"\xc3": 1, "</think>": 5},
    b"\xc3": {b"\xa9": 3, b"t": 2, "</think>": 5},
    b"\xa9": {b"t": 2, "</think>": 8},
    "</think>": {b"c": 2, "<tool_call>": 8},
    b"c": {b"c": 4, b"\xf0": 1, "<tool_call>": 3, "<|user|>": 2},
    b"\xf0": {b"c": 2, "<tool_call>": 6, "<|user|>": 2},
    "<tool_call>": {b"f": 19, b"g": 0.5, "</tool_call>": 0.5},
    b"f": {"<arg_key>": 6, "</tool_call>": 4},
    b"g": {"</tool_call>": 1},
    "<arg_key>": {b"k": 1},
    b"k": {"</arg_key>": 1},
    "</arg_key>": {"<arg_value>": 1},
    "<arg_value>": {b"7": 6, b"\xe2": 2, "</arg_value>": 2},
    b"7": {b"7": 4, b"\xe2": 1, "</arg_value>": 5},
    b"\xe2": {"</arg_value>": 1},
    "</arg_value>": {"</tool_call>": 1},
    "</tool_call>": {"<|observation|>": 13, "<tool_call>": 3, b"\xf0": 2, "<|user|>": 1},
}
LENGTH, GROUP = 224, 10
CFG = one_layer(
    vocab_size=TOKENIZER.vocab_size,
    eos_token_id=TOKENIZER.eos_ids,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def token(name) -> int:
    """Returns the id of a byte or of a special token."""
    return SINGLE[name] if isinstance(name, bytes) else TOKENIZER.special_ids[name]


@functools.cache
def policy():
    """Returns a model that follows the table, up to some tenths of a nat."""
    params = jax.tree.map(np.array, glm5.init_params(CFG, jax.random.key(0)))
    params["dense_layers"]["attn"]["o"] *= 5
    table = np.full((CFG.hidden_size, CFG.vocab_size), -10.0, np.float32)
    for row, (name, next_weights) in enumerate(TRANSITIONS.items()):
        params["embed"]["weight"][token(name)] = np.eye(CFG.hidden_size)[row]
        for next_name, weight in next_weights.items():
            table[row, token(next_name)] = np.log(weight / sum(next_weights.values()))
    params["lm_head"]["weight"] = table / np.sqrt(CFG.hidden_size)
    return glm5.Glm5(CFG, params=jax.tree.map(jnp.asarray, params))


async def answer_call(task, call):
    """Answers a call; fails for some arguments."""
    if call.arguments.get("k", "").startswith("777"):
        raise ToolError("it is down")
    return f"<|user|>{call.arguments.get('k', 'é')}"


async def reward_length(task, attempt):
    return Reward(float(attempt.num_sampled_tokens))


def continues_turn(turn, ids):
    """Returns whether a prompt begins with a turn."""
    before = [*turn[0], *turn[1].ids]
    return list(ids[: len(before)]) == before


def replaces_end_marker(turn, ids):
    """Returns whether a prompt continues a turn whose calls ended with another marker than that of results."""
    *before, end = [*turn[0], *turn[1].ids]
    observation = token("<|observation|>")
    return end != observation and list(ids[: len(before) + 1]) == [*before, observation]


@functools.cache
def sample_groups():
    """Returns (groups, (prompt, reply) pairs of each attempt in their order)."""
    engine = Engine(
        policy(),
        TOKENIZER,
        EngineConfig(
            max_num_seqs=12, max_length=LENGTH, page_size=32, prefill_chunk=64, batch_invariant=True
        ),
    )
    generate, chats_seen = engine.generate, []

    def record_replies(prompts, samplings, **options):
        replies = generate(prompts, samplings, **options)
        for ids, reply in zip(prompts, replies, strict=True):
            matching = [
                chat
                for chat in chats_seen
                if continues_turn(chat[-1], ids) or replaces_end_marker(chat[-1], ids)
            ]
            if not matching:
                chats_seen.append([])
            (matching or chats_seen[-1:])[0].append((list(ids), reply))
        return replies

    engine.generate = record_replies
    chats = Chats(seed=0)
    tasks = [
        Task(id=f"t{i}", kind="any", messages=({"role": "user", "content": chats.text(6) + "?"},), tools=(LOOK,), thinking=i % 3 > 0)
        for i in range(20)
    ]  # fmt: skip
    config = RolloutConfig(group=GROUP, max_tokens=24, max_turns=4)
    groups = Rollouts(engine, TOKENIZER, config, 0.9, answer_call).sample(tasks, 0)
    run_sync(judge(groups, TaskSuite(tasks=None, held_out={}, verify=reward_length), 8))
    return groups, chats_seen


def test_trains_on_sampled_tokens_byte_for_byte():
    groups, seen = sample_groups()
    records = assign_credit(groups, CreditConfig(baseline="none"), CFG.vocab_size)
    streams = ("token_ids", "loss_mask", "rollout_logp", "rl_weight", "advantage")
    batch, rows = pack_records(records, 2 * LENGTH, 40, streams)
    logp = jax.jit(score_function(CFG, StepConfig(mtp_steps=0), temperature=0.9))(
        glm5.params_of(policy()), batch
    )
    batch["logp"] = np.asarray(logp)
    counts = collections.Counter()
    for i, row_records in enumerate(rows):
        for segment, record in enumerate(row_records, 1):
            in_segment = batch["segment_ids"][i] == segment
            row = {name: values[i, in_segment] for name, values in batch.items()}
            group, number = map(int, record.rollout_id.split("-"))
            replies = seen[group * GROUP + number]
            is_trained, before, dropped = np.zeros(in_segment.sum(), bool), None, 0
            for turn, after in itertools.zip_longest(replies, replies[1:]):
                prompt, reply = turn
                if before is not None:
                    results = prompt[before + dropped :]
                    assert results[0] == token("<tool_response>")
                    assert not {token("<|user|>"), token("<|observation|>")} & {*results}
                dropped = int(after is not None and replaces_end_marker(turn, after[0]))
                before = len(prompt) + len(reply.ids) - dropped
                positions = slice(len(prompt), before)
                count = positions.stop - positions.start
                ids, logprobs = reply.ids[:count], reply.logprobs[:count]
                assert row["token_ids"][: positions.start].tolist() == prompt
                assert row["token_ids"][positions].tolist() == ids
                assert row["rollout_logp"][positions].tolist() == np.float32(logprobs).tolist()
                counts += {"dropped": dropped}
                is_trained[positions] = True
                counts += tally(reply)
            for name in ("loss_mask", "rl_weight"):
                assert ((row[name] != 0) == is_trained).all()
            reward = sum(len(reply.ids) for _, reply in replies)
            assert (row["advantage"] == np.where(is_trained, reward, 0)).all()
            assert np.abs(row["logp"] - row["rollout_logp"])[is_trained].max() < 1e-4
            counts += {"several turns": len(replies) > 1, "tokens": int(is_trained.sum())}
            counts += {groups[group].attempts[number].finish_reason: 1}
    # The chats cover all cases.
    assert len(seen) == 200 and counts["several turns"] > 100 and counts["tokens"] > 3000
    for name in ("no text", "others", "in thought", "dropped", "stop", "length"):
        assert counts[name] > 5, (name, counts)


def tally(reply) -> collections.Counter:
    """Counts the irregularities of a reply."""
    text = TOKENIZER.decode(reply.ids)
    return collections.Counter(
        {
            "no text": "\ufffd" in text,
            "others": TOKENIZER.encode(text, parse_special=True) != reply.ids,
            "in thought": "<tool_call>" in text and "</think>" not in text,
        }
    )


def test_excludes_attempts_whose_environment_failed():
    groups, _ = sample_groups()
    failed = {
        f"{i}-{j}"
        for i, group in enumerate(groups)
        for j, attempt in enumerate(group.attempts)
        if "it is down" in attempt.error
    }
    assert 5 < len(failed) < 100
    trained = {
        record.rollout_id for record in assign_credit(groups, CreditConfig(), CFG.vocab_size)
    }
    all_ids = {f"{i}-{j}" for i in range(20) for j in range(GROUP)}
    assert trained == all_ids - failed
    assert batch_metrics(groups)["rollout"]["environment_errors"] == len(failed) / 200
