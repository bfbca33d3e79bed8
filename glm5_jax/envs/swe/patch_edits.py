"""Edits patches: drops a hunk, or reverses all of them."""

import dataclasses
import re
from collections.abc import Sequence

from glm5_jax.envs.swe.patches import (
    FilePatch,
    PatchError,
    parse_patch,
    read_git_paths,
    render_patch,
)

_SWAPS = (
    ("new file mode", "deleted file mode"),
    ("old mode", "new mode"),
    ("rename from", "rename to"),
)


def drop_last_hunk(text: str) -> str:
    """Returns a patch without its last hunk, which must not resolve an instance; empty if there is no other hunk."""
    files = parse_patch(text)
    if not files:
        raise PatchError("the patch is empty, so it has no last hunk")
    last = files.pop()
    if len(last.hunks) > 1:
        files.append(dataclasses.replace(last, hunks=last.hunks[:-1]))
    return render_patch(files)


def reverse_patch(text: str) -> str:
    """Returns the patch that undoes a patch. Raises PatchError for binary files without their content."""
    return render_patch(_reverse_file(file) for file in reversed(parse_patch(text)))


def _reverse_file(file: FilePatch) -> FilePatch:
    if file.binary.startswith("Binary files"):
        raise PatchError(
            f"{file.path} is binary and its content is not in the diff; use git diff --binary"
        )
    if any(line.startswith("copy ") for line in file.header):
        raise PatchError(f"{file.path} is a copy; make the diff without --find-copies")
    return FilePatch(
        old_path=file.new_path,
        new_path=file.old_path,
        header=tuple(_reverse_header(file.header)),
        hunks=tuple(hunk.reverse() for hunk in file.hunks),
        binary=_reverse_binary(file.binary),
    )


def _reverse_header(header: Sequence[str]) -> list[str]:
    swapped: dict[str, str] = {}
    for one, two in _SWAPS:
        swapped |= {one: two, two: one}
    lines: list[str] = []
    for line in header:
        if match := re.fullmatch(r'diff --git ("?)a/(.*?)\1 ("?)b/(.*?)\3\n?', line):
            old, new = read_git_paths(line)
            if old != new:
                line = f"diff --git {match[3]}a/{match[4]}{match[3]} {match[1]}b/{match[2]}{match[1]}\n"
        elif match := re.fullmatch(r"index (\w+)\.\.(\w+)(.*\n?)", line):
            line = f"index {match[2]}..{match[1]}{match[3]}"
        elif prefix := next((name for name in swapped if line.startswith(f"{name} ")), None):
            line = swapped[prefix] + line.removeprefix(prefix)
        lines.append(line)
    if len(lines) > 1 and lines[-2].startswith("--- ") and lines[-1].startswith("+++ "):
        old, new = lines[-2][4:], lines[-1][4:]
        lines[-2:] = [f"--- {_swap_prefix(new)}", f"+++ {_swap_prefix(old)}"]
    # The old side comes first.
    order = {"old mode": 0, "new mode": 1, "rename from": 2, "rename to": 3}
    places = [i for i, line in enumerate(lines) if " ".join(line.split(" ")[:2]) in order]
    ordered = sorted(
        (lines[i] for i in places), key=lambda line: order[" ".join(line.split(" ")[:2])]
    )
    for i, line in zip(places, ordered):
        lines[i] = line
    return lines


def _swap_prefix(text: str) -> str:
    for one, two in (("a/", "b/"), ("b/", "a/"), ('"a/', '"b/'), ('"b/', '"a/')):
        if text.startswith(one):
            return two + text.removeprefix(one)
    return text


def _reverse_binary(binary: str) -> str:
    """Returns a binary hunk with its two parts, forward and backward, in the other order."""
    if not binary:
        return ""
    head, *blocks = re.split(r"(?m)^(?=(?:literal|delta) \d+$)", binary)
    if len(blocks) != 2:
        raise PatchError("a binary hunk has no backward part; use git diff --binary")
    return head + blocks[1] + blocks[0]
