"""A run from the command line to its report: on a mesh, finished, resumed on another mesh, killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from glm5_jax.checkpoint import store
from glm5_jax.metrics import metrics_log
from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.text.tokenizer import Tokenizer
from launch import run
from tests.contracts.source_tree import ROOT

MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
}
OTHERS = {
    "data.sequence_length": 32,
    "data.sources": [{"kind": "shakespeare"}],
    "batch.start": 256,
    "batch.end": 256,
    "batch.multiple": 256,
    "optimizer.ns_dtype": "float32",
    "schedule.peak": 0.01,
    "schedule.warmup_steps": 2,
    "schedule.total_steps": 12,
    "step.mtp_steps": 1,
    "train.eval_interval": 4,
    "train.eval_batches": 2,
    "train.save_interval": 4,
    "train.sample_interval": 8,
    "sample.tokens": 4,
}


# Where the journey does not go through experts or MTP, which take most of the time to compile.
DENSE = {"model.first_k_dense_replace": 2, "model.num_nextn_predict_layers": 0}


def command(workdir, **more) -> list[str]:
    """Returns the arguments of a run of a very small model on Shakespeare."""
    fields = {f"model.{k}": v for k, v in MODEL.items()} | OTHERS | more
    spec = f"--experiment={ROOT}/experiments/pretrain.py:tiny"
    return [
        "run",
        spec,
        f"--workdir={workdir}",
        *[f"--experiment.{k}={v}" for k, v in fields.items()],
    ]


@pytest.fixture
def run_on_one_device(plain_env):
    """Returns a function that runs a command in a process with one device; it returns (exit code, stderr)."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")

    def run_alone(arguments) -> tuple[int, str]:
        child = subprocess.run(
            [sys.executable, "-m", "launch.run", *arguments[1:]],
            cwd=ROOT,
            env=plain_env | {"XLA_FLAGS": flags},
            capture_output=True,
            text=True,
        )
        return child.returncode, child.stderr

    return run_alone


def losses(workdir) -> list:
    names = ("loss/total", "loss/ce", "loss/mtp", "held_out/loss", "grad_norm/muon")
    rows = metrics_log.read(workdir)
    return [(row["step"], n, row[n]) for row in rows for n in names if n in row]


class ReportWatcher:
    """Sink that notes the steps before which the report was written."""

    def __init__(self, run):
        self._workdir = run.workdir

    def write(self, step, values):
        if (self._workdir / "report" / "index.html").exists():
            with (self._workdir / "reported").open("a") as file:
                file.write(f"{step}\n")

    def close(self):
        pass


@pytest.mark.slow
def test_run_trains_reports_and_resumes_on_another_mesh(tmp_path, capsys):
    mesh = {"mesh.fsdp": 2, "mesh.expert": 4}
    sinks = {"train.sinks": (f"{ReportWatcher.__module__}:ReportWatcher",)}
    assert run.main(command(tmp_path, **mesh, **sinks)) == 0
    reported = set(map(int, (tmp_path / "reported").read_text().split()))
    assert reported == set(range(1, 13))  # since the evaluation before the first step
    out, err = capsys.readouterr()
    rows = metrics_log.read(tmp_path)
    steps, loss = metrics_log.column(rows, "loss/ce")
    assert steps == list(range(1, 13))
    assert loss[-1] < loss[0] - 0.2
    assert metrics_log.column(rows, "held_out/bits_per_byte")[0] == [0, 4, 8, 12]
    assert metrics_log.column(rows, "tokens")[1][-1] == 12 * 256
    assert len(rows[-2]["router/load_imbalance"]) == 2  # one layer with experts, and the MTP block
    for name in ("unigram", "bigram"):
        assert 1 < metrics_log.column(rows, f"baseline/{name}")[1][0] < 4
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == ["12.txt", "8.txt"]
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()
    assert any((tmp_path / "tensorboard").iterdir())
    assert json.loads((tmp_path / "config.json").read_text())["model"]["hidden_size"] == 32
    sample = (tmp_path / "samples" / "12.txt").read_text()
    page = (tmp_path / "report" / "index.html").read_text()
    assert "bigram baseline" in page
    for part in ("ROMEO:", "bits per byte  (baselines: unigram", "tokens/s"):
        assert part in out
    assert "step 12/12" in err and out.count("sample at step 12") == out.count(sample) == 1
    summary = out[out.index("\n\n") :]

    began = time.monotonic()
    assert run.main(command(tmp_path, **mesh)) == 0  # finished: shown again, at once
    assert time.monotonic() - began < 10
    assert summary.strip().endswith(capsys.readouterr().out.strip())
    assert metrics_log.read(tmp_path) == rows

    (tmp_path / "report" / "index.html").unlink()  # as if killed before it was written
    assert run.main(command(tmp_path, **mesh)) == 0
    assert (tmp_path / "report" / "index.html").read_text() == page

    other = {"mesh.fsdp": 4, "mesh.expert": 2, "train.steps": 14}
    assert run.main(command(tmp_path, **other)) == 0
    assert "resuming at step 12" in capsys.readouterr().out
    assert metrics_log.read(tmp_path)[: len(rows)] == rows
    assert store.latest_step(tmp_path) == 14

    assert run.main(command(tmp_path, **{**mesh, "model.q_lora_rank": 20})) == 2
    assert "model.q_lora_rank was 24, is 20" in capsys.readouterr().err


