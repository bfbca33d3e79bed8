"""Ablations of SFT: common and different parts of their arms, judged replies, and the verdicts."""

import dataclasses
import itertools

import numpy as np
import pytest

from experiments import lifecycle
from experiments.ablations import error_masking, finetuned, sft_attention, thinking
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.chat_tasks import ChatTaskConfig
from glm5_jax.data.conversation import parse_line
from glm5_jax.evals.chats import Answer
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply

pytestmark = pytest.mark.usefixtures("without_pictures")

TOKENIZER = Tokenizer.default()
MODULES = (thinking, error_masking, sft_attention)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_arms_and_seeds_share_base_models(module, size):
    arms = module.get_config(size)
    trials = [arm.trial(seed=seed) for arm in arms.values() for seed in (0, 1)]
    for one, other in itertools.combinations(trials, 2):
        shared = [a == b for a, b in zip(one.digests, other.digests)]
        assert shared[:4] == [True] * 4  # pre-training and mid-training
        assert not shared[-1]
    stage = trials[0].stages[-1]
    assert stage.data.seed == stage.seed == 0 and stage.data.held_out_fraction == finetuned.HELD_OUT


def test_arm_is_lifecycle_with_another_sft():
    base = lifecycle.get_config("tiny")
    names = [field.name for field in dataclasses.fields(base)]
    stages = [getattr(base, name) for name in names[: names.index("sft")]]
    before = [stage.name for stage in stages if stage is not None]
    arm = thinking.get_config("tiny")["preserved"]
    assert [stage.name for stage in arm.stages[:-1]] == before and arm.num_fixed == len(before)


def test_masked_and_unmasked_differ_only_in_mask():
    masked, unmasked = (arm.stages[-1] for arm in error_masking.get_config("tiny").values())
    (source, *chains), (other, *others) = masked.data.sources, unmasked.data.sources
    assert chains == others and not any(chat.chats.mistakes for chat in chains)
    assert source.mask_errors and not other.mask_errors
    assert dataclasses.replace(source, mask_errors=False) == other
    data = dataclasses.replace(unmasked.data, sources=(source, *others))
    assert dataclasses.replace(unmasked, data=data, name=masked.name) == masked


def test_dense_and_sparse_train_on_same_data():
    arms = sft_attention.get_config("tiny")
    sparse, dense = (arms[name].trial(seed=3).stages for name in ("sparse", "dense"))
    assert [s.model.attention for s in sparse[-3:]] == ["dense", "sparse", "sparse"]
    assert [s.model.attention for s in dense[-3:]] == ["dense", "dense", "dense"]
    for ours, theirs in zip(sparse[-2:], dense[-2:]):
        assert (ours.data, ours.schedule, ours.batch) == (
            theirs.data,
            theirs.schedule,
            theirs.batch,
        )
        assert not theirs.step.index_weight and theirs.optimizer.frozen == ("indexer/",)
    assert sparse[-1].data.seed == dense[-1].data.seed == 3


def test_held_out_questions_differ_and_suffice():
    source = ChatSourceConfig(chats=ChatTaskConfig(kind="chain", size=1000), mode="turn_level")
    chats = finetuned.held_out(source, 20)
    assert len({chat.messages[0]["content"] for chat in chats}) == 20
    with pytest.raises(ValueError, match="held-out questions, not 500; make more"):
        finetuned.held_out(source, 500)


def answer(text, prompt=(1, 2), thinking=True):
    ids = marker_ids(text)
    reply = parse_reply(ids, tokenizer=TOKENIZER, thinking=thinking)
    close = TOKENIZER.special_ids["</think>"]
    num = ids.index(close) + 1 if close in ids else 0
    return Answer(list(prompt), ids, num, reply, 0.5 if thinking else 0.1)


def marker_ids(text: str) -> list[int]:
    """Returns ids of a text whose words may be markers."""
    ids = []
    for word in text.split():
        special = TOKENIZER.special_ids.get(word)
        ids += TOKENIZER.encode(word) if special is None else [special]
    return ids


