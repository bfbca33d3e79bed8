"""Tests conversations as a data source: records of samples, rows of complete conversations and the held-out split."""

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
    """Returns a conversation of turns (question, reply, reasoning)."""
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


def open_chats(config, fraction=0.0, training=True):
    return config.open(TOKENIZER, fraction, training=training)


def assert_same_record(record, other):
    for name, stream in record.streams().items():
        np.testing.assert_array_equal(stream, getattr(other, name))
    assert record.spans == other.spans


CHATS = [
    chat(("One?", "1", "thought of one"), ("Two?", "2", "thought of two")),
    chat(("Three?", "3"), mode="preserved"),
    chat(("Four?", "4"), ("Five?", "5"), mode="preserved"),
]


@pytest.mark.parametrize("mode", ("interleaved", "preserved"))
def test_makes_record_of_every_sample_in_mode(tmp_path, mode):
    records = open_chats(source(tmp_path, *CHATS, mode=mode))
    wanted = [
        record
        for line in CHATS
        for record in make_records(parse_line(line), TOKENIZER, mode=line.get("mode", mode))
    ]
    assert len(records) == len(wanted) == (4 if mode == "interleaved" else 3)
    for record, other in zip((records[i] for i in range(len(records))), wanted):
        assert_same_record(record, other)


def test_reads_several_files_and_skips_empty_lines(tmp_path):
    source(tmp_path, "", chat(("One?", "1")), "  ", chat(("Two?", "2")), name="a")
    source(tmp_path, chat(("Three?", "3")), name="b")
    records = open_chats(ChatSourceConfig(chats=f"{tmp_path}/*.jsonl", max_tokens=64))
    assert [first_user_text(records.conversation(i)) for i in range(3)] == [
        "One?",
        "Two?",
        "Three?",
    ]


def test_masks_mistakes_by_default(tmp_path):
    wrong = chat(("Q", "right"))
    wrong["messages"][1:1] = [
        {"role": "assistant", "content": "wrong", "weight": 0},
    ]
    masked, unmasked = (
        open_chats(source(tmp_path, wrong, mask_errors=mask))[0] for mask in (True, False)
    )
    trained = [TOKENIZER.decode(r.token_ids[r.loss_mask == 1].tolist()) for r in (masked, unmasked)]
    assert "wrong" not in trained[0] and "wrong" in trained[1] and "right" in trained[0]


def test_drops_samples_without_trained_tokens(tmp_path):
    half = chat(("One?", "1"), ("Two?", "2"))
    half["messages"][1]["weight"] = 0
    records = open_chats(source(tmp_path, half))
    assert len(records) == 1 and records[0].loss_mask.any()
    assert len(open_chats(source(tmp_path, half, mask_errors=False))) == 2


def test_splits_by_prompt(tmp_path):
    chats = [chat((f"Question {i}?", f"{j}")) for i in range(200) for j in range(2)]
    config = source(tmp_path, *chats)
    sides = [
        [first_user_text(records.conversation(i)) for i in range(len(records))]
        for records in (open_chats(config, 0.3, training) for training in (True, False))
    ]
    assert len(sides[0]) + len(sides[1]) == 400 and not set(sides[0]) & set(sides[1])
    assert 80 < len(sides[1]) < 160
    for side in sides:
        assert len(side) == 2 * len(set(side))


def test_rejects_invalid_lines_before_reading(tmp_path):
    good = chat(("One?", "1"))
    config = source(tmp_path, good, "{", '{"messages": []}')
    with pytest.raises(ValueError, match=r"line 2: the line is not JSON.*\(and 1 lines more\)"):
        open_chats(config)
    untrained = chat(("One?", "1"))
    untrained["messages"][1]["weight"] = 0
    with pytest.raises(ValueError, match="line 1: it has no token to train on"):
        open_chats(source(tmp_path, untrained))
    with pytest.raises(ValueError, match="no file matches"):
        open_chats(ChatSourceConfig(chats=f"{tmp_path}/none*.jsonl"))
    (tmp_path / "chats.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ValueError, match="is a table, and conversations are lines of JSON; convert"
    ):
        open_chats(ChatSourceConfig(chats=f"{tmp_path}/*.parquet"))
    with pytest.raises(ValueError, match="has no held-out conversation among 1"):
        open_chats(source(tmp_path, good), 0.0, training=False)


def test_shows_progress_of_long_check(tmp_path, monkeypatch, capsys):
    config = source(tmp_path, *(chat((f"{i}?", "1")) for i in range(50)))
    open_chats(config)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(chat_data, "QUIET_BYTES", 1000)
    open_chats(config)
    assert capsys.readouterr().err.startswith("byte 1")


def test_accepts_samples_of_exactly_max_tokens(tmp_path):
    long = chat(("One?", "word " * 60))
    tokens = max(map(len, make_records(parse_line(long), TOKENIZER)))
    assert len(open_chats(source(tmp_path, long, max_tokens=tokens))) == 1
    with pytest.raises(ValueError, match=f"has {tokens} tokens, more than {tokens - 1}"):
        open_chats(source(tmp_path, long, max_tokens=tokens - 1))


