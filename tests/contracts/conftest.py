"""What the contract tests share."""

import pytest

from tests.contracts.source_tree import PACKAGES, python_files, syntax


@pytest.fixture(scope="session")
def parsed():
    """Parses all Python files once, so that no test's call is charged with it."""
    for path in python_files(*PACKAGES, "tests"):
        syntax(path)
