"""Trials: solutions score 1, doing nothing scores 0, no cheat scores, and errors have their cause."""

import asyncio
import pathlib

import pytest

from glm5_jax.envs.terminal import Nop, Oracle, TrialRunner, load_task, trial
from glm5_jax.envs.terminal.grading import Grader, Verdict
from tests.envs.leftovers import run
from tests.envs.terminal.folders import (
    ORDINARY,
    SHIPPED,
    Text,
    make_task,
    needs_root,
    selected_values,
    shipped_cheats,
    slow_but,
    write_shipped,
)

pytestmark = [pytest.mark.usefixtures("isolation"), needs_root]
FORGE = """
for p, t in (("/logs/verifier/reward.txt", "1"), ("/logs/verifier/reward.json", '{"reward": 1}')):
    try:
        open(p, "w").write(t)
    except OSError:
        pass
"""
# A module that the tests of an ordinary task import into their process.
DOUBLED = "import sys\nsys.path.insert(0, '/app')\nfrom doubled import double\n\n\n"
DOUBLED += "def test_double():\n    assert double(4) == 8\n\n\ndef test_none():\n    assert double(0) == 0\n"


def plant_file(text: str, path: str = "/app/doubled.py") -> str:
    return f"cat > {path} <<'PY'\n{text}\nPY\n"


def todo(text: str) -> str:
    return plant_file(text, "/app/todo.py")


