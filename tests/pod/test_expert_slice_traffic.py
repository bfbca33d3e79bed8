"""Tests of the rows that cross between slices in the compiled expert dispatch and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from glm5_jax.model.expert_dispatch import routed_experts
from glm5_jax.parallel.mesh import AXES, Region, device_grid
from launch import pods
from launch.aot.hlo import Collective, find_collectives

pytestmark = pytest.mark.aot

SLICES, WIDTH, TOKENS, CHOSEN, LOCAL = 2, 1024, 64, 4, 2  # TOKENS and LOCAL experts per device
ROW = 2 * WIDTH  # bytes


def compile_exchanges(target: str, slices: int) -> list[Collective]:
    """Returns the exchanges of the mixture's gradient on two TPU slices or two GPU hosts."""
    pod = pods.parse(target)
    if pods.install_hint(pod):
        pytest.skip("the compilers are not installed; bash launch/test.sh aot installs them")
    devices = sorted(pods.list_devices(pod), key=lambda d: (getattr(d, "slice_index", 0), d.id))
    count = len(devices)
    cut = device_grid(devices, (1, 1, count, 1, 1), SLICES)
    mesh = Mesh(cut, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def shape(*dims, dtype=jnp.bfloat16):
        where = NamedSharding(mesh, P("expert"))
        return jax.ShapeDtypeStruct((dims[0] * count, *dims[1:]), dtype, sharding=where)

    w = {name: shape(LOCAL, WIDTH, WIDTH) for name in ("gate", "up", "down")}
    ids, weights = (shape(TOKENS, CHOSEN, dtype=t) for t in (jnp.int32, jnp.float32))
    region = Region.of(mesh)
    mixture = jax.shard_map(
        lambda w, *args: routed_experts(w, *args, region, kernels="xla", slices=slices),
        mesh=mesh,
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=False,
    )

    def loss(w, x, ids, weights):
        return jnp.sum(mixture(w, x, ids, weights).astype(jnp.float32) ** 2)

    traced = jax.jit(jax.grad(loss, (0, 1, 3))).trace(w, shape(TOKENS, WIDTH), ids, weights)
    program = traced.lower(lowering_platforms=(pod.platform,)).compile()
    return [c for c in find_collectives(program.as_text(), mesh) if c.kind == "ragged-all-to-all"]


def groups(collectives) -> set:
    return {tuple(sorted(c.groups)) for c in collectives}


def test_sends_token_once_between_gpu_hosts():
    plain, two = compile_exchanges("h200:2x8", 1), compile_exchanges("h200:2x8", SLICES)
    positions = np.arange(16).reshape(SLICES, 8)
    across, inside = (tuple(map(tuple, p.tolist())) for p in (positions.T, positions))
    assert groups(plain) == {(tuple(range(16)),)} and groups(two) == {across, inside}
    crossing = [c for c in two if tuple(sorted(c.groups)) == across]
    # The receive buffer holds a row per token of all 16 devices and per local expert, or a row per token of the two
    # devices at one position. The backward's buffer holds the rows that were sent.
    assert {c.num_bytes for c in plain} == {16 * TOKENS * LOCAL * ROW, TOKENS * CHOSEN * ROW}
    assert {c.num_bytes for c in crossing} == {SLICES * TOKENS * ROW}
    assert_halves_crossing_rows("h200:2x8", plain, crossing)


def test_sends_only_crossing_rows_through_tpu_hosts():
    plain, two = compile_exchanges("2*v5p:2x2x1", 1), compile_exchanges("2*v5p:2x2x1", SLICES)
    # With one level, rows for the same slice go through the hosts too, because no exchange is among four chips only.
    positions = np.arange(8).reshape(SLICES, 4)
    across, inside = (tuple(map(tuple, p.tolist())) for p in (positions.T, positions))
    assert groups(c for c in plain if c.between_slices) == {(tuple(range(8)),)}
    assert inside in groups(c for c in two if not c.between_slices)
    crossing = [c for c in two if c.between_slices]
    assert groups(crossing) == {across}
    plain = [c for c in plain if c.between_slices]
    assert max(c.num_bytes for c in plain) == 8 * TOKENS * LOCAL * ROW
    assert max(c.num_bytes for c in crossing) == SLICES * TOKENS * ROW
    assert_halves_crossing_rows("2*v5p:2x2x1", plain, crossing)


def assert_halves_crossing_rows(target: str, plain, two) -> None:
    """Checks that two levels need less than half of the buffers for rows that cross, and prints them."""
    sums = [sum(c.num_bytes for c in collectives) for collectives in (plain, two)]
    print(f"\n{target}: buffers for rows that cross {sums[0]:,} -> {sums[1]:,} bytes per device")
    assert 2 * sums[1] < sums[0]
