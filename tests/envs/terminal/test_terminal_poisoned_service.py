"""Poisoned tasks beside healthy ones through the whole path of reinforcement learning (acceptance check 28 of the
specification): a trainer, the orchestrator, services of terminal tasks, the gateway, and an engine whose policy poisons.

Two services, since shares and breakers are per service; that of the poisoned tasks has a healthy one too."""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import pytest

from glm5_jax.envs.terminal import AttemptConfig, load_task
from glm5_jax.envs.terminal.service import TerminalService
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.server import Orchestrator
from glm5_jax.runtime.http_server import find_free_port
from glm5_jax.text.tokenizer import Tokenizer
from tests.envs.leftovers import (
    descendants,
    folders,
    groups,
    namespaces,
    processes_in,
    still_there,
)
from tests.envs.terminal.folders import TOML, needs_root, own, shipped, shipped_cheats
from tests.rl.fleet import SOON, Engine, gateway, orchestrator_config, service_config, until
from tests.rl.test_orchestrator import sessions

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
TOKENIZER = Tokenizer.load("bytes")
LIMIT = 10.0  # seconds that a poisoned attempt has
ATTEMPT = AttemptConfig(max_turns=4)
SHORT = TOML.replace("30.0", str(LIMIT)).replace("memory_mb = 512", "memory_mb = 200")
SHORT += "build_timeout_sec = 60.0\n"
# What the policy does beside what a script does: its command has a limit of its own, or goes on behind its back.
COMMANDS = {name: (text, None) for name, text in POISONS.items()} | {
    "ended forks": (BOMB, 2),
    "forks behind": (f"setsid bash -c '{BOMB.replace(chr(39), chr(34))}' >/dev/null 2>&1 &", None),
    "a stopped shell": ("kill -STOP $$", 2),
}
TESTED = ("forks", "output")  # that the tests run, too
# What is told of attempts whose poison works, by its error or its tool.
BITES = {
    **dict.fromkeys(("forks", "endless-output", "stopped-init"), f"no end within {LIMIT:g} s"),
    **dict.fromkeys(("stopped-neighbours", "tested-forks"), f"no end within {LIMIT:g} s"),
    **dict.fromkeys(("ended-forks", "a-stopped-shell"), "no end within 2 s"),
    "memory": "out of memory",
}
GROUP, BATCH, STALENESS = 2, 4, 1
MOST = (STALENESS + 1) * BATCH * GROUP  # rollouts that are ever under way
DEADLINE = 200.0  # seconds of a poisoned rollout; it should take a tenth of them


class Attempts(Engine):
    """Its policy runs the command of the task that its prompt names, or, of those that may be left undone, leaves it as is
    drawn; then it is done. commands: by instruction, with seconds, and whether they may be left."""

    def __init__(self, commands):
        super().__init__()
        self._commands = commands

    def reply(self, prompt, draw):
        text = TOKENIZER.decode(prompt, errors="replace")
        if "<|observation|>" in text:
            return TOKENIZER.encode("</think>Done.<|user|>", parse_special=True)
        asked = next(asked for asked in self._commands if asked in text)
        command, seconds, left = self._commands[asked]
        if left and draw.random() < 0.5:
            return TOKENIZER.encode("I leave it.</think>Done.<|user|>", parse_special=True)
        limit = f"<arg_key>timeout_sec</arg_key><arg_value>{seconds}</arg_value>" if seconds else ""
        call = f"bash<arg_key>command</arg_key><arg_value>{command}</arg_value>{limit}"
        text = f"I do it.</think><tool_call>{call}</tool_call><|observation|>"
        return TOKENIZER.encode(text, parse_special=True)


class Course:
    """Folders of tasks in `top`, and what the policy does at them.

    healthy, poisoned: names in order of their service. asked: instruction -> name.
    """

    def __init__(self, top: pathlib.Path):
        self.top, self.asked, self.commands = top, {}, {}
        self.healthy, self.poisoned = [], []
        for name in HEALTHY:
            folder = shipped(name, top)
            solve = (folder / "solution" / "solve.sh").read_text()
            self._add(self.healthy, folder, solve, None, True)
        for name, (command, seconds) in COMMANDS.items():
            self._poison(name, SCORED, command, seconds)
        for name in TESTED:
            self._poison(f"tested {name}", RUN, f"cat > answer.sh <<'X'\n{POISONS[name]}\nX", None)
        self._poison("none", SCORED, "echo 1 > score", None, True)

    def _poison(self, name, test, command, seconds, left=False):
        files = {"instruction.md": f"Do what is called {name}.\n"}
        folder = own(self.top, name.replace(" ", "-"), toml=SHORT, test=test, **files)
        self._add(self.poisoned, folder, command, seconds, left)

    def _add(self, names, folder, command, seconds, left):
        asked = load_task(folder).instruction.strip()
        names.append(folder.name)
        self.asked[asked], self.commands[asked] = folder.name, (command, seconds, left)

    def service(self, name, orchestrator, **options):
        return service(
            str(self.top), getattr(self, name), name=name, orchestrator=orchestrator, **options
        )

    def task(self, group):
        """The name of the task that a group is of."""
        text = everything(group.members[0])
        [name] = [name for asked, name in self.asked.items() if asked in text]
        return name

    def check_rewards(self, found):
        """That each attempt is worth what its policy did; the tasks that were solved, and not. Of each poison one works
        at least: a script that is ended for its time may have come past its bomb."""
        solved, undone, said = set(), set(), collections.defaultdict(list)
        for group in found:
            task = self.task(group)
            for member in group.members:
                does = learnt(member).startswith("I do it.")
                may = task in self.healthy or task == "none"
                assert member.reward.value == float(does and may), (task, member.reward)
                said[task] += everything(member), member.reward.error
                if may:
                    (solved if does else undone).add(task)
                    assert member.reward.error == ""
        for task, words in said.items():
            assert BITES.get(task, "") in "\n".join(words), task
        return solved, undone