class Scripted:
    """Replaces a model by fixed answers, with and without thinking."""

    tokenizer = TOKENIZER

    def __init__(self, on, off=()):
        self.replies = {True: list(on), False: list(off)}

    def __call__(self, requests, num_new):
        return [
            answer(self.replies[r.enable_thinking][i], thinking=r.enable_thinking)
            for i, r in enumerate(requests)
        ]


CHATS = [
    parse_line(
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": str(i), "reasoning_content": "so"},
            ]
        }
    )
    for i in range(3)
]


def test_judges_replies_by_answer_end_and_marks():
    assistant = Scripted(
        on=["so </think> 0 <|user|>", "so </think> 7 <|user|>", "so so"],
        off=["0 <|user|>", "</think> 1 <|user|>", "5 <|user|>"],
    )
    on, off = (thinking.ask_assistant(assistant, CHATS, think) for think in (True, False))
    assert on["right"] == off["right"] == [1, 0, 0]
    assert on["closed"] == pytest.approx(2 / 3) and on["stopped"] == pytest.approx(2 / 3)
    assert off["marks"] == 1 and off["tokens"] == pytest.approx(7 / 3)
    assert (on["seconds"], off["seconds"]) == (0.5, pytest.approx(0.1))


def test_finds_common_prefix():
    assert thinking.common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert thinking.common_prefix([1, 2], [1, 2, 4]) == 2
    assert thinking.common_prefix([], [1]) == 0


def row(seed, on, off, marks=0):
    def of(right, tokens, seconds):
        return {"right": right, "closed": 1.0, "marks": marks, "stopped": 1.0} | {
            "tokens": tokens,
            "seconds": seconds,
        }

    return {"seed": seed, "on": of(on, 40, 0.4), "off": of(off, 4, 0.1)}


def turns(reasoning, right, share=1.0):
    first = {
        "right": [1, 1],
        "reasoning": 30,
        "shared": None,
        "all_shared": None,
        "new_tokens": 20.0,
    }
    later = {
        "right": right,
        "reasoning": reasoning,
        "shared": share,
        "all_shared": share,
        "new_tokens": 9.0,
    }
    return {"turns": [first, later]}


def test_verdicts_on_thinking():
    rows = {
        "turn_level": [
            row(0, [1] * 400 + [0] * 200, [1] * 100 + [0] * 500),
            row(1, [1] * 600, [1] * 600),
        ],
        "preserved": [turns(10, [1, 0]), turns(10, [1, 1])],
        "interleaved": [turns(40, [1, 0]), turns(40, [0, 1])],
    }
    verdicts = thinking.finding(rows, "command").verdicts
    assert verdicts[0].startswith("seed 0: 66.7% right with thinking, 16.7% without")
    assert "+50.0 points" in verdicts[0] and verdicts[0].endswith("at least 2: met")
    error = 100 * 0.5 / 599**0.5
    assert f"{50 / error:.1f} standard" in verdicts[0]
    assert verdicts[1].endswith("not met")  # no difference
    assert "0 marks of thinking in 1,200 replies: met" in verdicts[2]
    assert "saves 90% of the tokens and 75% of the time" in verdicts[3]
    assert "in 100.0% of conversations: met" in verdicts[4]
    assert "thinks 75% fewer tokens than interleaved" in verdicts[5]
    assert "+25.0" in verdicts[5]
    rows["preserved"][1] = turns(10, [1, 1], share=0.5)
    rows["turn_level"] = [row(0, [1] * 499, [0] * 499, marks=1)] * 2
    verdicts = thinking.finding(rows, "command").verdicts
    assert verdicts[0].endswith("not met"), "fewer than 500 questions"
    assert "2 marks" in verdicts[2] and "not met" in verdicts[2]
    assert "in 50.0% of conversations: not met" in verdicts[4]


