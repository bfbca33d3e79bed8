"""The budget of the default tier, and the shares of the slow one."""

import json
import subprocess
import sys

import pytest

from tests import shares
from tests.budget import FOLDER, TOLERANCE, Budget, Spent, cpu_seconds, violations

BUDGET = Budget(
    directories={"tests/rl": 10.0},
    call_s=2.0,
    compiling_call_s=5.0,
    calibration_s=1.0,
    coverage_factor=1.4,
)


def spent(total_s, call_s=0.0, has_compiled=False):
    return Spent(total_s=total_s, call_s=call_s, has_compiled=has_compiled)


def test_reports_directories_over_budget_by_half():
    within = {f"tests/rl/test_a.py::test_{i}": spent(1.5) for i in range(10)}
    assert violations(within, BUDGET) == []
    over = within | {"tests/rl/test_b.py::test_last": spent(2.0)}
    first, slowest, *rest = violations(over, BUDGET)
    assert first == "tests/rl: 17 CPU seconds of 10; the slowest:"
    assert slowest.split() == ["2.0", "tests/rl/test_b.py::test_last"] and len(rest) == 9
    assert violations(over, BUDGET, factor=1.2) == []


def test_reports_long_calls_and_allows_more_for_compilation():
    test = "tests/rl/test_a.py::test_long"
    assert violations({test: spent(4.0, 2.9)}, BUDGET) == []
    (line,) = violations({test: spent(4.0, 3.1)}, BUDGET)
    assert line.startswith(f"{test}: its call took 3.1 CPU seconds of 2")
    assert violations({test: spent(7.6, 3.1, has_compiled=True)}, BUDGET) == []
    assert len(violations({test: spent(7.6, 7.6, has_compiled=True)}, BUDGET)) == 1


def test_reports_directories_without_budget():
    lines = violations({"tests/new/test_a.py::test_a": spent(3.5)}, BUDGET)
    assert lines[0] == "tests/new: 4 CPU seconds of 2; the slowest:"


def test_cpu_seconds_count_children():
    before = cpu_seconds()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert cpu_seconds() - before >= 0.3


def test_gives_every_directory_of_tests_a_budget():
    directories = {f"tests/{path.parent.name}" for path in FOLDER.glob("*/test_*.py")} | {"tests"}
    assert set(Budget.read().directories) == directories
    # Ten minutes of two cores are 1,200; what is above that has to go.
    assert sum(Budget.read().directories.values()) <= 1320


def test_assigns_every_test_once_and_evenly():
    durations = {f"f{i}.py::test": float(i) for i in range(1, 30)}
    tests = [*durations, "f0.py::test"]
    share_of = shares.shares(tests, durations, 7)
    assert set(share_of) == set(tests) and set(share_of.values()) == set(range(7))
    loads = [
        sum(durations.get(test, shares.UNKNOWN_S) for test in tests if share_of[test] == share)
        for share in range(7)
    ]
    assert max(loads) - min(loads) <= 5.0


def test_divides_only_files_that_are_longer_than_a_share():
    durations = {f"long.py::test{i}": 50.0 for i in range(7)}
    durations |= {f"short.py::test{i}": 5.0 for i in range(7)}
    share_of = shares.shares([*durations], durations, 7)
    assert {share_of[f"long.py::test{i}"] for i in range(7)} == set(range(7))
    assert len({share_of[f"short.py::test{i}"] for i in range(7)}) == 1


@pytest.mark.parametrize("text", ["7/7", "1", "-1/7", "a/b", "1/0"])
def test_rejects_unknown_shares(text):
    with pytest.raises(ValueError, match="K from 0 to N - 1, such as 0/7"):
        shares.parse(text)


@pytest.mark.slow
def test_fails_run_with_slow_test(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    seconds = 2 * TOLERANCE * Budget.read().call_s
    (tmp_path / "test_slow.py").write_text(
        "import pytest, time\n"
        "def burn(s):\n"
        "    end = time.process_time() + s\n"
        "    while time.process_time() < end: pass\n"
        f"def test_burns(): burn({seconds})\n"
        "@pytest.mark.slow\n"
        f"def test_burns_in_another_tier(): burn({seconds})\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.budget", "--rootdir", tmp_path]
    command += ["--durations-json", tmp_path / "found.json", tmp_path, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "over budget (tests/budget.json)" in done.stdout and "2 passed" in done.stdout
    assert "test_burns: its call took" in done.stdout
    assert "test_burns_in_another_tier: its call" not in done.stdout
    assert len(json.loads((tmp_path / "found.json").read_text())) == 2
