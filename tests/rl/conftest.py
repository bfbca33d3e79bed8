"""Fixtures of tests of weight pushes and of orchestrators."""

import contextlib

import pytest

from tests.rl.fleet import ENGINE, gateway


@pytest.fixture
def served_engine():
    from tests.rl.pushing import serving  # slow to import, and most tests do not need it

    with serving() as engine:
        yield engine


@pytest.fixture(scope="module")
def engine():
    """Runs `ENGINE`, and returns its URL."""
    with ENGINE.running() as url:
        yield url


@pytest.fixture(scope="module")
def gate(engine):
    """Runs a gateway in front of `engine`, and returns its URL."""
    with gateway(engine) as url:
        yield url


@pytest.fixture
def stack():
    """Closes at the end of the test all contexts that were entered."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def one_device(monkeypatch):
    """Trains stages on one device, without a report page."""
    from tests.rl.small_stage import train_on_one_device

    train_on_one_device(monkeypatch)
