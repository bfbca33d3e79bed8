"""Poisoned repositories end in time, next to a healthy one that is built at the same time."""

import asyncio

import pytest

from glm5_jax.envs.swe.builder import BuildError, RuleBuilder
from glm5_jax.envs.swe.file_tree import text_file, with_changes
from glm5_jax.envs.swe.layers import LayerStore, SweLimits
from tests.envs.swe.tiny_project import BASE

POISONS = {
    "forks": "import os\nwhile True:\n    os.fork()\n",
    "fills the log": "import sys\nwhile True:\n    sys.stderr.write('x' * 1_000_000 + '\\n')\n",
    "fills the disk": "with open('/tmp/big', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 24))\n",
    "fills the memory": "held = []\nwhile True:\n    held.append(bytes(1 << 26))\n",
    "kills its parents": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "never ends": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True:\n    pass\n",
}
LIMITS = SweLimits(test_timeout_s=10, memory_bytes=1 << 29, disk_bytes=1 << 28, max_processes=128)


@pytest.mark.slow
def test_poisoned_projects_end_in_time_next_to_healthy_one(builder, nothing_left):
    quick = RuleBuilder(LayerStore(builder.store.folder, LIMITS))

    async def build(poison: str | None) -> str:
        files = {"tests/test_poison.py": text_file(poison)} if poison else {}
        try:
            built = await quick.build(with_changes(BASE, files))
        except BuildError as error:
            return str(error)
        return f"built with {len(built.record.test_status)} tests"

    async def build_all() -> list[str]:
        async with asyncio.timeout(300):
            return await asyncio.gather(*map(build, [*POISONS.values(), None]))

    *poisoned, healthy = asyncio.run(build_all())

    assert healthy == "built with 2 tests"
    for name, result in zip(POISONS, poisoned):
        assert result.startswith("verify: "), (name, result)
