"""Plots of a page that a reader can hover over and zoom: JSON in a figure, which plots.js draws in the browser."""

import json
import math
from collections.abc import Sequence

import numpy as np

from glm5_jax.metrics import html_page
from glm5_jax.metrics.charts import NUM_COLOURS, Series

_MAX_POINTS = 1500  # of a line, to bound the size of the page
_MAX_COLUMNS = 300  # of a heat map


def line_plot(
    series: Sequence[Series],
    title: str,
    note: str = "",
    *,
    x_label: str = "steps",
    tokens: dict[int, float] | None = None,
    other_runs: Sequence[tuple[Series, dict[int, float]]] = (),
    log: bool = False,
    smooth: bool = False,
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """Returns a figure with lines over a shared x axis.

    - series: (name, x, y) of each line; values that are not finite are left out. A line without points still uses up
      its colour.
    - tokens: tokens seen after each step, with which a reader can change the x axis; None: x is not steps.
    - other_runs: lines of other runs, which are drawn fainter, with their tokens.
    - log: whether the y axis is logarithmic at first.
    - smooth: draw a running mean over a faint line of the values.
    - levels: (name, y) of dashed horizontal lines, as references.
    """
    lines = [_line(one, i, tokens) for i, one in enumerate(series)]
    for i, (one, tokens_of_run) in enumerate(other_runs, len(lines)):
        lines.append(_line(one, i, tokens_of_run) | {"faded": True})
    data = {
        "title": title,
        "x_label": x_label,
        "tokens": tokens is not None,
        "log": log,
        "smooth": smooth,
        "levels": [[name, _rounded(y)] for name, y in levels],
        "series": lines,
    }
    return _figure(data, note)


def heat_plot(
    steps: Sequence[int],
    values: Sequence[Sequence[float]],
    title: str,
    note: str = "",
    *,
    rows: Sequence[str],
    tokens: dict[int, float],
) -> str:
    """Returns a figure whose colours are values: values[i] holds those of all rows at steps[i]."""
    shown = _shown(len(steps), _MAX_COLUMNS)
    table = [[_finite(value) for value in values[i]] for i in shown]
    known = np.array([x for column in table for x in column if x is not None] or [0.0])
    low, high = float(known.min()), float(np.quantile(known, 0.99))
    x = [steps[i] for i in shown]
    data = {
        "title": title,
        "x_label": "steps",
        "x": x,
        "tokens": _tokens_at(x, tokens),
        "rows": list(rows)[: len(table[0])],
        "values": [[None if v is None else _rounded(v) for v in column] for column in table],
        "low": _rounded(low),
        "high": _rounded(max(high, low + 1e-6)),
    }
    return _figure(data, note)


def _figure(data: dict, note: str) -> str:
    # A "<" could end the script element early.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return html_page.plot_figure(text, note)


def _line(series: Series, number: int, tokens: dict[int, float] | None) -> dict:
    name, x, y = series
    points = [(a, value) for a, b in zip(x, y) if (value := _finite(b)) is not None]
    points = [points[i] for i in _shown(len(points), _MAX_POINTS)]
    x = [a for a, _ in points]
    line = {"name": name, "colour": number % NUM_COLOURS + 1, "x": x}
    line["y"] = [_rounded(b) for _, b in points]
    return line | ({} if tokens is None else {"tokens": _tokens_at(x, tokens)})


def _tokens_at(steps: Sequence[int], tokens: dict[int, float]) -> list[int]:
    """Returns the tokens seen after each step, interpolated between those that are known."""
    known = {0: 0.0} | tokens
    at = sorted(known)
    return np.interp(steps, at, [known[step] for step in at]).astype(int).tolist()


def _shown(count: int, limit: int) -> list[int]:
    """Returns the indices of at most about `limit` of `count` points, the last one included."""
    every = max(1, math.ceil(count / limit))
    return list(range((count - 1) % every, count, every)) if count else []


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
