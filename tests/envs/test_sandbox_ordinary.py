"""Sandboxes of an ordinary user, who has neither groups of processes nor a second user to give."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

from glm5_jax.envs import sandbox
from tests.envs.test_sandbox_attacks import PROBE, REFUSED, ROOT

NOBODY = 65534
# Nothing to find on the host, and a number that no process has.
HOST = {"file": "/etc/shadow", "secret": "very-secret", "port": 1, "name": "none", "pid": 2**30}


@pytest.fixture(scope="module")
def told(_isolation):
    """What `ordinary.py` prints and logs, run by nobody with an interpreter that nobody can read."""
    if os.getuid() != 0:
        pytest.skip("the other tests of sandboxes run as an ordinary user already")
    assert _isolation is None
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = pathlib.Path(folder, "code", "glm5_jax", "envs")
        shutil.copytree(pathlib.Path(sandbox.__file__).parent, place / "sandbox")
        for package in (place, place.parent):
            (package / "__init__.py").touch()
        for name in ("ordinary.py", "probe.py"):
            shutil.copy(PROBE.with_name(name), folder)
        pathlib.Path(folder, "temporary").mkdir()
        os.chown(pathlib.Path(folder, "temporary"), NOBODY, NOBODY)
        attacks = sorted(set(REFUSED) | set(ROOT))
        host = json.dumps(HOST | {"attacks": attacks, "device": os.stat("/").st_dev})
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}/code"}
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": f"{folder}/temporary"}
        result = subprocess.run(
            [*user, "/usr/bin/python3", f"{folder}/ordinary.py", f"{folder}/probe.py", host],
            env=env,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        assert os.listdir(f"{folder}/temporary") == []
    return json.loads(result.stdout), result.stderr


def test_nothing_leads_out(told):
    found, _ = told
    # Agent and root are one user there, without and with what capabilities root keeps.
    for user, capabilities in (("root", [0, 1, 2, 3, 4, 5, 6, 7, 10]), ("agent", [])):
        expected = REFUSED | ROOT | {"gain_capabilities": f"only {capabilities}"}
        assert found[user] == expected


def test_the_limits_hold_as_far_as_they_are_said_to(told):
    found, log = told
    limits = found["limits"]
    assert limits["memory"] == "rlimit: each process, not all together"
    assert limits["processes"] == "rlimit"
    assert limits["cpus"] == "not limited"
    assert limits["users"] == "one: root and agent are not apart"
    assert "lack limits that this machine does not provide" in log
    assert found["memory"] == ""
    assert (found["processes"], found["more processes"]) == ("", "all\n")
    assert found["disk"] == "1\n"
    assert found["late"] == [True, "0\n"]
    # What stops whoever comes to end it, who is the same user, gains no minute by that.
    timed_out, took = found["stopper"]
    assert timed_out and took < 30


def test_files_and_layers(told):
    found, _ = told
    assert found["files"] == "1"
    assert found["link"].endswith("/app/a/link: a link, not a regular file")
    assert found["layer"] == "on\na\ny\n"


def test_nothing_is_left(told):
    found, _ = told
    assert found["left"] == [] and not found["folders"]
