"""Formats an ablation's finding: spreads over seeds, tables, and a page with them and the plots.

A `Finding` is printed as plain text and written as `report/NAME.html` of the ablation's workdir: self-contained, in
the style of a training's report.
"""

import dataclasses
import functools
import html
import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.scipy.special import betainc
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from glm5_jax.metrics import charts, html_page

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Spread:
    """Values of one quantity, one per seed.

    `half` is half the width of Student's 95% interval of the mean; None for a single seed.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Returns the spread of values. Raises ValueError if there are none, or if one is not finite (it diverged)."""
        values = tuple(values)
        if not values or not all(v is not None and math.isfinite(v) for v in values):
            raise ValueError(f"no mean of {values}; leave out diverged trainings, and list them")
        return cls(tuple(float(v) for v in values))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def __neg__(self) -> "Spread":
        return Spread(tuple(-v for v in self.values))

    @property
    def half(self) -> float | None:
        n = len(self.values)
        if n < 2:
            return None
        return student_quantile(n - 1) * statistics.stdev(self.values) / math.sqrt(n)

    def __format__(self, spec: str) -> str:
        """Formats as mean ± half (lowest .. highest), each in the given format (default .3f)."""
        spec = spec or ".3f"
        if self.half is None:
            return format(self.mean, spec)
        low, high = min(self.values), max(self.values)
        return (
            f"{format(self.mean, spec)} ± {format(self.half, spec.lstrip('+'))} "
            f"({format(low, spec)} .. {format(high, spec)})"
        )


@functools.cache
def student_quantile(freedom: int) -> float:
    """Returns t such that Student's T with `freedom` degrees of freedom lies in (-t, t) with CONFIDENCE.

    P(|T| > t) = I_x(freedom / 2, 1 / 2) with x = freedom / (freedom + t^2), which rises with x.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        x = (low + high) / 2
        if betainc(freedom / 2, 0.5, x) > 1 - CONFIDENCE:
            high = x
        else:
            low = x
    return math.sqrt(freedom * (1 / high - 1))


def paired(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    """Returns the spread of ours - theirs, seed by seed, which removes what the seeds have in common."""
    return Spread.of(a - b for a, b in zip(ours, theirs, strict=True))


def verdict(margin: Spread, *, strictly: bool = False) -> str:
    """Returns whether a margin is not negative (strictly: positive) on average, and beyond its interval too."""
    if margin.mean < 0 or (strictly and margin.mean == 0):
        return "not met"
    sure = margin.half is not None and margin.mean > margin.half
    return "met" if sure else "met on average, within the spread"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text.

    Attributes:
      title: title of the table.
      columns: names of the columns.
      rows: rows of text.
      note: what a reader must know; empty for none.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Plot:
    """A chart (SVG of metrics.charts) and its caption."""

    drawing: str
    caption: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of an ablation.

    Attributes:
      title: title of the page.
      command: command line that reproduces the result.
      verdicts: sentences, each on a target and whether it was met.
      tables, plots: tables and charts.
    """

    title: str
    command: str
    verdicts: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()

    def print(self, console: Console | None = None) -> None:
        """Prints the tables, the verdicts and the command, without colours if the output is not a terminal."""
        console = console or Console(highlight=False)
        for table in self.tables:
            shown = RichTable(title=Text(table.title))
            for name in table.columns:
                shown.add_column(Text(name))
            for row in table.rows:
                shown.add_row(*map(Text, row))
            console.print(shown)
            if table.note:
                console.print(Text(table.note), soft_wrap=True)
        for verdict in self.verdicts:
            console.print(Text(f"- {verdict}"), soft_wrap=True)
        console.print(Text(f"command: {self.command}"), soft_wrap=True)

    def write(self, workdir: str | os.PathLike, name: str) -> pathlib.Path:
        """Writes the page and returns its path, `report/NAME.html`, because ablations may share a workdir."""
        path = pathlib.Path(workdir) / "report" / f"{name}.html"
        verdicts = "".join(f"<li>{html.escape(text)}</li>" for text in self.verdicts)
        figures = (html_page.figure(plot.drawing, plot.caption) for plot in self.plots)
        parts = [
            f"<section><ul>{verdicts}</ul></section>",
            html_page.chart_section(figures),
            *map(_section, self.tables),
        ]
        return html_page.write(path, self.title, self.command, parts)


def curves(arms: Mapping[str, Sequence[Sequence[Sequence[float]]]], **options) -> str:
    """Returns a chart of the mean curve of each arm, with a band from its lowest to its highest seed.

    Args:
      arms: {name: one (steps, values) per seed}. The seeds of an arm have the same steps. An arm without seeds is not
        drawn.
      **options: options of `charts.line_chart`.
    """
    lines, bands = [], []
    for name, seeds in arms.items():
        if not seeds:
            lines.append((name, [], []))
            bands.append(([], []))
            continue
        steps = list(seeds[0][0])
        values = np.array([curve[1] for curve in seeds], float)
        lines.append((name, steps, list(values.mean(0))))
        bands.append((list(values.min(0)), list(values.max(0))))
    return charts.line_chart(lines, bands=tuple(bands), **options)


def tuning_table(tuned: Iterable[tuple[str, dict[float, float]]]) -> Table:
    """Returns a table of the loss at every learning rate, from (arm, {rate: loss, infinite where it diverged}).

    A best rate at an end of the grid is marked, because a better one may lie beyond it.
    """

    def cells(losses):
        best = min(losses, key=losses.get)
        for rate, loss in losses.items():
            open_ended = rate == best and rate in (min(losses), max(losses))
            yield f"{rate:.3g}: {loss:.4f}" + " (best, at the end)" * open_ended

    rows = ((name, "  ".join(cells(losses))) for name, losses in tuned)
    title = "Tuning: loss by peak learning rate, first seed"
    return Table(title=title, columns=("arm", "rate: loss"), rows=tuple(rows))


def by_rate(arms: dict[str, dict[float, float]], **options) -> str:
    """Returns a chart of {arm: {learning rate: loss}} with logarithmic rates; diverged ones are left out."""
    lines = []
    for name, losses in arms.items():
        finite = [(math.log10(rate), x) for rate, x in sorted(losses.items()) if math.isfinite(x)]
        lines.append((name, [r for r, _ in finite], [x for _, x in finite]))
    return charts.line_chart(lines, x_label="log10 of the peak learning rate", **options)


def tuned_plots(
    arms: Mapping[str, Sequence[Sequence[Sequence[float]]]],
    losses: dict[str, dict[float, float]],
    **options,
) -> tuple[Plot, Plot]:
    """Returns the held-out curves of arms, and the losses {arm: {rate: loss}} of their tuning.

    Options are those of `curves`.
    """
    label = "Held-out loss, nats per token"
    shown = "Mean over the seeds, each arm at its best rate; shadow: lowest to highest seed."
    return (
        Plot(curves(arms, y_label=label, **options), shown),
        Plot(by_rate(losses, y_label=f"{label}, by learning rate"), "First seed."),
    )


def _section(table: Table) -> str:
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return html_page.section(table.title, html_page.text_table(table.rows, table.columns) + note)