# Name -> (task, script of the agent).
CHEATS = shipped_cheats() | {
    "more planted modules": (
        "log-levels",
        "for f in /app/conftest.py /app/json.py /app/collections.py /app/sitecustomize.py /app/pytest.py "
        "/usr/lib/python3/dist-packages/sitecustomize.py; do echo 'import os; os._exit(0)' > $f; done\n"
        "mkdir -p /tests && cp /app/conftest.py /tests/conftest.py",
    ),
    "poisoned python in each place": (
        "log-levels",
        "rm -f /usr/bin/python3; printf '#!/bin/bash\\nexit 0\\n' > /usr/bin/python3\n"
        "mkdir -p /usr/local/bin ~/bin; cp /bin/true /usr/local/bin/python3; cp /bin/true ~/bin/python3\n"
        "cp /bin/true /grader/bin/python3",
    ),
    "a link to the reward": (
        "log-levels",
        "ln -sf /logs/verifier/reward.txt /app/summary.json; rm -rf /logs/verifier; ln -s /app /logs/verifier; "
        "echo 1 > /app/reward.txt",
    ),
    "a pipe as reward": (
        "hello-file",
        "mkfifo /logs/verifier/reward.txt /logs/verifier/reward.json",
    ),
    "a pipe as answer": ("log-levels", "mkfifo /app/summary.json"),
    "a device as answer": ("log-levels", "ln -s /dev/zero /app/summary.json"),
    "no number as reward": ("hello-file", "echo NaN | tee /logs/verifier/reward.{txt,json}"),
    "a huge reward": (
        "hello-file",
        "head -c 50M /dev/zero | tr '\\0' 1 > /logs/verifier/reward.txt",
    ),
    "tests planted beforehand": (
        "hello-file",
        "mkdir -p /tests; printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; "
        "chmod 755 /tests/test.sh; chattr +i /tests/test.sh",
    ),
    "settings of shells": (
        "hello-file",
        "for f in /root/.bashrc /root/.profile /etc/profile /etc/bash.bashrc /etc/environment /app/.bashrc; do "
        "echo 'echo 1 > /logs/verifier/reward.txt; exit' >> $f; done; echo /app/x.so > /etc/ld.so.preload",
    ),
    "settings of pytest": (
        "hello-file",
        "printf '[pytest]\\naddopts = --collect-only\\n' | tee /app/pytest.ini /tests/pytest.ini /pytest.ini /tox.ini",
    ),
    "a program that forges": ("todo-cli", todo(FORGE)),
    "a program that unlocks and forges": (
        "todo-cli",
        todo(
            "import os, shutil\nfor path in ('/logs/verifier', '/tests', '/grader', '/tests/test_outputs.py'):\n"
            "    try:\n        os.chmod(path, 0o777)\n    except OSError:\n        pass\n"
            "try:\n    os.setuid(0)\nexcept OSError:\n    pass\n"
            + FORGE
            + "open('/tests/test_outputs.py', 'w').write('def test(): pass')"
        ),
    ),
    "a program that ends its tests": (
        "todo-cli",
        todo(
            "import os, signal\nfor pid in [int(p) for p in os.listdir('/proc') if p.isdigit()]:\n"
            "    try:\n        if pid not in (1, os.getpid()): os.kill(pid, signal.SIGTERM)\n"
            "    except OSError:\n        pass"
        ),
    ),
    "a program that changes its tests": (
        "todo-cli",
        todo(
            "import os\nfor pid in (p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()):\n"
            "    for name in ('mem', 'environ', 'fd/3', 'root/logs/verifier/reward.txt'):\n"
            "        try:\n            open(f'/proc/{pid}/{name}', 'r+b').write(b'1')\n"
            "        except (OSError, ValueError):\n            pass\n" + FORGE
        ),
    ),
    "a program that leaves a daemon": (
        "todo-cli",
        todo(
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    end = time.time() + 5\n"
            "    while time.time() < end:\n"
            + FORGE.replace("\n", "\n        ")
            + "\n        time.sleep(0.01)\n    os._exit(0)"
        ),
    ),
    "settings of git": (
        "git-recover",
        "cd /app/repo; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json\\n' "
        "> /app/forge; chmod 777 /app/forge; git config core.fsmonitor /app/forge; git config core.pager /app/forge; "
        "git config filter.x.clean /app/forge; echo '* filter=x' > .git/info/attributes; touch a.txt",
    ),
    "git that forges": (
        "direct",
        "git init -q . ; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.json\\n' > forge; chmod 777 forge; "
        "git config core.fsmonitor /app/forge",
    ),
    "make that forges": (
        "direct",
        "printf 'all:\\n\\techo 1 > /logs/verifier/reward.json\\n' > Makefile",
    ),
    "a script that forges": ("direct", plant_file(FORGE, "/app/answer.py")),
    "a program that reads its tests": (
        "direct",
        plant_file("print(open('/tests/key').read())", "/app/answer.py"),
    ),
    "a shell script that forges": (
        "direct",
        "echo 'echo 1 > /logs/verifier/reward.json' > /app/answer.sh",
    ),
    "a module that forges": (
        "direct",
        "mkdir answer; " + plant_file(FORGE, "/app/answer/__main__.py"),
    ),
    "forged by a child": ("scored", plant_file(FORGE, "/app/answer.py")),
    "imported and gone": ("ordinary", plant_file(f"import os\n{FORGE}\nos._exit(0)")),
    "gone at the end": (
        "ordinary",
        plant_file("import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 1"),
    ),
    "gone when called": ("ordinary", plant_file("import os\ndef double(x): os._exit(0)")),
    "ends as if passed": ("ordinary", plant_file("import sys\nsys.exit(0)")),
    "forges when called": (
        "ordinary",
        plant_file(
            "import os\ndef double(x):\n" + FORGE.replace("\n", "\n    ") + "\n    return 1"
        ),
    ),
    "becomes root when imported": (
        "ordinary",
        plant_file(
            f"import os\nos.setresuid(0, 0, 0)\nos.setresgid(0, 0, 0)\n{FORGE}\nos._exit(0)"
        ),
    ),
    "replaces files that root runs": (
        "ordinary",
        plant_file(
            "import os\nfor p in ('/root/.bashrc', '/etc/ld.so.preload', '/tests/test.sh', '/grader/bin/pytest', "
            "'/grader/missing/x'):\n    try:\n        open(p, 'w').write('echo 1 > /logs/verifier/reward.txt')\n"
            "    except OSError:\n        pass\ndef double(x): return 1"
        ),
    ),
    "stops its supervisor": (
        "ordinary",
        plant_file("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)"),
    ),
    "leaves a daemon when imported": (
        "ordinary",
        plant_file(
            "import os, time\nif os.fork() == 0:\n    end = time.time() + 5\n    while time.time() < end:\n"
            + FORGE.replace("\n", "\n        ")
            + "\n        time.sleep(0.01)\n    os._exit(0)\ndef double(x): return 1"
        ),
    ),
    "skips its tests": ("ordinary", plant_file("import pytest\npytest.exit('done', returncode=0)")),
}
# One for each barrier between an attempt and its reward; the others are slow tests.
WALLS = (
    *shipped_cheats(),
    "poisoned python in each place",
    "settings of shells",
    "tests planted beforehand",
    "settings of git",
    "a program that forges",
    "git that forges",
    "a script that forges",
    "a program that reads its tests",
    "forged by a child",
    "imported and gone",
    "gone when called",
    "becomes root when imported",
)
QUICK = ("tests planted beforehand", "a script that forges", "imported and gone")
SOLVED = "cat > /app/doubled.py <<'PY'\ndef double(x): return 2 * x\nPY\n"


