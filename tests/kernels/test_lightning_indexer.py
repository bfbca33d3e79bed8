"""Tests of index scores against the NumPy oracle, and of their selection against a stable sort."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from jax.sharding import Mesh, PartitionSpec as P

from pallas_kernels import compat
from pallas_kernels.lightning_indexer import (
    index_scores,
    lightning_indexer,
    select as exact_select,
    tpu,
)
from pallas_kernels.quantized_vectors import quantize_vectors
from tests.kernels.implementations import (
    in_tiers,
    interpreted,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.oracles import indexer as oracle


def test_signed_index_scores_equal_oracle():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 5, 3, 10)), rng.standard_normal((2, 7, 10))
    w = rng.standard_normal((2, 5, 3))
    args = [jnp.asarray(a, jnp.float32) for a in (q, w * 3**-0.5, k)]
    got = index_scores(*args)
    np.testing.assert_allclose(got, oracle.index_scores(q, k, w), atol=1e-5)
    assert (got < 0).any()  # weights are signed


def select(scores, visible, k):
    return np.asarray(jax.jit(exact_select, static_argnums=2)(scores, visible, k))


def row(scores, k, visible=None):
    scores = np.asarray(scores, np.float32)[None, None]
    visible = np.ones(scores.shape, bool) if visible is None else np.asarray(visible)[None, None]
    return select(scores, visible, k)[0, 0].tolist()


def test_selects_keys_of_handwritten_rows():
    nan, inf = np.nan, np.inf
    some = np.array([0, 1, 0, 1, 0], bool)
    table = {
        "indices ascend": ([3, 9, 1, 7, 5], 3, None, [1, 3, 4]),
        "ties go to the lower index": ([1, 2, 2, 2, 0], 3, None, [1, 2, 3]),
        "the last of ties is dropped": ([2, 2, 3, 2, 2], 3, None, [0, 1, 2]),
        "zeros of both signs are equal": ([0.0, -0.0, 5.0, -0.0, 0.0], 3, None, [0, 1, 2]),
        "-0 equals 0": ([-0.0, 0.0, -0.0, 0.0, -1], 3, None, [0, 1, 2]),
        "few visible keys": ([9, 1, 9, 2, 9], 3, some, [1, 3, -1]),
        "no visible key": ([9, 1, 9, 2, 9], 3, ~some & some, [-1, -1, -1]),
        "NaN is last": ([nan, 1, -5, nan, 2], 3, None, [1, 2, 4]),
        "NaN is before hidden keys": (
            [inf, -inf, nan, 1, nan],
            3,
            some | (np.arange(5) == 2),
            [1, 2, 3],
        ),
        "NaN ties with minus infinity": ([nan, 1, -5, -inf, 2], 4, None, [0, 1, 2, 4]),
        "more than exist": ([3, 1, 2], 9, None, [0, 1, 2]),
    }
    for name, (scores, k, visible, expected) in table.items():
        assert row(scores, k, visible) == expected, name


def test_selection_is_exact_at_low_matmul_precision():
    """A TPU rounds operands of float32 products to 8 bits by default, and the count of empty words has more.

    XLA:CPU has no such product and fails where one does not name its precision.
    """
    s, k = 32 * 1001, 64
    scores = np.zeros(s, np.float32)
    chosen = np.arange(s - 2 * k, s, 2)
    scores[chosen] = 1 + np.arange(k)
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert row(scores, k) == chosen.tolist()


SPECIAL = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf")]
SCORES = arrays.arrays(
    np.float32,
    (2, 3, 8),
    elements=st.one_of(st.sampled_from(SPECIAL), st.floats(-4, 4, width=16)),
)


@given(SCORES, arrays.arrays(np.bool_, (2, 3, 8)), st.just(3))
@settings(max_examples=40)
def test_select_equals_stable_sort(scores, visible, k):
    expected = oracle.select(scores, visible, k)
    np.testing.assert_array_equal(select(scores, visible, k), expected)


@pytest.mark.parametrize("start,block", in_tiers([("traced", 4)], [(0, 4), (5, 4), (5, 64)]))
def test_selects_in_blocks_of_queries(start, block):
    """Blocks split documents anywhere, at any offset into the keys."""
    rng = np.random.default_rng(2)
    t, s, k = 11, 16, 5
    first = 5 if start == "traced" else start
    q, idx_k = rng.standard_normal((2, t, 3, 10)), rng.standard_normal((2, s, 10))
    w = rng.standard_normal((2, t, 3))
    k_segments = np.repeat([[0, 1, 2], [3, 3, 4]], [3, 6, 7], axis=1)
    q_segments = k_segments[:, first : first + t]
    causal = np.arange(s) <= first + np.arange(t)[:, None]
    visible = (
        causal & (q_segments[:, :, None] == k_segments[:, None]) & (q_segments != 0)[..., None]
    )
    expected = oracle.select(oracle.index_scores(q, idx_k, w), visible, k)

    def run(start):
        return lightning_indexer(
            *(jnp.asarray(a, jnp.float32) for a in (q, w * 3**-0.5, idx_k)),
            k,
            start=start,
            q_segments=jnp.asarray(q_segments),
            k_segments=jnp.asarray(k_segments),
            block=block,
        )

    got = jax.jit(run)(5) if start == "traced" else run(start)
    np.testing.assert_array_equal(got, expected)


LONG_ROWS = {
    "distinct": lambda rng, shape: rng.standard_normal(shape),
    "all equal": lambda rng, shape: np.zeros(shape),
    "zeros of both signs": lambda rng, shape: rng.choice([0.0, -0.0, -1.0], shape),
    "few values": lambda rng, shape: rng.integers(-2, 3, shape),
    # 2 of 16 groups, so for k = 8 the filter passes too many.
    "two groups hold the best": lambda rng, shape: np.where(
        np.arange(shape[-1]) % 16 < 2, 9.0 + rng.random(shape), rng.standard_normal(shape)
    ),
    "nan and infinity": lambda rng, shape: rng.choice(SPECIAL, shape),
    "growing": lambda rng, shape: np.broadcast_to(np.arange(shape[-1]), shape),
}


@pytest.mark.parametrize("k", in_tiers([8], [1, 40]))
def test_selects_from_filtered_long_rows(k):
    rng = np.random.default_rng(7)
    shape = (1, 3, 405)
    masks = {
        "all": np.ones(shape, bool),
        "some": rng.random(shape) < 0.5,
        "few": rng.random(shape) < 0.02,
        "the last": np.broadcast_to(np.arange(405) >= 395, shape),
    }
    for (name, draw), (visible, mask) in itertools.product(LONG_ROWS.items(), masks.items()):
        scores = draw(rng, shape).astype(np.float32)
        got, expected = select(scores, mask, k), oracle.select(scores, mask, k)
        np.testing.assert_array_equal(got, expected, err_msg=f"{name}, {visible} visible")


over_all = over_implementations("lightning_indexer")
over_all_slow_on_hopper = over_implementations("lightning_indexer", slow="gpu")


def oracle_selection(scores, first, k):
    """Returns the oracle's selection from scores [b t s] among the keys up to each query."""
    t, s = scores.shape[1:]
    causal = np.arange(s) <= first + np.arange(t)[:, None]
    return oracle.select(scores, np.broadcast_to(causal, scores.shape), k)


