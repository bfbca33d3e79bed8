"""Tests of the cost estimates of TPU kernels against the products of XLA's forms and counts by hand."""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.parallel.flops import REST, count_flops, work_by_scope
from pallas_kernels.cost import Cost, estimate, sum_costs, visible_pairs
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.flash_mla import flash_mla
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.index_scores import index_scores
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.lightning_indexer import lightning_indexer, paged_lightning_indexer
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.scatter_rows import scatter_rows
from pallas_kernels.sparse_flash_attention import sparse_flash_attention
from pallas_kernels.sparse_indexer_kl import sparse_indexer_kl
from pallas_kernels.summed_attention_probs import summed_attention_probs
from pallas_kernels.w4a8_matmul import w4a8_grouped_matmul, w4a8_matmul
from tests.kernels.implementations import interpreted

TPU = interpreted("tpu")
F32, BF16, I32, I8 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def size(*shape) -> int:
    """Returns the bytes of a float32 array."""
    return 4 * math.prod(shape)


def kernels(run, *shapes) -> dict[str, tuple[int, int, int]]:
    """Returns {kernel: (FLOPs, bytes, transcendentals)} of run(*shapes, implementation=TPU), summed over calls."""
    costs: dict[str, tuple[int, int, int]] = {}

    def look(jaxpr, times):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                cost, name = eqn.params["cost_estimate"], eqn.params["name"]
                mine = cost.flops, cost.bytes_accessed, cost.transcendentals
                before = costs.get(name, (0, 0, 0))
                costs[name] = tuple(a + times * b for a, b in zip(before, mine))
                continue
            leaves = jax.tree.leaves(
                tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            )
            for inner in (x for x in leaves if hasattr(x, "eqns")):
                more = eqn.params["length"] if eqn.primitive.name == "scan" else 1
                look(getattr(inner, "jaxpr", inner), times * more)

    look(jax.make_jaxpr(functools.partial(run, implementation=TPU))(*shapes).jaxpr, 1)
    return costs


def products(run, *shapes) -> int:
    """Returns the FLOPs of XLA's form."""
    return count_flops(functools.partial(run, implementation="xla"), *shapes)


def gradients(run, *which):
    """Returns a function that computes a nonlinear function of the first result and its gradients.

    It is nonlinear because a plain sum would not need the forward.
    """

    def both(*args, implementation):
        def loss(*chosen):
            replaced = dict(zip(which, chosen))
            out = run(
                *(replaced.get(i, x) for i, x in enumerate(args)), implementation=implementation
            )
            out = jax.tree.leaves(out)[0]
            return jnp.sum(jnp.sin(out.astype(F32)))

        return jax.value_and_grad(loss, tuple(range(len(which))))(*(args[i] for i in which))

    return both


def test_counts_visible_pairs_of_causal_attention():
    for t, s, start in [(5, 5, 0), (3, 7, 4), (3, 7, 2), (4, 3, 1), (2, 3, 9)]:
        assert visible_pairs(t, s, start) == sum(min(start + 1 + q, s) for q in range(t))
    shards = sum(visible_pairs(4, 12, start) for start in (0, 4, 8))
    assert shards == 3 * visible_pairs(4, 12, None)


def test_sums_costs_and_rounds_estimates():
    one, two = Cost(5, 7, "int8", 1), Cost(10, 4, "int8", 2)
    assert sum_costs(one, two) == Cost(15, 11, "int8", 3)
    assert sum_costs(one, two, bytes=8) == Cost(15, 8, "int8", 3)
    cost = estimate(sum_costs(one, two), calls=2)
    assert (cost.flops, cost.bytes_accessed, cost.transcendentals) == (8, 6, 2)


def test_counts_cross_entropy():
    m, d, v = 12, 128, 320
    shapes = array(m, d), array(d, v), array(m, dtype=I32)
    run = functools.partial(linear_cross_entropy, chunk=4)
    flops, moved, exponentials = kernels(run, *shapes)["cross_entropy"]
    assert flops == products(run, *shapes) == 2 * m * d * v
    assert moved == size(m, d) + size(d, v) + 3 * size(m)  # targets; nll and log partition
    assert exponentials == m * v
    half = kernels(run, array(m, d, dtype=BF16), array(d, v, dtype=BF16), shapes[2])
    assert half["cross_entropy"][1] == (size(m, d) + size(d, v)) // 2 + 3 * size(m)


