"""Tests that every kind of source reads its documents, and that errors name invalid input."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from glm5_jax.data.document import PASSAGE_LENGTH
from glm5_jax.data.sources import (
    FINGERPRINT_DOCUMENTS,
    SHAKESPEARE,
    SourceConfig,
    fingerprint,
    is_held_out,
    open_source,
    stdlib_paths,
)

TEXTS = ["first ä", "second\nline", "third"]


def _texts(config):
    source = open_source(config)
    return [source[index] for index in range(len(source))]


def _write(kind, folder):
    """Writes TEXTS in two files (b comes before c) and returns their glob."""
    for name, texts in (("c", TEXTS[2:]), ("b", TEXTS[:2])):
        file = folder / f"{name}.data"
        if kind == "jsonl":
            lines = [json.dumps({"id": 1, "body": text}) for text in texts]
            file.write_text("\n\n".join(lines), "utf-8")
        elif kind == "parquet":
            table = pyarrow.table({"id": [1] * len(texts), "body": texts})
            pyarrow.parquet.write_table(table, file)
        elif kind == "array_record":
            writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1")
            for text in texts:
                writer.write(json.dumps({"body": text}).encode())
            writer.close()
    return str(folder / "*.data")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "array_record"])
def test_reads_records_in_order_of_files(kind, tmp_path):
    config = SourceConfig(kind=kind, path=_write(kind, tmp_path), field="body")
    assert _texts(config) == TEXTS
    with pytest.raises(ValueError, match="missing"):
        _texts(SourceConfig(kind=kind, path=config.path, field="missing"))


def test_reads_text_files_as_documents(tmp_path):
    (tmp_path / "deep").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "deep" / f"{number}.txt").write_text(text, "utf-8")
    assert _texts(SourceConfig(kind="text", path=str(tmp_path / "**" / "*.txt"))) == TEXTS


def test_reads_array_record_of_bare_text(tmp_path):
    writer = array_record_module.ArrayRecordWriter(str(tmp_path / "x"), "group_size:1")
    writer.write("ä bare".encode())
    writer.close()
    assert _texts(SourceConfig(kind="array_record", path=str(tmp_path / "x"), field="")) == [
        "ä bare"
    ]


def test_reads_arrow_files_of_saved_data_set(tmp_path):
    """`datasets.Dataset.save_to_disk` writes such streams, in record batches, next to files of JSON."""
    texts = [f"ä {number}" for number in range(5)]
    for shard, part in enumerate((texts[:3], texts[3:])):
        table = pyarrow.table({"id": [0] * len(part), "text": part})
        name = str(tmp_path / f"data-{shard:05d}-of-00002.arrow")
        with pyarrow.OSFile(name, "wb") as file:
            with pyarrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    (tmp_path / "state.json").write_text("{}")
    config = SourceConfig(kind="arrow", path=f"{tmp_path}/**/*.arrow")
    assert _texts(config) == texts
    (tmp_path / "cut.arrow").write_bytes(
        (tmp_path / "data-00000-of-00002.arrow").read_bytes()[:-60]
    )
    with pytest.raises(ValueError, match=r"cut.arrow is no complete arrow file"):
        open_source(config)
    with pytest.raises(ValueError, match=r"it is a folder; give its files, as in .*/\*\*/\*"):
        open_source(SourceConfig(kind="arrow", path=str(tmp_path)))


def test_refuses_mapped_copies_next_to_saved_data_set(tmp_path):
    """`map` and `filter` of a loaded data set store their results in its folder."""
    for name in ("data-00000-of-00001", "cache-1f2e"):
        table = pyarrow.table({"text": TEXTS})
        with pyarrow.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file:
            with pyarrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    with pytest.raises(ValueError, match="cache-1f2e.arrow repeats rows of the other files"):
        _texts(SourceConfig(kind="arrow", path=f"{tmp_path}/*.arrow"))
    for name in ("data", "cache"):
        assert _texts(SourceConfig(kind="arrow", path=f"{tmp_path}/{name}-*.arrow")) == TEXTS


@pytest.mark.parametrize("mark", ["\n", " ", ""])
def test_cuts_long_paragraph(tmp_path, mark):
    text = mark.join(["ab" * 700] * 20)
    (tmp_path / "book.txt").write_text(text)
    passages = _texts(SourceConfig(kind="passages", path=str(tmp_path / "book.txt")))
    assert "".join(passages) == text
    assert max(map(len, passages)) <= PASSAGE_LENGTH and min(map(len, passages[:-1])) > 2000
    assert all(passage.endswith(mark) for passage in passages[:-1])


def test_cuts_passages_at_blank_lines_without_loss(tmp_path):
    paragraphs = [f"{number} " + "x" * 1500 for number in range(7)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    passages = _texts(SourceConfig(kind="passages", path=str(tmp_path / "book.txt")))
    assert "".join(passages) == "\n\n".join(paragraphs)
    assert [passage[0] for passage in passages] == ["0", "2", "4", "6"]


def test_reads_shipped_shakespeare():
    texts = _texts(SourceConfig(kind="shakespeare"))
    assert "".join(texts) == SHAKESPEARE.read_text("utf-8")
    assert texts[0].startswith("First Citizen:") and len(texts) > 200


def test_reads_standard_library_without_tests():
    paths = stdlib_paths()
    names = [path.as_posix() for path in paths]
    assert len(paths) > 200 and any(name.endswith("/json/decoder.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)
    source = open_source(SourceConfig(kind="stdlib"))
    assert len(source) == len(paths)
    assert sum(path.stat().st_size for path in paths) > 5_000_000
    assert source[0] == paths[0].read_text("utf-8")


def test_rejects_missing_files_and_documents(tmp_path):
    with pytest.raises(ValueError, match=r"text:.*nothing.*: no file matches"):
        open_source(SourceConfig(kind="text", path=str(tmp_path / "nothing*")))
    (tmp_path / "empty").write_text("\n\n")
    for kind in ("jsonl", "passages"):
        with pytest.raises(ValueError, match=f"{kind}:.*empty.*no document"):
            open_source(SourceConfig(kind=kind, path=str(tmp_path / "empty")))


def test_names_position_of_invalid_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    source = open_source(SourceConfig(kind="text", path=str(tmp_path / "latin.txt")))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8: byte 0xe9 at offset 3"):
        source[0]
    with pytest.raises(ValueError, match="latin.txt is not UTF-8"):
        open_source(SourceConfig(kind="passages", path=str(tmp_path / "latin.txt")))


BROKEN_LINES = [
    ('{"text": ', "is not JSON: .*; correct it, or remove it before a run begins"),
    ('{"text": "a"', "is not JSON: "),
    ('{"text": "a raw\ttab"}', "is not JSON: Invalid control character"),
    ('{"body": "a"}', r"has no string at 'text'; it has \['body'\]; .* the source's field"),
    ("[]", "has no string at 'text'; it has list"),
    (r'{"text": "\ud83d broken"}', "holds half of a surrogate pair, character 0 of 'text'; "),
    ('{"text": "caf\udce9"}', "is not UTF-8: byte 0xe9 at offset 13"),
    ('{"text": 3}', r"has no string at 'text'; it has \['text'\]"),
    ('{"body": "text"}', r"has no string at 'text'; it has \['body'\]"),
    ('{"text": "a",}', "is not JSON: "),
    ('{"text": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
    ('{"text": ' + "[" * 100_000 + "}", "is not JSON: maximum recursion depth"),
]


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize(
    ("module", "program"),
    [(gzip, "gunzip"), (bz2, "bunzip2"), (lzma, "unxz")],
    ids=["gz", "bz2", "xz"],
)
def test_names_program_for_compressed_file(tmp_path, kind, module, program):
    (tmp_path / "x").write_bytes(module.compress(b'{"text": "words"}\n'))
    with pytest.raises(ValueError, match=f"compressed; unpack the file with {program}"):
        open_source(SourceConfig(kind=kind, path=str(tmp_path / "x")))[0]


@pytest.mark.parametrize("kind", ["text", "passages", "books"])
def test_byte_order_mark_is_no_text(tmp_path, kind):
    (tmp_path / "x.txt").write_text("words", "utf-8-sig")
    [document] = open_source(SourceConfig(kind=kind, path=str(tmp_path / "x.txt")))
    assert document == "words"


def _lines(folder, *lines) -> SourceConfig:
    (folder / "x.jsonl").write_text("\n".join(lines), "utf-8", "surrogateescape")
    return SourceConfig(kind="jsonl", path=str(folder / "x.jsonl"))


@pytest.mark.parametrize("line, message", BROKEN_LINES, ids=range(len(BROKEN_LINES)))
def test_rejects_invalid_json_lines_when_opened(line, message, tmp_path):
    config = _lines(tmp_path, '{"text": "good"}', "", line, '{"text": "good"}')
    with pytest.raises(ValueError, match=f"source 'jsonl:.*x.jsonl, line 3 {message}") as error:
        open_source(config)
    assert "\n" not in str(error.value)


def test_reads_unusual_but_valid_json_lines(tmp_path):
    lines = [r' {"text": "\ud83d\ude00"} ', r'{"te\u0078t": "key"}', r'{"text": "\\ud83d"}']
    lines += [
        '{"a": NaN, "text": "number"}',
        r'{"a": "\ud800", "text": "half"}',
        '{"text": 3, "text": "last"}',
    ]
    expected = ["\N{GRINNING FACE}", "key", r"\ud83d", "number", "half", "last"]
    assert _texts(_lines(tmp_path, *lines)) == expected


def test_rejects_parquet_column_without_text_or_with_gaps(tmp_path):
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2], "gap": ["a", None]}), file)
    with pytest.raises(ValueError, match="is int64; it must be string"):
        open_source(SourceConfig(kind="parquet", path=str(file)))
    with pytest.raises(ValueError, match="'gap' .* has 1 empty entries"):
        open_source(SourceConfig(kind="parquet", path=str(file), field="gap"))
    latin = pyarrow.array([b"ok", b"caf\xe9"]).buffers()
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, latin)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
    with pytest.raises(ValueError, match="'text' of .*x.parquet is not UTF-8: .*index 1; convert"):
        open_source(SourceConfig(kind="parquet", path=str(file)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"kind": "csv"}, "source kind is 'csv'; use one of text, passages, jsonl"),
        ({"kind": "text"}, "source 'text' needs a path"),
        ({"kind": "stdlib", "path": "x"}, "takes no path"),
        ({"kind": "stdlib", "weight": 0.0}, "make it positive"),
        ({"kind": "stdlib", "weight": float("nan")}, "make it positive"),
    ],
)
def test_rejects_contradictory_source(arguments, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig(**arguments)


class _Counting(list):
    """Source that records which documents are read."""

    def __init__(self, texts):
        super().__init__(texts)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("count", [1, 2, FINGERPRINT_DOCUMENTS, FINGERPRINT_DOCUMENTS + 1, 100_000])
def test_fingerprint_reads_few_documents_of_full_range(count):
    source = _Counting(f"document {number}" for number in range(count))
    assert fingerprint(source) == fingerprint(source) and str(count) in fingerprint(source)
    num_documents = min(count, FINGERPRINT_DOCUMENTS)
    assert sorted(set(source.read)) == source.read[:num_documents]
    assert source.read[0] == 0 and source.read[num_documents - 1] == count - 1
    for number in (0, count - 1):
        other = _Counting(source)
        list.__setitem__(other, number, "changed")
        assert fingerprint(other) != fingerprint(source)


def test_held_out_split_is_fixed_and_grows_with_fraction():
    texts = [f"document {number}" for number in range(4000)]
    few = {text for text in texts if is_held_out(text, 0.05)}
    more = {text for text in texts if is_held_out(text, 0.2)}
    assert few < more and abs(len(few) - 200) < 50 and abs(len(more) - 800) < 100
    assert not any(is_held_out(text, 0.0) for text in texts)
    # The split must never change: models were trained on the documents that it does not hold out.
    assert [n for n in range(100) if f"document {n}" in few] == [40, 70]
