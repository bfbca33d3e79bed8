"""The builder: rounds on disk, resumed after a stop; broken drafts are repaired, and hopeless ones given up."""

import asyncio
import json

import pytest

from glm5_jax.agents.writers import RuleWriter, WriterError, WriterPrompt
from glm5_jax.envs.terminal import load_task
from glm5_jax.envs.terminal.synthesis.builder import (
    ACCEPTED,
    GIVEN_UP,
    Brief,
    BuilderBusyError,
    BuilderConfig,
    TaskBuilder,
    apply_edits,
    read_records,
)
from glm5_jax.envs.terminal.synthesis.reports import Check, ValidationReport
from glm5_jax.envs.terminal.synthesis.sandbox_runs import TaskRuns
from glm5_jax.envs.terminal.synthesis.static_checks import check_static
from glm5_jax.envs.terminal.synthesis.validator import validate
from tests.envs.leftovers import run
from tests.envs.terminal.folders import needs_root
from tests.envs.terminal.synthesis.faults import IMAGE, SOLVE, TEST, add_file, replace_text, texts

BRIEF = Brief(name="d-00001-0", text="Sum the meters.", origin={"kind": "seed", "ref": "x"})
BOTH = ["tests/test.sh", "solution/solve.sh"]
SPACED = replace_text("task.toml", "memory_mb", "memory_mib")
# Fault -> edit that plants it. The scripted model repairs what the report names.
BROKEN = {
    "missing package": replace_text(IMAGE, "recommends ", "recommends no-such-package "),
    "wrong path": replace_text(SOLVE, "> largest.txt", "> maximum.txt"),
    "test checks an old name": replace_text(TEST, "largest.txt", "biggest.txt"),
    "script is not executable": lambda files: None,
    "package without a version": add_file(IMAGE, "RUN pip install requests\n"),
    "nothing passes": lambda files: files.update({TEST: "def test_sum():\n    assert True\n"}),
}


def repair(data: dict) -> dict:
    """Scripted model that repairs the file named in the report."""
    failed, good = json.dumps(data["failed"]), texts()
    if "is not executable" in failed:
        return {"files": {}, "executable": BOTH}
    if "is not pinned" in failed or "no-such-package" in failed:
        return {"files": {IMAGE: good[IMAGE]}, "executable": BOTH}
    if "biggest.txt" in failed or "V04" in failed:
        return {"files": {TEST: good[TEST]}, "executable": BOTH}
    if "V03" in failed and "largest" in failed:
        return {"files": {SOLVE: good[SOLVE]}, "executable": BOTH}
    return {"files": {}, "executable": BOTH}


class Scripted(RuleWriter):
    """Writer by rules that records the kinds of its prompts."""

    def __init__(self, edit, refine=repair, executable=BOTH, scripts=()):
        def construct(data):
            files = texts()
            edit(files)
            return {"files": files, "executable": executable}

        super().__init__({"construct": construct, "refine": refine, "attack": lambda data: {"scripts": [*scripts]}})  # fmt: skip
        self.prompts: list[WriterPrompt] = []

    async def ask(self, prompt, schema):
        self.prompts.append(prompt)
        return await super().ask(prompt, schema)


async def static(folder, attacks) -> ValidationReport:
    """Validates only the files."""
    return ValidationReport(task=folder.name, checks=(check_static(folder)[0],))


def build(tmp_path, writer, validator=static, brief=BRIEF, **config):
    builder = TaskBuilder(writer, validator, tmp_path, BuilderConfig(**config), clock=lambda: 0.0)
    return asyncio.run(builder.build(brief))


def test_accepts_task_and_writes_provenance(tmp_path):
    result = build(tmp_path, Scripted(lambda files: None))
    assert (result.status, result.rounds) == (ACCEPTED, 1)
    task = load_task(tmp_path / "tasks" / BRIEF.name)
    facts = json.loads((task.folder / "provenance.json").read_text())
    assert facts["origin"] == BRIEF.origin and facts["rounds"][0]["checks"]["V01_static"]["ok"]
    assert len(facts["sha256"]["tests"]) == 64 and len(facts["rounds"][0]["prompt_sha256"]) == 64


def test_repairs_reported_faults(tmp_path):
    writer = Scripted(BROKEN["package without a version"], executable=["tests/test.sh"])
    result = build(tmp_path, writer, max_attacks=0)
    assert (result.status, result.rounds) == (ACCEPTED, 3)
    records = read_records(tmp_path / "work" / BRIEF.name)
    assert [record["stage"] for record in records] == ["construct", "refine", "refine"]
    assert [record["ok"] for record in records] == [False, False, True]
    assert records[2]["edits"] == [IMAGE] and "is not pinned" in writer.prompts[1].text


