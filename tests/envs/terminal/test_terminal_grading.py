"""The result of a trial: rewards as the tests give them, and errors by their cause."""

import asyncio
import dataclasses
import types

import pytest

from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.terminal import Nop, TrialRunner, grading, load_task, rewards
from tests.envs.leftovers import run
from tests.envs.terminal.folders import (
    PYTEST,
    TOML,
    Text,
    make_task,
    needs_root,
    selected_values,
    slow_but,
)

pytestmark = [pytest.mark.usefixtures("isolation"), needs_root]
SHORT = TOML.replace("timeout_sec = 30.0", "timeout_sec = 1.5")
COPIED = "cat /app/answer > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
PASSED = "def test(): pass\n"
# Ways in which test scripts start Python; each line must succeed.
PYTHON = r"""#!/bin/bash
set -e
trap 'echo 0 > /logs/verifier/reward.txt; echo "line $LINENO" >&2' ERR
[ "$(python3 -c 'import sys; print(sys.argv)' a b)" = "['-c', 'a', 'b']" ]
[ "$(echo 'import sys; print(sys.argv)' | python3 - a)" = "['-', 'a']" ]
[ "$(python3 <<< 'print(1)')" = 1 ]
python3 -c 'import sys; sys.exit(3)' || [ $? = 3 ]
python3 -c 'raise SystemExit("said")' 2>&1 | grep -qx said
python3 -c '1/0' 2>&1 | grep -q ZeroDivisionError
! python3 -c '1/0' 2>/dev/null
[ "$(python3 -IB -X utf8 -W ignore /tests/part.py x)" = "/tests/part.py x other" ] || \
  [ "$(python3 /tests/part.py x)" = "/tests/part.py x other" ]
[ "$(python -m json.tool --compact <<< '{"a": 1}')" = '{"a":1}' ]
python3 --version | grep -q '^Python 3'
[ "$(python3 /app/tool.py)" = "1000 0000000000000000" ]
[ "$(python3 -m tool)" = "1000 0000000000000000" ]
[ "$(python3 -c 'import os; print(os.path.exists("/var/lib/x"), open("/var/lib/x").read())')" = "True secret" ]
python3 -c 'import subprocess, sys
out = subprocess.run([sys.executable, "/app/tool.py"], capture_output=True, text=True).stdout
assert out == "1000 0000000000000000\n", out'
python3 -c 'import os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try: open("/var/lib/x")
except PermissionError: pass
else: raise SystemExit(1)'
python3 -c 'open("/logs/verifier/own.txt", "w").write("x")' && grep -q x /logs/verifier/own.txt
python3 -c 'import statistics; assert not hasattr(statistics, "planted")'
cd /app && python3 -c 'import tool_of_mine' && cd /
uv pip install pytest==8 && pip install -U pip && uv venv && uv add pytest
uv run python3 -c 'print(1)'
pytest --junitxml=/logs/verifier/junit.xml --ctrf /logs/verifier/ctrf.json /tests/test_one.py
grep -q 'tests="2"' /logs/verifier/junit.xml
python3 -c 'import json; s = json.load(open("/logs/verifier/ctrf.json"))["results"]["summary"]; assert (s["passed"], s["skipped"]) == (1, 1), s'
! pytest /tests/test_two.py
! pytest /tests/nothing_here.py
pytest -p no:randomly -k one /tests
(cd /app && python3 -m pytest /tests/test_cwd.py)
bash -c 'python3 /tests/part.py x' | grep -q other
timeout 20 bash /tests/part.sh
[ "$(timeout 20 python3 /app/tool.py)" = "1000 0000000000000000" ]
[ "$(env A=1 bash /app/tool.sh)" = 1000 ]
[ "$(sh -c 'id -u')" = 0 ]
git --version && (cd /app && git init -q . && git status)
echo 1 > /logs/verifier/reward.txt
"""
WHO = "import os; print(os.getuid(), [l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')][0])"
PARTS = {
    "tests/part.py": "import os, sys\ntry:\n    import other\nexcept ImportError: sys.exit(1)\n"
    "print(os.path.abspath(__file__), sys.argv[1], other.__name__)\n",
    "tests/other.py": "",
    "tests/part.sh": "pytest /tests/test_one.py && [ $(id -u) = 0 ]\n",
    "environment/tool.sh": "id -u\n",
    "tests/test_one.py": "import pytest\ndef test_one(): pass\ndef test_skipped(): pytest.skip()\n",
    "tests/test_two.py": "def test_two(): assert 0\n",
    "tests/test_cwd.py": "def test_here():\n    import tool_of_mine, statistics\n    assert not hasattr(statistics, 'planted')\n",
    "environment/tool.py": WHO,
    "environment/tool_of_mine.py": "",
    "environment/statistics.py": "planted = 1\n",
}
# Name -> files of the task, script of the agent, reward, and a part of the error (None: no error).
CASES = {
    "a number": ({"test": "echo 0.25 > /logs/verifier/reward.txt"}, "", 0.25, None),
    "json first": (
        {"test": "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 0.5, \"x\": 3}' > /logs/verifier/reward.json"},
        "",
        0.5,
        None,
    ),
    "exit code ignored": ({"test": "echo 1 > /logs/verifier/reward.txt; exit 3"}, "", 1.0, None),
    "missing": ({"test": "exit 3"}, "", None, "no reward.txt (test.sh ended with exit code 3)"),
    "empty": ({"test": ": > /logs/verifier/reward.txt"}, "", None, "reward.txt is empty"),
    "infinite": ({"test": "echo inf > /logs/verifier/reward.txt"}, "", None, "no finite number"),
    "no end": ({"test": "sleep 60", "toml": SHORT}, "", None, "no end within 1.5 s"),
    "the attempt's number": ({"test": COPIED}, "echo 0.5 > answer", 0.5, None),
    "the attempt's NaN": ({"test": COPIED}, "echo nan > answer", 0.0, "reward.txt is nan, no finite"),
    "the attempt's text": ({"test": COPIED}, "echo yes > answer", 0.0, "'yes', no number"),
    "too much text": ({"test": COPIED}, "yes 1 | head -c 1M > answer", 0.0, "more than the maximum of 65536 bytes"),
    "tests that the attempt stops": (
        {"test": "[ -e slow ] && sleep 60; echo 1 > /logs/verifier/reward.txt", "toml": SHORT},
        "touch slow",
        0.0,
        "no end within 1.5 s",
    ),
    "a link as reward": (
        {"test": "[ -e l ] && ln -s /app/l /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"},
        "echo 1 > l",
        0.0,
        "reward.txt: a link, not a regular file",
    ),
    "a pipe as reward": (
        {"test": "[ -e l ] && mkfifo /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"},
        "touch l",
        0.0,
        "reward.json: a named pipe, not a regular file",
    ),
    "a late agent": (
        {"test": "[ -e x ] && echo 1 > /logs/verifier/reward.txt", "toml": SHORT},
        "touch x; sleep 60",
        1.0,
        "the agent had no end within 1.5 s",
    ),
    "too much work": (
        {"test": "echo 1 > /logs/verifier/reward.txt", "toml": TOML.replace("= 256", "= 1000").replace("512", "4096")},
        "truncate -s 600M x",
        0.0,
        "more than the maximum of 536870912 bytes",
    ),
    "a missing package": (
        {"test": "uvx --with numpy==2 pytest /tests/test_outputs.py; echo 0 > /logs/verifier/reward.txt", "tests": PASSED},
        "",
        None,
        "the tests need what this machine lacks: Python package numpy",
    ),
    "a missing package that the attempt has": (
        {"test": "pip install nolib\n" + PYTEST, "tests": "import sys\nsys.path.append('/app')\nimport nolib\n"
         "def test():\n    nolib.check(1)\n"},
        "echo 'def check(x): pass' > nolib.py",
        None,
        "the tests need what this machine lacks: Python package nolib",
    ),
    "a missing program": (
        {"test": "apt-get install -y no-such-thing; echo 0 > /logs/verifier/reward.txt"},
        "",
        None,
        "package no-such-thing",
    ),
    "a missing network": (
        {"test": "curl -sf https://example.org/data || echo 0 > /logs/verifier/reward.txt"},
        "",
        None,
        "network (example.org)",
    ),
    "a pytest that passes every test": (
        {"test": PYTEST, "tests": "def test(): assert 0\n",
         "tests/conftest.py": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"},
        "",
        0.0,
        None,
    ),
    "a missing plug-in": (
        {"test": PYTEST.replace("-rA", "--json-report"), "tests": PASSED},
        "",
        None,
        "pytest with --json-report",
    ),
    "an attempt that uses missing programs": (
        {"test": COPIED},
        "curl https://example.org; apt-get install x; echo 1 > answer; touch /grader/missing/x",
        1.0,
        None,
    ),
    "a link to the answer": (
        {"test": "cmp /app/answer /tests/key && echo 1 > /logs/verifier/reward.txt", "tests/key": "42"},
        "ln -s / d; ln -s d/tests/key answer",
        0.0,
        "a link to /tests/key",
    ),
    "a link to the reward": (
        {"test": "echo 1 > /app/out; echo 0 > /logs/verifier/reward.txt"},
        "ln -s /proc/self/cwd/../logs/verifier/reward.json out",
        0.0,
        "a link to /logs/verifier/reward.json",
    ),
    "odd names": (
        {"test": "[ $(find . -type f | wc -c) -gt 1000 ] && echo 1 > /logs/verifier/reward.txt"},
        "touch $'a\\nb' $'\\xff\\xfe' ' ' '-rf' '*'; mkdir -p $(printf 'd/%.0s' {1..60}) && touch "
        "$(printf 'd/%.0s' {1..60})/$(printf 'n%.0s' {1..250}); for i in 1 2 3 4; do touch $(printf 'n%.0s' {1..240})$i; done; "
        "ln -s loop loop; ln -s $(printf 'x/%.0s' {1..500}) long; mkfifo p; python3 -c "
        "'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'",
        1.0,
        None,
    ),
    "copied work": (
        {
            "test": "[ -x run ] && [ \"$(readlink l)\" = /etc/passwd ] && [ ! -e old ] && [ \"$(cat /data/a/b)\" = 1 ] && "
            "[ \"$(cat /srv/one)\" = 2 ] && [ ! -e /etc/mine ] && [ ! -e /data/old ] && [ $(stat -c %u run) = 1000 ] && "
            "[ ! -e /srv/none ] && echo 1 > /logs/verifier/reward.txt",
            "dockerfile": "FROM debian\nRUN mkdir -p /data && touch /data/old\nWORKDIR /app\nRUN touch old\n",
            "toml": 'artifacts = ["/data", "/srv/one", {source = "/srv/none"}]\n' + TOML,
        },
        "touch run; chmod +x run; ln -s /etc/passwd l; rm old /data/old; mkdir /data/a; echo 1 > /data/a/b; "
        "echo 2 > /srv/one; touch /etc/mine",
        1.0,
        None,
    ),
    "python": (
        {
            "test": PYTHON,
            "dockerfile": "FROM debian\nWORKDIR /app\nCOPY tool* statistics.py .\nRUN printf secret > /var/lib/x && chmod 600 /var/lib/x\n",
            **PARTS,
        },
        "",
        1.0,
        None,
    ),
    "the user of the image": (
        {
            "test": "[ \"$(cat who)\" = \"app /srv/app /app\" ] && echo 1 > /logs/verifier/reward.txt",
            "dockerfile": "FROM debian\nRUN useradd -m -d /srv/app app\nWORKDIR /app\nRUN chown app .\nUSER app\n",
        },
        "echo $(id -un) $HOME $PWD > who; touch /srv/x && rm who",
        1.0,
        None,
    ),
    "variables": (
        {
            "test": "[ \"$A$B$C\" = 12d ] && [ \"$(cat said)\" = 12 ] && echo 1 > /logs/verifier/reward.txt",
            "dockerfile": "FROM debian\nENV A=1 B=x\nWORKDIR /app\n",
            "toml": TOML + 'env = {B = "2"}\n[verifier.env]\nC = "${NO_SUCH:-d}"\n',
        },
        "echo $A$B > said",
        1.0,
        None,
    ),
}  # fmt: skip


# A reward, none, one that is the attempt's failure, an unsupported feature, files that reach the tests, and a pytest
# that no verdict may rest on.
QUICK = (
    "a number", "missing", "the attempt's NaN", "a missing package", "a link to the answer", "copied work",
    "a pytest that passes every test",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """Returns the results of cases by name, three at a time."""
    folder, names = tmp_path_factory.mktemp("cases"), selected_values(request, "name")
    places = asyncio.Semaphore(3)

    async def one(trials, name, files, text):
        async with places:
            agent = Text(text) if text else Nop()
            return await trials.run(
                load_task(make_task(folder, name.replace(" ", "-"), **files)), agent
            )

    async def work():
        async with TrialRunner() as trials:
            cases = [one(trials, name, *CASES[name][:2]) for name in names]
            return dict(zip(names, await asyncio.gather(*cases)))

    return run(work())


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_trial_has_reward_and_error(results, name):
    _, _, reward, error = CASES[name]
    result = results[name]
    assert result.reward == reward, result
    assert (result.error is None) if error is None else (error in result.error), result
    assert 0 < result.duration_s < 60


@dataclasses.dataclass
class Failing:
    error: Exception

    async def run(self, task, sandbox):
        raise self.error


def test_failed_agent_gets_no_reward(tmp_path, caplog):
    async def work():
        async with TrialRunner() as trials:
            task = load_task(make_task(tmp_path, test="echo 1 > /logs/verifier/reward.txt"))
            errors = ConnectionError("no server"), KeyError("mine"), SandboxError("lost")
            return [await trials.run(task, Failing(error)) for error in errors]

    first, second, third = run(work())
    assert (first.reward, first.error) == (None, "no server")
    assert (second.reward, second.error) == (None, "the agent failed: KeyError: 'mine'")
    # The agent runs in the sandbox, next to other attempts.
    assert (third.reward, third.error) == (0.0, "lost")


@pytest.mark.parametrize(
    ("data", "reward", "parts"),
    [
        (b"0.5", 0.5, {}),
        (b" -1\n", -1.0, {}),
        (b'{"reward": 1}', 1.0, {"reward": 1.0}),
        (b'{"correct": 0.25}', 0.25, {"correct": 0.25}),
        (b'{"a": 1, "reward": 0}', 0.0, {"a": 1.0, "reward": 0.0}),
    ],
)
def test_reads_json_rewards(data, reward, parts):
    assert rewards.read_json(data) == (reward, parts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no JSON"),
        (b"NaN", "nan, no finite"),
        (b"Infinity", "inf, no finite"),
        (b"1e999", "inf, no finite"),
        (b"1" * 400, "inf, no finite"),
        (b"true", "'True', no number"),
        (b'"1"', "'1', no number"),
        (b"null", "'None', no number"),
        (b"[1]", "no number"),
        (b"{}", "an empty object"),
        (b'{"a": 1, "b": 0}', "no 'reward' among a, b"),
        (b'{"reward": 1, "b": NaN}', "'b' in reward.json is nan"),
        (b'{"reward": true}', "'reward' in reward.json is 'True'"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff", "no JSON"),
    ],
)
def test_rejects_invalid_json_reward(data, message):
    with pytest.raises(rewards.RewardError, match=message):
        rewards.read_json(data)


def test_reads_text_rewards():
    assert [rewards.read_text(data) for data in (b"1", b"0.5\n", b" -2e-1 ")] == [1.0, 0.5, -0.2]


@pytest.mark.parametrize(
    "data", [b"", b" \n", b"nan", b"-inf", b"one", b"1 2", b"1_0", b"\xff", b"True"]
)
def test_rejects_invalid_text_reward(data):
    with pytest.raises(rewards.RewardError):
        rewards.read_text(data)


def test_closes_files_of_attempt_whose_sandbox_ended():
    class EndedSandbox:
        async def save(self, path, file, max_bytes):
            files.append(file)
            raise SandboxError("the sandbox has ended")

    files = []
    task = types.SimpleNamespace(verifier=None, artifacts=())
    with pytest.raises(SandboxError, match="has ended"):
        run(grading.collect(EndedSandbox(), task, "/app"))
    assert [file.closed for file in files] == [True]
