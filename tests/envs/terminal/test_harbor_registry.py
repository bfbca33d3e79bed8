"""Datasets of Harbor registries: with a stand-in of the harbor package, and with the package itself."""

import importlib.util
import json
import pathlib
import sys
import types

import pytest

from glm5_jax.envs.terminal.registry import HarborShare

HAS_HARBOR = importlib.util.find_spec("harbor") is not None


@pytest.fixture
def dataset(tmp_path):
    """Writes ten tasks, and a registry that lists them under two versions of a dataset; returns its file."""
    tasks = []
    for number in range(10):
        folder = tmp_path / "tasks" / f"task-{number}"
        (folder / "environment").mkdir(parents=True)
        (folder / "tests").mkdir()
        (folder / "task.toml").write_text('version = "1.0"\n')
        (folder / "instruction.md").write_text(f"Write {number} into the file /app/number.")
        (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
        (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        tasks.append({"name": f"task-{number}", "path": str(folder)})
    rows = [
        {"name": "numbers", "version": version, "description": "", "tasks": listed}
        for version, listed in (("1.0", tasks[:4]), ("2.0", tasks))
    ]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps(rows))
    return registry


@pytest.fixture
def harbor(monkeypatch, dataset):
    """Puts a stand-in of the package in its place, and returns the arguments that it got."""
    calls = {}

    class Client:
        async def download_dataset(self, name, output_dir):
            calls["dataset"], calls["folder"] = name, output_dir
            paths = sorted((dataset.parent / "tasks").iterdir())
            return [types.SimpleNamespace(downloaded_path=path) for path in paths]

    class Factory:
        @staticmethod
        def create(**options):
            calls.update(options)
            return Client()

    module = types.ModuleType("harbor.registry.client.factory")
    module.RegistryClientFactory = Factory
    monkeypatch.setitem(sys.modules, "harbor.registry.client.factory", module)
    for name in ("harbor", "harbor.registry", "harbor.registry.client"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return calls


def test_loads_tasks_of_registry_file(harbor, dataset, tmp_path):
    share = HarborShare(harbor="numbers@2.0", registry=str(dataset), folder=str(tmp_path / "cache"))
    training, held_out = share.load()
    assert len(training) + len(held_out) == 10 and training
    assert training[0].instruction.startswith("Write ")
    assert harbor == {
        "registry_url": None,
        "registry_path": dataset,
        "dataset": "numbers@2.0",
        "folder": tmp_path / "cache",
    }


def test_passes_address_of_registry(harbor, tmp_path):
    url = "https://example.org/registry.json"
    HarborShare(harbor="numbers", registry=url, folder=str(tmp_path)).download()
    assert (harbor["registry_url"], harbor["registry_path"]) == (url, None)
    HarborShare(harbor="numbers", folder=str(tmp_path)).download()
    assert (harbor["registry_url"], harbor["registry_path"]) == (None, None)


def test_names_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "harbor.registry.client.factory", None)
    share = HarborShare(harbor="numbers", folder=str(tmp_path))
    with pytest.raises(ValueError, match="'numbers' needs the package harbor.*pip install harbor"):
        share.load()
    with pytest.raises(ValueError, match="harbor is empty"):
        HarborShare()


@pytest.mark.skipif(
    not HAS_HARBOR, reason="harbor is not installed (pip install harbor, Python 3.12)"
)
def test_real_package_reads_registry(dataset, tmp_path):
    options = {"registry": str(dataset), "folder": str(tmp_path / "cache")}
    paths = HarborShare(harbor="numbers@1.0", **options).download()
    assert [path.name for path in paths] == [f"task-{number}" for number in range(4)]
    training, held_out = HarborShare(harbor="numbers", **options).load()
    assert len(training) + len(held_out) == 10  # the newest version
    with pytest.raises(ValueError, match="nothing cannot be downloaded: ValueError: Dataset"):
        HarborShare(harbor="nothing", **options).load()
    assert pathlib.Path(options["folder"]).is_dir()
