"""Campaigns of mutations: which candidates run, what a killed run leaves, and the dataset at the end."""

import asyncio
import json

import pytest

from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.swe.builder import BuildError
from glm5_jax.envs.swe.dataset import InstanceSource
from glm5_jax.envs.swe.instance import SweInstance, read_records
from glm5_jax.envs.swe.journal import JournalBusyError, open_journal
from glm5_jax.envs.swe.mutations.campaign import MutationCampaign
from glm5_jax.envs.swe.mutations.maker import MutationProject, MutationResult


class ScriptedMaker:
    """Maker that keeps every second candidate; projects named "broken" do not build.

    Attributes:
      tried: (project, number) of all candidates of all makers.
      fails_at: number of candidates after which the process is killed; None: never.
    """

    tried: list[tuple[str, int]] = []
    fails_at: int | None = None

    def __init__(self, project, builder, archive, seed):
        self._name, self._archive = project.name, archive

    async def prepare(self) -> None:
        if self._name == "broken":
            raise BuildError("verify: no test was found")

    async def make(self, number: int) -> MutationResult:
        if self.fails_at is not None and len(self.tried) >= self.fails_at:
            raise SandboxError("killed")
        self.tried.append((self._name, number))
        await asyncio.sleep(0)
        fields = {"project": self._name, "language": "python", "number": number}
        if number % 2:
            return MutationResult(**fields, status="breaks no test")
        name = f"{self._name}__mutation-{number}"
        instance = SweInstance(
            instance_id=name, repo=self._name, base_commit="tree:0", patch="", test_patch="",
            problem_statement="It is wrong.",
        )  # fmt: skip
        source = InstanceSource(instance_id=name, archive=self._archive)
        return MutationResult(**fields, status="kept", instance=instance, source=source)


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.setattr(ScriptedMaker, "tried", [])
    return ScriptedMaker.tried


def run(folder, names=("a", "b"), count=5, concurrency=1):
    archive = folder.parent / "x.tar"
    archive.write_bytes(b"archive")
    projects = [MutationProject(name=name, archive=archive) for name in names]
    campaign = MutationCampaign(
        projects, None, folder, count=count, concurrency=concurrency, make_maker=ScriptedMaker
    )
    return asyncio.run(campaign.run())


def names_of(folder):
    return [record.instance_id for record in read_records(folder / "instances.jsonl", SweInstance)]


def test_makes_instances_of_all_projects(tmp_path, tried):
    summary = run(tmp_path / "out")

    assert summary["instances"] == 5
    assert names_of(tmp_path / "out") == [
        *(f"a__mutation-{n}" for n in (0, 2, 4)),
        *(f"b__mutation-{n}" for n in (0, 2)),
    ]
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    assert len(list((tmp_path / "out/archives").iterdir())) == 1


def test_continues_campaign_that_was_killed_twice(tmp_path, tried, monkeypatch):
    reference = run(tmp_path / "whole", concurrency=2)
    before = list(tried)
    tried.clear()
    for limit in (3, 6):
        monkeypatch.setattr(ScriptedMaker, "fails_at", limit)
        with pytest.raises(SandboxError):
            run(tmp_path / "out", concurrency=2)
        with open(tmp_path / "out/candidates.jsonl", "ab") as file:
            file.write(b'{"project": "a", "num')  # half a line of a process that was killed
        assert not (tmp_path / "out/instances.jsonl").exists()
    monkeypatch.setattr(ScriptedMaker, "fails_at", None)

    summary = run(tmp_path / "out", concurrency=2)

    assert summary["instances"] == reference["instances"]
    unbroken, out = tmp_path / "whole", tmp_path / "out"
    assert (unbroken / "instances.jsonl").read_bytes() == (out / "instances.jsonl").read_bytes()
    # No candidate that was in the journal ran again.
    assert len(tried) <= len(before) + 2


def test_leaves_out_project_that_does_not_build(tmp_path, tried):
    summary = run(tmp_path / "out", names=("broken", "b"), count=3)

    assert summary["failures"] == {"broken": "verify: no test was found"}
    assert names_of(tmp_path / "out") == [f"b__mutation-{n}" for n in (0, 2, 4)]


def test_rejects_second_process_in_folder(tmp_path, tried):
    with open_journal(tmp_path / "out/candidates.jsonl", MutationResult):
        with pytest.raises(JournalBusyError, match="another process writes"):
            run(tmp_path / "out")


def test_rejects_projects_of_one_name(tmp_path):
    with pytest.raises(ValueError, match="each with its own name"):
        run(tmp_path / "out", names=("a", "a"))