@pytest.mark.parametrize("start", [5, 20, None])
def test_counts_flash_mla(start):
    """With blocks of one query XLA's form multiplies exactly the visible keys."""
    b, t, s, n, m, x, y = 2, 8, 14, 6, 3, 24, 40
    shapes = array(b, t, n, x), array(b, s, m, x), array(b, s, m, y)

    def run(q, k, v, first, implementation):
        first = first if start is None else start
        return flash_mla(q, k, v, scale=1.0, start=first, block=1, implementation=implementation)

    shapes = (*shapes, array(dtype=I32))
    run_back = gradients(run, 0, 1, 2)
    costs = kernels(run_back, *shapes)
    pairs = b * n * (t * (s + 1) / 2 if start is None else visible_pairs(t, s, start))
    forward, moved, exponentials = costs["flash_mla_forward"]
    assert forward == 2 * pairs * (x + y)
    assert exponentials == pairs
    q, k, v, out = size(b, t, n, x), size(b, s, m, x), size(b, s, m, y), size(b, t, n, y)
    assert moved == q + k + v + out + 2 * size(b, t, n)
    backward, moved, exponentials = costs["flash_mla_backward"]
    assert backward == 2 * pairs * (3 * x + 2 * y)
    assert moved == 2 * q + 2 * k + 2 * v + out + 2 * size(b, t, n)
    assert exponentials == pairs
    if start is not None:
        assert forward == products(run, *shapes)
        assert forward + backward == products(run_back, *shapes)


def test_flash_mla_reads_shared_keys_and_values_once():
    b, t, s, n, x = 1, 2, 6, 4, 32

    def run(q, k, implementation):
        return flash_mla(q, k, k, scale=1.0, start=4, implementation=implementation)

    _, moved, _ = kernels(run, array(b, t, n, x), array(b, s, 1, x))["flash_mla_forward"]
    assert moved == 2 * size(b, t, n, x) + size(b, s, x) + 2 * size(b, t, n)


def test_split_backward_costs_the_same(monkeypatch):
    """If the gradients of all rows do not fit on the chip, several calls share the cost."""
    tpu = importlib.import_module("pallas_kernels.flash_mla.tpu")
    b, t, n, x = 1, 1024, 4, 32

    def run(q, k, implementation):
        return flash_mla(q, k, k, scale=1.0, implementation=implementation)

    shapes = array(b, t, n, x), array(b, t, 1, x)
    unsplit = kernels(gradients(run, 0, 1), *shapes)["flash_mla_backward"]
    monkeypatch.setattr(tpu, "max_units", lambda *args: 2)
    assert kernels(gradients(run, 0, 1), *shapes)["flash_mla_backward"] == unsplit


def test_counts_gated_delta():
    b, t, n, h, u, chunk = 2, 64, 3, 24, 40, 16
    shapes = [array(b, t, n, w) for w in (h, h, u)] + [array(b, t, n)] * 2
    run = functools.partial(gated_delta, chunk=chunk)
    rows = 2 * size(b, t, n, h) + size(b, t, n, u) + 2 * size(b, t, n)
    state, out, one = size(b, n, h, u), size(b, t, n, u), b * t * n * h * u
    exponentials = b * t * n * chunk
    without_gradients = kernels(run, *shapes)["gated_delta_forward"]
    assert without_gradients == (6 * one, rows + out + 2 * state, exponentials)
    costs = kernels(gradients(run, 0, 1, 2, 3, 4), *shapes)
    states = t // chunk * state
    assert costs["gated_delta_forward"] == (6 * one, rows + out + 2 * state + states, exponentials)
    moved = 2 * rows + out + 2 * state + states
    assert costs["gated_delta_backward"] == (18 * one, moved, exponentials)


def test_counts_all_rows_of_grouped_matmul():
    """All rows count because the number of filled rows is unknown."""
    m, k, n, e = 48, 128, 256, 3
    shapes = array(m, k), array(e, k, n), array(e, dtype=I32)
    costs = kernels(gradients(grouped_matmul, 0, 1), *shapes)
    one, x, w, y = 2 * m * k * n, size(m, k), size(e, k, n), size(m, n)
    assert costs["grouped_matmul"] == (2 * one, (x + w + y) + (y + w + x), 0)
    assert costs["grouped_matmul_dw"] == (one, x + y + w, 0)


