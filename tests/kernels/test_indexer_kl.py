"""The warm-up's KL and its gradients against the NumPy oracle, and what both passes may hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from pallas_kernels import blocks, compat
from pallas_kernels.index_scores import tpu as index_scores_tpu
from pallas_kernels.indexer_kl import gpu as indexer_kl_gpu, indexer_kl, tpu as indexer_kl_tpu
from pallas_kernels.summed_attention_probs import tpu as summed_attention_probs_tpu
from tests.kernels import indexer_problem
from tests.kernels.implementations import (
    interpreted,
    over_cases,
    over_implementations,
    over_pallas_forms,
    watched,
)
from tests.kernels.indexer_problem import (
    SCALE,
    SEGMENTS,
    START,
    TRAINED,
    B,
    N,
    S,
    T,
    assert_equal,
    assert_summed_wide,
    expected,
    in_bfloat16,
    keep,
    log_sum_exp,
    problem,
    target_gradients,
)
from tests.oracles import indexer_kl as oracle


def call(given, lse, start=START, segments=None, **options):
    """(loss, kl) of a problem."""
    options = given | {"lse": lse, "scale": SCALE, "start": start, "block": 4} | options
    if segments is not None:
        t = given["q"].shape[1]
        options |= {"q_segments": segments[:, start : start + t], "k_segments": segments}
    return indexer_kl(**options)


def pulled(given, lse, **options):
    """The same with the gradients."""
    return indexer_problem.pulled(lambda given: call(given, lse, **options), given)


@pytest.fixture
def few_extents(monkeypatch):
    """Runs of several blocks, as in sequences of more than 16 blocks."""
    monkeypatch.setattr(blocks, "EXTENTS", 2)


CASES = {
    "the end of a row": dict(start=S - T),
    "the beginning": dict(start=0),
    "documents": dict(segments=SEGMENTS),
    "one key for all heads": dict(key_heads=1, block=1),
    "two heads to a key": dict(key_heads=2, segments=SEGMENTS, block=64),
}


QUICK = {
    "ref": ("documents",),
    "tpu": ("two heads to a key",),
    "gpu": (),
}


@pytest.mark.usefixtures("few_extents")
@over_cases("indexer_kl", CASES, QUICK)
def test_kl_and_its_gradients(name, implementation):
    case = dict(CASES[name])
    given = problem(key_heads=case.pop("key_heads", N))
    mask = keep(case.get("start", START), case.get("segments"))
    got = pulled(given, log_sum_exp(given, mask), implementation=implementation, **case)
    assert_equal(got, expected(given, mask))
    assert not np.asarray(got["kl"])[~mask.any(-1)].any()


def test_kl_and_its_gradients_on_hopper():
    """Of few queries and keys, as its emulator is slow."""
    t, s = 3, 40
    given = {name: x[:1] for name, x in problem(t=t, s=s).items()}
    mask = keep(s - t, None, t, s)[:1]
    options = {"start": s - t, "implementation": interpreted("gpu")}
    assert_equal(pulled(given, log_sum_exp(given, mask), **options), expected(given, mask))


# Rows in which tiles of 128 keys are of other documents alone, before and between a query's own.
LONG = np.stack(
    [np.repeat([5, 1, 2, 2], [90, 60, 100, 50]), np.repeat([3, 0, 4, 3], [130, 20, 30, 120])]
)


@pytest.mark.slow
@over_pallas_forms("indexer_kl")
@pytest.mark.parametrize("block", [128, 256])
def test_over_several_tiles(name, block, monkeypatch):
    """140 queries and 300 keys: two blocks of a tile or one of two, each over three tiles of keys."""
    if name == "tpu":
        for module in (summed_attention_probs_tpu, index_scores_tpu):
            monkeypatch.setattr(module, "QUERIES", (128,))
            monkeypatch.setattr(module, "KEYS", (128,))
        monkeypatch.setattr(indexer_kl_tpu, "BLOCKS", (block,))
    else:
        monkeypatch.setattr(indexer_kl_gpu, "BLOCK", block)
    t, s = 140, 300
    given = problem(t=t, s=s)
    for segments in (None, LONG):
        mask = keep(s - t, segments, t, s)
        options = {"start": s - t, "segments": segments, "implementation": interpreted(name)}
        assert_equal(pulled(given, log_sum_exp(given, mask), **options), expected(given, mask))


@over_implementations("indexer_kl", slow="tpu gpu")
def test_start_known_at_run_time_and_no_gradient_asked(implementation):
    given = problem()
    lse = log_sum_exp(given, keep(START))
    run = jax.jit(lambda start: call(given, lse, start, implementation=implementation))
    loss, kl = run(START)
    want = expected(given, keep(START))
    np.testing.assert_allclose(kl, want["kl"], atol=2e-5)
    np.testing.assert_allclose(loss, want["loss"], rtol=1e-5)


def test_the_oracles_gradients_are_the_slopes_of_its_loss():
    given = {name: x.astype(np.float64) for name, x in problem().items()}
    rng = np.random.default_rng(3)
    mask = keep(START, SEGMENTS)
    want = expected(given, mask)
    for name in TRAINED:
        way, step = rng.standard_normal(given[name].shape), 1e-6
        losses = [
            expected(given | {name: given[name] + sign * step * way}, mask)["loss"]
            for sign in (1, -1)
        ]
        slope = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(way * want[f"d_{name}"]), slope, rtol=1e-6)


@pytest.mark.slow
@over_implementations("indexer_kl")
def test_equal_scores_measure_how_sharp_the_attention_is(implementation):
    """Head weights of zero: I is flat, so kl = log(visible keys) - entropy(p), and only the weights learn."""
    given = problem()
    given["idx_w"] = np.zeros_like(given["idx_w"])
    mask = keep(START)
    got = pulled(given, log_sum_exp(given, mask), implementation=implementation)
    p = oracle.summed_attention_probs(given["q"], given["k"], mask, SCALE) / N
    entropy = -np.sum(np.where(mask, p * np.log(np.where(mask, p, 1)), 0), axis=-1)
    np.testing.assert_allclose(got["kl"], np.log(mask.sum(-1)) - entropy, atol=2e-5)
    assert not np.asarray(got["d_idx_q"]).any() and not np.asarray(got["d_idx_k"]).any()
    assert np.asarray(got["d_idx_w"]).any()


@over_implementations("indexer_kl", slow="tpu gpu")
def test_the_target_is_normalised(implementation):
    """A log-sum-exp that is off by a constant scales every probability alike."""
    given = problem()
    lse = log_sum_exp(given, keep(START))
    got = pulled(given, lse - 0.7, implementation=implementation)
    assert_equal(got, expected(given, keep(START)))


@over_implementations("indexer_kl", slow="tpu gpu")
def test_the_target_does_not_learn(implementation):
    given = problem()
    run = functools.partial(call, implementation=implementation)
    gradients = target_gradients(run, given, log_sum_exp(given, keep(START)))
    assert not any(np.asarray(g).any() for g in gradients)


def test_gradients_scale_with_the_losses_own():
    given = problem()
    lse = log_sum_exp(given, keep(START))

    def loss(trained):
        return -3 * call(given | trained, lse)[0]

    got = jax.jit(jax.grad(loss))({name: given[name] for name in TRAINED})
    want = expected(given, keep(START))
    for name in TRAINED:
        np.testing.assert_allclose(got[name], -3 * want[f"d_{name}"], atol=1e-4)


def test_without_weights_every_query_counts_once():
    given = problem()
    lse = log_sum_exp(given, keep(START))
    loss, kl = jax.jit(lambda: call(given, lse, weight=None))()
    np.testing.assert_allclose(loss, kl.sum(), rtol=1e-6)


@pytest.mark.slow
@over_implementations("indexer_kl")
def test_bfloat16_sums_wide_and_the_same_twice(implementation):
    low, rounded = in_bfloat16(problem())
    lse = log_sum_exp(rounded, keep(START))
    got, again = (pulled(low, lse, implementation=implementation) for _ in range(2))
    assert_summed_wide(low, expected(rounded, keep(START)), got, again)


@over_implementations("indexer_kl", several_devices=True, slow="ref tpu")
def test_in_a_manual_region_of_8_devices(implementation):
    """Queries over devices, keys whole, as the model shards them: the keys' gradient is the devices' sum."""
    given = problem()
    mask = keep(S - T)
    lse = log_sum_exp(given, mask)
    queries = 16  # 13 of them and padding: no segment, no weight
    pad = {name: np.pad(given[name], [(0, 0), (0, queries - T)] + [(0, 0)] * (given[name].ndim - 2))
           for name in ("idx_q", "idx_w", "q", "weight")}  # fmt: skip
    lse = np.pad(lse, [(0, 0), (0, queries - T), (0, 0)])
    own = np.pad(np.ones((B, T), np.int32), [(0, 0), (0, queries - T)])
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    split, whole = P(None, "context"), P()

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split, split, whole, split, whole, split, split, split),
        out_specs=(whole, (split, split, whole)),
        check_vma=False,
    )
    def run(idx_q, idx_w, idx_k, q, k, lse, weight, own):
        start = S - T + jax.lax.axis_index("context") * idx_q.shape[1]

        def loss(idx_q, idx_w, idx_k):
            return indexer_kl(
                idx_q,
                idx_w,
                idx_k,
                q,
                k,
                lse,
                scale=SCALE,
                weight=weight,
                start=start,
                q_segments=own,
                k_segments=jnp.ones((B, S), jnp.int32),
                implementation=implementation,
            )[0]

        value, (dq, dw, dk) = jax.value_and_grad(loss, (0, 1, 2))(idx_q, idx_w, idx_k)
        return jax.lax.psum(value, "context"), (dq, dw, jax.lax.psum(dk, "context"))

    arrays = (
        pad["idx_q"],
        pad["idx_w"],
        given["idx_k"],
        pad["q"],
        given["k"],
        lse,
        pad["weight"],
        own,
    )
    value, (dq, dw, dk) = run(*arrays)
    got = {"loss": value, "d_idx_q": dq[:, :T], "d_idx_w": dw[:, :T], "d_idx_k": dk}
    assert_equal(got, expected(given, mask), got)


@pytest.mark.slow
def test_under_vmap_and_traced_once():
    traces = []

    @jax.jit
    def run(given, lse):
        traces.append(1)
        rows = jax.tree.map(lambda x: x[:, None], (given, lse))
        return jax.vmap(lambda given, lse: call(given, lse))(*rows)

    for seed in (0, 1):
        given = problem(seed)
        loss, kl = run(given, log_sum_exp(given, keep(START)))
        want = expected(given, keep(START))
        np.testing.assert_allclose(kl[:, 0], want["kl"], atol=2e-5)
        np.testing.assert_allclose(loss.sum(), want["loss"], rtol=1e-5)
    assert len(traces) == 1


@pytest.mark.slow
@over_pallas_forms("indexer_kl")
def test_no_races(name):
    given = problem()
    mask = keep(START, SEGMENTS)
    lse = log_sum_exp(given, mask)

    def loss(trained):
        return call(given | trained, lse, segments=SEGMENTS, implementation=watched(name))

    (_, kl), gradients = jax.value_and_grad(loss, has_aux=True)({n: given[n] for n in TRAINED})
    assert not compat.has_races(name)
    got = {"kl": kl} | {f"d_{name}": g for name, g in gradients.items()}
    assert_equal(got, expected(given, mask), got)


# ---- what both passes may hold -------------------------------------------------------------------


def shapes(t: int):
    """Abstract arguments of `step` for t tokens: 8 heads of 16, 4 index heads of 8."""

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return of(1, t, 4, 8), of(1, t, 4), of(1, t, 8), *[of(1, t, 8, 16)] * 2, of(1, t, 8)


def step(block: int):
    """KL and the indexer's gradients."""
    loss = functools.partial(indexer_kl, scale=0.1, block=block)
    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def largest(jaxpr) -> int:
    """Elements of the largest array that any equation of a jaxpr makes, inside loops and calls too."""
    most = 0
    for equation in jaxpr.eqns:
        params = jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        inner = [largest(getattr(p, "jaxpr", p)) for p in params if hasattr(p, "eqns")]
        most = max([most, *inner, *(v.aval.size for v in equation.outvars)])
    return most


def test_no_array_has_a_place_for_every_query_and_key():
    """Let alone for every head: nothing is larger than the queries of all heads."""
    t = 512
    assert largest(jax.make_jaxpr(step(block=32))(*shapes(t)).jaxpr) <= t * 8 * 16


@pytest.mark.slow
@pytest.mark.usefixtures("few_extents")
def test_memory_is_linear_in_the_length():
    """Twice the tokens take twice the temporaries, where all scores would take four times as many."""

    def temporaries(t):
        compiled = jax.jit(step(block=32)).lower(*shapes(t)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(2048)
    assert long < 2.2 * short
    assert long < 2048 * 2048  # a quarter of the scores' bytes
