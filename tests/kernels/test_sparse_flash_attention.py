"""Tests of attention over selected rows and its backward against softmax attention in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import backends, compat
from pallas_kernels.quantized_vectors import FORMATS
from pallas_kernels.sparse_flash_attention import (
    RowLayout,
    WordRows,
    gpu,
    paged_sparse_attention,
    sparse_flash_attention,
    tpu,
)
from tests.kernels.attention_problem import (
    SCALE,
    SEGMENTS,
    B,
    N,
    S,
    T,
    X,
    Y,
    normal,
    plain,
    topk_of,
)
from tests.kernels.implementations import (
    in_tiers,
    interpreted,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.oracles import eight_bits

KERNEL = "sparse_flash_attention"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Makes several blocks of queries, with several tiles of rows each, in small inputs."""
    monkeypatch.setattr(tpu, "BLOCKS", tpu.BlockSizes(queries=4, rows=8))


def reference(q, latents, dy, topk):
    """Returns (y, lse, largest logit, dq, dlatents) in float64."""
    mask = (np.asarray(topk)[..., None] == np.arange(latents.shape[1])).any(-2)
    shape = (*latents.shape[:2], q.shape[2], latents.shape[2])
    keys = np.broadcast_to(latents[:, :, None], shape)
    y, top, dq, dk, dv = plain(q, keys, keys[..., : dy.shape[-1]], dy, mask)
    dk[..., : dy.shape[-1]] += dv
    logits = np.einsum("btnx,bsx->btns", q.astype(np.float64), latents) * SCALE
    logits = np.where(mask[:, :, None], logits, -np.inf)
    lse = np.logaddexp.reduce(logits, axis=-1)
    return y, np.where(np.isinf(lse), np.inf, lse), top, dq, dk.sum(2)


def run(q, latents, dy, topk, implementation, **named):
    """Returns the kernel's (y, lse, largest logit, dq, dlatents)."""

    def attend(q, latents):
        named_too = dict(scale=SCALE, value_dim=dy.shape[-1], implementation=implementation)
        out, lse, top = sparse_flash_attention(q, latents, topk, **named_too, **named)
        return out, (lse, top)

    y, pull, (lse, top) = jax.vjp(attend, q, latents, has_aux=True)
    return y, lse, top, *pull(dy.astype(y.dtype))


def problem(b=B, t=T, n=N, s=S, x=X, y=Y):
    return normal(b, t, n, x), normal(b, s, x), normal(b, t, n, y)


def spread(t, k, step, s):
    """Returns int32 [1 t k]: every second row, starting `step` rows later for each query."""
    first = np.arange(t, dtype=np.int32)[:, None] * step
    return np.sort((first + 2 * np.arange(k, dtype=np.int32)) % s, axis=-1)[None]


def padded_selection(topk):
    """Returns topk [b t k] broadcast and padded with -1 to int32 [B T 9]."""
    topk = np.pad(topk, ((0, 0), (0, 0), (0, 9 - topk.shape[-1])), constant_values=-1)
    return np.broadcast_to(topk, (B, T, 9)).copy()


SELECTIONS = {
    "random visible keys": padded_selection(topk_of(7, SEGMENTS)),
    "same for all queries": padded_selection(spread(1, 9, 0, S)),
    "one differs from the neighbour's": padded_selection(spread(T, 9, 2, S)),
    "disjoint from the neighbour's": padded_selection(spread(T, 2, 5, S)),
}


@functools.cache
def jitted_run(implementation):
    return jax.jit(functools.partial(run, implementation=implementation, block=4))


def check(implementation, name):
    topk = SELECTIONS[name].copy()
    topk[0, 2] = -1
    topk[1, :, 1] = -1  # a missing entry
    args = problem()
    got = jitted_run(implementation)(*args, topk)
    for ours, theirs in zip(got, reference(*args, topk), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)
    assert not np.asarray(got[0])[0, 2].any() and np.isinf(np.asarray(got[1])[0, 2]).all()


@over_implementations(KERNEL, slow="gpu")
def test_sparse_attention_and_gradients_equal_oracle(implementation):
    """A latent is the key of every head, and its first columns are the value."""
    for name in SELECTIONS:
        check(implementation, name)