def exact_scores(q, w, keys):
    """Returns the oracle's index scores, up to a common power of 2 if there are 1, 4 or 16 heads."""
    return oracle.index_scores(*(np.asarray(x, np.float64) for x in (q, keys, w)))


TRACED = []


@functools.cache
def selector(implementation, k):
    """Returns a jitted (q, w, keys, start, q_segments, k_segments) -> topk with a traced start."""

    def run(idx_q, idx_w, idx_k, start, q_segments, k_segments):
        TRACED.append((implementation, k, idx_k.shape))
        return lightning_indexer(
            *(idx_q, idx_w, idx_k, k),
            start=start,
            q_segments=q_segments,
            k_segments=k_segments,
            implementation=implementation,
        )

    return jax.jit(run)


def with_scores(scores, t):
    """Returns (q [b t 2 j], w [b t 2], keys [b s j]) whose index scores equal scores [b s] for every query."""
    b, s = scores.shape
    keys = np.zeros((b, s, 16), np.float32)
    keys[..., 0] = scores * 4  # the index scores are divided by the root of 16
    q, w = np.zeros((b, t, 2, 16), np.float32), np.ones((b, t, 2), np.float32)
    q[:, :, 0, 0], q[:, :, 1, 0], w[:, :, 1] = 1, -1, -1
    return q, w, keys


