"""Tests of the warm-up's KL and its gradients against the NumPy oracle, and of their memory."""

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
    race_checked,
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
    assert_summed_in_float32,
    expected,
    in_bfloat16,
    keep,
    log_sum_exp,
    problem,
    target_gradients,
)
from tests.oracles import indexer_kl as oracle


def call(inputs, lse, start=START, segments=None, **options):
    """Returns (loss, kl) of the inputs."""
    options = inputs | {"lse": lse, "scale": SCALE, "start": start, "block": 4} | options
    if segments is not None:
        t = inputs["q"].shape[1]
        options |= {"q_segments": segments[:, start : start + t], "k_segments": segments}
    return indexer_kl(**options)


def with_gradients(inputs, lse, **options):
    """Returns (loss, kl) and the gradients by name."""
    return indexer_problem.with_gradients(lambda inputs: call(inputs, lse, **options), inputs)


@pytest.fixture
def few_extents(monkeypatch):
    """Makes runs of several blocks, as in sequences of more than 16 blocks."""
    monkeypatch.setattr(blocks, "EXTENTS", 2)


CASES = {
    "end of a row": dict(start=S - T),
    "start of a row": dict(start=0),
    "documents": dict(segments=SEGMENTS),
    "one key for all heads": dict(key_heads=1, block=1),
    "two heads to a key": dict(key_heads=2, segments=SEGMENTS, block=64),
}


QUICK = {
    "xla": ("documents",),
    "tpu": ("two heads to a key",),
    "gpu": (),
}


@pytest.mark.usefixtures("few_extents")
@over_cases("indexer_kl", CASES, QUICK)
def test_kl_and_gradients_equal_oracle(name, implementation):
    case = dict(CASES[name])
    inputs = problem(key_heads=case.pop("key_heads", N))
    mask = keep(case.get("start", START), case.get("segments"))
    got = with_gradients(inputs, log_sum_exp(inputs, mask), implementation=implementation, **case)
    assert_equal(got, expected(inputs, mask))
    assert not np.asarray(got["kl"])[~mask.any(-1)].any()


def test_hopper_kl_and_gradients_equal_oracle():
    """Uses few queries and keys because Hopper's emulator is slow."""
    t, s = 3, 40
    inputs = {name: x[:1] for name, x in problem(t=t, s=s).items()}
    mask = keep(s - t, None, t, s)[:1]
    options = {"start": s - t, "implementation": interpreted("gpu")}
    assert_equal(
        with_gradients(inputs, log_sum_exp(inputs, mask), **options), expected(inputs, mask)
    )


# Some tiles of 128 keys hold other documents only, before and between those of a query's document.
LONG = np.stack(
    [np.repeat([5, 1, 2, 2], [90, 60, 100, 50]), np.repeat([3, 0, 4, 3], [130, 20, 30, 120])]
)


@pytest.mark.slow
@over_pallas_forms("indexer_kl")
@pytest.mark.parametrize("block", [128, 256])
def test_kl_over_several_tiles_equals_oracle(name, block, monkeypatch):
    """140 queries are two blocks of one tile or one block of two, over three tiles of keys."""
    if name == "tpu":
        for module in (summed_attention_probs_tpu, index_scores_tpu):
            monkeypatch.setattr(module, "QUERIES", (128,))
            monkeypatch.setattr(module, "KEYS", (128,))
        monkeypatch.setattr(indexer_kl_tpu, "BLOCKS", (block,))
    else:
        monkeypatch.setattr(indexer_kl_gpu, "BLOCK", block)
    t, s = 140, 300
    inputs = problem(t=t, s=s)
    for segments in (None, LONG):
        mask = keep(s - t, segments, t, s)
        options = {"start": s - t, "segments": segments, "implementation": interpreted(name)}
        assert_equal(
            with_gradients(inputs, log_sum_exp(inputs, mask), **options), expected(inputs, mask)
        )


@over_implementations("indexer_kl", slow="tpu gpu")
def test_accepts_traced_start_without_gradients(implementation):
    inputs = problem()
    lse = log_sum_exp(inputs, keep(START))
    run = jax.jit(lambda start: call(inputs, lse, start, implementation=implementation))
    loss, kl = run(START)
    want = expected(inputs, keep(START))
    np.testing.assert_allclose(kl, want["kl"], atol=2e-5)
    np.testing.assert_allclose(loss, want["loss"], rtol=1e-5)


