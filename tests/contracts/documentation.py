"""Checks what Markdown pages name: paths, modules, functions, flags and commands in code spans, and links between pages.

A span is a command, a path, a dotted name, a flag or a name; `problem` returns what is wrong with it. Spans of other forms,
such as JSON or numbers, are not checked. A name must be bound, accessed or quoted in the source; one in a module or
class of ours must be defined there. Words in capitals (DIR, STEP) stand for the reader's own values.

    python -m tests.contracts.documentation     # prints all problems
"""

import ast
import collections
import configparser
import functools
import pathlib
import re
import shlex
import sys
import unicodedata

from launch import experiment_files
from launch.glm5 import COMMANDS
from tests.contracts.source_tree import PACKAGES, ROOT, files, read, syntax

SUFFIXES = tuple(".py .sh .md .json .jsonl .toml .yml .cfg .svg .ipynb .html".split())
SOURCE_SUFFIXES = (".py", ".sh", ".cfg", ".toml", ".yml")
# Files that a run writes, or that a task brings.
WRITTEN = re.compile(
    r"(?:config|metrics|results|starts|verdicts|tokenizer|tokenizer_config|generation_config|reward|train|manifest)\.jsonl?"
    r"|(?:checkpoints|samples|tensorboard|tokenizer|report|solution|environment|workdir|hosts|roles)(?:/.*)?"
    r"|task\.toml|instruction\.md|tests/test\.sh|logs/.*|build/site"
)
PLACEHOLDER = re.compile(r"(?<![A-Za-z_])[A-Z][A-Z_]+(?![a-z])")
PATH = re.compile(r"\.?[\w*][\w.*-]*(?:/[\w.*-]+)*/?(?::[\w,]+)?")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(.*\))?")
NAME = re.compile(r"[A-Za-z_]\w*(?:\(.*\))?")
# A name with the file that defines it: `NAME` (`FILE.py`), `NAME` in `FILE.py`, `NAME` of `FILE.py`.
PAIR = re.compile(r"`([A-Za-z_][\w.]*)`,?\s+(?:\(|in\s+|of\s+)`([\w/.]+\.py)`")
FLAG = re.compile(r"--?[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
# Programs of others that pages may call.
ROOT_PAGES = ("README.md", "WORKSPACE.md")
OTHERS = {"apt-get", "cd", "curl", "export", "git", "pip", "source", "tensorboard"}
OTHERS |= {"codex", "inspect", "lm_eval", "mini", "opencode"}  # of docs/clients.md
# Names of other libraries and programs that our source does not mention.
EXTERNAL = {"apply_chat_template", "cmp", "malloc_info", "openai", "ppermute", "ptxas"}


def pages() -> list[pathlib.PurePosixPath]:
    """Returns the pages that are checked."""
    named = [p for p in files() if str(p) in ROOT_PAGES]
    return named + [p for p in files() if p.suffix == ".md" and p.parts[0] == "docs"]


def without_blocks(text: str) -> str:
    """Returns a page without its fenced blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```[^\n]*$", "", text)


def spans(text: str) -> list[str]:
    """Returns the code spans of a page, each on one line."""
    matches = re.findall(r"(?<!`)`([^`]+)`(?!`)", without_blocks(text))
    return [" ".join(span.replace("\\|", "|").split()) for span in matches]


def block_commands(text: str) -> list[str]:
    """Returns the commands in the shell blocks of a page, each on one line."""
    blocks = re.findall(r"(?ms)^ *```(?:bash|sh|shell|console)\n(.*?)^ *```", text)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        " ".join(line.split())
        for line in lines
        if line.strip() and not line.lstrip().startswith("#")
    ]


@functools.cache
def known_paths() -> frozenset[str]:
    """Returns all files and folders of the repository."""
    paths = {str(path) for path in files()}
    return frozenset(paths | {str(parent) for path in files() for parent in path.parents})


@functools.cache
def source_names() -> frozenset[str]:
    """Returns the names that the source binds, accesses or quotes, and those of files."""
    pattern = re.compile(
        r"(?:\bdef|\bclass|\bimport|\bas|\.|--)\s*(\w+)|\b(\w+)\s*[:=(,\[)]|[\"'@/.]([\w-]+)(?=[\"'=./])"
    )
    names = {path.stem for path in files()}
    for path in files():
        if path.suffix in SOURCE_SUFFIXES and path.parts[0] not in ("docs", "tests"):
            for groups in pattern.findall(read(path)):
                names.update(groups)
    return frozenset(names)


def find_module(parts: tuple[str, ...]) -> tuple[pathlib.PurePosixPath, tuple[str, ...]] | None:
    """Returns (file, remaining names) of the longest module that begins a dotted name; None: it is not ours."""
    for root in ((), ("glm5_jax",)):
        for size in range(len(parts), 0, -1):
            folder = pathlib.PurePosixPath(*root, *parts[:size])
            for path in (folder.with_suffix(".py"), folder / "__init__.py"):
                if str(path) in known_paths() and path.parts[0] in (*PACKAGES, "tests"):
                    return path, parts[size:]
            if (
                size == 1
                and str(folder) in known_paths()
                and folder.parts[0] in (*PACKAGES, "tests")
            ):
                return folder, parts[size:]
    return None


@functools.cache
def members(path: pathlib.PurePosixPath) -> dict[str, set[str] | None]:
    """Returns {top-level name of a module: names in that class, None if it is no class}."""
    names: dict[str, set[str] | None] = {}
    for node in syntax(path).body:
        match node:
            case ast.ClassDef():
                names[node.name] = {name for part in node.body for name in bound(part)}
                # Fields that a base class declares are checked as names of the source.
                if node.bases:
                    names[node.name] |= source_names()
            case ast.Import() | ast.ImportFrom():
                names |= dict.fromkeys(a.asname or a.name.split(".")[0] for a in node.names)
            case _:
                names |= dict.fromkeys(bound(node))
    return names


def bound(node: ast.stmt) -> list[str]:
    """Returns the names that a statement binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return []


def problem(span: str) -> str:
    """Returns what is wrong with a code span; "": nothing."""
    first = span.split(" ")[0]
    if " " in span:
        is_command = first in ("python", "bash", "pip", "glm5") or re.fullmatch(
            r"[A-Z_]+=\S*", first
        )
        return command_problem(span) if is_command else ""
    if span in EXTERNAL or re.fullmatch(r"[A-Z_]+(?:=.*)?|[.]+", span):
        return ""
    if FLAG.fullmatch(span) and span.startswith("--"):
        return flag_problem(span)
    if PATH.fullmatch(span) and ("/" in span or span.partition(":")[0].endswith(SUFFIXES)):
        return path_problem(span)
    if DOTTED.fullmatch(span):
        return name_problem(span)
    if NAME.fullmatch(span):
        name = span.partition("(")[0]
        return "" if name in source_names() else f"{name} is not in the source"
    return ""


def path_problem(span: str) -> str:
    """Returns what is wrong with a path, which may have a variant, or stars, or lack its .py."""
    path, _, variant = span.partition(":")
    path = path.rstrip("/")
    if PLACEHOLDER.search(path) or WRITTEN.fullmatch(path) or path.startswith("workdir/"):
        return ""
    if place := find_path(path):
        return variant_problem(place, variant)
    # parallel/mesh.Region is a name in a module, and policy/entropy a metric.
    if not path.endswith(SUFFIXES) and not variant:
        dotted = path.replace("/", ".")
        if find_module(tuple(dotted.split("."))[:2]) or "." in path:
            return name_problem(dotted)
        if all(part in source_names() for part in path.split("/")):
            return ""
    return f"{path} does not exist"


def find_path(path: str) -> str | None:
    """Returns a path below the root for a path, or the end of one; None: there is none."""
    if "*" in path:
        pattern = re.compile(re.escape(path).replace(r"\*", "[^/]*"))
        return next((known for known in known_paths() if pattern.fullmatch(known)), None)
    if path in known_paths():
        return path
    ends = f"/{path}", f"/{path}.py"
    return next((known for known in known_paths() if known.endswith(ends)), None)


def variant_problem(path: str, variant: str) -> str:
    """Returns what is wrong with the variant of an experiment's file."""
    words = [] if not variant or variant.isupper() else variant.split(",")
    text = read(pathlib.PurePosixPath(path)) if words else ""
    missing = [word for word in words if not re.search(rf"\b{re.escape(word)}\b", text)]
    return f"{path} has no variant {missing[0]}" if missing else ""


def name_problem(span: str) -> str:
    """Returns what is wrong with a dotted name: a module's attribute, a class's member, or names of the source."""
    parts = tuple(span.partition("(")[0].removeprefix("glm.").split("."))
    place = find_module(parts)
    if place is not None and place[0].suffix == ".py":
        path, rest = place
        if rest and rest[0] not in members(path) and path.name != "__init__.py":
            return f"{path} has no {rest[0]}"
        if len(rest) > 1 and (inside := members(path).get(rest[0])) and rest[1] not in inside:
            return f"{rest[0]} of {path} has no {rest[1]}"
        if rest and path.name == "__init__.py" and rest[0] not in source_names():
            return f"{path.parent} has no {rest[0]}"
        return ""
    missing = [part for part in parts if part not in source_names() and part not in EXTERNAL]
    return f"{missing[0]} of {span} is not in the source" if missing else ""


def flag_problem(flag: str) -> str:
    """Returns what is wrong with a flag by itself; --experiment.a.b needs the fields a and b."""
    name, _, value = flag.lstrip("-").partition("=")
    value = value.replace("...", "")
    if name == "experiment" and value:
        return path_problem(value)
    if f"--{name}" in source_names() or all(part in source_names() for part in name.split(".")):
        return ""
    return f"the flag --{name} is not in the source"


def command_problem(command: str) -> str:
    """Returns what is wrong with a command: its program, its flags, or what it runs on."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError as error:
        return f"{command}: {error}"
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        del words[0]
    words = words[: words.index("|")] if "|" in words else words
    match words:
        case [] | ["python" | "python3", "-m", "venv" | "pip", *_]:
            return ""
        case ["python" | ".venv/bin/python", "-m", module, *rest]:
            path = pathlib.PurePosixPath(*module.split("."))
            places = path.with_suffix(".py"), path / "__main__.py"
            if PLACEHOLDER.search(module) is None and not any(
                str(p) in known_paths() for p in places
            ):
                return f"there is no program {module}"
            return flags_problem(rest)
        case ["glm5", "run", spec, *rest] if PLACEHOLDER.search(spec) is None:
            return experiment_problem(spec) or flags_problem(rest)
        case ["glm5", command, *rest]:
            if command not in COMMANDS:
                return f"glm5 has no command {command}"
            named = [w for w in rest[:1] if ":" in w and PLACEHOLDER.search(w) is None]
            problems = [*map(experiment_problem, named), flags_problem(rest)]
            return next(filter(None, problems), "")
        case ["python" | "bash" | "source", path, *rest]:
            if path not in known_paths() and not path.startswith(".venv/"):
                return f"{path} does not exist"
            return flags_problem(rest)
        case ["pip", "install", *rest]:
            return extras_problem(rest)
        case [program, *_] if program in OTHERS or program in known_paths():
            return ""
    return f"{words[0]} is neither ours nor in OTHERS"


def experiment_problem(spec: str) -> str:
    """Returns what is wrong with NAME:VARIANT, as the command line would."""
    name, _, variant = spec.partition(":")
    try:
        experiment_files.find(name if variant.isupper() else spec)
    except ValueError as error:
        return f"{spec}: {error}"
    return ""


def flags_problem(words: list[str]) -> str:
    """Returns what is wrong with the flags of a command; those after -- are of another program."""
    for word in words[: words.index("--")] if "--" in words else words:
        if word.startswith("--") and (text := flag_problem(word)):
            return text
        if word.endswith((".py", ".sh")) and (text := path_problem(word)):
            return text
    return ""


def extras_problem(words: list[str]) -> str:
    """Returns the first extra of an installation that setup.cfg lacks."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for extra in re.findall(r"(?:^|\s)\.\[([\w,]+)\]", " ".join(words)):
        for name in extra.split(","):
            if name not in config["options.extras_require"]:
                return f"setup.cfg has no extra {name}"
    return ""


def pair_problem(name: str, path: str) -> str:
    """Returns the part of a name that the file given with it does not define; "": it defines all."""
    place = find_path(path)
    if place is None or find_path(name.replace(".", "/")):
        return (
            ""  # `problem` reports a missing file, and a module in a file's folder is no name in it
        )
    text = read(pathlib.PurePosixPath(place))
    for part in name.removeprefix("glm.").split("."):
        if not re.search(rf"(?m)^\s*(?:(?:async\s+)?def|class)\s+{part}\b|^\s*{part}\s*[:=]", text):
            return f"{path} does not define {part}"
    return ""


def page_problems(path: pathlib.PurePosixPath, text: str) -> list[str]:
    """Returns the problems of a page, each with the page's path."""
    problems = [problem(span) for span in dict.fromkeys(spans(text))]
    problems += [pair_problem(*pair) for pair in PAIR.findall(without_blocks(text))]
    problems += [command_problem(line) for line in block_commands(text)]
    problems += link_problems(path, text)
    return [f"{path}: {one}" for one in problems if one]


def slugs(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs makes them."""
    anchors: collections.Counter[str] = collections.Counter()
    for title in re.findall(r"(?m)^#+ (.*)$", without_blocks(text)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        ascii_title = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        anchors[re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_title).strip().lower())] += 1
    return set(anchors)


def link_problems(path: pathlib.PurePosixPath, text: str) -> list[str]:
    """Returns the links of a page whose file or heading does not exist."""
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        place = pathlib.Path(ROOT, path.parent, name).resolve() if name else ROOT / path
        if not place.exists():
            problems.append(f"the link {target} leads nowhere")
        elif anchor and anchor not in slugs(place.read_text("utf-8")):
            problems.append(f"the link {target} has no such heading")
    return problems


if __name__ == "__main__":
    lines = [line for path in pages() for line in page_problems(path, read(path))]
    print("\n".join(lines))
    sys.exit(bool(lines))