T, S, CHOSEN = 3, 405, 8


@over_all
def test_selection_equals_stable_sort(implementation):
    on_hopper = getattr(implementation, "name", None) == "gpu"  # its emulator takes half a second
    for name in ("nan and infinity",) if on_hopper else LONG_ROWS:
        check_selection(implementation, name, 7, S - T, 2)


@pytest.mark.slow
def test_hopper_selection_equals_stable_sort():
    for name in LONG_ROWS:
        check_selection(interpreted("gpu"), name, 7, S - T, 2)


@given(st.sampled_from(list(LONG_ROWS)), st.integers(0, 99), st.integers(0, S), st.integers(0, 9))
@example("few values", 0, 0, 0)
@example("all equal", 0, CHOSEN - T, 0)
@settings(max_examples=25)
@over_all_slow_on_hopper
def test_selects_at_any_start(implementation, name, seed, start, documents):
    check_selection(implementation, name, seed, start, documents)


def check_selection(implementation, name, seed, start, documents):
    rng = np.random.default_rng(seed)
    scores = LONG_ROWS[name](rng, (2, S)).astype(np.float32)
    segments = np.sort(rng.integers(0, documents + 1, (2, S)), axis=1).astype(np.int32)
    q_segments = segments[:, np.minimum(start + np.arange(T), S - 1)]
    causal = np.arange(S) <= start + np.arange(T)[:, None]
    visible = causal & (q_segments[..., None] == segments[:, None]) & (q_segments != 0)[..., None]
    got = selector(implementation, CHOSEN)(*with_scores(scores, T), start, q_segments, segments)
    shape = (2, T, S)
    expected = oracle.select(np.broadcast_to(scores[:, None], shape), visible, CHOSEN)
    np.testing.assert_array_equal(got, expected, err_msg=name)


def problem(b, t, s, heads=4, dtype=jnp.float32):
    """Returns (q, w, keys) of small integers, whose scores are exact in every precision and often tie."""
    rng = np.random.default_rng(4)
    shapes = (b, t, heads, 16), (b, t, heads), (b, s, 16)
    q, w, keys = (jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for shape in shapes)
    return q.astype(dtype), w, keys.astype(dtype)


@pytest.mark.slow
@over_all
def test_selects_from_many_keys(implementation):
    """Keys exceed a chunk and the ring of buffers; a result has two pieces; queries are padded."""
    t, s, k, start = 11, 9000, 600, 8985
    q, w, keys = problem(1, t, s, dtype=jnp.bfloat16)
    got = selector(implementation, k)(q, w, keys, start, None, None)
    np.testing.assert_array_equal(got, oracle_selection(exact_scores(q, w, keys), start, k))


@over_implementations("lightning_indexer", slow="tpu gpu")
def test_static_start_and_more_keys_than_exist(implementation):
    t, s = 5, 40
    q, w, keys = problem(2, t, s)
    expected = oracle_selection(exact_scores(q, w, keys), 20, 64)
    got = lightning_indexer(q, w, keys, 64, start=20, implementation=implementation)
    np.testing.assert_array_equal(got, expected)
    assert got.shape == (2, t, s) and got.dtype == jnp.int32


