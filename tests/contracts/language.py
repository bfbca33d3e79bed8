"""Counts words and names that readers of other code bases would not understand.

`phrases` looks at docstrings, comments, Markdown and notebooks; `identifiers` at the names that Python code binds;
`repeated_classes` at public class names defined more than once; `long_lines` at Markdown. What is left
stands in `language_baseline.json`, {rule: {file: count}}, which may only shrink.

    python -m tests.contracts.language            # a table of counts for each package
    python -m tests.contracts.language --write    # writes the baseline, if no rule's sum has grown
"""

import ast
import collections
import functools
import io
import json
import re
import sys
import tokenize

from tests.contracts.source_tree import PACKAGES, ROOT, files, python_files, read, syntax

BASELINE = ROOT / "tests" / "contracts" / "language_baseline.json"
FOLDERS = (*PACKAGES, "tests")
MAX_COLUMNS = 120

PHRASE = re.compile(
    r"\b(?:anew|learnt|whoever|so many|(?:is|are) told|behind)\b"
    r"|(?:\A|[.:]\s+)(?:Of which|Of whose|Of those)\b",
    re.IGNORECASE,
)
FRAGMENT = re.compile(r"(?:What|Of|That|Whose|As|Which)\b")
IDENTIFIER = re.compile(
    r"_*(?:own|told|heard|said|asked|found|given|made|whole|kept|here|there|behind|drew|(?:most|least)_\w+)_*",
    re.IGNORECASE,
)
# Counted only in the table, because each has a plain meaning too.
RIDDLE = re.compile(
    PHRASE.pattern + r"|\b(?:told|beside|alone|of those|of which|of whose|whose own)\b",
    re.IGNORECASE,
)
# Each kernel package has a `Static` by contract.
REPEATED = {"Static", "Work"}


@functools.cache
def nodes(path) -> list[ast.AST]:
    """Returns all nodes of the syntax tree of a file."""
    return list(ast.walk(syntax(path)))


@functools.cache
def docstrings(path) -> list[tuple[int, str]]:
    """Returns (line, text) of the docstrings of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in nodes(path) if isinstance(node, kinds)]
    return [(n.body[0].lineno, text) for n in documented if (text := ast.get_docstring(n))]


def comments(path) -> list[tuple[int, str]]:
    """Returns (line, text) of the comments of a file; none if no line with a # has a refused phrase."""
    if not any("#" in line and PHRASE.search(line) for line in read(path).splitlines()):
        return []  # the tokenizer takes seconds for all files
    tokens = tokenize.generate_tokens(io.StringIO(read(path)).readline)
    return [(t.start[0], t.string.lstrip("# ")) for t in tokens if t.type == tokenize.COMMENT]


def markdown_files() -> list:
    """Returns the Markdown files that are written here."""
    return [p for p in files() if p.suffix == ".md" and "assets" not in p.parts]


def notebooks() -> list:
    """Returns the notebooks that are written here."""
    return [p for p in files() if p.suffix == ".ipynb"]


def prose(path) -> list[tuple[int, str]]:
    """Returns (line, text) of all prose of a Python file, a Markdown file or a notebook, without its outputs."""
    text = read(path)
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    if path.suffix in (".md", ".ipynb"):
        return list(enumerate(text.splitlines(), 1))
    return docstrings(path) + comments(path)


def phrases(path) -> list[str]:
    """Returns the refused phrases of a file, each with its line, and docstrings that open as a fragment."""
    lines = [f"{path}:{line} {m[0]!r}" for line, text in prose(path) for m in PHRASE.finditer(text)]
    if path.suffix == ".py":
        lines += [
            f"{path}:{n} opens with {m[0]!r}"
            for n, text in docstrings(path)
            if (m := FRAGMENT.match(text))
        ]
    return lines