def shares(mistakes, corrected=0.9):
    def of(share):
        return {"mistakes": [int(i < round(100 * share)) for i in range(100)]}

    right = {"right": [int(i < round(100 * corrected)) for i in range(100)]}
    return {
        "drawn": of(mistakes) | right,
        "greedy": of(mistakes) | right,
        "corrected": of(0) | right,
    }


def test_verdicts_on_masking():
    rows = {
        "masked": [shares(0.0), shares(0.01), shares(0.0)],
        "unmasked": [shares(0.5), shares(0.45), shares(0.55)],
    }
    first, second = error_masking.finding(rows, "command").verdicts
    assert "50.0% are mistakes where they were trained on, 0.3% where they were masked" in first
    assert "is met beyond the spread" in first and "90.0% of the calls are right (masked)" in second
    rows["unmasked"] = [shares(0.0), shares(0.02), shares(0.0)]
    assert "not met" in error_masking.finding(rows, "command").verdicts[0]


def test_judges_calls_by_rule_of_masking():
    source = ChatSourceConfig(chats=ChatTaskConfig(kind="tools", size=400, mistakes=0.5))
    chats = [c for c in finetuned.held_out(source, 8) if c.mistakes][:2]
    names = [c.messages[3]["tool_calls"][0] for c in chats]

    def written(call, name=None):
        pairs = " ".join(
            f"<arg_key> {k} </arg_key> <arg_value> {v} </arg_value>" for k, v in call.items()
        )
        return f"so </think> <tool_call> {name} {pairs} </tool_call> <|observation|>"

    class Caller:
        def __init__(self, *texts):
            self.texts = texts

        def __call__(self, requests, num_new, **options):
            out = []
            for request, text in zip(requests, self.texts):
                ids = marker_ids(text)
                reply = parse_reply(ids, request.tools, tokenizer=TOKENIZER)
                out.append(Answer([1], ids, 1, reply, 0.1))
            return out

    good = [written(call["arguments"], call["name"]) for call in names]
    judged = error_masking.judge_calls(Caller(*good), chats, 1)
    assert judged == {"mistakes": [0, 0], "right": [1, 1]}
    other = written({"input": "x"}, names[0]["name"])
    unknown = written(names[1]["arguments"], "lookup")
    judged = error_masking.judge_calls(Caller(other, unknown), chats, 1)
    assert judged == {"mistakes": [1, 1], "right": [0, 0]}
    judged = error_masking.judge_calls(Caller("so </think> <|user|>", "so"), chats, 1)
    assert judged == {"mistakes": [0, 0], "right": [0, 0]}


def test_verdict_on_equal_curves():
    steps = list(range(1, 101))
    wave = np.linspace(3, 1, 100)

    def losses(scale):
        return [(steps, list(wave * scale * s)) for s in (1.0, 1.05)]

    rows = {name: [{"loss": 1.0}, {"loss": 1.1}] for name in ("sparse", "dense")}
    near = sft_attention.finding(rows, {"sparse": losses(1.01), "dense": losses(1.0)}, "c")
    assert "+1.00 " in near.verdicts[0] and " 1.00% apart" in near.verdicts[0]
    assert "seeds of one arm are 4.76% apart" in near.verdicts[0]
    assert near.verdicts[0].endswith("is met") and "+0.0000" in near.verdicts[1]
    far = sft_attention.finding(rows, {"sparse": losses(1.2), "dense": losses(1.0)}, "c")
    assert far.verdicts[0].endswith("is not met")
    # Curves that cross differ, though their means are equal.
    swing = [(steps, list(wave * np.repeat([1.2, 0.8], 50)))] * 2
    across = sft_attention.finding(rows, {"sparse": swing, "dense": losses(1.0)}, "c")
    assert across.verdicts[0].endswith("is not met")


def test_computes_running_means():
    np.testing.assert_allclose(sft_attention.running_mean([1, 2, 3, 4], 2), [1.5, 2.5, 3.5])