@over_implementations("lightning_indexer", slow="tpu gpu")
@pytest.mark.parametrize("dtype", in_tiers(["int8"], ["float8_e4m3fn"]))
def test_selects_from_quantized_keys(implementation, dtype):
    """A key's score is the product of the quantized values times the key's scale."""
    rng = np.random.default_rng(3)
    t, s, k = 4, 300, 20
    q, q_scale = quantize_vectors(jnp.asarray(rng.standard_normal((1, t, 3, 16))), dtype)
    keys, k_scale = quantize_vectors(jnp.asarray(rng.standard_normal((1, s, 16))), dtype)
    assert q.dtype == keys.dtype == dtype
    w = jnp.asarray(rng.standard_normal((1, t, 3)), jnp.float32) * q_scale

    @jax.jit
    def run(q, w, keys, k_scale):
        return lightning_indexer(
            q, w, keys, k, k_scale=k_scale, start=s - t, implementation=implementation
        )

    expected = oracle_selection(exact_scores(q, w, keys) * np.asarray(k_scale)[:, None], s - t, k)
    np.testing.assert_array_equal(run(q, w, keys, k_scale), expected)
    flat = run(q, w, keys, jnp.ones_like(k_scale))
    assert (np.asarray(flat) != expected).any()


@pytest.mark.slow
@over_implementations("lightning_indexer", several_devices=True)
def test_selection_vmaps_shards_and_repeats(implementation):
    """The selection is the same under vmap, over 8 devices that share the queries, and in a second run."""
    t, s, k = 16, 64, 9
    q, w, keys = problem(1, t, s)
    scores = exact_scores(q, w, keys)
    expected = oracle_selection(scores, s - t, k)
    run = functools.partial(lightning_indexer, k=k, implementation=implementation)

    def local(q, w, keys):
        first = s - t + jax.lax.axis_index("context") * (t // 8)
        return run(q, w, keys, start=first)

    mesh = Mesh(np.array(jax.devices()[:8]), ("context",))
    spread, replicated = P(None, "context"), P()
    specs = dict(in_specs=(spread, spread, replicated), out_specs=spread, check_vma=False)
    on_devices = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    first, second = on_devices(q, w, keys), on_devices(q, w, keys)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(first, second)

    both = jnp.stack([keys, keys[:, ::-1]])
    got = jax.vmap(lambda keys: run(q, w, keys, start=s - t))(both)
    np.testing.assert_array_equal(got[0], expected)
    np.testing.assert_array_equal(got[1], oracle_selection(scores[..., ::-1], s - t, k))


@over_implementations("lightning_indexer", slow="tpu gpu")
def test_selection_inside_differentiated_function(implementation):
    q, w, keys = problem(1, 4, 40)

    def loss(q, w, keys):
        topk = lightning_indexer(q, w, keys, 9, implementation=implementation)
        return jnp.sum(q) + jnp.sum(topk.astype(jnp.float32))

    jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, w, keys)


@over_all_slow_on_hopper
def test_selection_traces_once_for_all_starts(implementation):
    check_selection(implementation, "distinct", 0, 0, 1)
    check_selection(implementation, "distinct", 0, 30, 2)
    assert TRACED.count((implementation, CHOSEN, (2, S, 16))) == 1


@pytest.mark.slow
@over_pallas_forms("lightning_indexer")
def test_selection_has_no_races(name, monkeypatch):
    monkeypatch.setattr(tpu, "RING", 2)  # one buffer is refilled while the other is in use
    t, s, k = 3, 2500, 16
    q, w, keys = problem(1, t, s)
    segments = jnp.ones((1, s), jnp.int32)
    q_segments = segments[:, -t:]
    got = selector(race_checked(name), k)(q, w, keys, s - t, q_segments, segments)
    assert not compat.has_races(name)
    np.testing.assert_array_equal(got, selector("xla", k)(q, w, keys, s - t, q_segments, segments))


@over_pallas_forms("lightning_indexer")
def test_pallas_forms_reject_mixed_dtypes(name):
    q, w, keys = jnp.ones((1, 2, 2, 16)), jnp.ones((1, 2, 2)), jnp.ones((1, 40, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match="queries of float32 and keys of bfloat16"):
        lightning_indexer(q, w, keys, 8, implementation=interpreted(name))
