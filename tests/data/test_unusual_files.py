"""Tests reading files that users wrote: byte order marks, very long lines, and pipes in place of files."""

import json
import os

import pytest

from experiments import check_chats
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.mixture import DataConfig, training_documents
from glm5_jax.data.preferences import read_anchors
from glm5_jax.data.sources import SourceConfig, open_source
from glm5_jax.envs.instructions import ifeval
from glm5_jax.envs.reasoning.difficulty import read_verdicts
from glm5_jax.envs.search.passages import Corpus
from glm5_jax.runtime import files
from glm5_jax.runtime.files import check_line, read_line, read_lines, read_text
from glm5_jax.text import tokenizer
from glm5_jax.text.tokenizer import Tokenizer

BOM = b"\xef\xbb\xbf"
QUESTION, REPLY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
CHAT = json.dumps({"messages": [QUESTION, REPLY]}).encode()


def open_chats(path):
    return list(ChatSourceConfig(chats=str(path)).open(Tokenizer.default(), 0.0, training=True))


def open_texts(path):
    source = open_source(SourceConfig(kind="jsonl", path=str(path)))
    return [source[i] for i in range(len(source))]


READERS = [
    (open_chats, CHAT),
    (open_texts, b'{"text": "a"}'),
    (read_anchors, json.dumps({"messages": [QUESTION], "anchor": "A"}).encode()),
    (read_verdicts, b'{"task": "t", "passes": 1, "tries": 2}'),
    (lambda path: Corpus.read(path).passages, b'{"title": "a", "text": "b"}'),
    (
        lambda path: list(ifeval.tasks(path)),
        b'{"prompt": "a", "key": 1, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}',
    ),
]
NAMES = ["chats", "texts", "anchors", "verdicts", "passages", "instructions"]


@pytest.mark.parametrize(("read", "line"), READERS, ids=NAMES)
def test_reads_lines_after_byte_order_mark(read, line, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(BOM + line + b"\r\n")
    assert len(read(path)) == 1


@pytest.mark.parametrize(("read", "line"), READERS, ids=NAMES)
def test_names_line_that_is_too_long(read, line, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 200)
    path = tmp_path / "x.jsonl"
    path.write_bytes(line + b"\n" + b" " * 300 + line + b"\n" + line)
    with pytest.raises(ValueError, match=r"(line |:)2\b.*the line has more than 200 bytes"):
        read(path)


@pytest.mark.parametrize("read", [read for read, _ in READERS], ids=NAMES)
def test_rejects_pipe_without_blocking(read, tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="not a regular file|no file matches"):
        read(tmp_path / "x.jsonl")


def test_checks_lines_around_line_that_is_too_long(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    path, new = tmp_path / "x.jsonl", tmp_path / "new.jsonl"
    other = json.dumps({"messages": [QUESTION, {"role": "assistant", "content": "B"}]}).encode()
    path.write_bytes(b"\n".join([BOM + CHAT, b'{"messages": "' + b"x" * 3_000_000 + b'"}', other]))
    assert check_chats.main([str(path), f"--write={new}"]) == 1
    out = capsys.readouterr().out
    assert f"{path}, line 2: the line has more than 1,000 bytes; cut or remove it" in out
    assert new.read_bytes().splitlines() == [CHAT, other]


def test_reads_lines_by_offset(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(BOM + b"one\n\n  \r\ntwo\r\nthree")
    lines = list(read_lines(path))
    assert [(line.number, line.content) for line in lines] == [(1, b"one\n"), (4, b"two\r\n"), (5, b"three")]  # fmt: skip
    assert [read_line(path, line.offset, line.size) for line in lines] == [x.content for x in lines]


def test_reads_only_start_of_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * 5_000_000 + b"\n" + b"y" * 100 + b"\n")
    long, other = read_lines(path)
    assert len(long.content) == 101 and long.size == 5_000_001
    with pytest.raises(ValueError, match="more than 100 bytes"):
        check_line(long.content)
    assert other.number == 2 and read_line(path, other.offset, 3) == b"yyy"


@pytest.mark.parametrize("path", ["/dev/null", "/", "/proc/self/fd"])
def test_rejects_non_regular_file(path):
    with pytest.raises(ValueError, match=f"{path} is not a regular file; give a file"):
        read_text(path)


def test_rejects_text_that_is_too_large(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(BOM + "ä".encode())
    assert read_text(path, 5) == "ä"
    with pytest.raises(ValueError, match="config.json has more than 4 bytes"):
        read_text(path, 4)


def test_names_source_of_text_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_TEXT", 1000)
    (tmp_path / "a.txt").write_text("Once upon a time. " * 100)
    source = SourceConfig(kind="text", path=str(tmp_path / "*.txt"))
    config = DataConfig(sources=(source,), sequence_length=16, held_out_fraction=0.0)
    with pytest.raises(
        ValueError, match="source 'text:.*begins with 'Once upon .*1,800 characters"
    ):
        next(training_documents(config, source, Tokenizer.default()))
