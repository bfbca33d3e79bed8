"""Tests that weight versions beyond any trainer's are rejected, because all later pushes would be older."""

import pytest

from glm5_jax.data.record import MAX_VERSION
from tests.inference.test_engine import CFG
from tests.inference.test_server import get, post
from tests.rl.pushing import begin_message


@pytest.mark.parametrize("version", [MAX_VERSION + 1, 10**18, 2**63, -1, 1.5])
def test_rejects_version_out_of_range(healthy, version):
    before = get(healthy, "/weights")
    bodies = {
        "/update_weights": {"path": "0", "version": version},
        "/weights/begin": begin_message(1, "p", CFG) | {"version": version},
    }
    for path, body in bodies.items():
        status, answer = post(healthy, path, body)
        assert status == 400 and answer["error"]["param"] == "version", answer
    assert get(healthy, "/weights") == before
