"""What tests of pushes, and of orchestrators, have in common."""

import contextlib

import pytest

from tests.rl.fleet import ENGINE, gateway


@pytest.fixture
def served():
    from tests.rl.pushing import serving  # of which most tests have no need

    with serving() as one:
        yield one


@pytest.fixture(scope="module")
def engine():
    with ENGINE.running() as url:
        yield url


@pytest.fixture(scope="module")
def gate(engine):
    with gateway(engine) as url:
        yield url


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def one_device(monkeypatch):
    """Stages train on one device and write no page."""
    from tests.rl.small_stage import train_on_one_device

    train_on_one_device(monkeypatch)