def test_gives_up_after_the_last_round(tmp_path):
    writer = Scripted(SPACED, refine=lambda data: {"files": {}, "executable": BOTH})
    result = build(tmp_path, writer)
    assert (result.status, result.rounds, result.built_last) == (GIVEN_UP, 6, None)
    assert not (tmp_path / "tasks").exists() and len(writer.prompts) == 6


def test_resumes_stopped_round(tmp_path):
    calls = []

    async def stopped(folder, attacks):
        calls.append(folder.parent.name)
        if calls.count("round-3") == 1 and calls[-1] == "round-3":
            raise KeyboardInterrupt
        return await static(folder, attacks)

    writer = Scripted(SPACED, refine=lambda data: {"files": {}, "executable": BOTH})
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, writer, stopped)
    before = [*read_records(tmp_path / "work" / BRIEF.name)]
    assert len(before) == 2
    result = build(tmp_path, writer, stopped)
    assert calls == [f"round-{number}" for number in (1, 2, 3, 3, 4, 5, 6)] and result.rounds == 6
    assert read_records(tmp_path / "work" / BRIEF.name)[:2] == before
    assert build(tmp_path, writer, stopped) == result and len(calls) == 7


def test_refuses_second_builder_of_task(tmp_path):
    async def nested(folder, attacks):
        with pytest.raises(BuilderBusyError, match="another builder works at"):
            await TaskBuilder(Scripted(SPACED), static, tmp_path).build(BRIEF)
        return await static(folder, attacks)

    assert build(tmp_path, Scripted(lambda files: None), nested).status == ACCEPTED


def test_rejects_fewer_assertions_without_a_reason():
    before = {TEST: b"def test():\n    assert 1\n    assert 2\n"}
    fewer = {TEST: "def test():\n    assert 1\n"}
    with pytest.raises(ValueError, match="have 1 assertions instead of 2; say why"):
        apply_edits(before, fewer, " ")
    assert apply_edits(before, fewer, "The second was the same.")[TEST] == fewer[TEST].encode()


@pytest.mark.parametrize("path", ["../x", "tests/../../x", "/etc/passwd", "provenance.json", "tests//x"])  # fmt: skip
def test_rejects_paths_outside_of_task(path):
    with pytest.raises(ValueError, match="is no file of a task"):
        apply_edits({}, {path: "x"}, "")


def test_deletes_files():
    assert apply_edits({"tests/a.py": b"x"}, {"tests/a.py": None, "tests/b.py": "y"}, "") == {"tests/b.py": b"y"}  # fmt: skip


def test_counts_failed_replies_as_rounds(tmp_path):
    def refuses(data):
        raise ValueError("no idea")

    writer = Scripted(SPACED, refine=refuses)
    result = build(tmp_path, writer, max_rounds=3)
    records = read_records(tmp_path / "work" / BRIEF.name)
    assert result.rounds == 3 and "no idea" in records[1]["checks"]["V01_static"]["detail"]
    assert issubclass(WriterError, RuntimeError) and records[1]["edits"] == []


def test_passes_attacks_to_the_validator(tmp_path):
    received = []

    async def validator(folder, attacks):
        received.append(dict(attacks))
        won = bool(attacks) and len(received) == 2
        detail = "attacker 1: reward 1.0" if won else ""
        check = Check(id="V10", status="fail" if won else "pass", detail=detail)
        return ValidationReport(task=folder.name, checks=(check,))

    writer = Scripted(lambda files: None, scripts=["echo 1", "echo 2"])
    result = build(tmp_path, writer, validator, max_attacks=1)
    assert received == [{}, {"attacker 1": "echo 1"}] * 2
    assert (result.status, result.rounds, result.attacks_won) == (ACCEPTED, 2, 1)


def test_reviews_files_before_they_run(tmp_path):
    brief = Brief(name="p-1", text="Page", origin={}, review=lambda files: "copied from the page")
    result = build(tmp_path, Scripted(lambda files: None), brief=brief, max_rounds=2)
    assert result.status == GIVEN_UP


def test_rejects_config_out_of_range():
    with pytest.raises(ValueError, match="max_rounds is 0"):
        BuilderConfig(max_rounds=0)


@pytest.mark.slow
@needs_root
@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("fault", BROKEN)
def test_repairs_broken_draft_in_three_rounds(fault, tmp_path):
    executable = ["tests/test.sh"] if fault == "script is not executable" else BOTH
    writer = Scripted(BROKEN[fault], executable=executable, scripts=["touch sum.json largest.txt"])

    async def built():
        async with TaskRuns() as runs:

            async def check(folder, attacks):
                return await validate(folder, runs, attacks=attacks)

            return await TaskBuilder(writer, check, tmp_path).build(BRIEF)

    result = run(built())
    records = read_records(tmp_path / "work" / BRIEF.name)
    assert result.status == ACCEPTED and 2 <= result.rounds <= 3, records[-1]["checks"]
    assert result.built_last and result.attacks_won == 0
