"""Poisoned tasks next to healthy ones in the full RL system (acceptance check 28 of the specification).

The system is a trainer, the orchestrator, services of terminal tasks, the gateway, and an engine whose policy poisons.
There are two services, since shares and breakers are per service. That of the poisoned tasks has a healthy task too.
"""

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
    running_processes,
)
from tests.envs.terminal.folders import TOML, make_task, needs_root, shipped_cheats, write_shipped
from tests.rl.fleet import (
    SOON,
    Engine,
    gateway,
    num_sessions,
    orchestrator_config,
    service_config,
    until,
)

pytestmark = [pytest.mark.usefixtures("isolation", "nothing_left"), pytest.mark.slow, needs_root]
HEALTHY = ("log-levels", "fix-median", "todo-cli", "csv-join")
SCORED = "cat /app/score > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
BOMB = "python3 -c 'import os, time\nwhile True:\n  try: os.fork() or os.setsid()\n  except OSError: time.sleep(0.01)'"
# Used as an agent's script, and as a program that the tests of an ordinary task run.
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
LIMIT = 10.0  # time limit of a poisoned attempt, in seconds
ATTEMPT = AttemptConfig(max_turns=4)
SHORT = TOML.replace("30.0", str(LIMIT)).replace("memory_mb = 512", "memory_mb = 200")
SHORT += "build_timeout_sec = 60.0\n"
# Additional commands of the policy: with a time limit, in the background, and with a stopped shell.
COMMANDS = {name: (text, None) for name, text in POISONS.items()} | {
    "ended forks": (BOMB, 2),
    "forks in background": (
        f"setsid bash -c '{BOMB.replace(chr(39), chr(34))}' >/dev/null 2>&1 &",
        None,
    ),
    "a stopped shell": ("kill -STOP $$", 2),
}
TESTED = ("forks", "output")  # the tests run these, too
# Texts of attempts whose poison works, in the error or in the result of the tool.
EXPECTED_ERRORS = {
    **dict.fromkeys(("forks", "endless-output", "stopped-init"), f"no end within {LIMIT:g} s"),
    **dict.fromkeys(("stopped-neighbours", "tested-forks"), f"no end within {LIMIT:g} s"),
    **dict.fromkeys(("ended-forks", "a-stopped-shell"), "no end within 2 s"),
    "memory": "out of memory",
}
GROUP, BATCH, STALENESS = 2, 4, 1
MAX_RUNNING = (STALENESS + 1) * BATCH * GROUP  # maximum number of running rollouts
DEADLINE = 200.0  # time limit of a poisoned rollout, in seconds; it should take a tenth of it


class Attempts(Engine):
    """Engine whose policy runs the command of the task in its prompt, and then stops.

    commands: {instruction: (command, seconds, may be skipped)}; commands that may be skipped are run by chance.
    """

    def __init__(self, commands):
        super().__init__()
        self._commands = commands

    def reply(self, prompt, draw):
        text = TOKENIZER.decode(prompt, errors="replace")
        if "<|observation|>" in text:
            return TOKENIZER.encode("</think>Done.<|user|>", parse_special=True)
        instruction = next(instruction for instruction in self._commands if instruction in text)
        command, seconds, left = self._commands[instruction]
        if left and draw.random() < 0.5:
            return TOKENIZER.encode("I leave it.</think>Done.<|user|>", parse_special=True)
        limit = f"<arg_key>timeout_sec</arg_key><arg_value>{seconds}</arg_value>" if seconds else ""
        call = f"bash<arg_key>command</arg_key><arg_value>{command}</arg_value>{limit}"
        text = f"I do it.</think><tool_call>{call}</tool_call><|observation|>"
        return TOKENIZER.encode(text, parse_special=True)