def bound_names(path) -> list[tuple[int, str]]:
    """Returns (line, name) of all variables, parameters, attributes and functions that a file binds."""
    names = []
    for node in nodes(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.append((node.lineno, name))
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((node.lineno, name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append((node.lineno, name))
    return names


def identifiers(path) -> list[str]:
    """Returns the refused identifiers that a Python file binds, each with its line."""
    return [f"{path}:{n} {name}" for n, name in bound_names(path) if IDENTIFIER.fullmatch(name)]


def repeated_classes() -> dict[str, list[str]]:
    """Returns {path: classes} of the public classes whose name another file of the packages has too."""
    places = collections.defaultdict(list)
    for path in python_files(*PACKAGES):
        for node in syntax(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno} {node.name}")
    lines = collections.defaultdict(list)
    for name, found_at in places.items():
        for place in found_at if len(found_at) > 1 and name not in REPEATED else ():
            lines[place.split(":")[0]].append(place)
    return lines


def long_lines(path) -> list[str]:
    """Returns the lines of a Markdown file that are too long, except in tables and code."""
    lines, is_code = [], False
    for number, line in enumerate(read(path).splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > MAX_COLUMNS and not (is_code or line.lstrip().startswith("|")):
            lines.append(f"{path}:{number} {len(line)} columns")
    return lines


@functools.cache
def violations() -> dict[str, dict[str, list[str]]]:
    """Returns {rule: {path: lines}}; paths without a violation are left out."""
    sources = python_files(*FOLDERS)
    by_rule = {
        "phrases": {str(p): phrases(p) for p in sources + markdown_files() + notebooks()},
        "identifiers": {str(p): identifiers(p) for p in sources},
        "repeated_classes": repeated_classes(),
        "long_lines": {str(p): long_lines(p) for p in markdown_files()},
    }
    return {
        rule: {path: lines for path, lines in sorted(by_path.items()) if lines}
        for rule, by_path in by_rule.items()
    }


def grown(
    current: dict[str, dict[str, list[str]]], baseline: dict[str, dict[str, int]]
) -> list[str]:
    """Returns the lines of the files that have more violations than the baseline allows."""
    lines = []
    for rule, by_path in current.items():
        for path, where in by_path.items():
            allowed = baseline.get(rule, {}).get(path, 0)
            if len(where) > allowed:
                lines += [f"{rule}, {len(where)} of at most {allowed}:", *where]
    return lines


def counts(current: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, int]]:
    """Returns what the baseline holds for these violations."""
    return {rule: {p: len(v) for p, v in by_path.items()} for rule, by_path in current.items()}


def _package(path) -> str:
    return "/".join(path.parts[:2]) if path.parts[0] == "glm5_jax" else path.parts[0]


def _print_table() -> None:
    """Prints for each package: riddles per 1,000 words of docstrings, share of fragments, refused names."""
    by_package = collections.defaultdict(list)
    for path in python_files(*FOLDERS):
        by_package[_package(path)].append(path)
    print(f"{'package':24} {'words':>7} {'riddles/1000':>12} {'fragments':>9} {'names':>6}")
    for package, paths in sorted(by_package.items()):
        texts = [text for path in paths for _, text in docstrings(path)]
        words = sum(len(text.split()) for text in texts)
        riddles = sum(len(RIDDLE.findall(text)) for text in texts)
        fragments = sum(bool(FRAGMENT.match(text)) for text in texts)
        names = sum(len(identifiers(path)) for path in paths)
        print(
            f"{package:24} {words:7} {1000 * riddles / max(words, 1):12.1f} {fragments / max(len(texts), 1):9.1%} {names:6}"
        )


def main(arguments: list[str]) -> int:
    """Prints the table, or writes the baseline. Returns the exit code."""
    if arguments not in ([], ["--write"]):
        print(__doc__)
        return 2
    if not arguments:
        _print_table()
        return 0
    current = violations()
    before = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    sums = {rule: sum(by_path.values()) for rule, by_path in counts(current).items()}
    # Sums, because a renamed file has another path.
    if any(rule in before and sums[rule] > sum(before[rule].values()) for rule in sums):
        print("\n".join(grown(current, before)))
        return 1
    BASELINE.write_text(json.dumps(counts(current), indent=1) + "\n")
    print(sums)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