def test_counts_spelled_out_markers_as_text(tmp_path):
    """Text never has more tokens than bytes, so a line with fewer bytes than the limit of tokens needs no count."""
    text = "<|user|>" * 20
    [record] = make_records(parse_line(chat(("Q", text))), TOKENIZER)
    line = json.dumps(chat(("Q", text)))
    assert 100 < len(record) <= len(line)


def test_counts_tokens_of_tool_preamble(tmp_path):
    """The preamble is not part of the line, so a line of one token per byte has more tokens than bytes."""
    tools = [{"name": "f"}]
    line = chat(("鱻" * 30, "鱻"), tools=tools)
    tokens = max(map(len, make_records(parse_line(line), TOKENIZER)))
    assert tokens > len(json.dumps(line, ensure_ascii=False).encode())
    config = source(tmp_path, json.dumps(line, ensure_ascii=False), max_tokens=tokens)
    assert len(open_chats(config)) == 1
    with pytest.raises(ValueError, match=f"has {tokens} tokens, more than {tokens - 1}"):
        open_chats(dataclasses.replace(config, max_tokens=tokens - 1))


def test_splits_spellings_of_question_together(tmp_path):
    """Spellings: as text or in parts, composed or not, with trailing blanks."""
    chats = []
    for i in range(100):
        for content in (f"é{i}", [{"type": "text", "text": f"é{i}"}], f"e\u0301{i}  "):
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A"}]
            chats.append({"messages": messages})
    config = source(tmp_path, *chats)
    sides = [open_chats(config, 0.3, training) for training in (True, False)]
    assert all(len(side) % 3 == 0 for side in sides)


def test_limits_samples_to_row_length_by_default(tmp_path):
    config = source(tmp_path, chat(("One?", "word " * 60)), max_tokens=None)
    data = DataConfig(
        sources=(config,), sequence_length=64, packing="best_fit", held_out_fraction=0.0
    )
    with pytest.raises(ValueError, match="tokens, more than 64; shorten it"):
        Loader(data, TOKENIZER)
    batch = Loader(dataclasses.replace(data, sequence_length=128), TOKENIZER).next(1)
    assert batch["loss_mask"].sum() > 60


def test_rejects_unsuitable_or_mixed_layouts(tmp_path):
    with pytest.raises(ValueError, match="mode is 'preserved'; glm4.5 cannot keep"):
        ChatSourceConfig(chats="x.jsonl", mode="preserved", variant="glm4.5")
    config = source(tmp_path, chat(("One?", "1"), mode="preserved"), variant="glm4.5")
    with pytest.raises(ValueError, match="line 1: mode is 'preserved'; glm4.5 cannot keep"):
        open_chats(config)
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
def test_rejects_invalid_fields(field, value):
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


def test_packs_complete_conversations_into_rows():
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
                is_segment = segment == number
                assert ids[is_segment][0] == start and positions[is_segment][0] == 0
                # Two questions, and the stop marker of the last reply.
                assert TOKENIZER.decode(ids[is_segment].tolist()).count("<|user|>") == 3
    assert segments > 40


def test_masks_loss_to_assistant_tokens_in_batch():
    batch = Loader(mixture(CHAIN), TOKENIZER).next(4)
    trained = TOKENIZER.decode(batch["token_ids"][batch["loss_mask"] == 1].tolist())
    assert "?" not in trained and "<|assistant|>" not in trained and "</think>" in trained
    np.testing.assert_array_equal(batch["ce_weight"] * batch["loss_mask"], batch["loss_mask"])


def test_mixes_chats_texts_and_tasks_by_weight():
    tasks = TaskSourceConfig(
        tasks=LongContextTaskConfig(kind="mrcr", length=256, surface="tokens", reply_tokens=8)
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
    batches = [loader.next(2) for _ in range(3)]
    resumed = Loader(config, TOKENIZER)
    resumed.restore(state)
    for batch in batches:
        other = resumed.next(2)
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def test_holds_out_questions_that_are_not_trained():
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
    """Yields the tokens from each [gMASK] of the rows up to the reply."""
    marks = [TOKENIZER.special_ids[name] for name in ("[gMASK]", "<|assistant|>")]
    for row in ids:
        for first in np.flatnonzero(row == marks[0]):
            ends = np.flatnonzero(row[first:] == marks[1])
            yield row[first : first + ends[0]].tolist()


def test_rejects_rows_that_cut_conversations():
    for options in ({"packing": "concat"}, {"sequence_length": 64}):
        with pytest.raises(ValueError, match="use best_fit, and rows of that length, or shorter"):
            DataConfig(
                sources=(CHAIN,), **{"packing": "best_fit", "sequence_length": 128} | options
            )


def test_packs_plays_into_rows():
    rows = list(
        itertools.islice(
            held_out_batches(
                mixture(PLAYS, length=1024, held_out_fraction=0.1), PLAYS, TOKENIZER, 2
            ),
            1,
        )
    )
    assert rows[0]["loss_mask"].any()
