"""Conversations as a source: every sample a record, rows that hold them whole, both sides of the split."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from glm5_jax.data import chat_data
from glm5_jax.data.chat_data import ChatSourceConfig, first_user_text
from glm5_jax.data.chat_tasks import ChatTaskConfig
from glm5_jax.data.conversation import make_records, parse_line
from glm5_jax.data.loader import Loader, held_out_batches
from glm5_jax.data.long_context import TaskSourceConfig
from glm5_jax.data.mixture import DataConfig, training_documents
from glm5_jax.data.sources import SourceConfig
from glm5_jax.data.synthetic import LongContextTaskConfig
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()


def chat(*turns, **more):
    """Turns (question, reply, reasoning)."""
    messages = []
    for question, reply, *reasoning in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": reply, "reasoning_content": "".join(reasoning)},
        ]
    return {"messages": messages, **more}


def source(folder, *chats, name="chats", **options):
    file = folder / f"{name}.jsonl"
    lines = (line if isinstance(line, str) else json.dumps(line) for line in chats)
    file.write_text("\n".join(lines) + "\n")
    return ChatSourceConfig(chats=str(file), **{"max_tokens": 64} | options)


def opened(config, fraction=0.0, training=True):
    return config.open(TOKENIZER, fraction, training=training)


def same(record, other):
    for name, stream in record.streams().items():
        np.testing.assert_array_equal(stream, getattr(other, name))
    assert record.spans == other.spans


CHATS = [
    chat(("One?", "1", "thought of one"), ("Two?", "2", "thought of two")),
    chat(("Three?", "3"), mode="preserved"),
    chat(("Four?", "4"), ("Five?", "5"), mode="preserved"),
]


@pytest.mark.parametrize("mode", ("interleaved", "preserved"))
def test_every_sample_is_a_record_in_the_mode_of_its_line_or_the_sources(tmp_path, mode):
    found = opened(source(tmp_path, *CHATS, mode=mode))
    wanted = [
        record
        for line in CHATS
        for record in make_records(parse_line(line), TOKENIZER, mode=line.get("mode", mode))
    ]
    assert len(found) == len(wanted) == (4 if mode == "interleaved" else 3)
    for record, other in zip((found[i] for i in range(len(found))), wanted):
        same(record, other)


def test_empty_lines_and_several_files_are_read(tmp_path):
    source(tmp_path, "", chat(("One?", "1")), "  ", chat(("Two?", "2")), name="a")
    source(tmp_path, chat(("Three?", "3")), name="b")
    found = opened(ChatSourceConfig(chats=f"{tmp_path}/*.jsonl", max_tokens=64))
    assert [first_user_text(found.conversation(i)) for i in range(3)] == ["One?", "Two?", "Three?"]


def test_mistakes_are_masked_unless_told(tmp_path):
    wrong = chat(("Q", "right"))
    wrong["messages"][1:1] = [
        {"role": "assistant", "content": "wrong", "weight": 0},
    ]
    masked, unmasked = (
        opened(source(tmp_path, wrong, mask_errors=mask))[0] for mask in (True, False)
    )
    learnt = [TOKENIZER.decode(r.token_ids[r.loss_mask == 1].tolist()) for r in (masked, unmasked)]
    assert "wrong" not in learnt[0] and "wrong" in learnt[1] and "right" in learnt[0]


def test_samples_of_which_nothing_is_learnt_are_none(tmp_path):
    half = chat(("One?", "1"), ("Two?", "2"))
    half["messages"][1]["weight"] = 0
    found = opened(source(tmp_path, half))
    assert len(found) == 1 and found[0].loss_mask.any()
    assert len(opened(source(tmp_path, half, mask_errors=False))) == 2


def test_a_prompt_stands_on_one_side_of_the_split_with_all_its_answers(tmp_path):
    chats = [chat((f"Question {i}?", f"{j}")) for i in range(200) for j in range(2)]
    config = source(tmp_path, *chats)
    sides = [
        [first_user_text(found.conversation(i)) for i in range(len(found))]
        for found in (opened(config, 0.3, training) for training in (True, False))
    ]
    assert len(sides[0]) + len(sides[1]) == 400 and not set(sides[0]) & set(sides[1])
    assert 80 < len(sides[1]) < 160
    for side in sides:
        assert len(side) == 2 * len(set(side))


def test_wrong_lines_are_told_before_anything_is_read(tmp_path):
    good = chat(("One?", "1"))
    config = source(tmp_path, good, "{", '{"messages": []}')
    with pytest.raises(ValueError, match=r"line 2: the line is not JSON.*\(and 1 lines more\)"):
        opened(config)
    unlearnt = chat(("One?", "1"))
    unlearnt["messages"][1]["weight"] = 0
    with pytest.raises(ValueError, match="line 1: it has no token to train on"):
        opened(source(tmp_path, unlearnt))
    with pytest.raises(ValueError, match="no file matches"):
        opened(ChatSourceConfig(chats=f"{tmp_path}/none*.jsonl"))
    with pytest.raises(ValueError, match="has no held-out conversation among 1"):
        opened(source(tmp_path, good), 0.0, training=False)


def test_checking_much_shows_how_far_it_is(tmp_path, monkeypatch, capsys):
    config = source(tmp_path, *(chat((f"{i}?", "1")) for i in range(50)))
    opened(config)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(chat_data, "QUIET_BYTES", 1000)
    opened(config)
    assert capsys.readouterr().err.startswith("byte 1")


def test_the_longest_sample_is_the_longest_and_no_longer(tmp_path):
    long = chat(("One?", "word " * 60))
    tokens = max(map(len, make_records(parse_line(long), TOKENIZER)))
    assert len(opened(source(tmp_path, long, max_tokens=tokens))) == 1
    with pytest.raises(ValueError, match=f"has {tokens} tokens, more than {tokens - 1}"):
        opened(source(tmp_path, long, max_tokens=tokens - 1))


def test_marker_strings_count_as_the_text_they_are(tmp_path):
    """A line of fewer bytes than tokens there may be needs no look: text never has more tokens than bytes."""
    text = "<|user|>" * 20
    [record] = make_records(parse_line(chat(("Q", text))), TOKENIZER)
    line = json.dumps(chat(("Q", text)))
    assert 100 < len(record) <= len(line)


def test_text_around_tools_counts_too(tmp_path):
    """It stands in no line: text that is a token for each byte fills rows with it."""
    tools = [{"name": "f"}]
    line = chat(("鱻" * 30, "鱻"), tools=tools)
    tokens = max(map(len, make_records(parse_line(line), TOKENIZER)))
    assert tokens > len(json.dumps(line, ensure_ascii=False).encode())
    config = source(tmp_path, json.dumps(line, ensure_ascii=False), max_tokens=tokens)
    assert len(opened(config)) == 1
    with pytest.raises(ValueError, match=f"has {tokens} tokens, more than {tokens - 1}"):
        opened(dataclasses.replace(config, max_tokens=tokens - 1))


def test_two_spellings_of_a_question_stand_on_one_side(tmp_path):
    """As text or in parts, composed or not, with blanks behind it."""
    chats = []
    for i in range(100):
        for content in (f"é{i}", [{"type": "text", "text": f"é{i}"}], f"e\u0301{i}  "):
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A"}]
            chats.append({"messages": messages})
    config = source(tmp_path, *chats)
    sides = [opened(config, 0.3, training) for training in (True, False)]
    assert all(len(side) % 3 == 0 for side in sides)


def test_samples_are_as_long_as_rows_unless_told(tmp_path):
    config = source(tmp_path, chat(("One?", "word " * 60)), max_tokens=None)
    data = DataConfig(
        sources=(config,), sequence_length=64, packing="best_fit", held_out_fraction=0.0
    )
    with pytest.raises(ValueError, match="tokens, more than 64; shorten it"):
        Loader(data, TOKENIZER)
    batch = Loader(dataclasses.replace(data, sequence_length=128), TOKENIZER).next(1)
    assert batch["loss_mask"].sum() > 60


def test_layouts_that_cannot_keep_reasoning_and_several_layouts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="mode is 'preserved'; glm4.5 cannot keep"):
        ChatSourceConfig(chats="x.jsonl", mode="preserved", variant="glm4.5")
    config = source(tmp_path, chat(("One?", "1"), mode="preserved"), variant="glm4.5")
    with pytest.raises(ValueError, match="line 1: mode is 'preserved'; glm4.5 cannot keep"):
        opened(config)
    other = dataclasses.replace(CHAIN, variant="glm5.2")
    with pytest.raises(ValueError, match=r"layouts \['glm5', 'glm5.2'\]; use one layout"):
        mixture(CHAIN, dataclasses.replace(other, mode="interleaved"))
    assert mixture(other).chat_variant == "glm5.2"
    assert DataConfig(sources=(SourceConfig(kind="shakespeare"),)).chat_variant is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("category", "poems"),
        ("mode", "deep"),
        ("variant", "glm9"),
        ("max_tokens", 1),
    ],
)
def test_wrong_fields_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        ChatSourceConfig(chats="x.jsonl", **{field: value})
    with pytest.raises(ValueError, match="weight of source 'general:x.jsonl:interleaved' is 0"):
        ChatSourceConfig(chats="x.jsonl", weight=0)


def mixture(*sources, length=128, **options):
    return DataConfig(
        sources=sources, sequence_length=length, packing="best_fit", num_threads=0, **options
    )


CHAIN = ChatSourceConfig(
    chats=ChatTaskConfig(kind="chain", size=300, turns=2),
    category="reasoning",
    mode="preserved",
    max_tokens=128,
)
PLAYS = ChatSourceConfig(
    chats=ChatTaskConfig(kind="plays", size=300), mode="turn_level", max_tokens=1024
)


def test_rows_hold_conversations_whole():
    loader = Loader(mixture(CHAIN, length=256), TOKENIZER)
    start = TOKENIZER.special_ids["[gMASK]"]
    segments = 0
    for _ in range(20):
        batch = loader.next(2)
        for row in range(2):
            ids, segment, positions = (
                batch[name][row] for name in ("token_ids", "segment_ids", "positions")
            )
            for number in range(1, segment.max() + 1):
                segments += 1
                own = segment == number
                assert ids[own][0] == start and positions[own][0] == 0
                # Asks twice, and ends where the user would speak again.
                assert TOKENIZER.decode(ids[own].tolist()).count("<|user|>") == 3
    assert segments > 40


def test_only_what_the_assistant_says_is_learnt_in_a_batch():
    batch = Loader(mixture(CHAIN), TOKENIZER).next(4)
    learnt = TOKENIZER.decode(batch["token_ids"][batch["loss_mask"] == 1].tolist())
    assert "?" not in learnt and "<|assistant|>" not in learnt and "</think>" in learnt
    np.testing.assert_array_equal(batch["ce_weight"] * batch["loss_mask"], batch["loss_mask"])


def test_chats_texts_and_tasks_are_mixed_by_weight():
    tasks = TaskSourceConfig(
        LongContextTaskConfig(kind="mrcr", length=256, surface="tokens", reply_tokens=8)
    )
    config = mixture(
        CHAIN,
        SourceConfig(kind="shakespeare", weight=2.0),
        tasks,
        length=256,
        held_out_fraction=0.05,
    )
    loader = Loader(config, TOKENIZER)
    starts = [loader.next(1)["token_ids"][0, 0] for _ in range(40)]
    assert starts.count(TOKENIZER.special_ids["[gMASK]"]) == 10
    state = json.loads(json.dumps(loader.state()))
    ahead = [loader.next(2) for _ in range(3)]
    again = Loader(config, TOKENIZER)
    again.restore(state)
    for one in ahead:
        other = again.next(2)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_held_out_rows_are_of_questions_that_are_not_trained():
    config = mixture(CHAIN, held_out_fraction=0.2)
    batches = list(held_out_batches(config, CHAIN, TOKENIZER, 4, max_rows=8))
    held_out = {tuple(q) for batch in batches for q in questions(batch["token_ids"])}
    trained = {
        tuple(q)
        for ids in training_documents(config, CHAIN, TOKENIZER)
        for q in questions(np.array([ids]))
    }
    assert held_out and trained and not held_out & trained


def questions(ids):
    """Of rows: what stands behind each [gMASK]<sop><|user|>, up to the reply."""
    marks = [TOKENIZER.special_ids[name] for name in ("[gMASK]", "<|assistant|>")]
    for row in ids:
        for first in np.flatnonzero(row == marks[0]):
            ends = np.flatnonzero(row[first:] == marks[1])
            yield row[first : first + ends[0]].tolist()


def test_rows_that_cut_conversations_are_refused():
    for options in ({"packing": "concat"}, {"sequence_length": 64}):
        with pytest.raises(ValueError, match="use best_fit, and rows of that length, or shorter"):
            DataConfig(
                sources=(CHAIN,), **{"packing": "best_fit", "sequence_length": 128} | options
            )


def test_plays_fit_into_rows():
    rows = list(
        itertools.islice(
            held_out_batches(
                mixture(PLAYS, length=1024, held_out_fraction=0.1), PLAYS, TOKENIZER, 2
            ),
            1,
        )
    )
    assert rows[0]["loss_mask"].any()
