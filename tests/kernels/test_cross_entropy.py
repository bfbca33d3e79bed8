"""Tests of the chunked projection and cross-entropy and its gradients against the NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import compat
from pallas_kernels.cross_entropy import Static, gpu, linear_cross_entropy, tpu, xla
from tests.kernels.implementations import (
    implementation_names,
    interpreted,
    marks,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.kernels.offline import compile_for
from tests.oracles import cross_entropy

ROWS, D, V = 13, 6, 11


@pytest.fixture(scope="module")
def projection():
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((ROWS, D)), 2 * rng.standard_normal((D, V))
    weight = rng.random(ROWS) * (rng.random(ROWS) > 0.3)
    return hidden, head, rng.integers(0, V, ROWS).astype(np.int32), weight


def over_forms(test):
    """Parametrises over XLA in chunks with and without a remainder, and over the Pallas forms."""
    chunks = [
        pytest.param("xla", chunk, id=f"xla-{chunk}", marks=marks(chunk != 5))
        for chunk in (1, 5, 13, 4096)
    ]
    names = [name for name in implementation_names("cross_entropy") if name != "xla"]
    forms = [pytest.param(interpreted(name), 13, id=name) for name in names]
    return pytest.mark.parametrize(("implementation", "chunk"), chunks + forms)(test)


def gradients(targets, weight, z_weight, **named):
    """Returns a jitted (hidden, head) -> ((loss, nll), (d_hidden, d_head)); the z-loss uses the second output."""

    def loss(hidden, head):
        nll, logz = linear_cross_entropy(hidden, head, targets, **named)
        return jnp.sum(weight.astype(np.float32) * (nll + z_weight * logz**2)), nll

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def assert_equals_oracle(got, expected):
    (loss, nll), (d_hidden, d_head) = got
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(-nll, expected["logp"], atol=1e-5)
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], atol=1e-5)
    np.testing.assert_allclose(d_head, expected["d_weight"], atol=2e-5)


@over_forms
def test_cross_entropy_and_gradients_equal_oracle(projection, implementation, chunk):
    hidden, head, targets, weight = projection
    expected = cross_entropy.linear_cross_entropy(hidden, head, targets, weight, 0.3)
    run = gradients(targets, weight, 0.3, chunk=chunk, implementation=implementation)
    assert_equals_oracle(run(hidden.astype(np.float32), head.astype(np.float32)), expected)


@pytest.fixture(scope="module")
def tiles():
    """Returns inputs with two blocks of rows, of three pieces each, and two blocks of words.

    The last block of either is not full. Each block of words raises the maximum of some row and holds its target.
    """
    rng = np.random.default_rng(1)
    hidden, head = rng.standard_normal((1100, D)), rng.standard_normal((D, 1500))
    targets = rng.integers(0, 1500, 1100).astype(np.int32)
    return hidden, head, targets, rng.random(1100)


@over_implementations("cross_entropy", slow="xla gpu")
def test_several_tiles_equal_oracle(tiles, implementation, monkeypatch):
    monkeypatch.setattr(tpu, "BACKWARD_ROWS", 400)
    hidden, head, targets, weight = tiles
    assert tpu.choose_tile(1100, D, 1500, 4) == (224, 3, 1024)
    expected = cross_entropy.linear_cross_entropy(hidden, head, targets, weight, 0.3)
    run = gradients(targets, weight, 0.3, chunk=512, implementation=implementation)
    (loss, nll), (d_hidden, d_head) = run(hidden.astype(np.float32), head.astype(np.float32))
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(-nll, expected["logp"], atol=2e-5)
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(d_head, expected["d_weight"], rtol=1e-5, atol=2e-4)


@over_implementations("cross_entropy", slow="gpu")
@pytest.mark.parametrize("slope", [40.0, -40.0])
def test_handles_logits_of_tens_of_thousands(implementation, slope):
    """Logits rise or fall over the vocabulary, so the last or the first block holds the maximum."""
    head = slope * np.arange(1500, dtype=np.float32)[None]
    hidden, targets = np.float32([[1.0], [0.5]]), np.int32([3, 1499])
    run = jax.jit(functools.partial(linear_cross_entropy, chunk=2, implementation=implementation))
    nll, logz = run(hidden, head, targets)
    top = hidden[:, 0] * (slope * 1499 if slope > 0 else 0)
    np.testing.assert_allclose(logz, top, atol=1e-2)
    np.testing.assert_allclose(nll, top - hidden[:, 0] * slope * targets, atol=1e-2)


@pytest.mark.parametrize("m", [1, 128, 8192, 8193, 65_536, 101_376, 200_704])
def test_divides_backward_rows_evenly_into_full_tiles(m):
    rows = xla.rows_per_chunk(m, 8192)
    pieces = -(-m // rows)
    assert rows % 128 == 0 and rows <= 8192
    assert pieces == -(-m // 8192), "more pieces than needed"
    assert pieces * (rows - 128) < m, "too much padding"


def test_never_materializes_all_logits():
    """All logits (400 rows of 5000) would take 8 MB; those of a chunk of 4 rows take 80 kB."""

    def loss(hidden, head):
        return linear_cross_entropy(hidden, head, jnp.zeros(400, jnp.int32), 4)[0].sum()

    shapes = (
        jax.ShapeDtypeStruct((400, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, 5000), jnp.float32),
    )
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5e6


@over_implementations("cross_entropy", slow="gpu")
def test_sums_head_gradient_in_float32(implementation, monkeypatch):
    """A bfloat16 sum over 4096 equal rows would stop growing at 256."""
    monkeypatch.setattr(tpu, "BACKWARD_ROWS", 64)
    rows = 4096
    hidden = jnp.ones((rows, 2), jnp.bfloat16)
    head = jnp.zeros((2, 4), jnp.bfloat16)

    def loss(head):
        targets = jnp.zeros(rows, jnp.int32)
        return linear_cross_entropy(hidden, head, targets, 1, implementation=implementation)[
            0
        ].sum()

    got = jax.jit(jax.grad(loss))(head)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        got[0].astype(np.float32), rows * np.array([-0.75, 0.25, 0.25, 0.25])
    )


@over_pallas_forms("cross_entropy", slow="gpu")
def test_pallas_forms_take_bfloat16(tiles, name):
    hidden, head, targets, _ = tiles
    hidden, head = (jnp.asarray(x, jnp.bfloat16) for x in (hidden[:600], head))
    expected = cross_entropy.linear_cross_entropy(
        np.float64(hidden), np.float64(head), targets[:600], np.ones(600)
    )
    run = jax.jit(
        functools.partial(linear_cross_entropy, chunk=1, implementation=interpreted(name))
    )
    nll, logz = run(hidden, head, targets[:600])
    assert nll.dtype == logz.dtype == jnp.float32
    np.testing.assert_allclose(-nll, expected["logp"], atol=2e-5)


@pytest.mark.slow
@over_pallas_forms("cross_entropy", slow="gpu")
def test_pallas_forms_have_no_races(tiles, name, monkeypatch):
    monkeypatch.setattr(gpu, "MIN_BLOCKS", 1)  # few blocks, each with all words
    hidden, head, targets, _ = tiles
    run = jax.jit(
        functools.partial(linear_cross_entropy, chunk=1, implementation=race_checked(name))
    )
    args = hidden.astype(np.float32), head.astype(np.float32), targets
    first, second = (jax.device_get(run(*args)) for _ in range(2))
    assert not compat.has_races(name)
    np.testing.assert_array_equal(first, second)
    plain = jax.jit(
        functools.partial(linear_cross_entropy, chunk=1, implementation=interpreted(name))
    )
    np.testing.assert_allclose(first, plain(*args), atol=1e-5)


@pytest.mark.slow
@over_implementations("cross_entropy")
def test_vmap_traces_once(projection, implementation):
    hidden, head, targets, _ = projection
    traces = []

    def run(hidden, targets):
        traces.append(hidden.shape)
        head_ = jnp.asarray(head, jnp.float32)
        return linear_cross_entropy(hidden, head_, targets, 4, implementation=implementation)[0]

    batched = jax.jit(jax.vmap(run))
    hidden = np.stack([hidden, -hidden, 2 * hidden]).astype(np.float32)
    targets = np.stack([targets, targets[::-1], (targets + 1) % V])
    got = batched(hidden, targets)
    np.testing.assert_array_equal(got, batched(hidden, targets))
    assert len(traces) == 1
    for i in range(3):
        np.testing.assert_allclose(got[i], run(hidden[i], targets[i]), atol=1e-5)


@over_implementations("cross_entropy", several_devices=True, slow="tpu")
def test_shards_rows_and_head_over_mesh(implementation):
    """The loss does the same: it gathers the head and scatters its gradient."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(2)
    hidden, head = rng.standard_normal((40, 8)), rng.standard_normal((8, 24))
    targets, weight = rng.integers(0, 24, 40).astype(np.int32), rng.random(40)
    expected = cross_entropy.linear_cross_entropy(hidden, head, targets, weight)

    def local(hidden, head, targets, weight):
        def loss(hidden, head):
            gathered = jax.lax.all_gather(head, "fsdp", tiled=True)
            nll, _ = linear_cross_entropy(
                hidden, gathered, targets, 4, implementation=implementation
            )
            return jnp.sum(nll * weight)

        value, grads = jax.value_and_grad(loss, (0, 1))(hidden, head)
        return jax.lax.psum(value, "fsdp"), grads

    rows = P("fsdp")
    out = P(), (rows, rows)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=out, check_vma=False))
    args = hidden.astype(np.float32), head.astype(np.float32), targets, weight.astype(np.float32)
    value, (d_hidden, d_head) = run(*args)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], atol=1e-5)
    np.testing.assert_allclose(d_head, expected["d_weight"], atol=1e-5)


