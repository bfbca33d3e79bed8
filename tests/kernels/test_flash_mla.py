"""Tests of attention over all keys and its hand-written backward against softmax attention in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from glm5_jax.parallel.flops import count_flops
from pallas_kernels import blocks, compat
from pallas_kernels.flash_mla import flash_mla, tpu
from pallas_kernels.flash_mla.xla import selection_mask
from tests.kernels.attention_problem import (
    SCALE,
    SEGMENTS,
    B,
    N,
    S,
    T,
    X,
    Y,
    keep,
    lse,
    normal,
    plain,
    topk_of,
)
from tests.kernels.implementations import (
    implementation_names,
    in_tiers,
    interpreted,
    marks,
    over_implementations,
    over_pallas_forms,
    race_checked,
)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Makes tiles and runs of blocks so small that these inputs have several."""
    monkeypatch.setattr(blocks, "EXTENTS", 2)
    monkeypatch.setattr(tpu, "FORWARD", tpu.Tiles(8, 8))
    monkeypatch.setattr(tpu, "BACKWARD", tpu.Tiles(8, 16))
    monkeypatch.setattr(tpu, "ALIGN", 8)


CASES = {
    "causal": dict(),
    "start known at run time": dict(start=7, traced=True, heads=2),
    "documents": dict(segments=True),
    "selected keys": dict(topk=True),
    "everything": dict(start=7, segments=True, topk=True),
    "one shared key": dict(heads=1, start=7),
    "one shared key in a block": dict(heads=1, start=7, block=64),
    "blocks of one query": dict(block=1, start=7),
    "queries past the keys": dict(start=12, heads=2),
    "documents of two heads": dict(heads=2, start=7, segments=True, traced=True),
    "a window": dict(window=3),
    "a window, start known at run time": dict(window=5, start=7, traced=True, heads=2),
    "a window over documents": dict(window=4, start=7, segments=True, block=3),
    "a window past the keys": dict(window=6, start=12, heads=1),
    "a window of the query itself": dict(window=1, start=7, block=1),
    "a window over everything": dict(window=8, start=7, segments=True, topk=True),
}

SHORT = "documents of two heads"
QUICK = {  # the cases of the default tier; Hopper's emulator takes a second for each tile
    "xla": (SHORT, "everything", "a window over documents"),
    "tpu": (),  # test_handles_documents_across_tiles
    "gpu": (SHORT,),
}


def over_cases(test):
    """Parametrises over the cases; those of the Pallas forms have no topk, block and window, which only XLA takes."""
    named = [("xla", "xla", name) for name in CASES]
    for form in implementation_names("flash_mla"):
        names = [
            name for name, case in CASES.items() if not case.keys() & {"topk", "block", "window"}
        ]
        named += [(form, interpreted(form), name) for name in names if form != "xla"]
    params = [
        pytest.param(how, name, id=f"{form}-{name}", marks=marks(name not in QUICK[form]))
        for form, how, name in named
    ]
    return pytest.mark.parametrize(("implementation", "name"), params)(test)


