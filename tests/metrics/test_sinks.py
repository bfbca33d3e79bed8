"""Tests that a log writes to further sinks, that a failing one ends no run, and Weights & Biases through its module."""

import json
import sys
import types

import pytest

from glm5_jax.metrics.metrics_log import MetricsLog, read
from glm5_jax.metrics.sinks import RunInfo, WandbSink, check_sinks, open_sinks

ROWS = [
    {"step": 1, "loss": 0.5, "load": [1.0, 2.0]},
    {"step": 1, "program": "abc"},
    {"step": 2, "loss": 0.25},
]
SENT = [(1, {"loss": 0.5, "load/00": 1.0, "load/01": 2.0}), (2, {"loss": 0.25})]


class RecordingSink:
    """Sink that holds its rows; `fails_at` is the step of an error, or None."""

    fails_at = None

    def __init__(self, run):
        self.run, self.rows, self.is_closed = run, [], False

    def write(self, step, values):
        if step == self.fails_at:
            raise OSError("no route")
        self.rows.append((step, dict(values)))

    def close(self):
        self.is_closed = True


class FailingSink(RecordingSink):
    fails_at = 1


@pytest.fixture
def run(tmp_path):
    return RunInfo(name="sft:tiny", workdir=tmp_path, config={"seed": 3})


def write(workdir, sinks):
    with MetricsLog(workdir, sinks=sinks) as log:
        for row in ROWS:
            log.write(row)


def test_writes_numbers_to_sinks(run):
    [sink] = open_sinks((f"{__name__}:RecordingSink",), run)
    write(run.workdir, [sink])
    assert sink.rows == SENT and sink.is_closed and sink.run == run


def test_drops_failing_sink(run, caplog):
    failing, recording = FailingSink(run), RecordingSink(run)
    write(run.workdir, [failing, recording])
    assert read(run.workdir) == ROWS
    assert recording.rows == SENT and not failing.rows
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("name", "expected_error"),
    [
        ("mlflow", "the sink 'mlflow' is unknown; use wandb, or MODULE:NAME"),
        ("absent_module:Sink", "must be on PYTHONPATH"),
        ("json:Sink", "has no attribute 'Sink'"),
    ],
)
def test_rejects_unknown_sink(name, expected_error):
    with pytest.raises(ValueError, match=expected_error):
        check_sinks((name,))


def test_names_missing_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[wandb\]'"):
        check_sinks(("wandb",))


def test_resumes_run_of_wandb(run, monkeypatch):
    """The real package is tested in tests/journeys/test_clients.py."""
    calls, logged = [], []
    wandb = types.ModuleType("wandb")
    wandb.Settings = lambda **options: types.SimpleNamespace(project=None, **options)

    def init(**options):
        calls.append(options)
        finish = lambda: logged.append("end")  # noqa: E731
        return types.SimpleNamespace(log=lambda v, step: logged.append((step, v)), finish=finish)

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        write(run.workdir, [WandbSink(run)])
    assert logged == [*SENT, "end"] * 2
    first, second = calls
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["project"], first["name"]) == ("glm5_jax", "sft:tiny")
    assert json.dumps(first["config"]) == '{"seed": 3}'
