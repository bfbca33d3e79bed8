"""A small task that passes all checks, faults that can be planted in it, and the validator for one check."""

import pathlib
from collections.abc import Callable, Mapping

from glm5_jax.envs.terminal.synthesis.task_source import SyntheticTask, write_task

TESTS = """import json
import pathlib

APP = pathlib.Path("/app")


def numbers():
    return [int(line) for line in (APP / "numbers.txt").read_text().split()]


def test_sum():
    assert json.loads((APP / "sum.json").read_text()) == {"sum": sum(numbers())}


def test_largest():
    assert (APP / "largest.txt").read_text() == f"{max(numbers())}\\n"
"""
SOLUTION = """
sort -n numbers.txt > "$HOME/sorted"
tail -n 1 "$HOME/sorted" > largest.txt
awk '{s += $1} END {printf "{\\"sum\\": %d}\\n", s}' numbers.txt > sum.json
"""
INSTRUCTION = """
The meters wrote one whole number a line to /app/numbers.txt. Write their sum to /app/sum.json, an object with the key sum,
and the largest number to /app/largest.txt, as one line.
"""
SOURCE = SyntheticTask(
    name="meter-sum",
    topic="text processing",
    skills=("awk", "sort"),
    difficulty=1,
    title="Sum the numbers of a file",
    instruction=INSTRUCTION,
    files={"numbers.txt": b"17\n4\n4021\n993\n"},
    tests=TESTS,
    solution=SOLUTION,
)
Edit = Callable[[dict[str, str]], None]


def texts(source: SyntheticTask = SOURCE) -> dict[str, str]:
    return {name: data.decode() for name, data in source.folder_files().items()}


def write(folder: pathlib.Path, edit: Edit | None = None, executable=None) -> pathlib.Path:
    """Writes the task's folder with an edit of its texts."""
    files = texts()
    if edit is not None:
        edit(files)
    data = {name: text.encode() for name, text in files.items()}
    more = {} if executable is None else {"executable": executable}
    return write_task(folder / SOURCE.name, data, **more)


def replace_text(name: str, old: str, new: str) -> Edit:
    """Returns an edit that replaces a part of a file."""

    def edit(files: dict[str, str]) -> None:
        assert files[name].count(old) >= 1, (name, old)
        files[name] = files[name].replace(old, new)

    return edit


def add_file(name: str, text: str) -> Edit:
    def edit(files: dict[str, str]) -> None:
        files[name] = files.get(name, "") + text

    return edit


TEST, SOLVE, IMAGE = "tests/test_outputs.py", "solution/solve.sh", "environment/Dockerfile"
# Fault -> (check that finds it, edit).
STATIC_FAULTS: Mapping[str, tuple[str, Edit]] = {
    "field with a typing error": ("V01", replace_text("task.toml", "memory_mb", "memory_mib")),
    "package without a version": ("V01", add_file(IMAGE, "RUN pip install requests\n")),
    "image without a version": ("V01", replace_text(IMAGE, "debian:bookworm-slim", "debian")),
    "download while tests run": ("V01", replace_text("tests/test.sh", "cd /  #", "curl -O https://example.org/x\ncd /  #")),
    "solution in the image": ("V01", lambda files: files.update({"environment/files/help.txt": files[SOLVE]})),
    "shared verifier": ("V01", lambda files: (
        files.pop("tests/Dockerfile"),
        files.update({"task.toml": files["task.toml"].split("[verifier.environment]")[0].replace("separate", "shared")
                      + "[agent]\nuser = \"agent\"\n"}),
    )),
    "root agent": ("V01", replace_text("task.toml", 'user = "agent"', 'user = "root"')),
    "unknown guard": ("V01", replace_text("task.toml", "guard_tests = []", 'guard_tests = ["test_none"]')),
    "tests without a test": ("V01", lambda files: files.update({TEST: "VALUE = 1\n"})),
    "path not named": ("V07", replace_text("instruction.md", "/app/largest.txt", "a second file")),
    "key not named": ("V07", add_file(TEST, '\n\ndef test_key():\n    assert json.loads((APP / "sum.json").read_text())["total"]\n')),
    "solution echoes a constant": ("V08", lambda files: (
        add_file(TEST, "\n\ndef test_word():\n    assert 'quartzite' in (APP / 'largest.txt').read_text()\n")(files),
        add_file(SOLVE, "echo quartzite >> largest.txt\n")(files),
    )),
    "tests read the solution": ("V08", add_file(TEST, "\n\ndef test_same():\n    assert pathlib.Path('/solution/solve.sh').read_text()\n")),
}  # fmt: skip
FLAKY = "\n\ndef test_flaky():\n    assert (APP / 'sum.json').exists() and __import__('random').random() > 0.3\n"
SANDBOX_FAULTS: Mapping[str, tuple[tuple[str, ...], Edit]] = {
    "image that differs by build": (("V02",), add_file(IMAGE, "RUN date +%N > /app/built\n")),
    "package that is missing": (("V02",), replace_text(IMAGE, "recommends ", "recommends no-such-package ")),
    "flaky test": (("V03", "V11"), add_file(TEST, FLAKY)),
    "nothing scores": (("V04",), lambda files: files.update({TEST: 'def test_a():\n    assert True\n'})),
    "test that is always true": (("V05",), add_file(TEST, "\n\ndef test_true():\n    assert numbers()\n")),
    "half of the goal untested": (("V06",), lambda files: (
        files.update({TEST: files[TEST].split("\n\ndef test_sum")[0] + "\n\ndef test_largest" + files[TEST].split("def test_largest")[1]}),
    )),
    "answer in a file of the image": (("V09",), lambda files: (
        add_file(TEST, "\n\ndef test_code():\n    assert (APP / 'sum.json').read_text().strip() and 'basalt-7731' != numbers()\n")(files),
        files.update({"environment/files/.cache": "code: basalt-7731\n"}),
    )),
    "replaced program is believed": (("V10",), lambda files: (
        files.update({TEST: "import subprocess\n\n\ndef test_checker():\n    assert subprocess.run(['/app/bin/test']).returncode == 0\n"}),
        files.update({SOLVE: "#!/bin/bash\nset -eu\ncd /app\nmkdir bin\ncp /bin/true bin/test\n"}),
        add_file("instruction.md", "Make bin/test succeed.\n")(files),
    )),
    "solution needs most of the time": (("V12",), lambda files: (
        replace_text("task.toml", "timeout_sec = 600.0", "timeout_sec = 4.0")(files),
        replace_text(SOLVE, "cd /app\n", "cd /app\nsleep 2\n")(files),
    )),
}  # fmt: skip
