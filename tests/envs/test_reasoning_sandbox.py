"""Programs judged in real sandboxes: cheats find no more there than in the local sandbox of other tests."""

import pytest

from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from tests.envs.local_sandbox import LocalSandbox
from tests.envs.terminal.folders import slow_but
from tests.envs.test_reasoning_code import ADD, BOMBS, CHEATS, DOUBLE, HONEST, is_wrong, reward_of

sandbox = pytest.importorskip("glm5_jax.envs.sandbox")
pytestmark = pytest.mark.usefixtures("isolation", "nothing_left")
CONFIG = VerifierConfig(timeout_s=60, code_timeout_s=20)
QUICK = VerifierConfig(timeout_s=60, code_timeout_s=2)


def in_sandbox(data, code, config=CONFIG):
    return reward_of(data, code, config, sandbox=None)


def test_honest_programs_pass():
    assert in_sandbox(ADD, HONEST).value == 1.0
    assert in_sandbox(DOUBLE, "print(2 * int(input()))").value == 1.0


def test_program_has_no_network_or_host_files():
    code = (
        "import os, socket\ndef add(a, b):\n"
        f"    if os.path.exists({__file__!r}): return 0\n"
        "    try: socket.create_connection(('127.0.0.1', 22), 1)\n"
        "    except ConnectionRefusedError: return a + b\n"
        "    except OSError: return a + b\n"
        "    return 0"
    )
    assert in_sandbox(ADD, code).value == 1.0


@pytest.mark.parametrize("cheat", slow_but(["looks for the tests", "kills its group"], CHEATS))
def test_cheats_score_zero(cheat):
    assert is_wrong(in_sandbox(ADD, CHEATS[cheat]))


@pytest.mark.parametrize("bomb", slow_but(["forks"], BOMBS))
def test_bombs_score_zero(bomb):
    assert is_wrong(in_sandbox(ADD, BOMBS[bomb], QUICK))


def test_sandbox_has_limits_of_config(monkeypatch):
    configs = []

    def make_sandbox(config):
        configs.append(config)
        return LocalSandbox()

    monkeypatch.setattr(sandbox, "Sandbox", make_sandbox)
    assert (
        in_sandbox(DOUBLE, "", VerifierConfig(code_timeout_s=7, code_memory_bytes=2**28)).value
        == 0.0
    )
    config = configs[0]
    assert (config.timeout_s, config.memory_bytes, config.disk_bytes) == (7, 2**28, 2**27)
