"""Tests that weight versions beyond any trainer's are rejected, because all later pushes would be older."""

import pytest

from glm5_jax.data.record import MAX_VERSION
from tests.inference.test_server import get, post


@pytest.mark.parametrize("version", [MAX_VERSION + 1, 10**18, 2**63, -1, 1.5])
def test_rejects_version_out_of_range(healthy, version):
    before = get(healthy, "/weights")
    status, answer = post(healthy, "/update_weights", {"path": "0", "version": version})
    assert status == 400 and answer["error"]["param"] == "version", answer
    assert get(healthy, "/weights") == before
