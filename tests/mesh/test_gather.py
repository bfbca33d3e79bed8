"""Tests of the sharding and gathering of weights, and of the sum of their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import AXES, Region, make_mesh, resolve
from glm5_jax.parallel.sharding import gather, kept_sharded_axes, spec_of
from glm5_jax.parallel.tree import flatten
from tests.mesh.traffic import traffic

POD = dict(zip(AXES, resolve({"fsdp": 16, "expert": 64}, 1024)))
WIDE = dict(zip(AXES, resolve({"fsdp": 4, "expert": 256}, 1024)))
LONG = dict(zip(AXES, resolve({"fsdp": 2, "expert": 64, "context": 8}, 1024)))


@pytest.mark.parametrize(
    ("letters", "shape", "spec"),
    [
        ("d", (6144,), P(None)),
        ("l d", (75, 6144), P(None, None)),
        ("v d", (154880, 6144), P("expert", "fsdp")),
        ("d v", (6144, 154880), P("fsdp", "expert")),
        ("l q n hr", (75, 2048, 64, 256), P(None, "fsdp", "expert", None)),
        ("l n u d", (75, 64, 256, 6144), P(None, "expert", None, "fsdp")),
        ("l e d f", (75, 256, 6144, 2048), P(None, "expert", "fsdp", None)),
        ("l e f d", (75, 256, 2048, 6144), P(None, "expert", "fsdp", None)),
        ("e f d", (256, 2048, 6144), P("expert", "fsdp", None)),
        ("l f d", (3, 12288, 6144), P(None, "expert", "fsdp")),
        ("dd d", (12288, 6144), P("expert", "fsdp")),
    ],
)
def test_shards_one_dimension_per_axis(letters, shape, spec):
    assert spec_of(letters, shape, POD) == spec


def test_shards_second_last_dimension_over_context():
    cut = P(None, ("fsdp", "context"), "expert")
    assert spec_of("l d f", (3, 6144, 12288), LONG) == cut
    assert spec_of("l f d", (3, 12288, 6144), LONG) == P(None, ("context", "expert"), "fsdp")


def test_shards_head_dim_if_devices_exceed_heads():
    assert spec_of("l n u d", (75, 64, 256, 6144), WIDE) == P(None, None, "expert", "fsdp")
    assert spec_of("l c n u", (75, 512, 64, 256), WIDE) == P(None, "fsdp", None, "expert")


def test_does_not_shard_indivisible_dimension():
    sizes = dict(POD, expert=5)
    assert spec_of("l q n hr", (75, 2048, 64, 256), sizes) == P(None, "fsdp", None, None)


@pytest.mark.parametrize(
    ("sizes", "smaller"), [(POD, 1e8), (LONG, 1e8), (WIDE, 5e8)], ids=["4K", "128K", "wide"]
)
def test_shards_glm5_matrices_over_all_batch_axes(sizes, smaller):
    """With more devices than heads, k_b (4.7e8 elements) is not sharded over all of them."""
    cfg = presets.glm5()
    letters, shapes = flatten(glm5.axis_letters(cfg)), flatten(glm5.abstract_params(cfg))
    for path, x in shapes.items():
        spec = spec_of(letters[path], x.shape, sizes)
        used = {a for entry in spec if entry for a in np.atleast_1d(entry)}
        if x.size > smaller:
            assert used >= {a for a in ("fsdp", "expert") if sizes[a] > 1}, (path, spec)


def test_rejects_letters_that_do_not_fit_shape():
    with pytest.raises(ValueError, match="letters 'd f' do not fit the shape"):
        spec_of("d f", (2, 3, 4), POD)


CUTS = [
    ("d q", (32, 24), {"fsdp": 2, "expert": 4}),
    ("n u d", (8, 6, 32), {"expert": 2, "context": 2, "fsdp": 2}),
    ("n u d", (2, 8, 32), {"expert": 4, "fsdp": 2}),
    ("c n u", (8, 2, 16), {"expert": 4, "fsdp": 2}),
    ("f d", (48, 32), {"context": 2, "expert": 2, "fsdp": 2}),
    ("f d", (48, 32), {"tensor": 2, "expert": 2, "fsdp": 2}),
    ("e f d", (8, 16, 32), {"tensor": 2, "expert": 2, "fsdp": 2}),
    ("e d f", (8, 32, 16), {"tensor": 2, "expert": 2, "context": 2}),
]


@pytest.mark.parametrize(("letters", "shape", "axes"), CUTS)
@pytest.mark.parametrize(
    ("reduce_dtype", "far"), [(None, ()), ("bfloat16", ()), (None, ("fsdp",)), (None, ("expert",))]
)
def test_gathers_all_but_stationary_axes(letters, shape, axes, reduce_dtype, far):
    """The gradient of a gathered weight is the sum over devices."""
    mesh = make_mesh(axes)
    region = dataclasses.replace(Region.of(mesh), dcn_axes=far)
    spec = spec_of(letters, shape, mesh.shape)
    w = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    keep = kept_sharded_axes(letters)
    stationary = P(
        *(
            keep.get(letter) and region.nontrivial_axes(keep[letter]) or None
            for letter in letters.split()
        )
    )
    rest = tuple(
        a for a in region.nontrivial_axes(AXES) if not any(a in (e or ()) for e in stationary)
    )

    def local(w):
        out, pull = jax.vjp(
            lambda w: gather(w, letters, spec, region, jnp.float32, reduce_dtype), w
        )
        weight = 1.0 + region.index(rest)
        (gradient,) = pull(jnp.full(out.shape, weight, jnp.float32))
        # Dimensions that are not gathered are replicated, so the region sums their gradients.
        left = tuple(a for a in rest if not any(a in np.atleast_1d(e) for e in spec if e))
        return out[None], region.psum(gradient, left)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=(P(rest, *stationary), spec), check_vma=False
    )
    copies, gradient = jax.jit(run)(w)
    for copy in np.asarray(copies):
        np.testing.assert_array_equal(copy, w)
    num = region.size(rest)
    np.testing.assert_array_equal(gradient, np.full(shape, num * (num + 1) / 2))


@pytest.mark.parametrize("letters", ["d q", "q d", "q n hr"])
def test_slices_exchange_only_device_shards(letters):
    """Each of two slices of four devices sends a device's shards; the gradient returns them."""
    shape = {"d q": (48, 16), "q d": (16, 48), "q n hr": (48, 1, 16)}[letters]
    mesh = make_mesh(expert=4, fsdp=2)
    spec = spec_of(letters, shape, mesh.shape)
    region = dataclasses.replace(Region.of(mesh), dcn_axes=("fsdp",))

    def local(w):
        gathered, pull = jax.vjp(lambda w: gather(w, letters, spec, region, jnp.float32), w)
        return gathered[None], *pull(gathered)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=(P(("expert", "fsdp")), spec), check_vma=False
    )
    sent, part = traffic(run, jax.ShapeDtypeStruct(shape, jnp.float32)), 4 * 48 * 16 // 8
    assert sent["all_gather", ("fsdp",)] == 2 * part
    assert sent["reduce_scatter", ("fsdp",)] == part
    assert sent["all_gather", ("expert",)] == 8 * part