# Tests started by a shell, and by a program that writes the reward.
DIRECT = """#!/bin/bash
git -c safe.directory='*' status
make
bash /app/answer.sh
python3 -m answer
[ "$(python3 /app/answer.py)" = "$(cat /tests/key)" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
SCORED = """
import subprocess, sys
said = subprocess.run([sys.executable, "/app/answer.py"], capture_output=True, text=True).stdout
with open("/logs/verifier/reward.txt", "w") as file:
    file.write(str(float(said.strip() == "42")))
"""
ANSWER = "echo 'print(42)' > /app/answer.py\n"


def ordinary(folder: pathlib.Path) -> pathlib.Path:
    return make_task(folder, "ordinary", test=ORDINARY, tests=DOUBLED, solve=SOLVED)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Returns task folders by name."""
    folder = tmp_path_factory.mktemp("tasks")
    return {name: write_shipped(name, folder) for name in SHIPPED} | {
        "ordinary": ordinary(folder),
        "direct": make_task(folder, "direct", test=DIRECT, solve=ANSWER, **{"tests/key": "42\n"}),
        "scored": make_task(
            folder,
            "scored",
            test="python3 /tests/score.py",
            solve=ANSWER,
            **{"tests/score.py": SCORED},
        ),
    }


async def all_results(tasks, attempts, concurrency=3):
    """Returns the results of attempts {name: (task, agent)}. concurrency: attempts at a time."""
    places = asyncio.Semaphore(concurrency)

    async def one(trials, task, agent):
        async with places:
            return await trials.run(load_task(tasks[task]), agent)

    async with TrialRunner() as trials:
        results = await asyncio.gather(*(one(trials, *attempt) for attempt in attempts.values()))
    return dict(zip(attempts, results))


@pytest.mark.usefixtures("nothing_left")
def test_only_solutions_score(tasks):
    check_solutions(tasks, ["ordinary"])


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_only_solutions_of_all_tasks_score(tasks):
    check_solutions(tasks, tasks)


def check_solutions(tasks, names):
    attempts = {("oracle", name): (name, Oracle()) for name in names}
    attempts |= {("nop", name): (name, Nop()) for name in names if name not in ("direct", "scored")}
    results = run(all_results(tasks, attempts))
    assert {key: (r.reward, r.error) for key, r in results.items()} == {
        key: (float(key[0] == "oracle"), None) for key in attempts
    }


@pytest.mark.slow
def test_at_most_sixteen_submissions_are_on_disk(tasks, monkeypatch):
    """Work folders of up to 512 MiB wait on disk for their graders, so their number is limited."""
    ended = stored = most = 0
    collect = trial.collect

    class Ending(Nop):
        async def run(self, task, shell):
            nonlocal ended
            ended += 1
            return await super().run(task, shell)

    async def counting(*args):
        nonlocal stored, most
        stored += 1
        most = max(most, stored)
        return await collect(*args)

    async def grade(grader, task, image, submission):
        nonlocal stored
        while ended < 18:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # in which the last two are stored if nothing limits them
        stored -= 1
        return Verdict(reward=0.0)

    monkeypatch.setattr(trial, "collect", counting)
    monkeypatch.setattr(Grader, "__call__", grade)
    attempts = {number: ("hello-file", Ending()) for number in range(18)}
    results = run(all_results(tasks, attempts, concurrency=18))
    assert most == 16
    assert [result.reward for result in results.values()] == [0.0] * 18, results


@pytest.fixture(scope="module")
def cheat_results(tasks, request):
    """Returns the results of cheats by name."""
    attempts = {n: (CHEATS[n][0], Text(CHEATS[n][1])) for n in selected_values(request, "cheat")}
    return run(all_results(tasks, attempts))


@pytest.mark.parametrize("cheat", slow_but(QUICK, sorted(WALLS)))
def test_cheats_score_zero(cheat_results, cheat):
    assert cheat_results[cheat].reward == 0.0, cheat_results[cheat]


@pytest.mark.slow
def test_second_run_gives_same_rewards(tasks):
    """Acceptance check 27 of the specification: solutions 1, nothing 0, all cheats 0."""
    attempts = {("cheat", name): (task, Text(text)) for name, (task, text) in CHEATS.items()}
    for name in tasks:
        attempts |= {("oracle", name): (name, Oracle()), ("nop", name): (name, Nop())}
    first, second = (asyncio.run(all_results(tasks, attempts)) for _ in range(2))
    wrong = {k: r for k, r in first.items() if r.reward != float(k[0] == "oracle")}
    assert wrong == {}
    assert {k: (r.reward, r.error) for k, r in first.items()} == {
        k: (r.reward, r.error) for k, r in second.items()
    }
