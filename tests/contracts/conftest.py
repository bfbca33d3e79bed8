"""Fixtures of the contract tests."""

import gc

import pytest

from tests.contracts.source_tree import PACKAGES, python_files, syntax


@pytest.fixture(scope="session")
def parsed():
    """Parses all Python files once, so that no test's call is charged with it."""
    # The trees live until the process ends. Garbage collections that visit them would double the time of this loop
    # and slow down every later test.
    gc.disable()
    for path in python_files(*PACKAGES, "tests"):
        syntax(path)
    gc.freeze()
    gc.enable()
