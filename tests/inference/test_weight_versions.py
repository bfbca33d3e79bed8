"""Versions of new weights: none that no trainer reaches, after which all later pushes would be refused as older."""

import pytest

from glm5_jax.data.record import MAX_VERSION
from tests.inference.test_engine import CFG
from tests.inference.test_server import get, post
from tests.rl.pushing import begun


@pytest.mark.parametrize("version", [MAX_VERSION + 1, 10**18, 2**63, -1, 1.5])
def test_refuses_a_version_out_of_range(healthy, version):
    before = get(healthy, "/weights")
    bodies = {
        "/update_weights": {"path": "0", "version": version},
        "/weights/begin": begun(1, "p", CFG) | {"version": version},
    }
    for path, body in bodies.items():
        status, answer = post(healthy, path, body)
        assert status == 400 and answer["error"]["param"] == "version", answer
    assert get(healthy, "/weights") == before
