"""Work outside of the work folder: graded in shared mode, copied as an artifact, or named in the result."""

import pytest

from glm5_jax.envs.terminal import Nop, TrialRunner, load_task
from tests.envs.leftovers import run
from tests.envs.terminal.folders import TOML, Text, make_task, needs_root, run_trial

pytestmark = [pytest.mark.usefixtures("isolation", "nothing_left"), needs_root]
SHARED = TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "shared"')
PASS = (
    "if {}; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
)
IN_TMP = PASS.format('[ "$(cat /tmp/solution.txt)" = 4 ]')


def attempt(folder, script, **files):
    """Returns the result of a script as the agent."""
    return run(run_trial(make_task(folder, **files), Text(script)))


def test_names_changes_that_are_not_graded(tmp_path):
    result = attempt(
        tmp_path, "echo 4 > /tmp/solution.txt; mkdir /data; echo x > /data/out", test=IN_TMP
    )
    assert result.reward == 0.0
    assert result.error == "changed, not graded: /data/out, /tmp/solution.txt"


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ('[ "$(sed -n 1p /tests/key)" = 4 ]', "sed has no right to read /tests/key"),
        ('cd /tests; [ "$(/app/prog --in=key)" = 4 ]', "prog has no right to read /tests/key"),
    ],
)
def test_names_programs_without_right_to_read_tests(tmp_path, test, program):
    """The solution fails where the author did not expect that, so the result says why."""
    script = "printf '#!/bin/sh\\ncat \"${1#--in=}\"' > prog; chmod +x prog"
    result = attempt(tmp_path, script, test=PASS.format(test), **{"tests/key": "4\n"})
    assert (result.reward, result.error) == (0.0, f"while the tests ran, {program}")


def test_names_programs_left_running(tmp_path):
    """A server, and a zombie process."""
    script = "cp /bin/sleep server; setsid ./server 60 > /dev/null 2>&1 & setsid sh -c 'true & exec sleep 60' > /dev/null 2>&1 &"
    result = attempt(tmp_path, script, test=PASS.format("grep -qs server /proc/[0-9]*/comm"))
    assert (result.reward, result.error) == (0.0, "left running, not graded: server, sleep")


def test_names_no_changes_if_none_is_lost(tmp_path):
    ok = PASS.format("[ -e done ]")
    assert attempt(tmp_path, "touch done /tmp/x ~/.cache; sleep 60 &", test=ok).error is None


def test_grades_shared_task_in_sandbox_of_agent(tmp_path):
    """A file in /tmp, a new folder, and a process that the agent left running."""
    script = (
        "echo 4 > /tmp/solution.txt; mkdir /data; echo 5 > /data/out; "
        "(while sleep 0.05; do cat /data/out > /data/served; done) > /dev/null 2>&1 &"
    )
    test = PASS.format(
        '[ "$(cat /tmp/solution.txt)" = 4 ] && echo 6 > /data/out && '
        "for i in $(seq 100); do grep -q 6 /data/served && break; sleep 0.05; done; grep -q 6 /data/served"
    )

    async def both():
        task = load_task(make_task(tmp_path, toml=SHARED, test=test, dockerfile="FROM debian\n"))
        async with TrialRunner() as trials:
            return await trials.run(task, Text(script)), await trials.run(task, Nop())

    right, nothing = run(both())
    assert (right.reward, right.error) == (1.0, None)
    assert (nothing.reward, nothing.error) == (0.0, None)


@pytest.mark.slow
def test_runs_pytest_of_shared_task(tmp_path):
    tests = "import subprocess\ndef test():\n    assert open('/tmp/a').read() == '1'\n    assert subprocess.run(['true']).returncode == 0\n"
    test = PASS.format("uvx -w pytest==8.4.1 pytest /tests/test_outputs.py")
    result = attempt(tmp_path, "printf 1 > /tmp/a", toml=SHARED, test=test, tests=tests)
    assert (result.reward, result.error) == (1.0, None)


@pytest.mark.slow
@pytest.mark.parametrize("workdir", ["/", "/tmp", "/solution"])
def test_shared_task_may_work_in_any_folder(tmp_path, workdir):
    dockerfile = f"FROM debian\nWORKDIR {workdir}\n"
    result = attempt(
        tmp_path,
        "pwd > /srv/here",
        toml=SHARED,
        dockerfile=dockerfile,
        test=PASS.format(f"grep -qx {workdir} /srv/here"),
    )
    assert (result.reward, result.error) == (1.0, None)


def test_copies_artifacts_of_agent(tmp_path):
    test = PASS.format('[ "$(cat /logs/artifacts/a/b)" = 4 ] && [ ! -e /logs/agent/x ]')
    result = attempt(
        tmp_path,
        "mkdir /logs/artifacts/a; echo 4 > /logs/artifacts/a/b; touch /logs/agent/x",
        test=test,
    )
    assert (result.reward, result.error) == (1.0, None)
