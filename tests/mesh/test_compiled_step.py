"""Tests of the compiled train step on a mesh."""

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
    """Returns (report, warnings of a program that causes them, warnings of the step)."""
    # An empty cache, because a cached program causes no warning.
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
    reference_warnings, _, step_warnings = child.stderr.partition(compiled_step.END_OF_REFERENCE)
    return json.loads(child.stdout), reference_warnings, step_warnings


def test_xla_replicates_no_array_involuntarily(run):
    _, reference_warnings, step_warnings = run
    assert WARNING in reference_warnings, "the reference program causes no warning"
    assert WARNING not in step_warnings, step_warnings


def test_step_compiles_once_and_donates_state(run):
    report, _, _ = run
    assert report["programs"] == 1
    assert report["donated"]
    assert report["moved"] == []
    first, *_, last = report["losses"]
    assert last < first


def test_expert_devices_exchange_rows(run):
    """Each layer exchanges rows twice, to the experts and back."""
    report, _, _ = run
    assert report["in_loop"] >= 4
    assert report["largest_exchange"] > 1000


def test_shards_weights_and_moments_evenly(run):
    report, _, _ = run
    for path, (size, shard, axes) in report["shards"].items():
        assert size == shard * math.prod(DEVICES[a] for a in axes), path
    eighths = [path for path, (size, shard, _) in report["shards"].items() if size == 8 * shard]
    for name in ("experts/gate", "experts/down", "attn/o", "attn/q_b"):
        assert f"params/moe_layers/{name}" in eighths
        assert any(p.startswith("optimizer/") and p.endswith(f"moe_layers/{name}") for p in eighths)
    total = sum(size for size, _, _ in report["shards"].values())
    assert sum(shard for _, shard, _ in report["shards"].values()) < total / 5
