"""Tests of the report, which is made from the files of a run, complete or not."""

import dataclasses
import json
from html.parser import HTMLParser

import pytest

from glm5_jax import presets
from glm5_jax.metrics.metrics_log import MetricsLog
from glm5_jax.training import report

UNSAFE = '<script>alert("x")</script> & ROMEO:'


@pytest.fixture
def workdir(tmp_path):
    with MetricsLog(tmp_path) as log:
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
                }
            )
        log.write({"step": 20, report.HELD_OUT: 2.4})
        log.write({"step": 40, report.HELD_OUT: 1.9})
    (tmp_path / "samples").mkdir()
    for step in (20, 100, 40):
        (tmp_path / "samples" / f"{step}.txt").write_text(f"{UNSAFE} {step}")
    config = {"name": "a <name>", "model": dataclasses.asdict(presets.tiny())}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


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
    """Parser that collects tags and fails on anything that a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.count, self.text = {}, []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("#", "data:"))
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_self_contained_and_complete(workdir):
    path = report.write_page(workdir)
    assert path == workdir / "report" / "index.html"
    page = Checker()
    page.feed(path.read_text())
    assert "n-gram baselines that count the training text" in path.read_text()
    assert page.count["figure"] == 8
    words = "".join(page.text)
    for part in (
        "a <name>",
        "4 layers (3 with experts)",
        "1.900",
        "bigram baseline",
        "30.0%",
        f"{UNSAFE} 20",
        "Held-out bits per byte",
        "Training loss, nats per token",
        "Learning rate",
        "Gradient norm",
        "Largest expert load",
        "Largest attention logit",
        "Tokens per second",
        "Auxiliary losses",
        "model.hidden_size",
        "layer 0",
        "mtp",
    ):
        assert part in words, part
    assert words.index("step 100") < words.index("step 40") < words.index("step 20")
    assert "Starts" not in words


def test_page_lists_starts(workdir):
    for step in ("0", "20"):
        report.note_start(workdir, time=f"day {step}", command="run <a>", jax="1.2")
    page = Checker()
    page.feed(report.write_page(workdir).read_text())
    words = " ".join(page.text)
    assert words.index("Starts") < words.index("day 20") < words.index("day 0")
    assert "run <a>" in words


def test_writes_page_after_one_step(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "loss/ce": float("nan"), "loss/total": float("nan")})
    assert "steps, 0 tokens" in report.write_page(tmp_path).read_text()
    summary = report.summarise(tmp_path)
    assert (summary.step, summary.loss) == (1, None)
    assert str(summary).startswith("report")
