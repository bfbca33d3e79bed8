"""Tests of charts: valid SVG with all labels in the page's colours."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from glm5_jax.metrics import charts, html_page

X = list(range(1, 101))
Y = [5.0 / x + 1 for x in X]


@pytest.mark.parametrize(
    "options", [{}, {"log": True}, {"smooth": True}, {"levels": (("bigram", 2.0),)}]
)
def test_line_chart_is_svg_with_labels(options):
    svg = charts.line_chart([("model", X, Y), ("other", X[:9], Y[:9])], y_label="loss", **options)
    ElementTree.fromstring(svg)
    for word in (
        "loss",
        "step",
        "model",
        "other",
        *[name for name, _ in options.get("levels", ())],
    ):
        assert f">{word}</text>" in svg


def test_span_chart_has_bar_per_span():
    svg = charts.span_chart(
        {"host": [(0, 1), (2, 3), (4, 5)], "device": [(1, 3)]}, x_label="ms", y_label="steps"
    )
    ElementTree.fromstring(svg)
    assert all(f">{word}</text>" in svg for word in ("host", "device", "ms", "steps"))
    assert len(re.findall(r"fill: var\(--series-1\)", svg)) == 3
    assert len(re.findall(r"fill: var\(--series-2\)", svg)) == 1


def test_uses_colour_variables_of_page():
    lines = [(str(i), X, Y) for i in range(charts.NUM_COLOURS + 1)]
    svg = charts.line_chart(lines, smooth=True, levels=(("a", 1.0),))
    assert not re.search(r"(fill|stroke): #", svg)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", svg))
    series = {f"--series-{i + 1}" for i in range(charts.NUM_COLOURS)}
    assert used == {"--muted", "--line"} | series
    page = html_page.render("title", "", [])
    assert all(page.count(f"{name}:") == 2 for name in series), "light and dark"


def test_ids_are_unique_and_reproducible():
    one, two = (charts.line_chart([(name, X, Y)], y_label=name) for name in "ab")
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1]
    assert one == charts.line_chart([("a", X, Y)], y_label="a")


def test_thins_long_lines():
    many = list(range(100_000))
    assert len(charts.line_chart([("a", many, many)])) < 60_000


@pytest.mark.parametrize("line", [Y, Y[::-1]], ids=["at the bottom", "at the top"])
def test_end_labels_do_not_overlap(line):
    svg = charts.line_chart([(f"line{i}", X, [y + i / 1000 for y in line]) for i in range(4)])
    places = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>line\d', svg)]
    assert len(places) == 4
    assert np.diff(sorted(places)).min() > 8


def test_draws_band_in_colour_of_its_line():
    lines = [("none", [], []), ("b", [0, 1], [3.0, 2.0]), ("c", [0, 1], [1.0, 2.0])]
    assert "fill-opacity: 0.18" not in charts.line_chart(lines)
    svg = charts.line_chart(lines, bands=(([], []), ([2.0, 1.0], [4.0, 3.0])))
    assert ">none</text>" not in svg
    assert re.search(r"fill: var\(--series-2\)[^>]*>b</text>", svg)
    assert re.findall(r"fill: var\(--series-(\d)\)[^\"]*fill-opacity: 0.18", svg) == ["2"]


def test_shortens_numbers():
    values = {12000: "12K", 2.5e6: "2.5M", 0.00025: "2.5e-4", 0: "0", -1.5: "-1.5", 200: "200"}
    assert {value: charts.short_number(value) for value in values} == values


def test_running_mean_is_centred_and_exact_at_ends():
    y = np.arange(10.0)
    np.testing.assert_allclose(charts.running_mean(y, 2), y)
    np.testing.assert_allclose(charts.running_mean(np.array([0.0, 3.0, 0.0]), 5), [0, 1, 0])