def test_oracle_gradients_equal_finite_differences():
    inputs = {name: x.astype(np.float64) for name, x in problem().items()}
    rng = np.random.default_rng(3)
    mask = keep(START, SEGMENTS)
    want = expected(inputs, mask)
    for name in TRAINED:
        way, step = rng.standard_normal(inputs[name].shape), 1e-6
        losses = [
            expected(inputs | {name: inputs[name] + sign * step * way}, mask)["loss"]
            for sign in (1, -1)
        ]
        slope = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(way * want[f"d_{name}"]), slope, rtol=1e-6)


@pytest.mark.slow
@over_implementations("indexer_kl")
def test_kl_of_equal_scores_is_entropy_gap(implementation):
    """With zero head weights all scores are 0, so kl = log(visible keys) - entropy(p)."""
    inputs = problem()
    inputs["idx_w"] = np.zeros_like(inputs["idx_w"])
    mask = keep(START)
    got = with_gradients(inputs, log_sum_exp(inputs, mask), implementation=implementation)
    p = oracle.summed_attention_probs(inputs["q"], inputs["k"], mask, SCALE) / N
    entropy = -np.sum(np.where(mask, p * np.log(np.where(mask, p, 1)), 0), axis=-1)
    np.testing.assert_allclose(got["kl"], np.log(mask.sum(-1)) - entropy, atol=2e-5)
    assert not np.asarray(got["d_idx_q"]).any() and not np.asarray(got["d_idx_k"]).any()
    assert np.asarray(got["d_idx_w"]).any()


@over_implementations("indexer_kl", slow="tpu gpu")
def test_normalizes_target(implementation):
    """A constant error of the log-sum-exp scales all probabilities equally."""
    inputs = problem()
    lse = log_sum_exp(inputs, keep(START))
    got = with_gradients(inputs, lse - 0.7, implementation=implementation)
    assert_equal(got, expected(inputs, keep(START)))


@over_implementations("indexer_kl", slow="tpu gpu")
def test_target_has_no_gradient(implementation):
    inputs = problem()
    run = functools.partial(call, implementation=implementation)
    gradients = target_gradients(run, inputs, log_sum_exp(inputs, keep(START)))
    assert not any(np.asarray(g).any() for g in gradients)


def test_scales_gradients_by_cotangent():
    inputs = problem()
    lse = log_sum_exp(inputs, keep(START))

    def loss(trained):
        return -3 * call(inputs | trained, lse)[0]

    got = jax.jit(jax.grad(loss))({name: inputs[name] for name in TRAINED})
    want = expected(inputs, keep(START))
    for name in TRAINED:
        np.testing.assert_allclose(got[name], -3 * want[f"d_{name}"], atol=1e-4)


def test_default_weight_is_one():
    inputs = problem()
    lse = log_sum_exp(inputs, keep(START))
    loss, kl = jax.jit(lambda: call(inputs, lse, weight=None))()
    np.testing.assert_allclose(loss, kl.sum(), rtol=1e-6)


@pytest.mark.slow
@over_implementations("indexer_kl")
def test_kl_sums_bfloat16_in_float32(implementation):
    low, rounded = in_bfloat16(problem())
    lse = log_sum_exp(rounded, keep(START))
    got, again = (with_gradients(low, lse, implementation=implementation) for _ in range(2))
    assert_summed_in_float32(low, expected(rounded, keep(START)), got, again)