def service(top, names, *, name, orchestrator, **options):
    tasks = [load_task(pathlib.Path(top, own)) for own in names]
    options = (
        dict(rollout_timeout_s=500.0 if name == "healthy" else DEADLINE, heartbeat_interval_s=3.0)
        | options
    )
    return TerminalService(
        service_config(orchestrator, name, **options), tasks, (), TOKENIZER, ATTEMPT
    )


def learnt(member):
    """The text that is trained on."""
    [record] = member.records
    return TOKENIZER.decode(record.token_ids[record.loss_mask > 0].tolist(), errors="replace")


def everything(member):
    """The text of a member's record."""
    [record] = member.records
    return TOKENIZER.decode(record.token_ids.tolist(), errors="replace")


class Trainer:
    """Learns nothing from batches. groups: all that it has had."""

    def __init__(self, stack, course):
        self.engine = Attempts(course.commands)
        self.gate = stack.enter_context(gateway(stack.enter_context(self.engine.running())))
        # As in rl_agentic.py:tiny: while bombs have the processors, heartbeats are late.
        registry = dataclasses.replace(SOON["registry"], heartbeat_timeout_s=60.0)
        options = {"max_running": MOST, "registry": registry}
        orchestrator = Orchestrator(
            orchestrator_config(self.gate, GROUP, BATCH, STALENESS, **options)
        )
        self.orchestrator = stack.enter_context(orchestrator.running())
        self.client, self.step, self.groups = (
            OrchestratorClient(self.orchestrator, patience_s=10.0),
            0,
            [],
        )

    def train(self, enough, seconds=300.0):
        """Until it has had enough."""
        end = time.monotonic() + seconds
        if not self.step:
            self.client.begin(0, 0)
        while not enough():
            assert time.monotonic() < end, self.told()
            taken = self.client.take(self.step, 120)
            assert taken is not None, self.told()
            self.client.mark_trained(self.step)
            self.step += 1
            self.engine.version = self.step
            self.client.push(self.step)
            self.groups += taken

    def told(self):
        return json.dumps(self.client.status(), indent=1)

    def quiet(self, seconds):
        """The orchestrator's status, once no group begins any more and all have come."""
        self.client.pause()
        until(lambda: not self.client.status()["running"], seconds)
        return self.client.status()

    def of(self, name):
        return [group for group in self.groups if group.task == name]


def seconds_of(found, size):
    """Of the rollouts of groups behind the first epoch, in which images are built."""
    return sorted(m.duration_s for group in found if group.number >= size for m in group.members)


def check_accounts(trainer, status):
    """That nothing is counted as under way, and that as much may begin as the rule says."""
    assert (
        status["running"] == 0
        and status["groups"] == {}
        and status["blockers"] == ["the orchestrator is paused"]
    )
    step, version = status["step"], status["version"]
    assert status["num_admissible"] == (STALENESS + version - step + 1) * BATCH - status["waiting"]
    for told in status["tasks"].values():
        assert told["in_flight"] == told["groups"] == 0 and told["breaker"] == "closed"
        came = told["accepted_groups"] + told["dropped_groups"]
        assert told["cancelled_groups"] == 0 and told["rollouts"] == GROUP * came
        assert told["accepted"] == told["rollouts"] - told["failed"] and told["forfeit"] == 0
    until(lambda: sessions(trainer.gate) == 0)