@pytest.mark.slow
def test_unsaved_run_leaves_nothing_to_next_run(tmp_path):
    """On a mesh. The first run had another configuration and was killed before its first checkpoint."""
    with metrics_log.MetricsLog(tmp_path) as log:
        log.write({"step": 0, "baseline/unigram": 9.0})
        log.write({"step": 1, "loss/ce": 9.0})
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "1.txt").write_text("another's")
    (tmp_path / "config.json").write_text('{"seed": 9}')
    fields = DENSE | {"train.steps": 2, "mesh.fsdp": 8, "optimizer.matrices": "adamw"}
    assert run.main(command(tmp_path, **fields)) == 0
    rows = metrics_log.read(tmp_path)
    assert len(metrics_log.column(rows, "baseline/unigram")[0]) == 1
    assert metrics_log.column(rows, "baseline/unigram")[1][0] < 4
    assert metrics_log.column(rows, "loss/ce")[0] == [1, 2]
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["2.txt"]
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_rejects_late_line_without_text_before_start(tmp_path, capsys):
    lines = [json.dumps({"text": f"line {i}"}) for i in range(12_000)]
    lines[11_990] = '{"body": "text"}'
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    sources = [{"kind": "jsonl", "path": str(tmp_path / "text.jsonl")}]
    assert run.main(command(tmp_path / "run", **DENSE, **{"data.sources": sources})) == 2
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error:")]
    assert "text.jsonl, line 11991 has no string at 'text'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_small_tokenizer_ends_texts_and_other_data_is_refused(tmp_path, run_on_one_device):
    """Ids without a token are sampled at first. The model must end texts with the tokens of its data."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {i} of many"}) + "\n" for i in range(200)))
    tokenizer = Tokenizer.train(["to be or not to be"], 300)
    tokenizer.save(tmp_path / "tokenizer")
    fields = {
        "tokenizer": tmp_path / "tokenizer",
        "data.sources": [{"kind": "jsonl", "path": str(text)}],
    }
    flags = {"train.steps": 1, "sample.temperature": 5.0, "sample.tokens": 20} | DENSE
    assert run_on_one_device(command(tmp_path / "run", **fields, **flags))[0] == 0
    assert "\ufffd" in (tmp_path / "run" / "samples" / "1.txt").read_text()
    before = (tmp_path / "run" / "config.json").read_text()
    model = json.loads(before)["model"]
    assert tuple(model["eos_token_id"]) == tokenizer.eos_ids
    assert model["pad_token_id"] == tokenizer.pad_id

    text.write_text(text.read_text().replace("line", "LINE"))
    code, err = run_on_one_device(command(tmp_path / "run", **fields, **flags | {"train.steps": 2}))
    assert code == 2 and "resume with the same data" in err
    assert (tmp_path / "run" / "config.json").read_text() == before


@pytest.mark.slow
def test_killed_run_equals_unbroken_run(tmp_path, plain_env):
    def start(workdir):
        return subprocess.Popen(
            [sys.executable, "-m", "launch.run", *command(workdir)[1:]],
            cwd=ROOT,
            env=plain_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    unbroken, broken = tmp_path / "whole", tmp_path / "broken"
    process = start(unbroken)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    kills = 0
    for step, delay in ((1, 0.0), (4, 0.0), (4, 0.02), (8, 0.1), (11, 0.0)):
        process = start(broken)
        end = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < end:
            if step in metrics_log.column(metrics_log.read(broken), "loss/ce")[0]:
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        output, _ = process.communicate(timeout=60)
        if process.returncode == 0:  # it was faster than the kill
            break
        assert process.returncode == -signal.SIGKILL, output
    assert kills >= 3
    process = start(broken)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert losses(broken) == losses(unbroken)
    assert (broken / "samples" / "12.txt").read_text() == (
        unbroken / "samples" / "12.txt"
    ).read_text()


@pytest.mark.slow
def test_ctrl_c_ends_compiling_run_and_saves_training_run(tmp_path, plain_env):
    def interrupt_run(comes):
        """Runs the command and sends Ctrl-C after the first matching line. Returns (exit code, seconds, output)."""
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.run", *command(tmp_path)[1:], *steps],
            cwd=ROOT,
            env=plain_env | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = ""
        for line in process.stdout:
            output += line
            if comes in line:
                break
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        output += process.communicate(timeout=60)[0]
        return process.returncode, time.monotonic() - began, output

    steps = ["--experiment.schedule.total_steps=100000", "--experiment.train.eval_interval=0"]
    steps += ["--experiment.train.log_interval=5"]  # the step saved is not the last one logged
    code, seconds, output = interrupt_run("a batch of")
    assert (code, store.latest_step(tmp_path)) == (EXIT_RESTART, None), output
    assert output.endswith("\nstopped, with nothing to save\n") and seconds < 5
    code, _, output = interrupt_run("step 5/")
    assert code == EXIT_RESTART and "Traceback" not in output
    assert "\nstopping once this step is made and saved" in output
    assert f"stopped after step {store.latest_step(tmp_path)}; the same command goes on" in output
