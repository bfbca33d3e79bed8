"""The command that synthesises terminal tasks: its files, and the path of a model's tasks."""

import json

import pytest

from glm5_jax.envs.terminal import load_task
from glm5_jax.envs.terminal.synthesis.judged_checks import CRITERIA
from glm5_jax.runtime.http_server import ListenConfig, find_free_port
from launch import run as launch
from tests.agents.scripted import ScriptedServer
from tests.contracts.source_tree import ROOT
from tests.envs.conftest import _isolation, isolation  # noqa: F401
from tests.envs.terminal.folders import needs_root
from tests.envs.terminal.synthesis.faults import IMAGE, replace_text, texts

EXECUTABLE = ["tests/test.sh", "solution/solve.sh"]


def synthesise(capsys, workdir, variant="templates", **fields):
    """Returns the exit code and the output."""
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    experiment = f"--experiment={ROOT}/experiments/synthesise.py:{variant}"
    code = launch.main(["run", experiment, *flags, f"--workdir={workdir}"])
    return code, capsys.readouterr()


def test_writes_tasks_of_templates_and_reports_passages(capsys, tmp_path):
    out, references = tmp_path / "out", tmp_path / "references"
    references.mkdir()
    (references / "a.md").write_text(
        "A CANARY line.\nIt says: No header. Leave the log as it is. Done.\n"
    )
    code, printed = synthesise(capsys, out, count=3, checks=False, references=references)
    assert code == 0 and "3 tasks in" in printed.out and "1 passages" in printed.out
    tasks = [load_task(folder) for folder in sorted((out / "tasks").iterdir())]
    assert [task.name for task in tasks] == [
        "encoding-mix-0000",
        "log-analysis-0000",
        "regex-rename-0000",
    ]
    facts = json.loads((tasks[1].folder / "provenance.json").read_text())
    assert facts["origin"] == {"kind": "template", "ref": "log-analysis", "seed": 0}
    (shared,) = json.loads((out / "contamination.json").read_text())
    assert shared["task"] == "log-analysis-0000"
    code, _ = synthesise(capsys, out, count=3, checks=False)
    assert code == 0


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("validate", {}, "no task; give --experiment.task=DIR"),
        ("agent", {}, "no model; give --experiment.endpoint.base_url=URL"),
        ("templates", {"count": 0}, "count is 0"),
    ],
)
def test_rejects_missing_fields(capsys, tmp_path, variant, fields, message):
    code, printed = synthesise(capsys, tmp_path / "out", variant, **fields)
    assert code == 2 and message in printed.err


def replies(messages):
    """Scripted model that invents one draft, writes its task with a fault, and repairs it."""
    prompt = messages[-1]["content"]
    files = texts()
    if prompt.startswith("Invent a task"):
        number = int(prompt.partition("Variant ")[2][:1])
        value = {
            "goal": f"Sum the numbers of all meters, and find the largest one. {'Second idea. ' * number}",
            "start_state": ["/app/numbers.txt"],
            "observable_end_state": ["/app/sum.json"],
            "why_verifiable": "sums",
            "needs": {"packages": [], "network": number == 2, "minutes": 5},
        }
    elif prompt.startswith("Judge"):
        value = {name: {"answer": "pass", "reason": ""} for name in CRITERIA}
    elif prompt.startswith("Write a Bash script"):
        value = {"script": files["solution/solve.sh"], "missing": []}
    elif prompt.startswith("Write up to"):
        value = {"scripts": ["touch sum.json"]}
    elif "The validator found" in prompt:
        value = {"files": {IMAGE: files[IMAGE]}, "executable": EXECUTABLE}
    else:
        replace_text(IMAGE, "recommends ", "recommends no-such-package ")(files)
        value = {"files": files, "executable": EXECUTABLE}
    return json.dumps(value)


@pytest.mark.slow
@needs_root
@pytest.mark.usefixtures("isolation")
def test_builds_tasks_of_model(capsys, tmp_path):
    server = ScriptedServer(replies, ListenConfig(port=find_free_port()))
    url = f"http://127.0.0.1:{server.config.port}"
    with server.running():
        code, printed = synthesise(capsys, tmp_path, "agent", count=1, **{"endpoint.base_url": url})
    assert code == 0, printed.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accepted"] == summary["briefs"] == 1 and summary["rounds"] == [2]
    assert (summary["build_accuracy_first"], summary["build_accuracy_last"]) == (0.0, 1.0)
    rows = [json.loads(line) for line in (tmp_path / "funnel.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["in"], row["out"]) for row in rows] == [
        ("draft_rules", 2, 1),
        ("draft_duplicates", 1, 1),
        ("builder", 1, 1),
    ]
    assert load_task(tmp_path / "tasks" / "d-00000-0").instruction
