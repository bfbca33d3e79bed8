"""Executes notebooks like Colab: in an empty folder, with only what their install cell installs.

    python -m tests.journeys.notebooks [--write] [PART OF A NAME ...]

Executes the notebooks with such names (default: all) and prints their seconds. With --write it stores their outputs,
and first sets the badge and the install cell, which are the same everywhere: after a change of a notebook, or of `url`
in setup.cfg. `test_notebook.py` executes the same way.
"""

import argparse
import configparser
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.contracts.source_tree import ROOT, files

FOLDER = ROOT / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SOURCES = ("glm5_jax", "pallas_kernels", "experiments", "launch", "setup.cfg", "pyproject.toml")
SOURCES += ("README.md", "LICENSE")
KERNEL = "notebook"
CELL_TIMEOUT_S = 600
DIGEST = (
    "executed_sha256"  # in a notebook's metadata: digest of the code that the outputs belong to
)
_IMPORTED = re.compile(r"\bexperiments\.notebooks(?:\.|\s+import\s+)(\w+)")
# Variables of the test session that Colab does not have.
SESSION_VARIABLES = ("PYTHON", "PYTEST", "JAX", "XLA", "TF_", "COV", "MPL", "GLM5", "VIRTUAL_ENV")

INSTALL = """\
# Installs the project and keeps the jax plugin of the accelerator; does nothing if the project is installed.
import os
from importlib.metadata import distributions
from importlib.util import find_spec

if find_spec("glm5_jax") is None:
    source = os.environ.get("GLM5_JAX_SOURCE", "git+{url}")
    plugins = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13", "libtpu": "tpu"}
    names = {dist.name.lower().replace("_", "-") for dist in distributions()}
    extras = ",".join(plugins[name] for name in sorted(plugins) if name in names)
    %pip install -q "glm5_jax @ {source}" "jax[{extras}]"\
"""


def repository() -> str:
    """Returns the address of the repository on GitHub, `url` in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["metadata"]["url"]


def install_cell() -> str:
    """Returns the code of the install cell."""
    return INSTALL.replace("git+{url}", f"git+{repository()}")


def badge(path: pathlib.Path) -> str:
    """Returns the Markdown of the badge that opens a notebook in Colab."""
    colab = "https://colab.research.google.com"
    page = repository().replace("https://github.com", f"{colab}/github")
    target = f"{page}/blob/main/{path.relative_to(ROOT)}"
    return f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({target})"


def digest(notebook: nbformat.NotebookNode, folder: pathlib.Path = FOLDER) -> str:
    """Returns the digest of a notebook's code, and of the modules of the notebooks' folder that it imports."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code += [path.read_text("utf-8") for path in helper_modules("\n".join(code), folder)]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def helper_modules(code: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a folder's modules that code imports, directly or through each other, in order of name."""
    modules, sources = set(), [code]
    while sources:
        names = _IMPORTED.findall(sources.pop())
        others = {folder / f"{name}.py" for name in names} - modules
        modules |= others
        sources += [path.read_text("utf-8") for path in others]
    return sorted(modules)


def set_head(path: pathlib.Path, notebook: nbformat.NotebookNode) -> None:
    """Sets the badge, the first line of the first cell, and the install cell, which is the second."""
    first, second = notebook.cells[:2]
    _, _, text = first.source.partition("\n")
    first.source = f"{badge(path)}\n{text}"
    second.source = install_cell()


def kernel_environment(environment: pathlib.Path) -> dict[str, str]:
    """Returns the variables of a kernel of a virtual environment on a CPU."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(SESSION_VARIABLES)}
    source = (environment.parent / "source").as_uri()
    path = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    return variables | {"PATH": path, "JAX_PLATFORMS": "cpu", "GLM5_JAX_SOURCE": source}


def make_environment(folder: pathlib.Path) -> pathlib.Path:
    """Returns folder/environment: a virtual environment of Jupyter's kernel and what the install cell installs.

    The cell installs from a copy of this repository. Of two concurrent calls the second waits for the first.
    """
    environment, ready = folder / "environment", folder / "ready"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.exists():
            return environment
        _copy_sources(folder / "source")
        python = environment / "bin" / "python"
        for command in (
            [sys.executable, "-m", "venv", environment],
            [python, "-m", "pip", "install", "-q", "ipykernel"],
            [python, "-m", "ipykernel", "install", "--prefix", environment, "--name", KERNEL],
        ):
            subprocess.run(command, check=True, capture_output=True, cwd=folder)
        installation = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(install_cell())])
        execute(installation, environment)
        ready.touch()
    return environment


def _copy_sources(target: pathlib.Path) -> None:
    for path in files():
        if path.parts[0] in SOURCES:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path)


def execute(notebook: nbformat.NotebookNode, environment: pathlib.Path) -> float:
    """Executes a notebook in an empty folder and fills in its outputs. Returns the seconds."""
    start_s = time.monotonic()
    kernels = KernelSpecManager(kernel_dirs=[str(environment / "share" / "jupyter" / "kernels")])
    manager = AsyncKernelManager(kernel_name=KERNEL, kernel_spec_manager=kernels)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(cleanup_kc=True, env=kernel_environment(environment))
    return time.monotonic() - start_s


def printed(notebook: nbformat.NotebookNode) -> str:
    """Returns all text of a notebook's outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text", "") for output in outputs]
    return "".join(texts + [output.get("data", {}).get("text/plain", "") for output in outputs])


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser("python -m tests.journeys.notebooks", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the outputs")
    parser.add_argument("names", nargs="*", help="parts of notebooks' names")
    options = parser.parse_args()
    chosen = [p for p in NOTEBOOKS if not options.names or any(n in p.stem for n in options.names)]
    if not chosen:
        parser.error(
            f"no notebook is named like {options.names}; there are {[p.stem for p in NOTEBOOKS]}"
        )
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.monotonic()
        environment = make_environment(pathlib.Path(folder))
        print(f"environment: {time.monotonic() - start_s:.0f} s", flush=True)
        for path in chosen:
            notebook = nbformat.read(path, as_version=4)
            if options.write:
                set_head(path, notebook)
            seconds = execute(notebook, environment)
            print(f"{path.stem}: {seconds:.0f} s", flush=True)
            if options.write:
                notebook.metadata = {"kernelspec": _KERNELSPEC, DIGEST: digest(notebook)}
                nbformat.write(notebook, path)


_KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}

if __name__ == "__main__":
    main()