@over_cases
def test_attention_and_gradients_equal_oracle(implementation, name):
    case = dict(start=0, traced=False, segments=False, topk=False, heads=N, block=4, window=None)
    case |= CASES[name]
    start, heads = case["start"], case["heads"]
    rows = 1 if getattr(implementation, "name", None) == "gpu" else B  # its emulator is slow
    segments = SEGMENTS[:rows] if case["segments"] else None
    topk = topk_of(start, segments) if case["topk"] else None
    shapes = (T, N, X), (S, heads, X), (S, heads, Y), (T, N, Y)
    q, k, v, dy = (normal(rows, *shape) for shape in shapes)
    mask = keep(start, SEGMENTS if case["segments"] else None, topk, case["window"])[:rows]

    @jax.jit
    def run(q, k, v, start_now):
        def attend(q, k, v):
            q_segments = None if segments is None else jnp.asarray(segments[:, start : start + T])
            out, *rest = flash_mla(
                q,
                k,
                v,
                start=start_now if case["traced"] else start,
                q_segments=q_segments,
                k_segments=None if segments is None else jnp.asarray(segments),
                topk=None if topk is None else jnp.asarray(topk),
                window=case["window"],
                scale=SCALE,
                block=case["block"],
                implementation=implementation,
            )
            return out, rest

        y, pull, rest = jax.vjp(attend, q, k, v, has_aux=True)
        return y, *rest, *pull(jnp.asarray(dy))

    got = run(q, k, v, jnp.int32(start))
    repeat = functools.partial(np.repeat, repeats=N // heads, axis=2)
    y, top, dq, dk, dv = plain(q, repeat(k), repeat(v), dy, mask)
    dk, dv = (g.reshape(rows, S, heads, N // heads, -1).sum(3) for g in (dk, dv))
    expected = (y, lse(q, repeat(k), mask), top, dq, dk, dv)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert not np.asarray(got[0])[~mask.any(-1)].any()


@pytest.fixture(scope="module")
def packed():
    """Returns 40 queries that start at key 30 of 75, with 4 heads over 2.

    Documents cross tiles and fill some; padding is at the end and inside.
    """
    lengths = [[3, 30, 1, 20, 16, 5], [33, 8, 9, 2, 15, 8]]
    segments = np.stack([np.repeat([1, 2, 0, 3, 4, 0], row) for row in lengths]).astype(np.int32)
    q, dy = normal(2, 40, 4, 8), normal(2, 40, 4, 8)
    return (q, normal(2, 75, 2, 8), normal(2, 75, 2, 8), dy), segments


def attend(implementation, segments=None, start=30, scale=SCALE):
    """Returns a function (q, k, v, dy) -> (out, dq, dk, dv)."""
    q_segments = None if segments is None else jnp.asarray(segments)[:, 30:70]

    def run(q, k, v, dy, start=start):
        call = functools.partial(
            flash_mla,
            scale=scale,
            start=start,
            q_segments=q_segments,
            k_segments=None if segments is None else jnp.asarray(segments),
            block=16,
            implementation=implementation,
        )
        out, pull = jax.vjp(lambda *args: call(*args)[0], q, k, v)
        return out, *pull(dy)

    return run


def reference(arrays, segments):
    """Returns the outputs of `attend` in float64."""
    q, k, v, dy = (np.asarray(x, np.float64) for x in arrays)
    key, q_segments = np.arange(75), segments[:, 30:70]
    mask = (key <= 30 + np.arange(40)[:, None]) & (q_segments[:, :, None] == segments[:, None])
    mask &= (q_segments != 0)[..., None]
    y, _, dq, dk, dv = plain(q, k.repeat(2, axis=2), v.repeat(2, axis=2), dy, mask)
    return y, dq, *(g.reshape(2, 75, 2, 2, -1).sum(3) for g in (dk, dv))


@over_pallas_forms("flash_mla", slow="gpu")
def test_handles_documents_across_tiles(packed, name):
    arrays, segments = packed
    got = jax.jit(attend(interpreted(name), segments))(*arrays)
    for ours, theirs in zip(got, reference(arrays, segments), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@over_pallas_forms("flash_mla", slow="tpu gpu")
def test_sums_bfloat16_in_float32(packed, name):
    arrays, segments = packed
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    got = jax.jit(attend(interpreted(name), segments))(*arrays)
    for ours, theirs in zip(got, reference(arrays, segments), strict=True):
        assert ours.dtype == jnp.bfloat16
        difference = np.abs(np.float64(ours) - theirs)
        assert difference.max() < 0.01 * np.abs(theirs).max()
        assert difference.mean() < 0.004 * np.abs(theirs).mean()


@pytest.mark.slow
def test_backward_in_chunks_equals_oracle(packed, monkeypatch):
    """Three of the five row tiles of a head fit at once, so the last chunk is not full."""
    arrays, segments = packed
    monkeypatch.setattr(tpu, "max_units", lambda *_: 3)
    got = jax.jit(attend(interpreted("tpu"), segments))(*arrays)
    for ours, theirs in zip(got, reference(arrays, segments), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@over_implementations("flash_mla", slow="tpu gpu")
@pytest.mark.parametrize("t", in_tiers([3], [1]))
def test_decodes_over_shared_latent(implementation, t):
    """A tile holds the few queries of all heads; the latent is key and value."""
    q, latent = normal(2, t, 4, 8), normal(2, 20, 1, 8)
    mask = np.broadcast_to(np.arange(20) <= 16 + np.arange(t)[:, None], (2, t, 20))

    @jax.jit
    def run(q, latent, start):
        call = functools.partial(flash_mla, scale=SCALE, implementation=implementation)
        return call(q, latent, latent, start=start)

    y, total, top = run(q, latent, jnp.int32(16))
    keys = latent.repeat(4, axis=2)
    expected, largest, *_ = plain(q, keys, keys, np.zeros(q.shape), mask)
    np.testing.assert_allclose(y, expected, atol=2e-5)
    np.testing.assert_allclose(total, lse(q, keys, mask), atol=2e-5)
    np.testing.assert_allclose(top, largest, atol=2e-5)


@over_implementations("flash_mla", slow="tpu gpu")
def test_sums_gradients_of_shared_keys_and_values(implementation):
    q, latent, dy = normal(2, 3, 4, 8), normal(2, 20, 1, 8), normal(2, 3, 4, 8)

    def out(q, k, v):
        return flash_mla(q, k, v, scale=SCALE, start=17, implementation=implementation)[0]

    @jax.jit
    def run(q, latent, dy):
        both = jax.vjp(lambda k: out(q, k, k), latent)[1](dy)[0]
        return both, *jax.vjp(lambda k, v: out(q, k, v), latent, latent + 0)[1](dy)

    both, of_keys, of_values = run(q, latent, dy)
    np.testing.assert_allclose(both, of_keys + of_values, atol=1e-5)
    assert np.abs(of_keys).max() > 0.1 < np.abs(of_values).max()


@over_implementations("flash_mla", slow="gpu")
def test_handles_logits_of_tens_of_thousands(implementation):
    """Logits rise along the keys, so every tile raises the maximum, or fall."""
    k = np.linspace(-1, 1, 20, dtype=np.float32)[None, :, None, None].repeat(8, axis=3)
    q = np.full((1, 13, 2, 8), 4e3, np.float32) * np.float32([1, -1])[:, None]
    call = jax.jit(functools.partial(flash_mla, scale=1.0, start=7, implementation=implementation))
    out, total, top = call(q, np.repeat(k, 2, axis=2), np.repeat(k, 2, axis=2))
    np.testing.assert_allclose(out[0, :, 0], k[0, 7:, 0])
    np.testing.assert_allclose(out[0, :, 1], np.full((13, 8), -1))
    np.testing.assert_allclose(total[0, :, 0], 8 * 4e3 * k[0, 7:, 0, 0], rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(top, 8 * 4e3, rtol=1e-6)


@pytest.mark.slow
@over_pallas_forms("flash_mla")
def test_pallas_forms_have_no_races(name):
    """The inputs have three tiles of keys and two of rows; a document starts inside a tile."""
    segments = jnp.asarray(np.repeat([[1, 2]], [11, 13], axis=1))
    arrays = [jnp.asarray(normal(1, 16, 1, 8)) for _ in range(4)]

    def run(q, k, v, dy):
        def out(q, k, v):
            return flash_mla(
                q,
                k,
                v,
                scale=SCALE,
                q_segments=segments[:, :16],
                k_segments=segments[:, :16],
                implementation=race_checked(name),
            )[0]

        y, pull = jax.vjp(out, q, k, v)
        return y, pull(dy)

    run = jax.jit(run)
    first, second = (jax.device_get(run(*arrays)) for _ in range(2))
    assert not compat.has_races(name)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@over_implementations("flash_mla", slow="tpu gpu")
def test_vmap_traces_once(packed, implementation):
    """vmap runs over segments, which set the number of steps, and over the first query's index."""
    arrays, segments = packed
    single = [np.asarray(x)[:, None, :, :1] for x in arrays]
    single[1:3] = [x[:, :, :, :1] for x in single[1:3]]
    traces = []

    def run(q, k, v, segments, start):
        traces.append(start)
        return flash_mla(
            q,
            k,
            v,
            scale=SCALE,
            start=start,
            q_segments=lax.dynamic_slice_in_dim(segments, start, 40, 1),
            k_segments=segments,
            implementation=implementation,
        )[0]

    start = np.int32([30, 12])
    batched = jax.jit(jax.vmap(run))
    args = (*single[:3], segments[:, None], start)
    got = jax.device_get(batched(*args))
    np.testing.assert_array_equal(got, batched(*args))
    assert len(traces) == 1
    expected = jax.jit(run)
    for i in range(2):
        np.testing.assert_allclose(got[i], expected(*(x[i] for x in args)), atol=1e-6)


@over_implementations("flash_mla", several_devices=True, slow="tpu")
def test_shards_queries_over_mesh(implementation):
    """The model does the same: each device holds a range of queries and gathers the keys."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, k, v, dy = (normal(2, 32, 2, 8) for _ in range(4))

    def local(q, k, v, dy):
        def out(q, k, v):
            k, v = (lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
            start = q.shape[1] * lax.axis_index("context")
            return flash_mla(q, k, v, scale=SCALE, start=start, implementation=implementation)[0]

        y, pull = jax.vjp(out, q, k, v)
        return y, *pull(dy)

    spec = P("data", "context")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    mask = np.broadcast_to(np.tri(32, dtype=bool), (2, 32, 32))
    y, _, dq, dk, dv = plain(q, k, v, dy, mask)
    for ours, theirs in zip(jax.jit(run)(q, k, v, dy), (y, dq, dk, dv), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@over_pallas_forms("flash_mla")
def test_pallas_forms_reject_unsupported_inputs(name):
    q, k = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 9, 2, 8), np.float32)
    call = functools.partial(flash_mla, scale=1.0, implementation=interpreted(name))
    with pytest.raises(ValueError, match="topk"):
        call(q, k, k, topk=np.zeros((1, 4, 2), np.int32))
    with pytest.raises(ValueError, match="window"):
        call(q, k, k, window=2)
    with pytest.raises(ValueError, match="float16"):
        call(q.astype(np.float16), k.astype(np.float16), k.astype(np.float16))
    with pytest.raises(ValueError, match="all must be"):
        call(q, jnp.asarray(k, jnp.bfloat16), k)


def test_tpu_form_limits_number_of_tiles():
    q = jax.ShapeDtypeStruct((1, 1, 1, 8 * 400, 8), jnp.bfloat16)
    k, longer = (jax.ShapeDtypeStruct((1, 1, 8 * n, 8), jnp.bfloat16) for n in (400, 401))
    assert tpu.unsupported_reason(q, k, k, None) is None
    assert "tiles" in tpu.unsupported_reason(q, longer, longer, None)


@pytest.mark.parametrize("start", [0, None])
def test_window_makes_work_linear_in_length(start):
    """Each block of queries multiplies block + window - 1 keys, at every position."""

    def work(t):
        q = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)

        def run(q, begin):
            call = functools.partial(flash_mla, scale=1.0, window=100, block=32)
            where = begin if start is None else start
            out, pull = jax.vjp(lambda *args: call(*args, start=where)[0], q, q, q)
            return pull(out)

        return count_flops(run, q, jax.ShapeDtypeStruct((), jnp.int32))

    pairs, products = 32 + 100 - 1, 7  # two forward, five backward
    assert work(8192) - work(4096) == 2 * products * 8 * 4096 * pairs


@pytest.mark.parametrize("window", [0, -1])
def test_rejects_window_without_keys(window):
    x = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match=f"window {window}; it must be positive"):
        flash_mla(x, x, x, scale=1.0, window=window)


def test_selection_mask_ignores_padding():
    topk = jnp.asarray([[[0, 2, -1], [-1, -1, -1]]])
    assert selection_mask(topk, 4).tolist() == [[[True, False, True, False], [False] * 4]]
