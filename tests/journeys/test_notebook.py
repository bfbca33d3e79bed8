"""Notebooks begin with a badge and an install cell, hold the outputs of their code, and run in an empty folder."""

import importlib.metadata
import os
import re
import types

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.contracts.source_tree import ROOT
from tests.journeys import notebooks
from tests.journeys.notebooks import NOTEBOOKS, install_cell

PAGE = ROOT / "docs" / "notebooks.md"
MAX_MINUTES = 5
STEM = [path.stem for path in NOTEBOOKS]


def load(path):
    return nbformat.read(path, as_version=4)


def images(notebook) -> int:
    """Returns the number of pictures in the outputs of a notebook."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=STEM)
def test_notebook_begins_with_badge_time_and_install_cell(path):
    first, install = load(path).cells[:2]
    badge, _, title, *text = first.source.splitlines()
    assert badge == notebooks.badge(path)
    assert title.startswith("# ")
    [minutes] = re.findall(r"(?m)^- Time: about (\d+) minutes? on two CPU cores", "\n".join(text))
    assert 1 <= int(minutes) <= MAX_MINUTES
    assert re.search(r"(?m)^- Figures?: ", "\n".join(text))
    assert install.source == install_cell()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=STEM)
def test_notebook_holds_outputs_of_its_code(path):
    """Fails for a notebook that was changed after its last run: `python -m tests.journeys.notebooks --write NAME`."""
    notebook = load(path)
    assert notebook.metadata.get(notebooks.DIGEST) == notebooks.digest(notebook)
    assert images(notebook)
    assert not re.search("/tmp/|file://", notebooks.printed(notebook))
    for cell in notebook.cells:
        assert not [o for o in cell.get("outputs", []) if o.output_type == "error"]


def test_digest_covers_modules_that_notebook_imports(tmp_path):
    (tmp_path / "first.py").write_text("from experiments.notebooks import second\n")
    (tmp_path / "second.py").write_text("import experiments.notebooks.first\n")
    (tmp_path / "third.py").write_text("")
    code = "from experiments.notebooks.first import x"
    assert notebooks.helper_modules(code, tmp_path) == [
        tmp_path / "first.py",
        tmp_path / "second.py",
    ]
    assert notebooks.helper_modules("from experiments import pretrain", tmp_path) == []

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    digest = notebooks.digest(notebook, tmp_path)
    (tmp_path / "third.py").write_text("y = 1\n")
    assert notebooks.digest(notebook, tmp_path) == digest
    (tmp_path / "second.py").write_text("y = 1\n")
    assert notebooks.digest(notebook, tmp_path) != digest


def test_page_of_notebooks_lists_all_with_badges():
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if "colab-badge" in line]
    assert len(rows) == len(NOTEBOOKS)
    for path, row in zip(NOTEBOOKS, rows, strict=True):
        assert notebooks.badge(path) in row


@pytest.fixture
def run_install_cell(monkeypatch, tmp_path):
    """Returns a function that runs the cell and returns the arguments of `%pip` in it, which installs nothing."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("GLM5_JAX_SOURCE", raising=False)
    shell, calls = InteractiveShell(), []
    shell.register_magic_function(calls.append, magic_name="pip")

    def run() -> list[str]:
        shell.run_cell(install_cell()).raise_error()
        return calls

    return run


@pytest.mark.parametrize(
    ("packages", "jax"),
    [
        ((), "jax[]"),
        (("jax-cuda12-plugin",), "jax[cuda12]"),
        (("jax_cuda13_plugin", "jax"), "jax[cuda13]"),
        (("libtpu",), "jax[tpu]"),
    ],
    ids=["cpu", "cuda12", "cuda13", "tpu"],
)
def test_install_cell_keeps_plugin_of_accelerator(packages, jax, monkeypatch, run_install_cell):
    installed = [types.SimpleNamespace(name=name) for name in packages]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter(installed))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    expected = f'install -q "glm5_jax @ git+{notebooks.repository()}" "{jax}"'
    assert run_install_cell() == [expected]


def test_install_cell_does_nothing_where_project_is_installed(run_install_cell):
    assert run_install_cell() == []


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Returns the environment that the install cell makes, one for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if folder.name.startswith("popen-") else folder
    place = shared / "notebooks"
    place.mkdir(exist_ok=True)
    return notebooks.make_environment(place)


@pytest.mark.slow
def test_execution_ends_kernel(environment):
    cell = nbformat.v4.new_code_cell("import os; print(os.getpid())")
    notebook = nbformat.v4.new_notebook(cells=[cell])

    notebooks.execute(notebook, environment)

    with pytest.raises(ProcessLookupError):
        os.kill(int(notebooks.printed(notebook)), 0)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=STEM)
@pytest.mark.timeout(900)
def test_notebook_runs(path, environment):
    notebook = load(path)
    expected = images(notebook)
    for cell in notebook.cells:
        cell.pop("outputs", None)

    seconds = notebooks.execute(notebook, environment)

    assert images(notebook) >= max(expected, 1)
    assert seconds < 60 * 2 * MAX_MINUTES  # twice, because CI runs two processes on two cores
