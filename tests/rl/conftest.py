"""What tests of pushes have in common."""

import pytest

from tests.rl.pushing import serving


@pytest.fixture
def served():
    with serving() as one:
        yield one
