"""Draws docs/figures/architecture.svg, the programs of an agentic RL run and the messages between them.

    python docs/figures/architecture.py

A contract test compares the file with `render()`.
"""

import pathlib
from html import escape
from typing import NamedTuple

FILE = pathlib.Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 1180, 530
BOX_WIDTH, BOX_HEIGHT = 230, 120
COLUMNS, ROWS = (20, 465, 910), (60, 380)
LINE_HEIGHT = 17  # of a label, in pixels

STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 13px; fill: #37474f; text-anchor: middle }
  .name { font-size: 17px; font-weight: 600; fill: #102027 }
  .box { fill: #e8f0fe; stroke: #3f51b5; stroke-width: 1.5 }
  .arrow { stroke: #455a64; stroke-width: 1.5; fill: none; marker-end: url(#head) }
"""


class Box(NamedTuple):
    """Program of a run.

    Attributes:
      column: index into COLUMNS.
      row: index into ROWS.
      name: the program's name.
      lines: what it does, line by line.
    """

    column: int
    row: int
    name: str
    lines: tuple[str, ...]

    @property
    def x(self) -> int:
        return COLUMNS[self.column]

    @property
    def y(self) -> int:
        return ROWS[self.row]


class Arrow(NamedTuple):
    """Messages from one program to another.

    Attributes:
      start, end: points (x, y) in pixels.
      label: position (x, y) of the label's first line.
      lines: what travels, line by line.
    """

    start: tuple[int, int]
    end: tuple[int, int]
    label: tuple[int, int]
    lines: tuple[str, ...]


BOXES = (
    Box(0, 0, "Trainer", ("loss, gradients, Muon Split,", "checkpoints; on a mesh of", "devices or hosts")),
    Box(1, 0, "Orchestrator", ("admits groups of rollouts,", "bounds their staleness, divides", "engines among tasks; journal")),
    Box(2, 0, "Task services", ("tasks, agent loop, tools", "and verifier; one service", "per kind of task")),
    Box(0, 1, "Engines", ("continuous batching, paged", "KV cache, prefix cache,", "speculative decoding")),
    Box(1, 1, "Gateway", ("sessions of token ids,", "finished records, routing", "by session; journal")),
    Box(2, 1, "Sandboxes", ("untrusted commands and", "programs, tests", "of terminal tasks")),
)  # fmt: skip
ARROWS = (
    Arrow((465, 95), (250, 95), (357, 67), ("batch: rewards, versions,", "digests of records")),
    Arrow((250, 145), (465, 145), (357, 165), ("lease, step trained,", "weight version")),
    Arrow(
        (695, 95), (910, 95), (802, 50), ("rollout: task number,", "seed, session URL,", "deadline")
    ),
    Arrow((910, 145), (695, 145), (802, 165), ("reward, messages,", "heartbeats")),
    Arrow(
        (135, 180), (135, 380), (222, 262), ("weights in buckets,", "with version", "and checksums")
    ),
    Arrow((525, 180), (525, 380), (448, 262), ("open session,", "required", "weight version")),
    Arrow((575, 380), (575, 180), (640, 262), ("lengths,", "versions, digest", "of records")),
    Arrow((480, 380), (250, 172), (328, 340), ("token records", "of the batch")),
    Arrow((955, 180), (695, 395), (800, 245), ("messages", "and tools")),
    Arrow((695, 425), (985, 180), (873, 330), ("replies and", "tool calls")),
    Arrow((465, 415), (250, 415), (357, 387), ("prompt ids, seed,", "rank (/generate)")),
    Arrow((250, 465), (465, 465), (357, 485), ("token ids, log-probs,", "weight versions")),
    Arrow((1030, 180), (1030, 380), (985, 345), ("commands,", "files")),
    Arrow((1080, 380), (1080, 180), (1130, 262), ("output,", "exit codes,", "test results")),
)


def render() -> str:
    """Returns the figure as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Programs of an agentic RL run and the messages between them</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 Z" fill="#455a64"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
    ]
    for box in BOXES:
        parts += draw_box(box)
    for arrow in ARROWS:
        (x1, y1), (x2, y2) = arrow.start, arrow.end
        parts.append(f'<path class="arrow" d="M{x1} {y1} L{x2} {y2}"/>')
        parts += draw_lines(arrow.label, arrow.lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_box(box: Box) -> list[str]:
    """Returns the elements of a box with its name and lines."""
    middle = box.x + BOX_WIDTH // 2
    rect = f'<rect class="box" x="{box.x}" y="{box.y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="10"/>'
    name = f'<text class="name" x="{middle}" y="{box.y + 32}">{escape(box.name)}</text>'
    return [rect, name, *draw_lines((middle, box.y + 58), box.lines)]


def draw_lines(start: tuple[int, int], lines: tuple[str, ...]) -> list[str]:
    """Returns text elements, one below the other, centred at start."""
    x, y = start
    return [
        f'<text x="{x}" y="{y + index * LINE_HEIGHT}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    ]


if __name__ == "__main__":
    FILE.write_text(render(), "utf-8")
