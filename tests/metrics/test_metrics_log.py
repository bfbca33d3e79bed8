"""Tests that metrics.jsonl and TensorBoard hold each step once, also after restarts."""

import json
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from glm5_jax.metrics.metrics_log import MetricsLog, column, read


def write(workdir, steps, after=0):
    with MetricsLog(workdir, after) as log:
        for step in steps:
            log.write({"step": step, "loss": step / 3, "load": [1.0, step]})
        log.flush()


def test_reads_rows_exactly(tmp_path):
    write(tmp_path, range(1, 4))
    assert read(tmp_path)[1] == {"step": 2, "loss": 2 / 3, "load": [1.0, 2]}
    assert column(read(tmp_path), "loss") == ([1, 2, 3], [1 / 3, 2 / 3, 1.0])
    assert column(read(tmp_path), "absent") == ([], [])


def test_resuming_drops_later_rows_and_incomplete_line(tmp_path):
    write(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert len(read(tmp_path)) == 5
    write(tmp_path, [4, 5], after=3)
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3, 4, 5]


def test_new_run_clears_file(tmp_path):
    write(tmp_path, [1, 2])
    write(tmp_path, [1])
    assert [row["step"] for row in read(tmp_path)] == [1]
    assert read(tmp_path / "nothing") == []


def test_writes_non_finite_numbers_as_null(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "loss": float("nan"), "load": [float("inf"), 1.0]})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "load": [None, 1.0],
    }
    assert column(read(tmp_path), "loss") == ([], [])


def test_tensorboard_hides_steps_repeated_after_restart(tmp_path):
    write(tmp_path, [1, 2])
    write(tmp_path, [2], after=1)
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda f: f.name[-9:])
    first, second = (list(events(file)) for file in files)
    scalars = [(e.step, v.tag, v.simple_value) for e in first for v in e.summary.value]
    assert scalars[:3] == [
        (1, "loss", pytest.approx(1 / 3)),
        (1, "load/00", 1.0),
        (1, "load/01", 1.0),
    ]
    assert [e.step for e in second if e.HasField("session_log")] == [2]


def events(file):
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[12 + length + 4 :]


def test_resumes_from_damaged_file(tmp_path, caplog):
    write(tmp_path, [1, 2])
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    damage = (
        b'{"step": 3, "lo\n' + b"\0" * 40 + b"\n\n[1]\n\xe9\n" + b"[" * 100_000 + b'\n{"a": 1}\n'
    )
    (tmp_path / "metrics.jsonl").write_bytes(rows + damage)
    assert [row["step"] for row in read(tmp_path)] == [1, 2]
    assert f"line 3 of {tmp_path / 'metrics.jsonl'} holds no JSON object" in caplog.text
    write(tmp_path, [2], after=1)
    assert [row["step"] for row in read(tmp_path)] == [1, 2]