@over_pallas_forms("cross_entropy")
def test_pallas_forms_reject_other_dtypes(projection, name):
    hidden, head, targets, _ = projection
    with pytest.raises(ValueError, match="float16"):
        args = hidden.astype(np.float16), head.astype(np.float16), targets, 4
        linear_cross_entropy(*args, implementation=interpreted(name))
    with pytest.raises(ValueError, match="both must be"):
        args = hidden.astype(np.float32), jnp.asarray(head, jnp.bfloat16), targets, 4
        linear_cross_entropy(*args, implementation=interpreted(name))


@pytest.mark.aot
def test_limits_memory_on_tpu():
    """The forward stores no logits. The backward stores their gradient once, in bfloat16.

    It is XLA's, and computes that gradient inside the product. Otherwise float32 logits would be stored too.
    """
    m, d, v = 8192, 6144, 154880
    rows = jax.ShapeDtypeStruct((m,), jnp.float32)
    hidden = jax.ShapeDtypeStruct((m, d), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((d, v), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((m,), jnp.int32)
    static = Static(None, 1)

    def temporary(function, *shapes):
        compiled = compile_for("v5p", functools.partial(function, static), *shapes)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(tpu.forward, hidden, head, targets) < 2e7
    assert temporary(tpu.backward, (hidden, head, targets, rows), rows, rows) < 2 * m * v + 2e7
