"""A pytest plugin that runs one share of the selected tests: `--share=3/7`.

Files are dealt out by how long they took (`durations.json`, which `tests.budget` writes), the longest first, each to the
share that has least so far. A file's tests stay together, because they share fixtures. The shares 0 to 6 of 7 together are all tests.
"""

import collections
import json
import pathlib

import pytest

DURATIONS = pathlib.Path(__file__).parent / "durations.json"
UNKNOWN_S = 5.0  # seconds of a test that was never timed


def shares(tests: list[str], durations: dict[str, float], count: int) -> dict[str, int]:
    """The share, from 0 to count - 1, of the file of each of these tests' ids."""
    seconds = collections.Counter()
    for test in tests:
        seconds[test.split("::")[0]] += durations.get(test, UNKNOWN_S)
    loads, found = [0.0] * count, {}
    for file, length in sorted(seconds.items(), key=lambda item: (-item[1], item[0])):
        found[file] = loads.index(min(loads))
        loads[found[file]] += length
    return found


def parse(text: str) -> tuple[int, int]:
    """(3, 7) of "3/7"; ValueError if it is not that."""
    share, _, count = text.partition("/")
    if not (share.isdecimal() and count.isdecimal() and int(share) < int(count)):
        raise ValueError(f"--share={text}: it must be K/N with K from 0 to N - 1, such as 0/7")
    return int(share), int(count)


def pytest_addoption(parser):
    parser.addoption("--share", help="run only share K of N, as in 3/7")


@pytest.hookimpl(trylast=True)  # of what the marks have left
def pytest_collection_modifyitems(config, items):
    if not config.option.share:
        return
    try:
        share, count = parse(config.option.share)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    found = shares([item.nodeid for item in items], durations, count)
    kept = [item for item in items if found[item.nodeid.split("::")[0]] == share]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
