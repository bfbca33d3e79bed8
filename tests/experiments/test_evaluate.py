"""The command that evaluates an agent on terminal tasks: its files, resumption, and refusals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from glm5_jax.runtime.http_server import ListenConfig, find_free_port
from launch import run as launch
from tests.agents.scripted import ScriptedServer
from tests.contracts.source_tree import ROOT
from tests.envs.conftest import _isolation, isolation  # noqa: F401
from tests.envs.terminal.folders import make_task, needs_root, write_shipped

EVALUATE = f"--experiment={ROOT}/experiments/evaluate.py:harbor"
POLICY = {"agent": "policy", "endpoint.base_url": "http://127.0.0.1:9"}
SCORED = "cat /app/score > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"

pytestmark = needs_root


def evaluate(capsys, tasks, workdir, agent="oracle", **fields):
    """Returns the exit code, the results and the output."""
    flags_by_name = {"tasks": tasks, "agent": agent, **fields}
    flags = [
        f"--experiment.{name}={value}" for name, value in flags_by_name.items() if value is not None
    ]
    code = launch.main(["run", EVALUATE, *flags, f"--workdir={workdir}"])
    file = workdir / "results.json"
    results = json.loads(file.read_text()) if file.exists() else None
    return code, results, capsys.readouterr()


@pytest.mark.usefixtures("isolation")
def test_evaluates_folder_and_resumes(capsys, caplog, tmp_path):
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    write_shipped("hello-file", tasks)
    make_task(tasks, "half", test=SCORED, solve="echo 0.5 > /app/score\n")
    make_task(tasks, "elsewhere", dockerfile="FROM nginx:1.25\n")
    make_task(tasks, "several", toml="[[steps]]\nname = 'a'\n")
    code, results, output = evaluate(capsys, tasks, out)
    assert code == 0 and list(results) == ["elsewhere", "half", "hello-file", "several"]
    assert {name: set(row) for name, row in results.items()} == dict.fromkeys(
        results, {"reward", "error", "seconds"}
    )
    assert [results[name]["reward"] for name in results] == [None, 0.5, 1.0, None]
    assert results["half"]["error"] is None and 0 < results["half"]["seconds"] < 60
    assert results["elsewhere"]["error"].startswith("image nginx:1.25 is not on this machine")
    assert results["several"]["error"].startswith("task several: steps: ")
    assert "mean reward 0.750 of 2 tasks; 2 could not be graded" in output.out
    assert "task 4/4" in output.err
    warnings = [text for text in caplog.messages if "its reward can be forged" in text]
    assert len(warnings) == 1 and warnings[0].startswith("task half: ")

    # A reward stays, even if the task would give another now.
    make_task(tasks, "half", test=SCORED, solve="echo 0.75 > /app/score\n")
    make_task(tasks, "elsewhere", test=SCORED, solve="echo 0.25 > /app/score\n")
    make_task(tasks, "new", test=SCORED, solve="echo 1 > /app/score\n")
    code, again, output = evaluate(capsys, tasks, out)
    assert code == 0 and again["half"] == results["half"]
    assert again["hello-file"] == results["hello-file"]
    assert again["elsewhere"]["reward"] == 0.25 and again["new"]["reward"] == 1.0
    assert (
        "results of another agent (oracle, not nop)" in evaluate(capsys, tasks, out, "nop")[2].err
    )


@pytest.mark.slow
@pytest.mark.usefixtures("isolation")
def test_runs_script_of_user(capsys, tmp_path):
    tasks, script = tmp_path / "tasks", tmp_path / "script.sh"
    make_task(tasks, "half", test=SCORED)
    script.write_text("echo 0.125 > /app/score\n")
    code, results, _ = evaluate(capsys, tasks / "half", tmp_path / "s", "script", script=script)
    assert code == 0 and {name: row["reward"] for name, row in results.items()} == {"half": 0.125}
    script.write_text("true\n")
    refused = evaluate(capsys, tasks / "half", tmp_path / "s", "script", script=script)
    assert refused[0] == 2 and "results of another script" in refused[2].err


def hello(messages):
    """Scripted policy that writes one file, whatever the task is, and reads it."""
    commands = ["echo 'Hello, world!' > /app/hello.txt", "cat /app/hello.txt"]
    number = sum(message["role"] == "assistant" for message in messages)
    return [("bash", {"command": commands[number]})] if number < 2 else "I have written it."


@pytest.mark.slow
@pytest.mark.usefixtures("isolation")
def test_policy_works_with_shell(capsys, tmp_path):
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    write_shipped("hello-file", tasks)
    make_task(tasks, "other", test=SCORED)
    server = ScriptedServer(hello, ListenConfig(port=find_free_port(), api_key="secret"))
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = {
        "endpoint.base_url": f"http://127.0.0.1:{server.config.port}",
        "endpoint.api_key_file": str(key),
        "endpoint.model": "glm-5-tiny",
        "policy.max_turns": 3,
    }
    # Attempts without a server have no reward; the same command attempts them again.
    code, results, output = evaluate(capsys, tasks, out, "policy", **options)
    assert code == 0 and {row["reward"] for row in results.values()} == {None}
    for row in results.values():
        assert row["error"].startswith("the policy's server failed: no server answers at http")
    assert "2 could not be graded: the same command attempts them again" in output.out
    assert "Traceback" not in output.err
    with server.running():
        code, results, output = evaluate(capsys, tasks, out, "policy", **options)
        assert code == 0 and {name: row["reward"] for name, row in results.items()} == {
            "hello-file": 1.0,
            "other": 0.0,
        }
        assert all(row["error"] is None and row["seconds"] > 0 for row in results.values())
        num_requests = len(server.scripted.requests)
        assert num_requests == 6
        evaluate(capsys, tasks, out, "policy", **options)
        assert len(server.scripted.requests) == num_requests
    chat = json.loads((out / "chats" / "hello-file.json").read_text())
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert chat["ended"] == "answer" and [m["role"] for m in chat["messages"]] == roles
    assert chat["messages"][5]["content"] == "Hello, world!\n[exit code 0]"
    for _, fields in server.scripted.requests:
        assert (fields["model"], fields["temperature"], fields["top_p"]) == ("glm-5-tiny", 0.7, 1.0)
    assert "secret" not in (out / "config.json").read_text()
    refused = evaluate(capsys, tasks, out, "policy", **options | {"policy.max_turns": 4})
    assert refused[0] == 2 and "results of another policy.max_turns (3, not 4)" in refused[2].err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": None}, "no tasks; give --experiment.tasks=DIR"),
        ({"tasks": "/none/such"}, "no folder /none/such"),
        ({"tasks": str(ROOT / "launch")}, "none of its folders has a task.toml"),
        ({"agent": "human"}, "agent is 'human'; it can be oracle, nop, script, policy"),
        ({"agent": "script"}, "--experiment.agent=script --experiment.script=FILE"),
        ({"script": "x"}, "agent is 'oracle' and script is 'x'"),
        ({"agent": "script", "script": "/none/such"}, "no file /none/such for the agent to run"),
        ({"agent": "policy"}, "--experiment.agent=policy --experiment.endpoint.base_url=http"),
        ({"endpoint.base_url": "http://a:1"}, "agent is 'oracle' and endpoint.base_url is 'http"),
        (POLICY | {"endpoint.base_url": "a:1"}, "endpoint: base_url is 'a:1', which is no URL"),
        (POLICY | {"endpoint.base_url": "http://a:1/v1/"}, "leave /v1 out"),
        (POLICY | {"endpoint.temperature": -1.0}, "temperature is -1.0; it must not be negative"),
        (POLICY | {"endpoint.top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        (POLICY | {"endpoint.tokenizer": "/none/such"}, "/none/such"),
        (POLICY | {"policy.max_turns": 0}, "policy: max_turns is 0; it must be positive"),
        (
            POLICY | {"policy.bash.timeout_s": 900.0},
            "policy.bash: timeout_s is 900.0 and max_timeout_s",
        ),
        ({"concurrency": 0}, "concurrency is 0; it must be positive"),
        (
            {"images": "{'a': '/none'}"},
            "images: a is '/none', neither 'host' nor a root file system",
        ),
        ({"images": "3"}, "images is 3; it must be of type"),
    ],
)
def test_rejects_invalid_fields_before_writing(capsys, tmp_path, fields, message):
    tasks = tmp_path / "tasks"
    make_task(tasks)
    code, results, output = evaluate(capsys, workdir=tmp_path / "out", **{"tasks": tasks, **fields})
    assert (code, results) == (2, None) and message in output.err
    assert output.err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_refuses_several_processes(capsys, tmp_path):
    argv = ["run", EVALUATE, "--distributed=localhost:1,2,0", f"--workdir={tmp_path}"]
    assert launch.main(argv) == 2
    assert "evaluate.py runs in one process; leave the flag out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_keeps_graded_attempts_after_signal(capsys, tmp_path, plain_env, number):
    tasks, out, temporary = (tmp_path / name for name in ("tasks", "out", "temporary"))
    temporary.mkdir()
    make_task(tasks, "first", test=SCORED, solve="echo 1 > /app/score\n")
    make_task(tasks, "second", test=SCORED, solve="sleep 1021; echo 1 > /app/score\n")
    command = [sys.executable, "-m", "launch.run", EVALUATE, f"--workdir={out}"]
    command += [f"--experiment.tasks={tasks}", "--experiment.concurrency=1"]
    env = {**plain_env, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE) as process:
        while not (out / "results.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        while not running("sleep 1021"):
            time.sleep(0.05)
        process.send_signal(number)
        error = process.stderr.read().decode()
    for _ in range(200):
        if not running("sleep 1021"):
            break
        time.sleep(0.05)
    assert not running("sleep 1021")
    if number != signal.SIGKILL:
        assert process.returncode == 1 and "the same command goes on from there" in error
        assert list(temporary.iterdir()) == []
    before = json.loads((out / "results.json").read_text())
    assert list(before) == ["first"] and before["first"]["reward"] == 1.0
    make_task(tasks, "second", test=SCORED, solve="echo 0.5 > /app/score\n")
    code, results, _ = evaluate(capsys, tasks, out, concurrency=1)
    assert code == 0 and results["first"] == before["first"] and results["second"]["reward"] == 0.5


def running(text: str) -> bool:
    """Returns True if a program with that command line runs."""
    return subprocess.run(["pgrep", "-fx", text], capture_output=True).returncode == 0


def test_refuses_to_run_without_root(capsys, tmp_path, monkeypatch):
    make_task(tmp_path / "tasks")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    code, _, output = evaluate(capsys, tmp_path / "tasks", tmp_path / "out")
    assert code == 2 and "trials need root" in output.err and not (tmp_path / "out").exists()