def test_counts_expected_rows_of_grouped_swiglu():
    m, filled, d, f, e = 96, 20, 128, 256, 3
    weights = [array(e, d, f), array(e, d, f), array(e, f, d)]
    shapes = array(m, d), array(e, dtype=I32), *weights

    def run(*args, implementation):
        return grouped_swiglu(*args, expected_rows=filled, implementation=implementation)

    one, w = 2 * filled * d * f, size(e, d, f)
    wide, narrow = size(filled, d), size(filled, f)
    inner = (0, 3 * narrow, filled * f)
    forward = (3 * one, 2 * (wide + w + narrow) + narrow + w + size(m, d), 0)
    costs = kernels(run, *shapes)
    assert costs == {"grouped_matmul": forward, "grouped_swiglu_rows": inner}
    costs = kernels(gradients(run, 0, 2, 3, 4), *shapes)
    # The gradient of the activations, that of the rows by gate, and that by up, which is added.
    back = wide + w + narrow, narrow + w + size(m, d), narrow + w + 2 * wide
    assert costs["grouped_matmul"] == (6 * one, forward[1] + sum(back), 0)
    assert costs["grouped_swiglu_rows"] == (0, 9 * narrow, 2 * filled * f)
    assert costs["grouped_matmul_dw"] == (3 * one, 3 * (wide + narrow + w), 0)


def test_counts_summed_attention_probs():
    b, t, s, n, m, x = 2, 128, 256, 6, 3, 64
    shapes = array(b, t, n, x), array(b, s, m, x), array(b, t, n)
    moved = size(b, t, n, x) + size(b, s, m, x) + size(b, t, n) + size(b, t, s)
    for start in (3, s):  # from the second start every key is visible
        run = functools.partial(summed_attention_probs, scale=1.0, start=start)
        pairs = b * n * visible_pairs(t, s, start)
        assert kernels(run, *shapes)["summed_attention_probs"] == (2 * pairs * x, moved, pairs)
    assert 2 * pairs * x == products(run, *shapes)

    def later(q, k, lse, start, implementation):
        return summed_attention_probs(
            q, k, lse, scale=1.0, start=start, implementation=implementation
        )

    flops, _, _ = kernels(later, *shapes, array(dtype=I32))["summed_attention_probs"]
    assert flops == b * n * t * (s + 1) * x


def test_counts_index_scores():
    b, t, s, i, j = 2, 128, 256, 3, 40
    shapes = array(b, t, i, j), array(b, t, i), array(b, s, j)
    costs = kernels(gradients(index_scores, 0, 1, 2), *shapes)
    one, q, w, k, pairs = (
        2 * b * t * s * i * j,
        size(b, t, i, j),
        size(b, t, i),
        size(b, s, j),
        size(b, t, s),
    )
    assert costs["index_scores"] == (one, q + w + k + pairs, 0)
    assert costs["index_scores_backward"] == (3 * one, 2 * q + w + 2 * k + pairs, 0)
    assert one == products(index_scores, *shapes)
    assert 4 * one == products(gradients(index_scores, 0, 1, 2), *shapes)


def test_counts_indexer_kl():
    """Blocks of queries share the pairs. Where all keys are visible, the work equals XLA's."""
    b, t, s, n, x, i, j = 2, 1024, 1280, 2, 16, 3, 40
    shapes = array(b, t, i, j), array(b, t, i), array(b, s, j)
    shapes += array(b, t, n, x), array(b, s, n, x), array(b, t, n)
    q, w, k, blocks = size(b, t, i, j), size(b, t, i), size(b, s, j), 2
    for start in (7, s):
        run = functools.partial(indexer_kl, scale=1.0, start=start)
        pairs = b * visible_pairs(t, s, start)
        one = 2 * pairs * i * j
        costs = kernels(run, *shapes)
        assert costs["summed_attention_probs"][0] == 2 * pairs * n * x
        moved = q + w + blocks * k + 3 * size(b, t) + 4 * pairs
        assert costs["indexer_kl"] == (one, moved, 2 * pairs)
        costs = kernels(gradients(run, 0, 1, 2), *shapes)
        assert costs["indexer_kl"] == (one, moved + 4 * pairs, 2 * pairs)
        moved = 2 * q + w + 2 * blocks * k + 2 * 4 * pairs
        assert costs["indexer_kl_backward"] == (3 * one, moved, 0)
    counted = sum(flops for flops, _, _ in costs.values())
    assert counted == products(gradients(run, 0, 1, 2), *shapes)


