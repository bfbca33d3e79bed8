"""Arms that train on tokens and on text: re-encoded chats, and the arms for a few steps."""

import dataclasses
import functools

import numpy as np
import pytest

from experiments.ablations import text_in_text_out
from experiments.ablations.arms import SharedSteps
from experiments.ablations.text_in_text_out import (
    AGAIN,
    ARMS,
    IN_PLACE,
    TOKENS,
    LearnerLogpLoss,
    ReencodingCounts,
    reencode,
    with_weights,
)
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.algorithm.losses import PolicyConfig, PolicyLoss
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.rollouts.sessions import Session
from glm5_jax.rl.types import Attempt, Task
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply
from glm5_jax.training import report

pytestmark = pytest.mark.usefixtures("without_pictures")

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
TASK = Task(id="t", kind="math", messages=({"role": "user", "content": "37+85?"},))


@functools.cache
def tokenizer() -> Tokenizer:
    return text_in_text_out.digit_pair_tokenizer()


def config(length: int = 2048):
    stage = text_in_text_out.get_config("tiny")[IN_PLACE].stages[-1]
    rollout = RolloutConfig(thinking=False)
    return dataclasses.replace(stage, rollout=rollout, length=length)


def ids_of(*pieces: str) -> list[int]:
    """Returns a token for each piece: a marker, a pair of digits or a byte."""
    known = {tokenizer().bytes_of(i): i for i in range(tokenizer().vocab_size)}
    return [known[piece.encode()] for piece in pieces]


def chat(task: Task, *replies: tuple[str, ...], cut: bool = False):
    """Returns (attempt, record) of a task whose replies are these tokens; a tool answers "5" to all but the last. Log-probs are
    -1, -2, ... of each reply."""
    session, messages = Session(tokenizer()), []
    for turn, pieces in enumerate(replies):
        if turn:
            messages.append({"role": "tool", "content": "5"})
        plan = session.plan([*task.messages, *messages], task.tools, enable_thinking=False)
        ids = ids_of(*pieces)
        reply = parse_reply(ids, task.tools or None, tokenizer=tokenizer(), thinking=False).message
        reason = "length" if cut and turn == len(replies) - 1 else "stop"
        logp = [-1.0 - place for place in range(len(ids))]
        session.add(session.make_turn(plan, ids, logp, [turn] * len(ids), reason, reply))
        messages.append(reply)
    [record] = session.records(task_id=task.id)
    return Attempt(messages=tuple(messages), finish_reason="length" if cut else "stop"), record


def reencode_chat(task: Task, *replies: tuple[str, ...], cut: bool = False):
    """Returns (record before, re-encoded record, counts)."""
    attempt, record = chat(task, *replies, cut=cut)
    return record, *reencode(task, attempt, record, config(), tokenizer())


def trained_tokens(record) -> list[tuple[int, float, int]]:
    """Returns (id, log-prob, version) of the tokens with a loss."""
    mask = record.loss_mask == 1
    streams = record.token_ids, record.rollout_logp, record.weight_version
    return list(zip(*(stream[mask].tolist() for stream in streams)))


@pytest.mark.parametrize("cut", (False, True))
def test_keeps_canonical_tokens(cut):
    pieces = ("12", "2") if cut else ("12", "2", "<|user|>")
    record, encoded, counts = reencode_chat(TASK, pieces, cut=cut)
    for name, stream in record.streams().items():
        np.testing.assert_array_equal(getattr(encoded, name), stream)
    assert counts == ReencodingCounts(1, 0, len(pieces), 0)


def test_merged_tokens_keep_first_log_probs():
    record, encoded, counts = reencode_chat(TASK, ("1", "2", "2", "<|user|>"))
    [twelve, two, stop] = ids_of("12", "2", "<|user|>")
    assert trained_tokens(encoded) == [(twelve, -1, 0), (two, -2, 0), (stop, -3, 0)]
    # The second position has a 2 before and after.
    assert counts == ReencodingCounts(1, 1, 4, 3)
    prompt = len(record) - 4
    assert (encoded.token_ids[:prompt] == record.token_ids[:prompt]).all()
    assert not encoded.loss_mask[:prompt].any()


