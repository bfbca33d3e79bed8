"""Protections of rewards that a machine may lack: grading refuses to start, or says what is missing."""

import asyncio
import logging

import pytest

from glm5_jax.envs.sandbox import ExecResult, SandboxError
from glm5_jax.envs.terminal import isolation_check

WARNINGS = {
    "landlock": "The kernel has no Landlock: only user permissions keep",
    "watch": "Files cannot be watched (fanotify needs CAP_SYS_ADMIN of the machine)",
    "stopped links": "The kernel cannot disable links (Linux 5.10 can)",
}


class Box:
    """Sandbox on a machine without some of the protections, which answers the commands of the check."""

    def __init__(self, *missing):
        self._missing, self._are_links_stopped = missing, False

    async def put(self, path, content, **options):
        pass

    async def hide_processes(self):
        pass

    async def stop_links(self, folders):
        self._are_links_stopped = "stopped links" not in self._missing

    async def exec(self, command, **options):
        alert, code, stdout = "", 0, b""
        if command[0] == "python3":
            code = int("landlock" in self._missing)
        elif command.endswith("id -u"):
            stdout = b"0\n0\n" if "supervision" in self._missing else b"1000\n0\n"
        elif "/tests/key" in command:
            alert = "" if "watch" in self._missing else "a link to /tests/key"
        else:
            code = int(self._are_links_stopped)
        return ExecResult(code=code, stdout=stdout, stderr=b"", alert=alert)


@pytest.mark.parametrize("missing", [(), *((name,) for name in WARNINGS), tuple(WARNINGS)])
def test_warns_of_each_missing_protection(missing, caplog):
    with caplog.at_level(logging.WARNING):
        asyncio.run(isolation_check.check(Box(*missing)))
    assert len(caplog.messages) == len(missing)
    for name, message in zip(missing, caplog.messages):
        assert message.startswith(WARNINGS[name])


def test_refuses_machine_whose_programs_keep_root_rights():
    with pytest.raises(SandboxError, match="(?s)cannot be made unprivileged.*grading needs ptrace"):
        asyncio.run(isolation_check.check(Box("supervision")))
