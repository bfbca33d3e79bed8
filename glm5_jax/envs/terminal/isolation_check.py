"""Checks, before anything is graded, that the isolation of rewards from attempts works on this machine."""

import logging

from glm5_jax.envs.sandbox import RightsPolicy, Sandbox, SandboxError
from glm5_jax.envs.terminal import grader

log = logging.getLogger(__name__)

_CLOSE_FOLDERS = f"import sys; sys.path.append('{grader.FOLDER}/code')\n"
_CLOSE_FOLDERS += "import grader.privileges as p; sys.exit(not p.close_folders())"
_FOLDER = "/var/tmp/isolation"


async def check(box: Sandbox) -> None:
    """Raises SandboxError if programs cannot be supervised or hidden; warns of other missing protections."""
    await box.put(f"{_FOLDER}/program", b"#!/bin/sh\nid -u\n", mode=0o755)
    policy = RightsPolicy(**grader.POLICY)
    done = await box.exec(f"{_FOLDER}/program; id -u", user="root", cwd="/", policy=policy)
    if done.stdout.split() != [b"1000", b"0"]:
        output = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise SandboxError(
            f"programs that are started by root cannot be made unprivileged ({output or f'exit code {done.code}'}); grading needs ptrace, "
            "for example by --cap-add SYS_PTRACE for a container"
        )
    if (await box.exec(["python3", "-I", "-B", "-c", _CLOSE_FOLDERS], user="root", cwd="/")).code:
        log.warning(
            "The kernel has no Landlock: only user permissions keep processes of tests from rewards"
        )
    await box.hide_processes()
    await box.put("/tests/key", b"", user="root")
    command = f"ln -s /tests/key {_FOLDER}/key && cat {_FOLDER}/key"
    if not (await box.exec(command, user="root", cwd="/", policy=policy)).alert:
        log.warning(
            "Files cannot be watched (fanotify needs CAP_SYS_ADMIN of the machine): a program that makes a link while "
            "tests run, and removes it again, may pass them"
        )
    await box.stop_links([_FOLDER])
    command = f"ln -s /etc/passwd {_FOLDER}/link && cat {_FOLDER}/link > /dev/null 2>&1"
    if (await box.exec(command, user="root", cwd="/")).code == 0:
        log.warning(
            "The kernel cannot disable links (Linux 5.10 can): a program that makes some while tests run may pass them"
        )
