"""Writes the map in WORKSPACE.md: one line per module, which is the first sentence of its docstring.

`python -m tests.contracts.workspace_map --write` after a module was added, moved or described differently.
"""

import ast
import pathlib
import sys
import textwrap

from tests.contracts.source_tree import ROOT, python_files, syntax

FILE = ROOT / "WORKSPACE.md"
BEGIN, END = "<!-- map: begin -->", "<!-- map: end -->"
PACKAGES = ("launch", "experiments", "pallas_kernels", "glm5_jax")
NOT_LISTED = ("experiments/ablations/", "experiments/benchmarks/", "glm5_jax/__init__.py")


def first_sentence(path: pathlib.PurePosixPath) -> str:
    """Returns the first sentence of a module's docstring on one line; empty if it has none."""
    paragraph = (ast.get_docstring(syntax(path)) or "").split("\n\n")[0]
    text = " ".join(paragraph.split()).replace("|", "\\|")
    end = next((i for i in range(len(text)) if text[i : i + 2] == ". "), len(text) - 1)
    return text[:end].rstrip(".:")


def render() -> str:
    """Returns the map in Markdown: a table per folder; the packages of kernels are lines of one table."""
    folders: dict[str, list[pathlib.PurePosixPath]] = {}
    for package in PACKAGES:
        for path in sorted(python_files(package)):
            if str(path).startswith(NOT_LISTED):
                continue
            is_package = path.name == "__init__.py"
            if path.parts[0] == "pallas_kernels" and len(path.parts) > 2:
                if is_package:
                    folders.setdefault("pallas_kernels", []).append(path)
                continue
            paths = folders.setdefault(str(path.parent), [])
            if not is_package:
                paths.append(path)
    lines = []
    for folder, paths in folders.items():
        package = pathlib.PurePosixPath(folder) / "__init__.py"
        title = first_sentence(package) if (ROOT / package).is_file() else ""
        heading = textwrap.wrap(f"**`{folder}/`** {title}", 118)
        lines += ["", *heading, "", "| file | what it does |", "|---|---|"]
        for path in paths:
            target = path.parent if path.name == "__init__.py" else path
            lines.append(f"| [{target.stem}]({target}) | {first_sentence(path)} |")
        if not paths:
            del lines[-3:]
    return "\n".join(lines) + "\n\n"


def parts() -> tuple[str, str, str]:
    """Returns the file before the map, the map, and the file after it."""
    before, rest = FILE.read_text("utf-8").split(BEGIN + "\n")
    current, after = rest.split(END)
    return before, current, after


if __name__ == "__main__":
    before, current, after = parts()
    if "--write" in sys.argv:
        FILE.write_text(f"{before}{BEGIN}\n{render()}{END}{after}", "utf-8")
    else:
        print(render())