@over_implementations("indexer_kl", several_devices=True, slow="xla tpu")
def test_shards_queries_over_8_devices(implementation):
    """Queries are sharded are sharded and keys are not; the keys' gradient is the sum over devices."""
    inputs = problem()
    mask = keep(S - T)
    lse = log_sum_exp(inputs, mask)
    queries = 16  # 13 and padding, which has no segment and no weight
    pad = {name: np.pad(inputs[name], [(0, 0), (0, queries - T)] + [(0, 0)] * (inputs[name].ndim - 2))
           for name in ("idx_q", "idx_w", "q", "weight")}  # fmt: skip
    lse = np.pad(lse, [(0, 0), (0, queries - T), (0, 0)])
    q_segments = np.pad(np.ones((B, T), np.int32), [(0, 0), (0, queries - T)])
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    split, replicated = P(None, "context"), P()

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split, split, replicated, split, replicated, split, split, split),
        out_specs=(replicated, (split, split, replicated)),
        check_vma=False,
    )
    def run(idx_q, idx_w, idx_k, q, k, lse, weight, q_segments):
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
                q_segments=q_segments,
                k_segments=jnp.ones((B, S), jnp.int32),
                implementation=implementation,
            )[0]

        value, (dq, dw, dk) = jax.value_and_grad(loss, (0, 1, 2))(idx_q, idx_w, idx_k)
        return jax.lax.psum(value, "context"), (dq, dw, jax.lax.psum(dk, "context"))

    arrays = (
        pad["idx_q"],
        pad["idx_w"],
        inputs["idx_k"],
        pad["q"],
        inputs["k"],
        lse,
        pad["weight"],
        q_segments,
    )
    value, (dq, dw, dk) = run(*arrays)
    got = {"loss": value, "d_idx_q": dq[:, :T], "d_idx_w": dw[:, :T], "d_idx_k": dk}
    assert_equal(got, expected(inputs, mask), got)


@pytest.mark.slow
def test_kl_vmaps_and_traces_once():
    traces = []

    @jax.jit
    def run(inputs, lse):
        traces.append(1)
        rows = jax.tree.map(lambda x: x[:, None], (inputs, lse))
        return jax.vmap(lambda inputs, lse: call(inputs, lse))(*rows)

    for seed in (0, 1):
        inputs = problem(seed)
        loss, kl = run(inputs, log_sum_exp(inputs, keep(START)))
        want = expected(inputs, keep(START))
        np.testing.assert_allclose(kl[:, 0], want["kl"], atol=2e-5)
        np.testing.assert_allclose(loss.sum(), want["loss"], rtol=1e-5)
    assert len(traces) == 1


@pytest.mark.slow
@over_pallas_forms("indexer_kl")
def test_kl_has_no_races(name):
    inputs = problem()
    mask = keep(START, SEGMENTS)
    lse = log_sum_exp(inputs, mask)

    def loss(trained):
        return call(inputs | trained, lse, segments=SEGMENTS, implementation=race_checked(name))

    (_, kl), gradients = jax.value_and_grad(loss, has_aux=True)({n: inputs[n] for n in TRAINED})
    assert not compat.has_races(name)
    got = {"kl": kl} | {f"d_{name}": g for name, g in gradients.items()}
    assert_equal(got, expected(inputs, mask), got)


# ---- memory of both passes -------------------------------------------------------------------


def shapes(t: int):
    """Returns abstract arguments of `step` for t tokens, with 8 heads of 16 and 4 index heads of 8."""

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return of(1, t, 4, 8), of(1, t, 4), of(1, t, 8), *[of(1, t, 8, 16)] * 2, of(1, t, 8)


def step(block: int):
    """Returns a function that computes the KL and the indexer's gradients."""
    loss = functools.partial(indexer_kl, scale=0.1, block=block)
    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def largest(jaxpr) -> int:
    """Returns the elements of the largest array of a jaxpr, including loops and calls."""
    maximum = 0
    for equation in jaxpr.eqns:
        params = jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        inner = [largest(getattr(p, "jaxpr", p)) for p in params if hasattr(p, "eqns")]
        maximum = max([maximum, *inner, *(v.aval.size for v in equation.outvars)])
    return maximum


def test_never_materializes_all_scores():
    """No array is larger than the queries of all heads."""
    t = 512
    assert largest(jax.make_jaxpr(step(block=32))(*shapes(t)).jaxpr) <= t * 8 * 16


@pytest.mark.slow
@pytest.mark.usefixtures("few_extents")
def test_kl_memory_is_linear_in_length():
    """Twice the tokens take twice the temporary memory; all scores would take four times."""

    def temporaries(t):
        compiled = jax.jit(step(block=32)).lower(*shapes(t)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(2048)
    assert long < 2.2 * short
    assert long < 2048 * 2048  # a quarter of the scores' bytes
