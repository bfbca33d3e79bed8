"""Poisoned environments beside healthy ones (acceptance check 28 of the specification), through whole trials."""

import asyncio

import pytest

from glm5_jax.envs.terminal import Oracle, Trials, load_task
from tests.envs.leftovers import run
from tests.envs.terminal.folders import (
    TOML,
    Text,
    needs_root,
    own,
    shipped,
    shipped_cheats,
)

pytestmark = [pytest.mark.usefixtures("isolation", "nothing_left"), pytest.mark.slow, needs_root]
HEALTHY = ("log-levels", "fix-median", "todo-cli", "csv-join")
SCORED = "cat /app/score > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
BOMB = "python3 -c 'import os, time\nwhile True:\n  try: os.fork() or os.setsid()\n  except OSError: time.sleep(0.01)'"
# As an agent's script, and as a program that the tests of an ordinary task run.
POISONS = {
    "forks": BOMB,
    "memory": "python3 -c 'x = []\nwhile True: x.append(bytearray(b\"x\" * 2**20))'",
    "output": "head -c 300M /dev/zero; head -c 300M /dev/zero >&2",
    "endless output": "yes; true",
    "disk": "head -c 900M /dev/zero > /app/x; cat /dev/zero > /dev/shm/x",
    "files": "i=0; while mkdir -p d$i/d/d/d/d; do i=$((i+1)); [ $i -gt 30000 ] && break; done",
    "stopped init": shipped_cheats()["stopped-init"][1] + BOMB,
    "stopped neighbours": "kill -STOP -1; sleep 100",
}
RUN = "bash /app/answer.sh; echo 0 > /logs/verifier/reward.txt"


def test_healthy_trials_end_as_ever_and_nothing_is_left(tmp_path):
    healthy = [load_task(shipped(name, tmp_path)) for name in HEALTHY]
    toml = TOML.replace("30.0", "4.0").replace("memory_mb = 512", "memory_mb = 200")
    poisoned = load_task(own(tmp_path, "poisoned", toml=toml, test=SCORED))
    tested = load_task(own(tmp_path, "tested", toml=toml, test=RUN))

    async def attempt_all(trials):
        results = await asyncio.gather(*(trials.run(task, Oracle()) for task in healthy))
        assert [(result.reward, result.error) for result in results] == [(1.0, None)] * len(HEALTHY)
        return max(result.seconds for result in results)

    async def work():
        async with Trials() as trials:
            await attempt_all(trials)  # builds the images
            alone = await attempt_all(trials)
            bad = [
                *(trials.run(poisoned, Text(text)) for text in POISONS.values()),
                *(
                    trials.run(tested, Text(f"cat > answer.sh <<'X'\n{text}\nX"))
                    for text in POISONS.values()
                ),
            ]
            bad = [asyncio.create_task(trial) for trial in bad]
            await asyncio.sleep(1.0)
            beside = [await attempt_all(trials) for _ in range(2)]
            return alone, beside, await asyncio.gather(*bad)

    alone, beside, results = run(work())
    assert [result.reward for result in results] == [0.0] * len(results), results
    # As many processors as there are tasks they have neither way; a share of each is theirs.
    assert max(beside) < 10 * alone, (alone, beside)
