"""The commands that build software engineering environments and evaluate them, and these tasks in agentic RL."""

import dataclasses
import json
import os
import pathlib

import pytest

from glm5_jax.envs.swe.manifests import files_of, read_manifest
from glm5_jax.envs.swe.service import SweShare
from launch import command_line, run as launch
from tests.contracts.source_tree import ROOT
from tests.envs.conftest import _isolation, isolation  # noqa: F401
from tests.envs.terminal.folders import needs_root

ARCHIVE = str(ROOT / "tests/envs/swe/data/xmltodict-0.13.0.tar.xz")
MANIFEST = ROOT / "experiments/tasks/swe_pairs.jsonl"


def call(capsys, experiment, workdir, **fields):
    """Returns the exit code and the output."""
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    path = f"--experiment={ROOT}/experiments/{experiment}"
    code = launch.main(["run", path, *flags, f"--workdir={workdir}"])
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    ("experiment", "fields", "message"),
    [
        ("build_environments.py:mutations", {}, "no sources; give --experiment.sources="),
        ("build_environments.py:mutations", {"count": 0}, "count is 0"),
        ("build_environments.py:mutations", {"sources": "('/none',)"}, "/none is no folder and"),
        ("build_environments.py:pairs", {}, "no manifest; give --experiment.manifest=FILE"),
        ("evaluate.py:swe", {}, "no tasks; give --experiment.tasks=DIR"),
        ("evaluate.py:swe", {"tasks": "/none"}, "/none has no instances.jsonl"),
        ("evaluate.py:swe", {"agent": "human"}, "agent is 'human'; it can be gold, nop or policy"),
        ("evaluate.py:swe", {"agent": "policy"}, "--experiment.agent=policy --experiment.endpoint"),
    ],
)
def test_rejects_invalid_fields(capsys, tmp_path, experiment, fields, message):
    code, printed = call(capsys, experiment, tmp_path / "out", **fields)

    assert code == 2 and message in printed.err
    assert not pathlib.Path("/none").exists()


def test_refuses_to_build_without_root(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    fields = {"sources": (ARCHIVE,)}

    code, printed = call(capsys, "build_environments.py:mutations", tmp_path / "out", **fields)

    assert code == 2 and "need root" in printed.err


def test_agentic_rl_selects_dataset_by_its_flag():
    flags = ["run", f"--experiment={ROOT}/experiments/rl_agentic.py:tiny"]
    config = command_line.parse([*flags, "--experiment.tasks=({'dataset': 'out'},)"]).config

    (share,) = config.tasks
    assert dataclasses.asdict(share) == dataclasses.asdict(SweShare(dataset="out"))


def test_manifest_of_pairs_names_files_of_registries():
    entries = read_manifest(MANIFEST)

    assert len(entries) >= 60
    assert len({entry.language for entry in entries}) >= 7
    assert {file.url.partition(":")[0] for file in files_of(entries)} == {"debian", "npm"}
    assert all(entry.license for entry in entries)


@pytest.mark.slow
@needs_root
@pytest.mark.usefixtures("isolation")
def test_builds_mutations_and_evaluates_them(capsys, tmp_path):
    out = tmp_path / "out"
    fields = {"sources": (ARCHIVE,), "count": 2, "license": "MIT", "concurrency": 1}

    code, printed = call(capsys, "build_environments.py:mutations", out, **fields)

    assert code == 0 and "2 of 2 instances" in printed.out
    for agent, reward in (("gold", 1.0), ("nop", 0.0)):
        code, _ = call(capsys, "evaluate.py:swe", tmp_path / agent, tasks=out, agent=agent)
        results = json.loads((tmp_path / agent / "results.json").read_text())
        assert code == 0 and {row["reward"] for row in results.values()} == {reward}
    before = (out / "instances.jsonl").read_bytes()
    assert call(capsys, "build_environments.py:mutations", out, **fields)[0] == 0
    assert (out / "instances.jsonl").read_bytes() == before
