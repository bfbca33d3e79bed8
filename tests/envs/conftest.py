import asyncio
import os
import pathlib
import tempfile

import pytest

from glm5_jax.envs.sandbox import Sandbox, SandboxError
from tests.envs.leftovers import all_that_sandboxes_make, made_since


@pytest.fixture(scope="session")
def _isolation():
    """Returns the reason why no sandbox starts on this machine, or None."""

    async def start():
        async with Sandbox() as box:
            assert (await box.exec("exit 3")).code == 3

    try:
        asyncio.run(asyncio.wait_for(start(), 120))
    except SandboxError as error:
        return str(error)
    return None


@pytest.fixture
def isolation(_isolation):
    """Skips a test where no sandbox starts, but fails as root on Debian, where the packages can be installed."""
    if _isolation is None:
        return
    if os.getuid() == 0 and pathlib.Path("/etc/debian_version").exists():
        pytest.fail(_isolation)
    pytest.skip(_isolation)


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fails a test that leaves a process, mount, control group, temporary folder or descriptor."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = all_that_sandboxes_make()
    yield
    assert made_since(before) == {}
