"""Tests of the report, which is made from the files of a run, complete or not."""

import dataclasses
import json
import re
import subprocess
import sys
import types
from html.parser import HTMLParser

import pytest

from glm5_jax import presets
from glm5_jax.metrics.metrics_log import MetricsLog
from glm5_jax.training import provenance, report

UNSAFE = '<script>alert("x")</script> & ROMEO:'


@pytest.fixture
def workdir(tmp_path):
    workdir = tmp_path / "runs" / "run"
    with MetricsLog(workdir) as log:
        log.write({"step": 0, "baseline/unigram": 3.4, "baseline/bigram": 2.5})
        for step in range(1, 41):
            log.write(
                {
                    "step": step,
                    "loss/total": 5.0,
                    "loss/ce": 4.0 - step / 40,
                    "loss/mtp": 4.5,
                    "loss/balance": 0.02,
                    "loss/z": 0.0,
                    "grad_norm/muon": 1.0,
                    "learning_rate": 1e-4,
                    "router/load_imbalance": [1.0, 2.0, 3.0, 2.0],
                    "max_logit": [5.0, 6.0, 7.0, 8.0, 9.0],
                    "speed/tokens_per_second": 100.0 + step,
                    "speed/mfu": 0.3,
                    "tokens": step * 512,
                    "system/elapsed_s": 90.0 + step % 21,
                    "system/peak_host_bytes": step * 2**28,
                }
            )
        for step, value in ((0, 9.5), (20, 2.4), (40, 1.9)):
            sources = {f"held_out/{x}/bits_per_byte": value + i for i, x in enumerate("ab")}
            log.write({"step": step, report.HELD_OUT: value, **sources})
    (workdir / "samples").mkdir()
    for step in (20, 100, 40):
        (workdir / "samples" / f"{step}.txt").write_text(f"{UNSAFE} {step}")
    config = {"name": "a <name>", "model": dataclasses.asdict(presets.tiny())}
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir


def test_summary_shows_final_values(workdir):
    summary = report.summarise(workdir)
    assert (summary.step, summary.tokens) == (40, 40 * 512)
    assert summary.loss == pytest.approx(sum(4 - s / 40 for s in range(21, 41)) / 20)
    assert summary.bits_per_byte == 1.9
    assert summary.baselines == {"unigram": 3.4, "bigram": 2.5}
    assert summary.tokens_per_second == pytest.approx(120.5)
    text = str(summary)
    for part in (
        "30.0% of the peak",
        "1.900 bits per byte",
        "unigram 3.400, bigram 2.500",
        "tokens/s",
    ):
        assert part in text
    assert text.endswith(str(workdir / "report" / "index.html"))


def test_reports_number_of_baseline_tokens(workdir):
    assert "baselines: unigram 3.400, bigram 2.500)" in str(report.summarise(workdir))
    with MetricsLog(workdir, 40) as log:
        log.write({"step": 40, "baseline/tokens": 16_777_216})
    summary = report.summarise(workdir)
    assert summary.baselines == {"unigram": 3.4, "bigram": 2.5}
    assert "bigram 2.500, counted on 16,777,216 tokens)" in str(summary)
    page = report.write_page(workdir).read_text()
    assert "n-gram baselines that count 16,777,216 tokens of the training text" in page
    assert "tokens baseline" not in page


