"""Tests of the page of all stages, which is made from their folders."""

import json
import re

import pytest

from glm5_jax.metrics.metrics_log import MetricsLog
from glm5_jax.training import lifecycle_report, report


def make_stage(folder, *, checkpoint=None, held_out=(), losses=(), indexer=(), attention="dense"):
    with MetricsLog(folder) as log:
        for step, value in held_out:
            log.write({"step": step, report.HELD_OUT: value})
        for step, loss in enumerate(losses, 1):
            row = {"step": step, "loss/ce": loss, "tokens": 100 * step}
            log.write(row | ({"loss/indexer": indexer[step - 1]} if indexer else {}))
    config = {
        "checkpoint": checkpoint and str(checkpoint),
        "model": {"attention": attention},
        "data": {"sequence_length": 2048},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def stages(tmp_path):
    first = make_stage(tmp_path / "pretrain", held_out=[(40, 2.0)], losses=[5.0] * 4 + [3.0] * 36)
    second = make_stage(
        tmp_path / "dsa_<warm>up",
        checkpoint=first,
        held_out=[(0, 2.5), (20, 2.25)],
        losses=[3.0] * 20,
        indexer=[8.0, 8.0, *[4.0] * 16, 1.0, 1.0],
        attention="sparse",
    )
    return tmp_path, [first, second]


def test_reads_first_and_last_values_of_stages(stages):
    first, second = map(lifecycle_report.read_stage, stages[1])
    assert (first.checkpoint, first.held_out, first.indexer) == (None, (None, 2.0), None)
    assert first.loss == (5.0, 3.0)
    assert second.held_out == (2.5, 2.25)
    assert second.indexer == (8.0, 1.0)
    assert (second.tokens, second.sequence_length, second.attention) == (2000, 2048, "sparse")


def test_page_lists_and_links_stages(stages):
    workdir, folders = stages
    page = lifecycle_report.write_page(workdir, folders).read_text()
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    assert len(rows) == 3
    assert "random weights" in rows[1]
    assert 'href="../pretrain/report/index.html"' in rows[1]
    for part in ("<td>pretrain</td>", "2.500 → 2.250", "8.000 → 1.000", "sparse"):
        assert part in rows[2], part
    assert "<warm>" not in page
    assert page.count('<figure class="plot"') == 3


def test_page_shows_rewards_and_skills(stages):
    workdir, folders = stages
    rl = workdir / "rl"
    with MetricsLog(rl) as log:
        for step, value in ((0, 0.25), (10, 0.75)):
            log.write({"step": step, report.HELD_OUT_REWARD: value})
        log.write({"step": 10, report.REWARD: 0.5, "tokens": 10})
    config = {"checkpoint": str(folders[1]), "model": {"attention": "sparse"}, "length": 96}
    (rl / "config.json").write_text(json.dumps(config))
    result = lifecycle_report.read_stage(rl)
    assert result.reward == (0.25, 0.75) and result.sequence_length == 96
    assert "Skills" not in lifecycle_report.write_page(workdir, [*folders, rl]).read_text()
    matrix = {"sums": {"sft": 0.5, "rl": 0.875}, "a <b>": {"sft": 0.0, "rl": 1.0}}
    samples = {"sums": {"prompt": "1+1?", "sft": "<think>two</think>2", "rl": "2"}}
    skills = {"rewards": matrix, "samples": samples}
    (workdir / lifecycle_report.SKILLS).write_text(json.dumps(skills))
    page = lifecycle_report.write_page(workdir, [*folders, rl]).read_text()
    assert "0.250 → 0.750" in page and page.count('<figure class="plot"') == 4
    assert "<tr><td>skill</td><td>sft</td><td>rl</td></tr>" in page
    assert "<tr><td>sums</td><td>0.500</td><td>0.875</td></tr>" in page and "a &lt;b&gt;" in page
    assert "sums: 1+1?" in page and "<td>sft</td><td>&lt;think&gt;two&lt;/think&gt;2</td>" in page


def test_page_shows_stage_without_steps(stages):
    workdir, folders = stages
    started = make_stage(workdir / "next", checkpoint=folders[1])
    page = lifecycle_report.write_page(workdir, [*folders, started]).read_text()
    assert lifecycle_report.read_stage(started).loss is None
    assert ">next</a>" in page


def test_chart_concatenates_stages_by_tokens(stages, monkeypatch):
    charts = []
    monkeypatch.setattr(
        lifecycle_report.plots, "line_plot", lambda series, title, **_: charts.append(series) or ""
    )
    lifecycle_report.write_page(*stages)
    held_out = dict((name, (x, y)) for name, x, y in charts[1])
    assert held_out["pretrain"] == ([4000], [2.0])
    assert held_out["dsa_<warm>up"] == ([4000, 6000], [2.5, 2.25])
