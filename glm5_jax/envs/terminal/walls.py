"""Checks, before anything is graded, that what keeps attempts from their rewards works on this machine."""

import logging

from glm5_jax.envs.sandbox import RightsPolicy, Sandbox, SandboxError
from glm5_jax.envs.terminal import grader

log = logging.getLogger(__name__)

_CLOSES = f"import sys; sys.path.append('{grader.FOLDER}/code')\n"
_CLOSES += "import grader.guard as guard; sys.exit(not guard.close_folders())"
_PLACE = "/var/tmp/walls"


async def check(box: Sandbox) -> None:
    """Raises SandboxError if programs cannot be supervised; warns of what else is missing."""
    await box.put(f"{_PLACE}/program", b"#!/bin/sh\nid -u\n", mode=0o755)
    policy = RightsPolicy(**grader.POLICY)
    done = await box.exec(f"{_PLACE}/program; id -u", user="root", cwd="/", policy=policy)
    if done.stdout.split() != [b"1000", b"0"]:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise SandboxError(
            f"programs cannot be kept from root's rights here ({said or f'exit code {done.code}'}); grading needs ptrace, "
            "as in a container with --cap-add SYS_PTRACE"
        )
    if (await box.exec(["python3", "-I", "-B", "-c", _CLOSES], user="root", cwd="/")).code:
        log.warning(
            "The kernel has no Landlock: nothing but users keeps tests' processes from rewards"
        )
    await box.stop_links([_PLACE])
    look = f"ln -s /etc/passwd {_PLACE}/link && cat {_PLACE}/link > /dev/null 2>&1"
    if (await box.exec(look, user="root", cwd="/")).code == 0:
        log.warning(
            "The kernel cannot stop links (Linux 5.10 can): a program that makes some while tests run may pass them"
        )
