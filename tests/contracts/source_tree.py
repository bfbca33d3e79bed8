"""Lists the files of this repository and the names that their imports use."""

import ast
import dataclasses
import functools
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("pallas_kernels", "glm5_jax", "experiments", "launch")
FOLDERS = (*PACKAGES, "tests", ".ci")


@functools.cache
def files() -> tuple[pathlib.PurePosixPath, ...]:
    """Returns the paths below the root that are tracked or about to be; without git, those of the known folders."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        names = listing.stdout.split("\0")
    else:
        paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
        paths += ROOT.glob("[!.]*.*")
        names = [str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts]
    return tuple(pathlib.PurePosixPath(name) for name in names if (ROOT / name).is_file())


def python_files(*folders: str) -> list[pathlib.PurePosixPath]:
    """Returns the Python files below the given top folders."""
    return [path for path in files() if path.suffix == ".py" and path.parts[0] in folders]


def read(path: pathlib.PurePosixPath) -> str:
    """Returns the text of a file; empty if it is not text."""
    try:
        return (ROOT / path).read_text("utf-8")
    except UnicodeDecodeError:
        return ""


@functools.cache
def syntax(path: pathlib.PurePosixPath) -> ast.Module:
    return ast.parse(read(path), str(path))


@dataclasses.dataclass(frozen=True)
class Import:
    """`path` imports the dotted `name`, which is a.b for `from a import b`."""

    path: pathlib.PurePosixPath
    line: int
    name: str

    def is_from(self, *modules: str) -> bool:
        """Returns True if the name is one of these modules or something inside one."""
        return any(self.name == m or self.name.startswith(m + ".") for m in modules)

    def __str__(self):
        return f"{self.path}:{self.line} imports {self.name}"


@functools.cache
def imports(path: pathlib.PurePosixPath) -> list[Import]:
    """Returns all imports of a file, those inside functions included."""
    entries = []
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            entries += [Import(path, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[: len(path.parts) - node.level] if node.level else ()
            module = ".".join([*package, *filter(None, [node.module])])
            entries += [Import(path, node.lineno, f"{module}.{a.name}") for a in node.names]
    return entries


@functools.cache
def dotted_names(path: pathlib.PurePosixPath) -> list[tuple[int, str]]:
    """Returns (line, name) of each dotted name that a file writes out, as in `os.environ` after `import os`."""
    names = []
    for node in ast.walk(syntax(path)):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            names.append((node.lineno, ".".join([inner.id, *reversed(parts)])))
    return names