def alone(course):
    """The seconds of healthy rollouts with nothing beside them."""
    with contextlib.ExitStack() as stack:
        trainer = Trainer(stack, course)
        healthy = course.service("healthy", trainer.orchestrator, max_inflight=MOST // 3)
        stack.enter_context(healthy.running())
        trainer.train(lambda: len(trainer.of("healthy")) >= 16)
        course.check_rewards(trainer.groups)
        check_accounts(trainer, trainer.quiet(60))
    return seconds_of(trainer.groups, len(HEALTHY))


def test_healthy_groups_come_as_ever_beside_poisoned_ones_and_nothing_is_left(tmp_path, capsys):
    course = Course(tmp_path)
    quiet = alone(course)
    mounts = pathlib.Path("/proc/self/mounts").read_text()
    with contextlib.ExitStack() as stack:
        trainer = Trainer(stack, course)
        # Twice as many poisoned attempts as healthy ones, and neither ever has as many under way as it may.
        for name, weight in (("healthy", 1.0), ("poisoned", 2.0)):
            one = course.service(name, trainer.orchestrator, max_inflight=MOST, weight=weight)
            stack.enter_context(one.running())
        until(lambda: len(trainer.client.status()["tasks"]) == 2)
        trainer.train(
            lambda: (
                {course.task(group) for group in trainer.groups} >= {*course.poisoned}
                and len(trainer.of("healthy")) >= 12
            )
        )
        solved, undone = course.check_rewards(trainer.groups)
        status = trainer.quiet(DEADLINE)
        check_accounts(trainer, status)
        # With the services still there only what they start sandboxes from is.
        assert namespaces() == set() and groups() == []
        assert pathlib.Path("/proc/self/mounts").read_text() == mounts
        made = os.listdir(tempfile.gettempdir())
        assert made and all(f"-{os.getpid()}-" in name and "-layer-" in name for name in made)
        assert len(made) <= len({*HEALTHY}) + 3  # each image, that of all poisons, tools of both
    assert solved & {*HEALTHY} and undone & {*HEALTHY}
    tasks = status["tasks"]
    assert abs(tasks["healthy"]["accepted"] - tasks["poisoned"]["accepted"] / 2) <= 2 * GROUP
    assert tasks["healthy"]["failures"] == 0, tasks["healthy"]["error"]
    beside = seconds_of(trainer.of("healthy"), len(HEALTHY))
    poisoned = seconds_of(trainer.of("poisoned"), 0)
    with capsys.disabled():
        for name, found in (("alone", quiet), ("beside", beside), ("poisoned", poisoned)):
            print(
                f"{name}: {len(found)} rollouts, median {statistics.median(found):.1f} s, at most {found[-1]:.1f} s"
            )
        print({name: [told["failures"], told["accepted"]] for name, told in tasks.items()})
    # Of few processors each sandbox has an equal share. A healthy attempt that waited for a poisoned one would take as long.
    share = max(4, MOST / os.cpu_count())
    assert statistics.median(beside) < min(LIMIT, share * statistics.median(quiet))
    assert beside[-1] < 10 * quiet[-1]
    assert poisoned[-1] < DEADLINE


KILLED = """
import asyncio, json, sys
from tests.envs.terminal.test_terminal_poisoned_service import service
asyncio.run(service(**json.loads(sys.argv[1])).serve(lambda port: print(port, flush=True)))
"""


@contextlib.contextmanager
def process(course, **options):
    """The service of the poisoned tasks as a process of its own, which is killed at the end."""
    said = json.dumps(
        {"top": str(course.top), "names": course.poisoned, "name": "poisoned"} | options
    )
    env = os.environ | {"TMPDIR": tempfile.gettempdir()}
    command = [sys.executable, "-c", KILLED, said]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        try:
            assert child.stdout.readline().strip().isdigit()
            yield child
        finally:
            child.kill()


def test_a_killed_service_takes_its_sandboxes_along_and_the_next_sweeps_what_is_left(tmp_path):
    course = Course(tmp_path)
    with contextlib.ExitStack() as stack:
        trainer = Trainer(stack, course)
        healthy = course.service("healthy", trainer.orchestrator, max_inflight=MOST)
        stack.enter_context(healthy.running())
        options = {
            "orchestrator": trainer.orchestrator,
            "port": find_free_port(),
            "max_inflight": MOST,
        }
        with process(course, **options) as child:
            # Fork bombs and endless output of at least four attempts.
            trainer.train(lambda: trainer.of("healthy"))
            until(lambda: len(namespaces(child.pid)) >= 4, 60)
            killed = namespaces(child.pid), descendants(child.pid)
            assert groups(child.pid) and folders(child.pid)
            child.kill()
        until(lambda: not any(map(processes_in, killed[0])) and not still_there(killed[1]), 30)
        mine = folders(os.getpid())
        with process(course, **options) as other:
            before = len(trainer.of("poisoned"))
            # Of those that the killed one had under way, or was given while it was away, some may be left out.
            trainer.train(lambda: len(trainer.of("poisoned")) >= before + 8)
            assert groups(child.pid) == folders(child.pid) == []
            # Another's that is alive are not touched.
            assert mine and {*mine} <= {*folders(os.getpid())} and folders(other.pid)
            status = trainer.quiet(DEADLINE)
            other.send_signal(signal.SIGTERM)
            assert other.wait(60) == 0
        assert groups(other.pid) == folders(other.pid) == []
        solved, _ = course.check_rewards(trainer.groups)
        assert solved and status["tasks"]["poisoned"]["breaker"] == "closed"