def test_hopper_sparse_attention_equals_oracle():
    """Uses four queries of two heads because Hopper's emulator is slow."""
    args, topk = problem(1, 4, 2), SELECTIONS["random visible keys"][:1, :4].copy()
    topk[0, 2] = -1
    got = jitted_run(interpreted("gpu"))(*args, topk)
    for ours, theirs in zip(got, reference(*args, topk), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@over_implementations(KERNEL, slow="gpu")
@pytest.mark.parametrize(
    "topk", [[0, -1, 5], [-1] * 70 + [3, 7, 19]], ids=["after row 0", "more entries than rows"]
)
def test_sparse_attention_of_single_query_skips_gaps(implementation, topk):
    is_hopper = getattr(implementation, "name", None) == "gpu"
    args = problem(1, 1, 40 if is_hopper else 2)  # with 40 heads, its blocks have one query too
    topk = np.asarray(topk, np.int32)[None, None]
    got = jitted_run(implementation)(*args, topk)
    for ours, theirs in zip(got, reference(*args, topk), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
@over_implementations(KERNEL)
def test_sparse_attention_sums_bfloat16_in_float32(implementation):
    """Rows take several packed words, and every query selects row 0, whose gradient sums 64 terms."""
    q, latents, dy = (jnp.asarray(a, jnp.bfloat16) for a in problem(1, 16, 4, 24, 300, 256))
    q = q / 4
    topk = np.sort(spread(16, 9, 2, 24), axis=-1)
    topk[0, :, 0] = 0
    topk = np.where(np.diff(topk, prepend=-1, axis=-1) > 0, topk, -1)
    got = jax.jit(functools.partial(run, implementation=implementation))(q, latents, dy, topk)
    expected = reference(*(np.asarray(a, np.float64) for a in (q, latents, dy)), topk)
    for ours, theirs in zip(got, expected, strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert error < 0.006 * np.linalg.norm(theirs)
    assert [x.dtype for x in got] == ["bfloat16", "float32", "float32", "bfloat16", "bfloat16"]


@over_pallas_forms(KERNEL, slow="gpu")
def test_sparse_attention_is_deterministic(name):
    args = problem()
    function = jitted_run(interpreted(name))
    first, second = (function(*args, SELECTIONS["same for all queries"]) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_two_cores_share_blocks(batch, monkeypatch):
    """One batch row has a gradient sum on each core; of two rows each core takes one."""
    monkeypatch.setattr(tpu, "num_parts", lambda blocks: 2)
    args = problem(batch)
    topk = SELECTIONS["one differs from the neighbour's"][:batch]
    got = jax.jit(functools.partial(run, implementation=interpreted("tpu")))(*args, topk)
    for ours, theirs in zip(got, reference(*args, topk), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "blocks", "parts"), [("TPU v5", 6, 2), ("TPU v5", 7, 1), ("TPU v6 lite", 6, 1)]
)
def test_counts_cores_of_chip(kind, blocks, parts, monkeypatch):
    monkeypatch.setattr(backends, "device_kind", lambda: kind)
    assert tpu.num_parts(blocks) == parts


@pytest.mark.slow
@over_pallas_forms(KERNEL)
def test_sparse_attention_has_no_races(name, monkeypatch):
    """Neighbouring blocks share rows, so each adds to the sums of the previous one."""
    monkeypatch.setattr(tpu, "BLOCKS", tpu.BlockSizes(queries=2, rows=8))
    q, latents, dy = problem(1, 6, 2, 20)
    topk = spread(6, 9, 2, 20)
    got = run(q, latents, jnp.asarray(dy), jnp.asarray(topk), race_checked(name))
    for ours, theirs in zip(got, reference(q, latents, dy, topk), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert not compat.has_races(name)


@pytest.mark.slow
@over_implementations(KERNEL)
def test_sparse_attention_vmaps(implementation):
    """vmap runs over all inputs, and over queries only."""
    q, latents, dy = problem(2, 5, 2)
    topk = SELECTIONS["random visible keys"][:, :5]
    kernel = functools.partial(run, implementation=implementation)
    expected = reference(q, latents, dy, topk)
    got = jax.jit(jax.vmap(lambda *args: kernel(*(a[None] for a in args))))(q, latents, dy, topk)
    for index in (0, 1, 3, 4):
        np.testing.assert_allclose(got[index][:, 0], expected[index], atol=2e-5)
    got = jax.jit(jax.vmap(lambda q: kernel(q, latents, dy, topk)[0]))(np.stack([q, 2 * q]))
    np.testing.assert_allclose(got[0], expected[0], atol=2e-5)
    np.testing.assert_allclose(got[1], reference(2 * q, latents, dy, topk)[0], atol=2e-5)


@over_implementations(KERNEL, several_devices=True, slow="xla tpu")
def test_shards_queries_over_devices(implementation):
    """Every device holds all latents and an eighth of the queries; the latents' gradients are summed."""
    q, latents, dy = problem(1, 16, 2)
    topk = spread(16, 6, 2, S)

    def local(q, latents, dy, topk):
        y, lse, top, dq, dlatents = run(q, latents, dy, topk, implementation)
        return y, lse, jax.lax.pmax(top, "context"), dq, jax.lax.psum(dlatents, "context")

    mesh = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = P(None, "context")
    specs = dict(
        in_specs=(sharded, P(), sharded, sharded), out_specs=(sharded, sharded, P(), sharded, P())
    )
    got = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))(q, latents, dy, topk)
    for ours, theirs in zip(got, reference(q, latents, dy, topk), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def paged_problem(t, slots, dtype):
    """Returns (queries, latents [b s x], the latents in random pages, page table, topk).

    Unused pages, such as the first, hold NaN.
    """
    count = -(-S // slots)
    q, latents, _ = problem(B, t, N, count * slots, 40)
    table = 1 + np.random.default_rng(0).permutation(B * count + 2)[: B * count]
    pages = np.full((B * count + 3, slots, 40), np.nan)
    pages[table] = latents.reshape(-1, slots, 40)
    topk = SELECTIONS["one differs from the neighbour's"][:, :t].copy()
    topk[0, 0, 3:] = -1
    q, latents, pages = (jnp.asarray(a, dtype) for a in (q, latents, pages))
    return q, latents, pages, jnp.asarray(table.reshape(B, count), jnp.int32), jnp.asarray(topk)


@over_implementations(KERNEL)
@pytest.mark.parametrize(
    ("t", "slots", "packed"), in_tiers([(1, 4, True)], [(3, 3, False), (6, 8, False)])
)
def test_decodes_over_pages(t, slots, packed, implementation):
    dtype = jnp.bfloat16 if packed else jnp.float32
    q, latents, pages, table, topk = paged_problem(t, slots, dtype)
    decode = functools.partial(
        paged_sparse_attention, scale=SCALE, value_dim=32, implementation=implementation
    )
    if packed:
        pages = WordRows.encode(pages, RowLayout.exact(40, dtype))
    got = jax.jit(decode)(q, pages, table, topk)
    q, latents = (np.asarray(a, np.float64) for a in (q, latents))
    expected = reference(q, latents, np.zeros((*q.shape[:3], 32)), topk)
    for ours, theirs in zip(got, expected[:2], strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), theirs, atol=3e-2 if packed else 2e-5
        )


@over_implementations(KERNEL, slow="gpu")
@pytest.mark.parametrize("page", in_tiers([0], [-1]))
def test_paged_attention_of_empty_sequence_is_zero(page, implementation):
    """Its page table names no page, or one that holds NaN."""
    q, _, pages, table, topk = paged_problem(1, 4, jnp.float32)
    decode = functools.partial(
        paged_sparse_attention, scale=SCALE, value_dim=32, implementation=implementation
    )
    out, lse = jax.jit(decode)(q, pages, table.at[1].set(page), topk.at[1].set(-1))
    assert np.isfinite(out[0]).all() and not np.asarray(out[1]).any()
    assert np.isinf(lse[1]).all() and np.isfinite(lse[0]).all()


@over_implementations(KERNEL, slow="xla gpu")
@pytest.mark.parametrize(
    ("t", "kind", "dtype"), in_tiers([(3, "int8", jnp.float32)], [(1, "fp8", jnp.bfloat16)])
)
def test_decodes_over_8_bit_pages(t, kind, dtype, implementation, monkeypatch):
    """Attention over 8-bit pages equals the oracle's over the dequantized latents."""
    monkeypatch.setattr(gpu, "QUERIES_PER_STEP", 4)  # six queries need two steps
    # Float32, because bfloat16 has halves between two values, which may be rounded either way.
    q, latents, pages, table, topk = paged_problem(t, 4, jnp.float32)
    rows = WordRows.encode(
        pages, RowLayout(jnp.dtype(FORMATS[kind]).name, 32, 8, jnp.dtype(dtype).name)
    )
    q = q.astype(dtype)
    decode = functools.partial(
        paged_sparse_attention, scale=SCALE, value_dim=32, implementation=implementation
    )
    got = jax.jit(decode)(q, rows, table, topk)
    q, latents = (np.asarray(a, np.float64) for a in (q, latents))
    quantized = np.concatenate(
        [eight_bits.quantize_dequantize(latents[..., :32], kind), latents[..., 32:]], -1
    )
    zeros = np.zeros((*q.shape[:3], 32))
    want, exact = (reference(q, x, zeros, topk)[:2] for x in (quantized, latents))
    for ours, theirs, unquantized in zip(got, want, exact, strict=True):
        ours = np.asarray(ours, np.float64)
        np.testing.assert_allclose(ours, theirs, atol=3e-2 if dtype == jnp.bfloat16 else 1e-4)
        # The rounding to 8 bits changes the result, but little.
        off = np.abs(ours - unquantized)[np.isfinite(unquantized)].max()
        assert (1e-3 < off) if dtype == jnp.float32 else (off < 0.2)


@pytest.mark.slow
@over_pallas_forms(KERNEL)
@pytest.mark.parametrize("kind", [None, "int8"])
def test_paged_decoding_has_no_races(name, kind):
    q, latents, pages, table, topk = paged_problem(1, 4, jnp.float32)
    rows = pages if kind is None else WordRows.encode(pages, RowLayout(kind, 32, 8, "float32"))
    got = paged_sparse_attention(
        q, rows, table, topk, scale=SCALE, value_dim=32, implementation=race_checked(name)
    )
    expected = reference(*(np.asarray(a) for a in (q, latents)), np.zeros((B, 1, N, 32)), topk)
    np.testing.assert_allclose(got[0], expected[0], atol=2e-5 if kind is None else 0.1)
    assert not compat.has_races(name)


@over_pallas_forms(KERNEL)
def test_pallas_forms_reject_rows_of_other_dtype(name):
    q, _, pages, table, topk = paged_problem(1, 4, jnp.float32)
    rows = WordRows.encode(pages, RowLayout("int8", 32, 8, "bfloat16"))
    decode = functools.partial(paged_sparse_attention, scale=SCALE, value_dim=32)
    with pytest.raises(ValueError, match="float32 and (rows|latents) bfloat16"):
        decode(q, rows, table, topk, implementation=interpreted(name))


def test_rejects_mismatched_pages():
    q, _, pages, table, topk = paged_problem(2, 4, jnp.float32)
    decode = functools.partial(paged_sparse_attention, scale=1.0, value_dim=4)
    with pytest.raises(ValueError, match="first two dimensions"):
        decode(q, pages, table, topk[:, :1])
    with pytest.raises(ValueError, match="page_table the first"):
        decode(q, pages, table[:1], topk)
    for wrong in (pages[..., :7], pages[0], pages[..., None, :]):
        with pytest.raises(ValueError, match="use pages"):
            decode(q, wrong, table, topk)


@pytest.mark.parametrize(
    ("dtypes", "k", "words"),
    [
        (("float16", "float16"), 4, "not both bfloat16 or both float32"),
        (("bfloat16", "float32"), 4, "not both bfloat16 or both float32"),
        (("float32", "int32"), 4, "not both bfloat16 or both float32"),
        (("float32", "float32"), 2**16, "scalar memory"),
    ],
)
def test_tpu_form_names_unsupported_inputs(dtypes, k, words):
    shapes = (1, 4, 2, 8), (1, 9, 8)
    q, latents = (jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True))
    topk = jax.ShapeDtypeStruct((1, 4, k), "int32")
    assert words in tpu.unsupported_reason(q, latents, topk, 8)
