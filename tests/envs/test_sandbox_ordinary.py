"""Sandboxes of an ordinary user, without control groups and without a second user."""

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
# Nothing to find on the host, and a number without a process.
HOST = {"file": "/etc/shadow", "secret": "very-secret", "port": 1, "name": "none", "pid": 2**30}


@pytest.fixture(scope="module")
def report(_isolation):
    """Returns the outcomes and the log of `ordinary.py`, run by the user nobody with an unreadable interpreter."""
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


def test_probe_cannot_get_out(report):
    results, _ = report
    # Agent and root are one user; root has all capabilities that bubblewrap keeps.
    for user, capabilities in (("root", [0, 1, 2, 3, 4, 5, 6, 7, 10]), ("agent", [])):
        expected = REFUSED | ROOT | {"gain_capabilities": f"only {capabilities}"}
        assert results[user] == expected


def test_limits_hold_as_reported(report):
    results, log = report
    limits = results["limits"]
    assert limits["memory"] == "rlimit: each process, not all together"
    assert limits["processes"] == "rlimit"
    assert limits["cpus"] == "not limited"
    assert limits["users"] == "one: root and agent are not apart"
    assert "lack limits that this machine does not provide" in log
    assert results["memory"] == ""
    assert (results["processes"], results["more processes"]) == ("", "all\n")
    assert results["disk"] == "1\n"
    assert results["late"] == [True, "0\n"]
    # A program of the same user that stops its supervisors does not delay its end.
    timed_out, took = results["stopper"]
    assert timed_out and took < 30


def test_copies_files_and_layers(report):
    results, _ = report
    assert results["files"] == "1"
    assert results["link"].endswith("/app/a/link: a link, not a regular file")
    assert results["layer"] == "on\na\ny\n"


def test_leaves_nothing(report):
    results, _ = report
    assert results["left"] == [] and not results["folders"]