@pytest.mark.parametrize("shape", [(4, 16), (4, 16, 5), (4, 16, 3, 2)])
def test_gathers_sequence_in_order_and_sums_gradients(shape):
    mesh = make_mesh(data=2, context=2, tensor=2)
    region, cut = Region.of(mesh), P("data", ("context", "tensor"))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    cotangent = np.cos(x)

    def local(x, cotangent):
        gathered, pull = jax.vjp(region.gather_sequence, x)
        share = 1.0 + region.index(("context", "tensor"))
        return gathered, *pull(cotangent * share)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(cut, P("data")), out_specs=(P("data"), cut), check_vma=False
    )
    gathered, gradient = jax.jit(run)(x, cotangent)
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_allclose(gradient, cotangent * (1 + 2 + 3 + 4), rtol=1e-6)


def test_sums_gradients_in_reduce_dtype():
    """256 + 1 is 256 in bfloat16."""
    mesh = make_mesh(fsdp=8)
    region, spec = Region.of(mesh), P("fsdp", None)

    def gradient(reduce_dtype):
        def local(w):
            _, pull = jax.vjp(
                lambda w: gather(w, "d q", spec, region, jnp.bfloat16, reduce_dtype), w
            )
            size = jnp.where(region.index(("fsdp",)) == 0, 256, 1).astype(jnp.bfloat16)
            return pull(jnp.full((8, 3), size))[0]

        run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(run)(jnp.zeros((8, 3), jnp.float32))

    assert gradient("float32").dtype == jnp.float32
    np.testing.assert_array_equal(gradient("float32"), 263.0)
    assert np.all(np.abs(np.asarray(gradient(None)) - 263.0) > 0)