class Course:
    """Folders of tasks in `top`, with the commands of the policy.

    healthy, poisoned: names in order of their service. names_by_instruction: instruction -> name.
    """

    def __init__(self, top: pathlib.Path):
        self.top, self.names_by_instruction, self.commands = top, {}, {}
        self.healthy, self.poisoned = [], []
        for name in HEALTHY:
            folder = write_shipped(name, top)
            solve = (folder / "solution" / "solve.sh").read_text()
            self._add(self.healthy, folder, solve, None, True)
        for name, (command, seconds) in COMMANDS.items():
            self._poison(name, SCORED, command, seconds)
        for name in TESTED:
            self._poison(f"tested {name}", RUN, f"cat > answer.sh <<'X'\n{POISONS[name]}\nX", None)
        self._poison("none", SCORED, "echo 1 > score", None, True)

    def _poison(self, name, test, command, seconds, left=False):
        files = {"instruction.md": f"Do what is called {name}.\n"}
        folder = make_task(self.top, name.replace(" ", "-"), toml=SHORT, test=test, **files)
        self._add(self.poisoned, folder, command, seconds, left)

    def _add(self, names, folder, command, seconds, left):
        instruction = load_task(folder).instruction.strip()
        names.append(folder.name)
        self.names_by_instruction[instruction], self.commands[instruction] = (
            folder.name,
            (command, seconds, left),
        )

    def service(self, name, orchestrator, **options):
        return service(
            str(self.top), getattr(self, name), name=name, orchestrator=orchestrator, **options
        )

    def task(self, group):
        """Returns the name of a group's task."""
        text = full_text(group.members[0])
        [name] = [
            name for instruction, name in self.names_by_instruction.items() if instruction in text
        ]
        return name

    def check_rewards(self, finished):
        """Checks that each attempt has the reward of its policy. Returns the solved tasks, and the skipped ones.

        Of each poison at least one attempt must work: a script that reaches its time limit may have passed its bomb.
        """
        solved, undone, texts = set(), set(), collections.defaultdict(list)
        for group in finished:
            task = self.task(group)
            for member in group.members:
                does = trained_text(member).startswith("I do it.")
                may = task in self.healthy or task == "none"
                assert member.reward.value == float(does and may), (task, member.reward)
                texts[task] += full_text(member), member.reward.error
                if may:
                    (solved if does else undone).add(task)
                    assert member.reward.error == ""
        for task, words in texts.items():
            assert EXPECTED_ERRORS.get(task, "") in "\n".join(words), task
        return solved, undone


def service(top, names, *, name, orchestrator, **options):
    tasks = [load_task(pathlib.Path(top, task_name)) for task_name in names]
    options = (
        dict(rollout_timeout_s=500.0 if name == "healthy" else DEADLINE, heartbeat_interval_s=3.0)
        | options
    )
    return TerminalService(
        service_config(orchestrator, name, **options), tasks, (), TOKENIZER, ATTEMPT
    )


def trained_text(member):
    """Returns the text that is trained on."""
    [record] = member.records
    return TOKENIZER.decode(record.token_ids[record.loss_mask > 0].tolist(), errors="replace")


def full_text(member):
    """Returns the text of a member's record."""
    [record] = member.records
    return TOKENIZER.decode(record.token_ids.tolist(), errors="replace")


class Trainer:
    """Trainer that takes batches without training.

    groups: all groups of its batches.
    """

    def __init__(self, stack, course):
        self.engine = Attempts(course.commands)
        self.gate = stack.enter_context(gateway(stack.enter_context(self.engine.running())))
        # As in rl_agentic.py:tiny, because heartbeats are late while bombs use the processors.
        registry = dataclasses.replace(SOON["registry"], heartbeat_timeout_s=60.0)
        options = {"max_running": MAX_RUNNING, "registry": registry}
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
        """Takes batches until `enough()` is true."""
        end = time.monotonic() + seconds
        if not self.step:
            self.client.begin(0, 0)
        while not enough():
            assert time.monotonic() < end, self.status_text()
            taken = self.client.take(self.step, 120)
            assert taken is not None, self.status_text()
            self.client.mark_trained(self.step)
            self.step += 1
            self.engine.version = self.step
            self.client.push(self.step)
            self.groups += taken

    def status_text(self):
        return json.dumps(self.client.status(), indent=1)

    def quiet(self, seconds):
        """Returns the orchestrator's status, after new groups are paused and all running ones have arrived."""
        self.client.pause()
        until(lambda: not self.client.status()["running"], seconds)
        return self.client.status()

    def of(self, name):
        return [group for group in self.groups if group.task == name]


def seconds_of(finished, size):
    """Returns the sorted seconds of rollouts, without the first epoch, in which images are built."""
    return sorted(m.duration_s for group in finished if group.number >= size for m in group.members)


def check_accounts(trainer, status):
    """Checks that nothing counts as running, and that the admissible number is that of the rule."""
    assert (
        status["running"] == 0
        and status["groups"] == {}
        and status["blockers"] == ["the orchestrator is paused"]
    )
    step, version = status["step"], status["version"]
    assert status["num_admissible"] == (STALENESS + version - step + 1) * BATCH - status["waiting"]
    for counts in status["tasks"].values():
        assert counts["in_flight"] == counts["groups"] == 0 and counts["breaker"] == "closed"
        came = counts["accepted_groups"] + counts["dropped_groups"]
        assert counts["cancelled_groups"] == 0 and counts["rollouts"] == GROUP * came
        assert (
            counts["accepted"] == counts["rollouts"] - counts["failed"] and counts["forfeit"] == 0
        )
    until(lambda: num_sessions(trainer.gate) == 0)