class Checker(HTMLParser):
    """Parser that collects text and plots, and fails on anything that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.text, self.plots, self.links, self._is_data = [], {}, [], False

    def handle_starttag(self, tag, attrs):
        assert tag not in ("link", "iframe", "img")
        for name, value in attrs:
            assert name not in ("src", "xlink:href")
            if name == "href":
                assert value.startswith("../")
                self.links.append(value)
        self._is_data = ("type", "application/json") in attrs

    def handle_data(self, data):
        if self._is_data:
            plot = json.loads(data)
            self.plots[plot["title"]] = plot
        else:
            self.text.append(data)
        self._is_data = False


def test_page_is_self_contained_and_complete(workdir):
    path = report.write_page(workdir)
    assert path == workdir / "report" / "index.html"
    page = Checker()
    page.feed(path.read_text())
    assert "n-gram baselines that count the training text" in path.read_text()
    assert set(page.plots) == {
        "Held-out bits per byte",
        "Held-out bits per byte, by source",
        "Training loss, nats per token",
        "Learning rate",
        "Gradient norm",
        "Largest expert load",
        "Largest attention logit",
        "Tokens per second",
        "Auxiliary losses",
    }
    words = "".join(page.text)
    for part in (
        "a <name>",
        "4 layers (3 with experts)",
        "1.900",
        "bigram baseline",
        "30.0%",
        "tokens per second (80%: 105 to 136)",
        f"{UNSAFE} 20",
        "model.hidden_size",
    ):
        assert part in words, part
    assert words.index("step 100") < words.index("step 40") < words.index("step 20")
    assert page.plots["Largest attention logit"]["rows"] == [f"layer {i}" for i in range(4)] + [
        "mtp"
    ]


def test_plots_held_out_text_by_source_from_step_0(workdir):
    page = Checker()
    page.feed(report.write_page(workdir).read_text())
    (total,) = page.plots["Held-out bits per byte"]["series"]
    assert (total["x"], total["y"]) == ([0, 20, 40], [9.5, 2.4, 1.9])
    assert total["tokens"] == [0, 20 * 512, 40 * 512]
    assert page.plots["Held-out bits per byte"]["levels"] == [["unigram", 3.4], ["bigram", 2.5]]
    a, b = page.plots["Held-out bits per byte, by source"]["series"]
    assert (a["name"], b["name"], b["y"]) == ("a", "b", [10.5, 3.4, 2.9])


def test_compares_runs_on_same_held_out_data(tmp_path):
    data = {"sources": ["a"]}
    for name, fields in (
        ("run", {"data": data}),
        ("same", {"data": data}),
        ("other data", {"data": {"sources": ["b"]}}),
        ("broken", None),
    ):
        with MetricsLog(tmp_path / name) as log:
            log.write({"step": 5, "tokens": 500, report.HELD_OUT: 2.0})
        text = "{" if fields is None else json.dumps(fields)
        (tmp_path / name / "config.json").write_text(text)
    page = Checker()
    page.feed(report.write_page(tmp_path / "run").read_text())
    run, other = page.plots["Held-out bits per byte"]["series"]
    assert (run["name"], other["name"], other["tokens"]) == ("this run", "same", [500])
    assert other["faded"] and "faded" not in run


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"data": "a set"}, {}),
        ({"data": [1]}, {}),
        ({}, {report.HELD_OUT: "none"}),
        ({}, {report.HELD_OUT: [1.0]}),
        ({}, {report.HELD_OUT: 10**400}),
        ({}, {"tokens": "5"}),
        ({}, {"step": 10**400}),
        (f'{{"a": {"[" * 10**5}{"]" * 10**5}}}', {}),
    ],
)
def test_ignores_what_other_programs_write_into_neighbouring_folders(tmp_path, config, values):
    data = {"data": {"sources": ["a"]}}
    for name, fields, more in (("run", data, {}), ("other", config, values)):
        (tmp_path / name).mkdir()
        text = fields if isinstance(fields, str) else json.dumps(data | fields)
        (tmp_path / name / "config.json").write_text(text)
        row = {"step": 5, "tokens": 500, report.HELD_OUT: 2.0} | more
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = Checker()
    page.feed(report.write_page(tmp_path / "run").read_text())
    [run] = page.plots["Held-out bits per byte"]["series"]
    assert run["name"] == "this run"


def test_page_has_facts_of_run_and_links(workdir, monkeypatch):
    model = presets.tiny()
    monkeypatch.setattr(sys, "argv", ["/a/bin/run", "<a>"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for step in (0, 20):
        provenance.record_start(workdir, model, step)
    page = Checker()
    page.feed(report.write_page(workdir).read_text())
    words = " ".join(page.text)
    for part in (
        "run '<a>'",
        "Python 3.",
        "jax ",
        f"{model.num_stored_parameters:,}",
        "at step 20",
        "3 min 39 s of training",  # 110 s before the resume, 109 s after
        "10.00 GiB",
    ):
        assert part in words, part
    assert page.links == [
        f"../{x}"
        for x in ("metrics.jsonl", "config.json", "starts.jsonl", "samples", "tensorboard")
    ]
    provenance.record_start(workdir, model, 0)
    assert len(provenance.read_starts(workdir)) == 1


@pytest.mark.parametrize(
    ("module", "program"),
    [("launch.glm5", "glm5"), ("launch.run", "python -m launch.run"), (None, "script.py")],
)
def test_names_command_as_typed(module, program, monkeypatch):
    spec = None if module is None else types.SimpleNamespace(name=module)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["/folder/script.py", "run", "pretrain:tiny", "--a=b c"])
    assert provenance.command_line() == f"{program} run pretrain:tiny '--a=b c'"


def test_names_commit_of_clone(tmp_path):
    assert provenance.source_commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    commit = provenance.source_commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "file").write_text("2")
    assert provenance.source_commit(tmp_path) == f"{commit}, with changes"


def test_marks_prompts_of_samples(workdir):
    config = json.loads((workdir / "config.json").read_text())
    config["sample"] = {"prompts": ["<script>", "ROMEO:"]}
    (workdir / "config.json").write_text(json.dumps(config))
    page = report.write_page(workdir).read_text()
    assert "<b>&lt;script&gt;</b>alert(&quot;x&quot;)&lt;/script&gt; &amp; <b>ROMEO:</b> 20" in page


def test_writes_page_after_one_step(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "loss/ce": float("nan"), "loss/total": float("nan")})
    assert "steps, 0 tokens" in report.write_page(tmp_path).read_text()
    summary = report.summarise(tmp_path)
    assert (summary.step, summary.loss) == (1, None)
    assert str(summary).startswith("report")


def test_report_of_rl_shows_rewards_policy_and_dropped_groups(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 5):
            log.write(
                {
                    "step": step,
                    "tokens": step * 100,
                    report.REWARD: step / 4,
                    "reward/std": 0.1,
                    "reward_part/format": 1.0,
                    report.HELD_OUT_REWARD: step / 8,
                    "policy/entropy": 2.0,
                    "policy/clip_frac_low": 0.125,
                    "policy/clip_frac_high": 0.25,
                    "policy/staleness": 3.0,
                    "mismatch/expert_match_rate": 0.97,
                    "share/addition": 0.5,
                    "rollout/tokens": 40.0,
                    "rollout/truncated": 0.0,
                    "dropped/equal_rewards": 1.0,
                    "seconds/train": 0.5,
                }
            )
    (tmp_path / "config.json").write_text("{}")
    page = Checker()
    page.feed(report.write_page(tmp_path).read_text())
    assert {
        "Reward on held-out tasks",
        "Parts of the reward",
        "Entropy, nats per token",
        "Staleness, steps",
        "Equal choices, share",
        "Tasks, shares of attempts",
        "Tokens per attempt",
        "Attempts and groups, shares",
        "Groups dropped per batch",
        "Seconds per step",
    } <= page.plots.keys()
    shares = {}
    for title in ("Share of tokens masked", "Share of tokens trained on"):
        shares |= {line["name"]: line["y"][-1] for line in page.plots[title]["series"]}
    assert shares["masked"] == 0.375 and shares["inside"] == 0.625
