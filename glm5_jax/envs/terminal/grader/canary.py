"""Tests that run after every run of pytest: nothing counts unless the first fails and the second passes."""

SEEN = []


def test_that_fails():
    """Records that it ran, and fails."""
    SEEN.append("fails")
    assert len(SEEN) > 1000


def test_that_passes():
    """Records that it ran."""
    SEEN.append("passes")