def seconds_without_poison(course):
    """Returns the seconds of healthy rollouts without other tasks."""
    with contextlib.ExitStack() as stack:
        trainer = Trainer(stack, course)
        healthy = course.service("healthy", trainer.orchestrator, max_inflight=MAX_RUNNING // 3)
        stack.enter_context(healthy.running())
        trainer.train(lambda: len(trainer.of("healthy")) >= 16)
        course.check_rewards(trainer.groups)
        check_accounts(trainer, trainer.quiet(60))
    return seconds_of(trainer.groups, len(HEALTHY))


def test_poisoned_tasks_do_not_delay_healthy_ones(tmp_path, capsys):
    course = Course(tmp_path)
    quiet = seconds_without_poison(course)
    mounts = pathlib.Path("/proc/self/mounts").read_text()
    with contextlib.ExitStack() as stack:
        trainer = Trainer(stack, course)
        # Twice as many poisoned attempts as healthy ones; neither service reaches its maximum.
        for name, weight in (("healthy", 1.0), ("poisoned", 2.0)):
            one = course.service(
                name, trainer.orchestrator, max_inflight=MAX_RUNNING, weight=weight
            )
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
        # While the services run, only their images exist.
        assert namespaces() == set() and groups() == []
        assert pathlib.Path("/proc/self/mounts").read_text() == mounts
        remaining = os.listdir(tempfile.gettempdir())
        assert remaining and all(
            f"-{os.getpid()}-" in name and "-layer-" in name for name in remaining
        )
        # Each image, one for all poisons, and tools of both.
        assert len(remaining) <= len({*HEALTHY}) + 3
    assert solved & {*HEALTHY} and undone & {*HEALTHY}
    tasks = status["tasks"]
    assert abs(tasks["healthy"]["accepted"] - tasks["poisoned"]["accepted"] / 2) <= 2 * GROUP
    assert tasks["healthy"]["failures"] == 0, tasks["healthy"]["error"]
    concurrent = seconds_of(trainer.of("healthy"), len(HEALTHY))
    poisoned = seconds_of(trainer.of("poisoned"), 0)
    with capsys.disabled():
        for name, seconds in (
            ("healthy only", quiet),
            ("healthy with poisoned", concurrent),
            ("poisoned", poisoned),
        ):
            print(
                f"{name}: {len(seconds)} rollouts, median {statistics.median(seconds):.1f} s, at most {seconds[-1]:.1f} s"
            )
        print({name: [counts["failures"], counts["accepted"]] for name, counts in tasks.items()})
    # Sandboxes share the processors equally. A healthy attempt that waits for a poisoned one would take as long as that.
    share = max(4, MAX_RUNNING / os.cpu_count())
    assert statistics.median(concurrent) < min(LIMIT, share * statistics.median(quiet))
    assert concurrent[-1] < 10 * quiet[-1]
    assert poisoned[-1] < DEADLINE


KILLED = """
import asyncio, json, sys
from tests.envs.terminal.test_terminal_poisoned_service import service
asyncio.run(service(**json.loads(sys.argv[1])).serve(lambda port: print(port, flush=True)))
"""


@contextlib.contextmanager
def process(course, **options):
    """Runs the service of the poisoned tasks in a separate process, which is killed at the end."""
    arguments = json.dumps(
        {"top": str(course.top), "names": course.poisoned, "name": "poisoned"} | options
    )
    env = os.environ | {"TMPDIR": tempfile.gettempdir()}
    command = [sys.executable, "-c", KILLED, arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        try:
            assert child.stdout.readline().strip().isdigit()
            yield child
        finally:
            child.kill()


def test_killed_service_ends_sandboxes_and_next_one_sweeps(tmp_path):
    course = Course(tmp_path)
    with contextlib.ExitStack() as stack:
        trainer = Trainer(stack, course)
        healthy = course.service("healthy", trainer.orchestrator, max_inflight=MAX_RUNNING)
        stack.enter_context(healthy.running())
        options = {
            "orchestrator": trainer.orchestrator,
            "port": find_free_port(),
            "max_inflight": MAX_RUNNING,
        }
        with process(course, **options) as child:
            # Fork bombs and endless output of at least four attempts.
            trainer.train(lambda: trainer.of("healthy"))
            until(lambda: len(namespaces(child.pid)) >= 4, 60)
            killed = namespaces(child.pid), descendants(child.pid)
            assert groups(child.pid) and folders(child.pid)
            child.kill()
        until(
            lambda: not any(map(processes_in, killed[0])) and not running_processes(killed[1]), 30
        )
        mine = folders(os.getpid())
        with process(course, **options) as other:
            before = len(trainer.of("poisoned"))
            # Some groups of the killed service, and of the time without a service, may be dropped.
            trainer.train(lambda: len(trainer.of("poisoned")) >= before + 8)
            assert groups(child.pid) == folders(child.pid) == []
            # Folders of other live processes stay.
            assert mine and {*mine} <= {*folders(os.getpid())} and folders(other.pid)
            status = trainer.quiet(DEADLINE)
            other.send_signal(signal.SIGTERM)
            assert other.wait(60) == 0
        assert groups(other.pid) == folders(other.pid) == []
        solved, _ = course.check_rewards(trainer.groups)
        assert solved and status["tasks"]["poisoned"]["breaker"] == "closed"
