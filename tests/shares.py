"""Pytest plugin that runs one share of the selected tests: `--share=3/7`.

Files are assigned by their durations (`durations.json`, which `tests.budget` writes), the longest first, each to the
share with the smallest sum. A file's tests stay together, because they share fixtures, unless they take longer than a
share. Shares 0 to 6 of 7 are all tests.
"""

import collections
import json
import pathlib

import pytest

DURATIONS = pathlib.Path(__file__).parent / "durations.json"
UNKNOWN_S = 0.5  # seconds of a test that is not listed: it is shorter, or was never timed


def shares(tests: list[str], durations: dict[str, float], count: int) -> dict[str, int]:
    """Returns {test id: share, from 0 to count - 1}."""
    by_file = collections.defaultdict(list)
    for test in tests:
        by_file[test.split("::")[0]].append(test)

    def length(group: list[str]) -> float:
        return sum(durations.get(test, UNKNOWN_S) for test in group)

    # Groups of tests that stay together.
    mean, groups = length(tests) / count, []
    for group in by_file.values():
        groups += [group] if length(group) <= mean else [[test] for test in group]
    # The longest group goes first, to the share with the smallest sum.
    loads, share_of = [0.0] * count, {}
    for group in sorted(groups, key=lambda group: (-length(group), group)):
        share = loads.index(min(loads))
        loads[share] += length(group)
        share_of |= dict.fromkeys(group, share)
    return share_of


def parse(text: str) -> tuple[int, int]:
    """Parses "3/7" to (3, 7). Raises ValueError for other text."""
    share, _, count = text.partition("/")
    if not (share.isdecimal() and count.isdecimal() and int(share) < int(count)):
        raise ValueError(f"--share={text}: it must be K/N with K from 0 to N - 1, such as 0/7")
    return int(share), int(count)


def pytest_addoption(parser):
    parser.addoption("--share", help="run only share K of N, as in 3/7")


@pytest.hookimpl(trylast=True)  # after the selection by marks
def pytest_collection_modifyitems(config, items):
    if not config.option.share:
        return
    try:
        share, count = parse(config.option.share)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    share_of = shares([item.nodeid for item in items], durations, count)
    selected = [item for item in items if share_of[item.nodeid] == share]
    config.hook.pytest_deselected(items=[item for item in items if share_of[item.nodeid] != share])
    items[:] = selected
