"""Spreads, tables and the page of an ablation."""

import io
from html.parser import HTMLParser

import pytest
from rich.console import Console

from experiments.ablations.findings import (
    Finding,
    Plot,
    Spread,
    Table,
    by_rate,
    curves,
    paired,
    student_quantile,
    tuning_table,
    verdict,
)

NASTY = '<script>alert("x")</script> & [bold]'


def test_interval_is_that_of_student():
    """t(0.975) is 4.302653 for two degrees of freedom and 12.706205 for one, 2.228139 for ten (standard tables)."""
    three, two = Spread.of([1, 2, 3]), Spread.of([1.0, 3.0])
    assert (three.mean, two.mean) == (2, 2)
    assert three.half == pytest.approx(4.302653 / 3**0.5, rel=1e-5)
    assert two.half == pytest.approx(12.706205, rel=1e-5)
    assert student_quantile(10) == pytest.approx(2.228139, rel=1e-5)
    assert Spread.of([5]).half is None


def test_spread_shows_mean_interval_and_extremes():
    spread = Spread.of([1, 2, 3])
    assert f"{spread}" == "2.000 ± 2.484 (1.000 .. 3.000)"
    assert f"{spread:+.1f}" == "+2.0 ± 2.5 (+1.0 .. +3.0)"
    assert f"{Spread.of([0.5]):.2f}" == "0.50"


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [None, 1.0], [float("inf")]])
def test_rejects_values_without_mean(values):
    with pytest.raises(ValueError, match="leave out diverged trainings"):
        Spread.of(values)


def test_paired_spread_removes_seed_effects():
    more = paired([1.1, 2.1, 3.1], [1, 2, 3])
    assert more.mean == pytest.approx(0.1)
    assert more.half < 1e-6
    with pytest.raises(ValueError):
        paired([1, 2], [1])


def finding() -> Finding:
    table = Table(
        title=f"title {NASTY}",
        columns=("arm", f"loss {NASTY}"),
        rows=(("first", "1.0"), (NASTY, "2.0")),
        note=NASTY,
    )
    lines = {"first": [([1, 2], [3.0, 2.0]), ([1, 2], [4.0, 3.0])]}
    return Finding(
        title="An ablation",
        command=f"python {NASTY}",
        verdicts=(f"met {NASTY}",),
        tables=(table,),
        plots=(Plot(curves(lines), "cap"),),
    )


def test_prints_finding_as_plain_text():
    out = io.StringIO()
    finding().print(Console(file=out, width=300, highlight=False))
    text = out.getvalue()
    for part in (
        "arm",
        "first",
        "1.0",
        f"title {NASTY}",
        f"- met {NASTY}",
        f"command: python {NASTY}",
    ):
        assert part in text
    assert text.count(NASTY) == 6
    assert "\x1b" not in text


def test_page_is_complete_and_escaped(tmp_path):
    path = finding().write(tmp_path, "toy")
    assert path == tmp_path / "report" / "toy.html"
    page = path.read_text()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 6
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org", "")  # the page loads nothing
    open_tags = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "path", "use", "image", "br"):
                open_tags.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Balance().feed(page)
    assert open_tags == []


def test_curves_show_mean_and_range_of_seeds(monkeypatch):
    from experiments.ablations import findings

    seen = {}
    monkeypatch.setattr(
        findings.charts, "line_chart", lambda lines, **rest: seen.update(lines=lines, **rest)
    )
    curves({"a": [([1, 2], [3.0, 2.0]), ([1, 2], [5.0, 3.0])]}, y_label="y")
    assert seen["lines"] == [("a", [1, 2], [4.0, 2.5])]
    assert seen["bands"] == (([3.0, 2.0], [5.0, 3.0]),)
    assert seen["y_label"] == "y"
    curves({"none": [], "a": [([1, 2], [3.0, 2.0])]})
    assert seen["lines"] == [("none", [], []), ("a", [1, 2], [3.0, 2.0])]
    assert seen["bands"] == (([], []), ([3.0, 2.0], [3.0, 2.0]))
    by_rate({"a": {0.1: 2.0, 0.01: 3.0, 1.0: float("inf")}})
    assert seen["lines"] == [("a", [-2.0, -1.0], [3.0, 2.0])]


def test_tuning_table_marks_best_rate_at_end():
    inside = {0.001: 2.0, 0.01: 1.5, 0.1: float("inf")}
    table = tuning_table([("a", {0.001: 2.0, 0.01: float("inf")}), ("b", inside)])
    assert table.rows == (
        ("a", "0.001: 2.0000 (best, at the end)  0.01: inf"),
        ("b", "0.001: 2.0000  0.01: 1.5000  0.1: inf"),
    )


@pytest.mark.parametrize(
    ("values", "strictly", "text"),
    [
        ([1.0, 2.0, 3.0], False, "met on average, within the spread"),
        ([1.9, 2.0, 2.1], False, "met"),
        ([1.9, 2.0, 2.1], True, "met"),
        ([-0.1, 0.1], False, "met on average, within the spread"),
        ([-0.1, 0.1], True, "not met"),
        ([-1.1, -1.0], False, "not met"),
        ([1.0], False, "met on average, within the spread"),
    ],
)
def test_verdict_depends_on_mean_and_interval(values, strictly, text):
    """One seed has no interval."""
    assert verdict(Spread.of(values), strictly=strictly) == text
    assert (-Spread.of(values)).mean == -Spread.of(values).mean
