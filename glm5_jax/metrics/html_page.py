"""Self-contained HTML pages, light and dark, with tables, the charts of charts.py and the plots of plots.py.

Every function takes and returns HTML; titles and lines of text are escaped here.
"""

import html
import pathlib
from collections.abc import Iterable, Sequence

from glm5_jax.runtime.files import replace_text

_PLOTS = pathlib.Path(__file__).with_name("plots.js")
_PLOT = '<figure class="plot">'


def write(path: pathlib.Path, title: str, subtitle: str, parts: Iterable[str]) -> pathlib.Path:
    """Writes a page with a heading and these parts, without the empty ones, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, render(title, subtitle, parts))
    return path


def render(title: str, subtitle: str, parts: Iterable[str]) -> str:
    """Returns a page with a heading and these parts, without the empty ones."""
    title, subtitle = html.escape(title), html.escape(subtitle)
    line = f"<p>{subtitle}</p>" if subtitle else ""
    header = f"<header><h1>{title}</h1>{line}</header>"
    body = "\n".join([header, *filter(None, parts)])
    if _PLOT in body:
        body += f"\n<script>\n{_PLOTS.read_text()}</script>"
    return _PAGE.replace("{title}", title).replace("{body}", body)


def section(title: str, body: str) -> str:
    """Returns a section with a heading."""
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def chart_section(figures: Iterable[str]) -> str:
    """Returns a section that shows figures in a grid."""
    return f'<section class="charts">{"".join(figures)}</section>'


def figure(drawing: str, caption: str = "") -> str:
    """Returns a figure. drawing: SVG."""
    note = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{drawing}{note}</figure>"


def plot_figure(data: str, caption: str = "") -> str:
    """Returns a figure that plots.js draws. data: JSON without "<"."""
    note = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    script = f'<script type="application/json">{data}</script>'
    return f"{_PLOT}{script}<noscript>This plot needs JavaScript.</noscript>{note}</figure>"


def details(summary: str, body: str, is_open: bool = False) -> str:
    """Returns a part that a reader can open."""
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{html.escape(summary)}</summary>{body}</details>"


def table(rows: Iterable[Iterable[str]], head: Sequence[str] = ()) -> str:
    """Returns a table of cells, which are HTML. head: cells of the heading; empty: no heading."""

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

    heading = [line(head, "th")] if head else []
    return f"<table>{''.join([*heading, *(line(row, 'td') for row in rows)])}</table>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns a list of names and their values, which are HTML."""
    items = (f"<dt>{html.escape(name)}</dt><dd>{value}</dd>" for name, value in pairs)
    return f"<dl>{''.join(items)}</dl>"


def text_table(rows: Iterable[Iterable[str]], head: Sequence[str] = ()) -> str:
    """Returns a table of cells, which are text."""
    escaped = ([html.escape(cell) for cell in row] for row in rows)
    return table(escaped, [html.escape(cell) for cell in head])


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --paper: #ffffff; --ink: #171a21; --muted: #667085; --line: #e4e7ec;
  --series-1: #3b5bdb; --series-2: #d9480f; --series-3: #2b8a3e; --series-4: #9c36b5;
  --series-5: #0b7285; --series-6: #a61e4d; --series-7: #846300; --series-8: #495057;
  --series-9: #087f5b; --series-10: #5f3dc4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1115; --paper: #171a21; --ink: #eceef2; --muted: #98a2b3; --line: #2a2f3a;
    --series-1: #91a7ff; --series-2: #ffa94d; --series-3: #69db7c; --series-4: #e599f7;
    --series-5: #66d9e8; --series-6: #faa2c1; --series-7: #ffd43b; --series-8: #ced4da;
    --series-9: #38d9a9; --series-10: #b197fc;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 40px 24px 64px; max-width: 1180px; background: var(--page);
  color: var(--ink); font: 15px/1.5 Inter, system-ui, "Segoe UI", Roboto, "Helvetica Neue",
  Arial, sans-serif; -webkit-font-smoothing: antialiased;
}
h1 { margin: 0; font-size: 28px; letter-spacing: -.02em; }
h2 { margin: 40px 0 12px; font-size: 18px; letter-spacing: -.01em; }
header p { margin: 4px 0 24px; color: var(--muted); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; }
.tile, figure, details {
  background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
}
.tile { padding: 16px 18px; }
.tile b { display: block; font-size: 26px; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.tile.main b { color: var(--series-1); }
.charts { display: grid; gap: 12px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; padding: 16px 16px 12px; }
figure svg { display: block; height: auto; }
figcaption { color: var(--muted); font-size: 13px; padding: 4px 4px 0; }
button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
.plot svg { touch-action: pan-y; user-select: none; cursor: crosshair; }
.plot text { fill: var(--muted); font-size: 11px; font-variant-numeric: tabular-nums; }
.plot path { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.plot path.faint { stroke-width: .8; opacity: .25; }
.plot .faded { opacity: .45; }
.plot .grid { stroke: var(--line); stroke-width: .8; }
.plot .level { stroke: var(--muted); stroke-width: 1.1; stroke-dasharray: 4 3; }
.cursor line { stroke: var(--muted); stroke-width: 1; }
.cursor circle { stroke: var(--paper); stroke-width: 1.5; }
.drag { fill: var(--series-1); opacity: .15; }
.plot-head { display: flex; justify-content: space-between; font-size: 14px; }
.plot-head button, .plot-bar button { color: var(--muted); font-size: 12px; padding: 0 8px;
  border: 1px solid var(--line); border-radius: 6px; }
.plot-head button.on, .plot-bar button.on { color: var(--series-1); border-color: var(--series-1); }
.plot-bar { display: flex; flex-wrap: wrap; gap: 4px 8px; margin-top: 20px; align-items: baseline;
  color: var(--muted); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; min-height: 22px; margin-bottom: 2px;
  font-size: 12.5px; font-variant-numeric: tabular-nums; }
.entry i { font-style: normal; margin-left: 5px; opacity: .8; }
.entry.off { opacity: .4; text-decoration: line-through; }
.readout { margin-left: auto; color: var(--muted); }
a { color: var(--series-1); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 20px; margin: 0; padding: 8px 18px;
  background: var(--paper); border: 1px solid var(--line); border-radius: 12px; font-size: 14px; }
dt, dd { margin: 0; padding: 5px 0; }
dt { color: var(--muted); }
dd { overflow-wrap: anywhere; }
details { margin-bottom: 8px; padding: 10px 16px; }
summary { cursor: pointer; color: var(--muted); font-variant-numeric: tabular-nums; }
pre { margin: 10px 0 4px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
table { width: 100%; margin-top: 8px; border-collapse: collapse; font-size: 13px; }
td { padding: 5px 8px; border-top: 1px solid var(--line); vertical-align: top; }
td:first-child { color: var(--muted); white-space: nowrap; width: 1%; }
details td:last-child { font-family: ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
</style>
</head>
<body>
{body}
</body>
</html>
"""
