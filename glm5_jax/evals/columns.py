"""Formats tables as plain text."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns a line per row, with its cells padded to the width of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
