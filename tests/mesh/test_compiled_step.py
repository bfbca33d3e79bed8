"""What the whole train step is compiled to on a mesh, and that it is compiled once."""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.mesh import compiled_step

pytestmark = pytest.mark.slow
WARNING = "Involuntary full rematerialization"
DEVICES = {"fsdp": 2, "expert": 2, "context": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(report, warnings of a program that provokes them, warnings of the step)."""
    # What comes from a cache warns of nothing, and the step is looked at before it runs.
    cache = tmp_path_factory.mktemp("compiled")
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    child = subprocess.run(
        [sys.executable, "-m", compiled_step.__name__],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    provoked, _, own = child.stderr.partition(compiled_step.END_OF_PROVOCATION)
    return json.loads(child.stdout), provoked, own


def test_nothing_is_replicated_involuntarily(run):
    _, provoked, own = run
    assert WARNING in provoked, "the search for the warning does not find it"
    assert WARNING not in own, own


def test_the_step_is_compiled_once_and_reuses_its_state(run):
    report, _, _ = run
    assert report["programs"] == 1
    assert report["donated"]
    assert report["moved"] == []
    first, *_, last = report["losses"]
    assert last < first


def test_rows_travel_between_the_experts_devices(run):
    """In each layer, out and back."""
    report, _, _ = run
    assert report["in_loop"] >= 4
    assert report["largest_exchange"] > 1000


def test_every_device_holds_its_share_of_weights_and_moments(run):
    report, _, _ = run
    for path, (size, shard, axes) in report["shards"].items():
        assert size == shard * math.prod(DEVICES[a] for a in axes), path
    eighths = [path for path, (size, shard, _) in report["shards"].items() if size == 8 * shard]
    for name in ("experts/gate", "experts/down", "attn/o", "attn/q_b"):
        assert f"params/moe_layers/{name}" in eighths
        assert any(p.startswith("optimizer/") and p.endswith(f"moe_layers/{name}") for p in eighths)
    total = sum(size for size, _, _ in report["shards"].values())
    assert sum(shard for _, shard, _ in report["shards"].values()) < total / 5
