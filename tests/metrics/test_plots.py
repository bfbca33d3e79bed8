"""Tests of the plots of a page: their data, and hover and zoom in a browser."""

import json
import math
import re
import shutil

import pytest

from glm5_jax.metrics import html_page, plots

CHROMIUM = shutil.which("chromium")
STEPS = list(range(1, 101))
TOKENS = {step: step * 10 for step in STEPS}


def data_of(figure):
    return json.loads(re.search(r'application/json">(.*?)</script>', figure, re.DOTALL)[1])


def test_line_plot_has_finite_points_and_tokens():
    line = ("a", [0, 10, 20, 30], [1.0, math.nan, math.inf, 2.00000001])
    plot = data_of(plots.line_plot([line, ("b", [], [])], "t", tokens={10: 100, 30: 300}))
    a, b = plot["series"]
    assert (a["x"], a["y"], a["tokens"]) == ([0, 30], [1.0, 2.0], [0, 300])
    assert (a["colour"], b["colour"], b["x"]) == (1, 2, [])
    assert not data_of(plots.line_plot([line], "t", x_label="tokens"))["tokens"]


def test_thins_long_lines_and_keeps_last_point():
    many = list(range(100_001))
    (line,) = data_of(plots.line_plot([("a", many, many)], "t"))["series"]
    assert len(line["x"]) <= 1500 and line["x"][-1] == 100_000


def test_heat_plot_has_row_per_layer():
    steps, values = [10, 20], [[0.0, 1.0, math.nan], [3.0, 4.0, 5.0]]
    plot = data_of(
        plots.heat_plot(steps, values, "load", rows=["a", "b", "c", "mtp"], tokens=TOKENS)
    )
    assert plot["rows"] == ["a", "b", "c"] and plot["x"] == steps and plot["tokens"] == [100, 200]
    assert plot["values"] == [[0.0, 1.0, None], [3.0, 4.0, 5.0]]
    assert plot["low"] == 0.0 and 4 < plot["high"] <= 5


def test_text_cannot_end_script():
    name = "</script><b>"
    figure = plots.line_plot([(name, [1], [1.0])], name, name)
    assert figure.count("</script>") == 1 and data_of(figure)["title"] == name
    assert html_page.render("t", "", [figure]).count("<script") == 2
    assert "<script" not in html_page.render("t", "", ["text"])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian's package is called so)")
def test_browser_shows_values_and_zooms(tmp_path):
    from playwright.sync_api import sync_playwright

    line = ("loss", STEPS, [5.0 - step / 100 for step in STEPS])
    figures = [
        plots.line_plot([line, ("other", STEPS, STEPS)], "Loss", tokens=TOKENS, smooth=True),
        plots.heat_plot(
            STEPS, [[x, 2 * x] for x in STEPS], "Load", rows=["l0", "l1"], tokens=TOKENS
        ),
    ]
    path = html_page.write(tmp_path / "page.html", "t", "", [html_page.chart_section(figures)])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        problems, fetched = [], []
        page.on("pageerror", lambda error: problems.append(error))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(path.as_uri())
        loss, load = page.locator("figure").all()
        box = loss.locator("svg").bounding_box()
        # Hover: both plots show the values at the cursor.
        page.mouse.move(box["x"] + 46 + (box["width"] - 58) * 49 / 99, box["y"] + 100)
        assert "loss4.5" in loss.locator(".legend").inner_text().replace("\n", "")
        assert "step 50" in loss.locator(".readout").inner_text()
        assert "step 50" in load.locator(".readout").inner_text()

        # A drag zooms both; Escape and a double click zoom out.
        def labels():
            return load.locator("svg text").all_text_contents()

        before = labels()
        for undo in (lambda: page.keyboard.press("Escape"), lambda: loss.locator("svg").dblclick()):
            page.mouse.move(box["x"] + 150, box["y"] + 50)
            page.mouse.down()
            page.mouse.move(box["x"] + 250, box["y"] + 50)
            page.mouse.up()
            assert labels() != before
            undo()
            assert labels() == before
        # Other units, a hidden line, a logarithmic axis.
        page.click("text=tokens")
        assert "tokens" in labels()
        paths = loss.locator("svg path").count()
        loss.locator(".entry").first.click()
        assert loss.locator("svg path").count() == paths - 2
        loss.locator("text=log").click()
        assert not problems
        assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
        browser.close()
