"""Every kind of source reads its documents; bad input is named."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from glm5_jax.data.sources import (
    SHAKESPEARE,
    SourceConfig,
    held_out,
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
def test_records_are_read_in_the_order_of_the_files(kind, tmp_path):
    config = SourceConfig(kind, _write(kind, tmp_path), field="body")
    assert _texts(config) == TEXTS
    with pytest.raises(ValueError, match="missing"):
        _texts(SourceConfig(kind, config.path, field="missing"))


def test_text_files_are_a_document_each(tmp_path):
    (tmp_path / "deep").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "deep" / f"{number}.txt").write_text(text, "utf-8")
    assert _texts(SourceConfig("text", str(tmp_path / "**" / "*.txt"))) == TEXTS


def test_array_records_may_hold_bare_text(tmp_path):
    writer = array_record_module.ArrayRecordWriter(str(tmp_path / "x"), "group_size:1")
    writer.write("ä bare".encode())
    writer.close()
    assert _texts(SourceConfig("array_record", str(tmp_path / "x"), field="")) == ["ä bare"]


def test_passages_are_cut_at_blank_lines_and_lose_nothing(tmp_path):
    paragraphs = [f"{number} " + "x" * 1500 for number in range(7)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    passages = _texts(SourceConfig("passages", str(tmp_path / "book.txt")))
    assert "".join(passages) == "\n\n".join(paragraphs)
    assert [passage[0] for passage in passages] == ["0", "2", "4", "6"]


def test_shakespeare_is_shipped():
    texts = _texts(SourceConfig("shakespeare"))
    assert "".join(texts) == SHAKESPEARE.read_text("utf-8")
    assert texts[0].startswith("First Citizen:") and len(texts) > 200


def test_the_standard_library_is_sorted_python_without_tests():
    paths = stdlib_paths()
    names = [path.as_posix() for path in paths]
    assert len(paths) > 200 and any(name.endswith("/json/decoder.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)
    source = open_source(SourceConfig("stdlib"))
    assert len(source) == len(paths)
    assert sum(path.stat().st_size for path in paths) > 5_000_000
    assert source[0] == paths[0].read_text("utf-8")


def test_no_files_and_no_documents_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"text:.*nothing.*: no file matches"):
        open_source(SourceConfig("text", str(tmp_path / "nothing*")))
    (tmp_path / "empty").write_text("\n\n")
    for kind in ("jsonl", "passages"):
        with pytest.raises(ValueError, match=f"{kind}:.*empty.*no document"):
            open_source(SourceConfig(kind, str(tmp_path / "empty")))


def test_bytes_that_are_not_utf8_name_the_file_and_the_place(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    source = open_source(SourceConfig("text", str(tmp_path / "latin.txt")))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8: byte 0xe9 at offset 3"):
        source[0]
    with pytest.raises(ValueError, match="latin.txt is not UTF-8"):
        open_source(SourceConfig("passages", str(tmp_path / "latin.txt")))


def test_a_broken_json_line_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n{"text": \n{"text": 3}\n[]\n')
    source = open_source(SourceConfig("jsonl", str(tmp_path / "x.jsonl")))
    assert source[0] == "good"
    with pytest.raises(ValueError, match=r"x.jsonl, line 2 is not JSON"):
        source[1]
    with pytest.raises(ValueError, match=r"line 3 has no string at 'text'; it has \['text'\]"):
        source[2]
    with pytest.raises(ValueError, match="line 4 has no string at 'text'; it has list"):
        source[3]


def test_parquet_columns_must_be_text_without_gaps(tmp_path):
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2], "gap": ["a", None]}), file)
    with pytest.raises(ValueError, match="is int64; it must be string"):
        open_source(SourceConfig("parquet", str(file)))
    with pytest.raises(ValueError, match="'gap' .* has 1 empty entries"):
        open_source(SourceConfig("parquet", str(file), field="gap"))


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
def test_contradictory_sources_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig(**arguments)


def test_the_held_out_split_is_a_fixed_share_that_grows_with_the_fraction():
    texts = [f"document {number}" for number in range(4000)]
    few = {text for text in texts if held_out(text, 0.05)}
    more = {text for text in texts if held_out(text, 0.2)}
    assert few < more and abs(len(few) - 200) < 50 and abs(len(more) - 800) < 100
    assert not any(held_out(text, 0.0) for text in texts)
    # The split may never move: a trained model would have seen its held-out documents.
    assert [n for n in range(100) if f"document {n}" in few] == [40, 70]