def test_counts_lightning_indexer():
    """XLA's form has more products: its weighted sum and its running sums."""
    b, t, s, i, j, k = 2, 8, 1300, 8, 128, 100
    shapes = array(b, t, i, j), array(b, t, i), array(b, s, j)
    moved = size(b, t, i, j) + size(b, t, i) + size(b, s, j) + size(b, t, k)

    def run(q, w, keys, start, implementation, **more):
        return lightning_indexer(q, w, keys, k, start=start, implementation=implementation, **more)

    for start in (900, s):
        flops = 2 * b * visible_pairs(t, s, start) * i * j
        got = kernels(functools.partial(run, start=start), *shapes)
        assert got == {"lightning_indexer": (flops, moved, 0)}
    assert flops < products(functools.partial(run, start=s), *shapes) < 1.1 * flops
    flops = b * t * (s + 1) * i * j
    assert kernels(run, *shapes, array(dtype=I32)) == {"lightning_indexer": (flops, moved, 0)}

    def scaled(q, w, keys, k_scale, implementation):
        return run(q, w, keys, 0, implementation, k_scale=k_scale)

    bytes_ = array(b, t, i, j, dtype=I8), shapes[1], array(b, s, j, dtype=I8), array(b, s)
    moved = b * t * i * j + size(b, t, i) + b * s * j + size(b, s) + size(b, t, k)
    assert kernels(scaled, *bytes_)["lightning_indexer"][1] == moved


def test_counts_half_of_paged_indexer_keys():
    b, t, i, j, pages, z, k = 3, 2, 8, 128, 10, 64, 100
    shapes = array(b, t, i, j), array(b, t, i), array(40, z, j)
    shapes += array(b, pages, dtype=I32), array(b, dtype=I32)
    run = functools.partial(paged_lightning_indexer, k=k)
    s = pages * z
    moved = size(b, t, i, j) + size(b, t, i) + size(b, s, j) + size(b, t, k)
    assert kernels(run, *shapes) == {"lightning_indexer": (b * t * (s + 1) * i * j, moved, 0)}