def test_split_tokens_get_zero_log_prob():
    _, encoded, counts = reencode_chat(TASK, ("5", "[MASK]", "<|user|>"))
    spelled = ids_of("5", *"[MASK]", "<|user|>")
    logp = [-1.0, -2.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert trained_tokens(encoded) == [(i, x, 0) for i, x in zip(spelled, logp)]
    assert counts == ReencodingCounts(1, 1, 3, 2)


def test_reencodes_each_reply_separately():
    task = dataclasses.replace(TASK, tools=(ADD,))
    call = ("<tool_call>", "a", "d", "d", "<arg_key>", "a", "</arg_key>", "<arg_value>")
    rest = ("</arg_value>", "</tool_call>", "<|observation|>")
    record, encoded, counts = reencode_chat(task, (*call, "1", "2", *rest), ("12", "<|user|>"))
    first, second = ids_of(*call, "12", *rest), ids_of("12", "<|user|>")
    want = [(i, -1.0 - place, 0) for place, i in enumerate(first)]
    assert trained_tokens(encoded) == [
        *want,
        *((i, -1.0 - place, 1) for place, i in enumerate(second)),
    ]
    assert counts == ReencodingCounts(2, 1, 15, 13 - len(call))
    assert len(encoded) == len(record) - 1
    # The tool's answer and the prompt after it are equal in both records.
    assert (encoded.loss_mask[-6:] == record.loss_mask[-6:]).all()
    assert (encoded.token_ids[-6:] == record.token_ids[-6:]).all()


def test_cuts_record_at_row_length():
    attempt, record = chat(TASK, ("5", "[MASK]", "<|user|>"))
    encoded, _ = reencode(TASK, attempt, record, config(), tokenizer())
    cut, _ = reencode(TASK, attempt, record, config(len(record)), tokenizer())
    assert len(cut) == len(record) < len(encoded)
    assert (cut.token_ids == encoded.token_ids[: len(record)]).all()


def test_keeps_record_of_failed_environment():
    attempt, record = chat(TASK, ("1", "2", "<|user|>"))
    failed = Attempt(messages=attempt.messages, finish_reason="failed", error="it is down")
    same, counts = reencode(TASK, failed, record, config(), tokenizer())
    assert same is record and counts == ReencodingCounts(0, 0, 0, 0)


@pytest.mark.parametrize("variant", ("tiny", "tools"))
def test_arms_differ_only_in_training_records(variant):
    arms = text_in_text_out.get_config(variant)
    base = arms[TOKENS].stages[-1]
    assert list(arms) == list(ARMS) and base.max_staleness == 0
    for name, arm in arms.items():
        [stage] = arm.stages
        assert stage.trained_on == name
        assert isinstance(stage.token_loss, LearnerLogpLoss) == (name == AGAIN)
        assert dataclasses.replace(stage, name=base.name, trained_on=TOKENS) == base
    with pytest.raises(ValueError, match="trained_on is 'sound'; use one of 'tokens'; 'text, in"):
        dataclasses.replace(base, trained_on="sound")


def test_policy_after_sft_needs_lifecycle_workdir(tmp_path):
    arm = text_in_text_out.get_config("tools")[TOKENS]
    with pytest.raises(ValueError, match="has no folder 'sft'; give the workdir of a life"):
        with_weights(arm, tmp_path)
    (tmp_path / "sft").mkdir()
    assert with_weights(arm, tmp_path).stages[-1].checkpoint == str(tmp_path / "sft")


@pytest.mark.parametrize("correction", ("icepop", "double_sided", "ppo"))
def test_reencoded_text_uses_learner_log_probs(correction):
    rng = np.random.default_rng(0)
    logp, streams = (
        -rng.random((2, 5)).astype(np.float32),
        {
            "rollout_logp": -9 * rng.random((2, 5)).astype(np.float32),
            "advantage": rng.normal(size=(2, 5)).astype(np.float32),
            "ref_logp": np.full((2, 5), -3, np.float32),
        },
    )
    policy = PolicyConfig(correction=correction)
    loss, metrics = LearnerLogpLoss(policy)(logp, streams)
    want, _ = PolicyLoss(policy)(logp, streams | {"rollout_logp": logp})
    other, seen = PolicyLoss(policy)(logp, streams)
    for part in ("rl", "ref_kl"):
        np.testing.assert_array_equal(loss[part], want[part])
        assert np.abs(loss[part] - other[part]).max() > 0.1
    assert np.abs(metrics["abs_logratio"]).max() == 0 < 1 < seen["abs_logratio"].max()
    assert not metrics["clip_frac_low"].any() and not metrics["clip_frac_high"].any()


@pytest.mark.slow
def test_arms_sample_equally_and_train_on_different_records(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write_page", lambda workdir: None)
    rows_of, steps = {}, SharedSteps()
    arms = text_in_text_out.get_config("tiny")
    for number, name in enumerate((TOKENS, IN_PLACE)):
        trial = with_weights(arms[name], tmp_path).trial(seed=0)
        stage = trial.stages[-1]
        stage = dataclasses.replace(
            stage,
            model=dataclasses.replace(
                stage.model, num_hidden_layers=1, first_k_dense_replace=1, hidden_size=32
            ),
            train=dataclasses.replace(stage.train, steps=2, eval_interval=2, save_interval=0),
            rollout=dataclasses.replace(stage.rollout, prompts=2, group=4),
            max_running=2,
            evaluation=dataclasses.replace(stage.evaluation, tasks=4),
            compare_interval=1,
        )
        stage.make_stage(tmp_path / str(number), step_maker=steps).run()
        rows_of[name] = read(tmp_path / str(number))
        row = text_in_text_out.measure(trial, tmp_path / str(number))
        assert 0 < row["tokens"] <= 1 and 0 < row["replies_end"] <= 1
        assert row["apart"] <= row["apart_max"]

    def of(arm, name):
        return column(rows_of[arm], name)[1]

    # A policy with random weights writes bytes that decoding does not preserve.
    assert of(TOKENS, "text/replies")[0] > 0.5
    for name in ("reward/mean", "text/replies", "text/tokens"):
        assert of(TOKENS, name)[0] == of(IN_PLACE, name)[0]
    assert max(of(TOKENS, "text/apart_max")) < 1e-4 < 1 < max(of(IN_PLACE, "text/apart_max"))
    assert (
        max(of(TOKENS, "policy/abs_logratio")) < 1e-4 < 0.1 < of(IN_PLACE, "policy/abs_logratio")[0]
    )
    assert of(TOKENS, "loss/rl")[0] != of(IN_PLACE, "loss/rl")[0]


def test_verdicts_compare_by_seed():
    rows = {
        name: [
            {
                "worth": 0.8 - 0.1 * place + seed / 1000,
                "reward": 0.6 + 0.05 * place + seed / 1000,
                "masked": 0.02 * place,
                "apart": 1e-6 if name == TOKENS else 2.0,
                "apart_max": 1e-5 if name == TOKENS else 9.0,
                "replies": 0.5,
                "tokens": 0.4,
                "replies_end": 0.3,
                "tokens_end": 0.2,
            }
            for seed in range(3)
        ]
        for place, name in enumerate(ARMS)
    }
    curve = {name: [([1, 2], [0.1, 0.2])] * 3 for name in ARMS}
    result = text_in_text_out.finding(rows, curve, curve, "command")
    ids, log_probs, in_place, reencoded = result.verdicts
    assert ids.index("50.0") < ids.index("40.0") < ids.index("30.0") < ids.index("20.0")
    assert "met, 1.0e-06 nats on average and 1.0e-05 at most" in log_probs
    assert "text in place 2.0e+00 nats on average and 9.0e+00 at most" in log_probs
    assert "met (+0.100 ± 0.000" in in_place and "met (+0.200 ± 0.000" in reencoded
    assert "greedy, held out: not met (-0.050 ± 0.000" in in_place
    [table] = result.tables
    assert table.rows[1][:6] == (IN_PLACE, "50.0, 30.0", "40.0, 20.0", "2.0e+00", "9.0e+00", "2.0")
    rows[TOKENS][0] |= {"apart_max": 0.5}
    for row in sum(rows.values(), []):
        row["reward"] = None  # nothing was held out
    result = text_in_text_out.finding(rows, curve, curve, "command")
    assert "not met" in result.verdicts[1] and "greedy" not in result.verdicts[2]
    assert result.tables[0].rows[0][-1] == "-"
