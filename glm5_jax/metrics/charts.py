"""Draws charts as inline SVG whose colours are CSS variables of the page, so that they follow its theme.

A page that shows them defines `--ink, --muted, --line, --paper` and `--series-1` to `--series-10` (`NUM_COLOURS`).
"""

import contextlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

# Imported late, because it takes a third of a second, and most errors of users come before the first chart.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLOURS = 10  # of lines; further lines repeat them

# Placeholder colours for Matplotlib; `_svg` replaces each by its variable.
_VARIABLES = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--paper",
    **{f"#0a0a{i:02x}": f"--series-{i}" for i in range(1, NUM_COLOURS + 1)},
}
_COLOUR = {name: colour for colour, name in _VARIABLES.items()}
_MAX_POINTS = 600  # of a line, to bound the size of the page

Series = tuple[str, list, list]  # label, x, y


def line_chart(
    series: list[Series],
    *,
    x_label: str = "step",
    y_label: str = "",
    log: bool = False,
    smooth: bool = False,
    levels: tuple[tuple[str, float], ...] = (),
    bands: tuple[tuple[list, list], ...] = (),
    size: tuple[float, float] = (5.6, 3.0),
) -> str:
    """Draws lines over a shared x axis, labelled at their ends, and returns the SVG.

    - series: (label, x, y) of each line. A line without points still uses up its colour.
    - log: logarithmic y axis, if all values are positive.
    - smooth: draw a running mean over a faint line of the values.
    - levels: (label, y) of dashed horizontal lines, as references.
    - bands: (lowest, highest) values around each of the first lines, drawn as shaded areas.
    - size: width and height, in inches.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    with _new_chart(size) as (figure, axes):
        # Lines with their bands, then levels.
        ends = []
        for i, (label, x, y) in enumerate(series):
            colour = _COLOUR[f"--series-{i % NUM_COLOURS + 1}"]
            if i < len(bands):
                low, high = (_thin(x, edge)[1] for edge in bands[i])
                axes.fill_between(_thin(x, y)[0], low, high, color=colour, alpha=0.18, linewidth=0)
            x, y = _thin(x, y)
            if smooth and len(y) > 20:
                axes.plot(x, y, color=colour, alpha=0.22, linewidth=0.8)
                y = running_mean(y, max(2, len(y) // 50))
            dot = {"marker": "o", "markersize": 3.2} if len(y) < 30 else {}
            axes.plot(x, y, color=colour, linewidth=1.8, solid_capstyle="round", **dot)
            if len(y):
                ends.append((y[-1], label, colour))
        for label, y in levels:
            axes.axhline(y, color=_COLOUR["--muted"], linewidth=1.1, linestyle=(0, (4, 3)))
            ends.append((y, label, _COLOUR["--muted"]))
        # Axes and labels.
        if log and all(y > 0 for _, _, ys in series for y in ys):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(short_number))
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left")
        axes.xaxis.set_major_formatter(FuncFormatter(short_number))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0.01)
        _label_ends(figure, axes, ends if len(ends) > 1 else [])
        return _svg(figure, f"{y_label} {[s[0] for s in series]}")


def span_chart(
    rows: dict[str, list[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str = "",
    size: tuple[float, float] = (5.6, 2.0),
) -> str:
    """Draws the (start, end) spans of each row as bars in two alternating shades, the first row on top."""
    with _new_chart(size) as (figure, axes):
        for i, spans in enumerate(rows.values()):
            colour = _COLOUR[f"--series-{i % NUM_COLOURS + 1}"]
            for turn, shade in enumerate((0.9, 0.5)):
                bars = [(start, end - start) for start, end in spans[turn::2]]
                axes.broken_barh(bars, (-i - 0.35, 0.7), color=colour, alpha=shade, linewidth=0)
        axes.set_yticks([-i for i in range(len(rows))], list(rows))
        axes.grid(False)
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left")
        return _svg(figure, y_label)


def _style() -> dict:
    muted = _COLOUR["--muted"]
    return {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": _COLOUR["--ink"],
        "axes.labelcolor": muted,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlepad": 10,
        "axes.edgecolor": _COLOUR["--line"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": _COLOUR["--line"],
        "grid.linewidth": 0.8,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
    }


@contextlib.contextmanager
def _new_chart(size: tuple[float, float]) -> Iterator[tuple["Figure", "Axes"]]:
    """Provides a transparent figure and its axes, in the style of the page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_style()):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        yield figure, axes


def _label_ends(figure, axes, ends) -> None:
    """Writes each line's label at its end, with labels moved apart so that none overlap."""
    figure.draw_without_rendering()
    height = axes.bbox.height
    ends = sorted(ends, key=lambda end: end[0])
    wanted = [axes.transData.transform((0, y))[1] - axes.bbox.y0 for y, *_ in ends]
    for at, (_, label, colour) in zip(spread_positions(wanted, 13.0, height * 1.1), ends):
        axes.annotate(
            label,
            (1.0, at / height),
            (6, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )


def spread_positions(wanted: list[float], gap: float, top: float) -> list[float]:
    """Returns ascending positions near the wanted ones (ascending), at least a gap apart and at most `top`."""
    positions, lowest = [], -math.inf
    for position in wanted:
        positions.append(max(position, lowest))
        lowest = positions[-1] + gap
    for i in reversed(range(len(positions))):
        positions[i] = min(positions[i], top)
        top = positions[i] - gap
    return positions


def _thin(x, y):
    step = max(1, math.ceil(len(x) / _MAX_POINTS))
    return np.asarray(x[::step], float), np.asarray(y[::step], float)


def running_mean(y: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Returns the mean over `width` values on either side, over fewer of them at both ends."""
    total = np.cumsum(np.concatenate([[0.0], y]))
    at = np.arange(len(y))
    reach = np.minimum(width, np.minimum(at, len(y) - 1 - at))
    return (total[at + reach + 1] - total[at - reach]) / (2 * reach + 1)


def short_number(value: float, _=None) -> str:
    """Formats a number briefly: 12000 -> 12K, 0.00025 -> 2.5e-4."""
    size = abs(value)
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'K' else limit):g}{suffix}"
    if 0 < size < 1e-3:
        digits, exponent = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:g}"


def _svg(figure, salt: str) -> str:
    from matplotlib import rc_context

    out = io.StringIO()
    # The salt makes ids reproducible, and different in each chart.
    with rc_context({"svg.hashsalt": salt}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would affect the full page
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # ids that every chart repeats and nothing uses
    svg = re.sub(r"font-family: [^;]*;", "font-family: inherit;", svg)
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var({name})")
    return svg