def test_counts_mla_prologue():
    b, t, d, q, n, x, c, r, rows = 2, 3, 256, 128, 2, 128, 128, 16, 64
    shapes = {"q_a": (d, q), "q_b": (q, n, x), "kv_a": (d, c + r)}
    w = {name: array(*shape) for name, shape in shapes.items()}
    w |= {"q_a_norm": array(q), "kv_a_norm": array(c)}
    turns = array(b, t, r // 2)

    def run(x, w, cos, sin, cache, slots, implementation):
        return mla_prologue(
            x, w, cos, sin, eps=1e-6, cache=cache, slots=slots, implementation=implementation
        )

    inputs = array(b, t, d), w, turns, turns, array(rows, c + r), array(b, t, dtype=I32)
    weights = sum(size(*shape) for shape in shapes.values())
    through = size(b, t, d) + size(b, t, q) + size(b, t, n, x) + size(b, t, c + r)
    flops, moved, _ = kernels(run, *inputs)["mla_prologue"]
    assert flops == products(run, *inputs)
    assert moved == weights + through + size(b, t, c + r)
    without = kernels(run, *inputs[:4], None, None)["mla_prologue"]
    assert without == (flops, weights + through, 0)


def test_counts_sparse_flash_attention():
    """XLA's form multiplies complete rows, so all columns are values in the comparison."""
    b, t, s, n, x, k = 2, 12, 40, 3, 48, 16
    shapes = array(b, t, n, x), array(b, s, x), array(b, t, k, dtype=I32)
    # Eight neighbours share a gather, and a row is copied in full lanes.
    gathers, words = b * k * t // 8, 128
    for y in (32, x):
        run = functools.partial(sparse_flash_attention, scale=1.0, value_dim=y)
        costs = kernels(gradients(run, 0, 1), *shapes)
        pairs, q, out = b * t * n * k, size(b, t, n, x), size(b, t, n, y)
        rest = size(b, t, k) + 2 * size(b, t, n)
        moved = q + out + rest + size(gathers, words)
        assert costs["sparse_flash_attention"] == (2 * pairs * (x + y), moved, pairs)
        moved = 2 * q + out + rest + size(gathers, words) + 2 * size(gathers, x)
        backward = 2 * pairs * (3 * x + 2 * y)
        assert costs["sparse_flash_attention_backward"] == (backward, moved, pairs)
    assert 2 * pairs * (x + y) == products(run, *shapes)
    assert 2 * pairs * (x + y) + backward == products(gradients(run, 0, 1), *shapes)


def test_counts_sparse_indexer_kl():
    b, t, s, k, n, x, i, j = 2, 6, 300, 128, 2, 24, 3, 40
    shapes = array(b, t, i, j), array(b, t, i), array(b, s, j)
    shapes += array(b, t, n, x), array(b, s, x), array(b, t, n), array(b, t, k, dtype=I32)
    run = functools.partial(sparse_indexer_kl, scale=1.0)
    name, exponentials = "sparse_indexer_kl", b * t * k * (n + 2)
    moved = size(b, t, i, j) + size(b, t, i) + size(b, t, n, x) + size(b, t, n)
    moved += size(b, t, k, x) + size(b, t, k, j) + size(b, t, k)
    flops = 2 * b * t * k * (n * x + i * j)
    assert kernels(run, *shapes)[name] == (flops, moved, exponentials)
    assert flops == products(run, *shapes)
    learning = gradients(run, 0, 1, 2)
    flops, moved = flops + 4 * b * t * k * i * j, moved + size(b, t, i, j) + size(b, t, k, j)
    assert kernels(learning, *shapes)[name] == (flops, moved, exponentials)
    assert flops == products(learning, *shapes)


def test_counts_w4a8_matmul():
    m, k, n, e, group = 32, 256, 384, 3, 128
    rows, scales = array(m, k, dtype=I8), array(m)
    weights = array(k // 2, n, dtype=I8), array(k // group, n)
    flops, moved, _ = kernels(w4a8_matmul, rows, scales, *weights)["w4a8_matmul"]
    assert flops == products(w4a8_matmul, rows, scales, *weights) == 2 * m * k * n
    assert moved == m * k + size(m) + k // 2 * n + size(k // group, n) + 2 * m * n
    each = array(e, k // 2, n, dtype=I8), array(e, k // group, n), array(e, dtype=I32)
    flops, moved, _ = kernels(w4a8_grouped_matmul, rows, scales, *each)["w4a8_matmul"]
    assert flops == 2 * m * k * n
    held = e * (k // 2 * n + size(k // group, n))
    assert moved == m * k + size(m) + held + 2 * m * n
    run = functools.partial(w4a8_grouped_matmul, expected_rows=(filled := 20))
    flops, moved, _ = kernels(run, rows, scales, *each)["w4a8_matmul"]
    assert flops == 2 * filled * k * n
    assert moved == filled * k + size(filled) + held + 2 * m * n


def test_counts_scatter_rows():
    s, m, w = 50, 12, 128
    shapes = array(s, 1, w, dtype=I32), array(m, 1, w, dtype=I32), array(m, dtype=I32)
    assert kernels(scatter_rows, *shapes) == {"scatter_rows": (0, 2 * size(m, w) + size(m), 0)}


@pytest.mark.slow
def test_work_by_scope_uses_cost_estimates():
    b, t, s, i, j, k = 2, 8, 1300, 8, 128, 100
    shapes = array(b, t, i, j), array(b, t, i), array(b, s, j)
    run = functools.partial(lightning_indexer, k=k, implementation=TPU)
    (cost,) = kernels(functools.partial(lightning_indexer, k=k), *shapes).values()
    assert work_by_scope(jax.make_jaxpr(run)(*shapes))[REST] == cost[:2]
