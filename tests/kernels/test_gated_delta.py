"""Tests of the gated delta rule, in chunks and in steps, against the recurrence in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import compat
from pallas_kernels.gated_delta import chunk as chunks, gated_delta, gated_delta_step
from tests.kernels.implementations import (
    in_tiers,
    interpreted,
    over_cases,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.oracles import gated_delta as oracle

B, T, N, H, U, CHUNK = 2, 43, 2, 6, 5, 16  # the last of three chunks is not full
NAMES = ("q", "k", "v", "g", "beta", "state")
ONE_DOCUMENT = np.ones((B, T), np.int32)
# Boundaries inside a chunk, at its start, two in one chunk, and documents of one position.
# The last document of the second row has the number of its first one.
DOCUMENTS = np.repeat([[1, 2, 3, 4, 5], [7, 7, 8, 9, 7]], [5, 11, 1, 20, 6], axis=1)
PADDED = DOCUMENTS * (np.arange(T) % 13 > 2)  # before, between and inside documents


def problem(seed=0, t=T):
    """Returns float32 arrays by NAMES in the layout of `gated_delta`, with unit keys and gates in (0, 1)."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, t, N, H))
    arrays = {
        "q": q,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((B, t, N, U)),
        "g": -np.exp(2 * rng.standard_normal((B, t, N)) - 2),
        "beta": 2 * rng.random((B, t, N)),
        "state": rng.standard_normal((B, N, H, U)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def cotangents(t=T):
    rng = np.random.default_rng(9)
    shapes = (B, t, N, U), (B, N, H, U)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def expected(args, segments, dout, dfinal):
    """Returns the oracle's (out, final state, gradients by name), computed per document and head."""
    out, final = np.zeros(dout.shape), np.zeros(dfinal.shape)
    grads = {name: np.zeros(x.shape) for name, x in args.items()}
    for b in range(len(segments)):
        positions = np.flatnonzero(segments[b])
        pieces = np.split(positions, 1 + np.flatnonzero(np.diff(segments[b, positions])))
        for n in range(N):
            state = args["state"][b, n].T.astype(np.float64)
            if not len(positions):
                final[b, n], grads["state"][b, n] = state.T, dfinal[b, n]
                continue
            for i, at in enumerate(pieces):
                of = [np.float64(args[name][b, at, n]) for name in NAMES[:-1]]
                start = state if i == 0 else 0 * state
                if i:
                    of[3][0] = 0  # the first position has no state to forget
                out[b, at, n], end = oracle.gated_delta(*of, start)
                last = i == len(pieces) - 1
                d = oracle.gradients(
                    *of, start, np.float64(dout[b, at, n]), dfinal[b, n].T * float(last)
                )
                for name in NAMES[:-1]:
                    grads[name][b, at, n] = d[name]
                if i == 0:
                    grads["state"][b, n] = d["state"].T
            final[b, n] = end.T
    return out, final, grads


@functools.cache
def runner(implementation, chunk=CHUNK):
    """Returns a jitted (args by name, segments, cotangents) -> (out, final state, gradients by name)."""

    def run(args, segments, dout, dfinal):
        def forward(args):
            args = dict(args)
            state = args.pop("state")
            named = dict(initial_state=state, segments=segments, chunk=chunk)
            return gated_delta(**args, **named, implementation=implementation)

        (out, final), pull = jax.vjp(forward, args)
        return out, final, pull((dout.astype(out.dtype), dfinal))[0]

    return jax.jit(run)


def assert_equal(got, wanted, tolerance=2e-5):
    for ours, theirs in zip(got[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance * max(1, np.abs(theirs).max()))
    for name in NAMES:
        ours, theirs = np.asarray(got[2][name], np.float64), wanted[2][name]
        limit = tolerance * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, atol=limit, err_msg=name)


def with_values(**values):
    """Returns the inputs with some arguments set to a number."""
    args = problem()
    for name, value in values.items():
        args[name] = np.full_like(args[name], value)
    return args


def with_closed_gates(args):
    """Closes two gates completely, the second at the start of a chunk."""
    args["g"][:, [7, CHUNK], 0] = -np.inf
    return args


CASES = {
    "everything": (problem(), PADDED),
    "one document": (problem(), ONE_DOCUMENT),
    "documents": (problem(), DOCUMENTS),
    "no gate: DeltaNet": (with_values(g=0), ONE_DOCUMENT),
    "beta 1, no gate, no state": (with_values(g=0, beta=1, state=0), ONE_DOCUMENT),
    "beta 0": (with_values(beta=0), ONE_DOCUMENT),
    "closed gates": (with_closed_gates(problem()), ONE_DOCUMENT),
    "strong gates": (with_values(g=-30), ONE_DOCUMENT),
    "only padding in a row": (problem(), DOCUMENTS * np.array([[1], [0]])),
}


QUICK = {
    "xla": CASES,
    "tpu": ("everything", "closed gates", "only padding in a row"),
    "gpu": (),
}


@over_cases("gated_delta", CASES, QUICK)
def test_chunked_form_and_gradients_equal_oracle(name, implementation):
    args, segments = CASES[name]
    wanted = expected(args, segments, *cotangents())
    got = runner(implementation)(args, segments, *cotangents())
    assert_equal(got, wanted)
    assert not np.asarray(got[0])[segments == 0].any()


def recurrent(args):
    """Returns (out, final state) by `gated_delta_step`."""
    state, rest = args["state"], [jnp.moveaxis(args[name], 1, 0) for name in NAMES[:-1]]

    def one(state, now):
        out, state = gated_delta_step(state, *now)
        return state, out

    state, out = jax.lax.scan(one, state, tuple(rest))
    return jnp.moveaxis(out, 0, 1), state


def test_steps_and_gradients_equal_oracle():
    args, (dout, dfinal) = problem(), cotangents()
    (out, final), pull = jax.vjp(jax.jit(recurrent), args)
    wanted = expected(args, ONE_DOCUMENT, dout, dfinal)
    assert_equal((out, final, pull((dout, dfinal))[0]), wanted)


@over_implementations("gated_delta", slow="tpu gpu")
def test_steps_continue_chunked_prefix(implementation):
    args = problem()
    prefix = {name: x[:, :33] for name, x in args.items() if name != "state"}
    rest = {name: x[:, 33:] for name, x in args.items() if name != "state"}
    run = jax.jit(functools.partial(gated_delta, chunk=CHUNK, implementation=implementation))
    first, state = run(**prefix, initial_state=args["state"])
    second, state = jax.jit(recurrent)(rest | {"state": state})
    out, final, _ = expected(args, ONE_DOCUMENT, *cotangents())
    np.testing.assert_allclose(np.concatenate([first, second], 1), out, atol=2e-5)
    np.testing.assert_allclose(state, final, atol=2e-5)


@pytest.mark.parametrize("chunk", in_tiers([7], [1, 64]))
def test_any_chunk_is_exact_in_float64(chunk):
    """A chunk of 64 is longer than the sequence."""
    with jax.enable_x64(True):
        args = {name: x.astype(np.float64) for name, x in problem().items()}
        d = tuple(x.astype(np.float64) for x in cotangents())
        got = runner("xla", chunk)(args, PADDED, *d)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(got))
        assert_equal(got, expected(args, PADDED, *d), 1e-13)


@over_implementations("gated_delta", slow="tpu")
def test_handles_repeated_keys(implementation):
    """With one key and no gate, powers of the inverted matrix reach 1e18 in a chunk of 64."""
    args = {name: x[:1, :, :1] for name, x in problem(t=64).items() if name != "state"}
    args["k"] = np.full_like(args["k"], H**-0.5)
    args["g"], args["beta"] = 0 * args["g"], 0 * args["beta"] + 1
    run = jax.jit(functools.partial(gated_delta, implementation=implementation))
    out, final = run(**args)
    of = [np.float64(args[name][0, :, 0]) for name in NAMES[:-1]]
    wanted, end = oracle.gated_delta(*of, np.zeros((U, H)))
    np.testing.assert_allclose(out[0, :, 0], wanted, atol=2e-5)
    np.testing.assert_allclose(final[0, 0], end.T, atol=2e-5)


@pytest.mark.parametrize("size", [1, 5, 16, 64])
@pytest.mark.parametrize("parts", [chunks.BF16Parts(0, 0), chunks.BF16Parts(2, 2)])
def test_inverts_triangular_matrix(size, parts):
    rng = np.random.default_rng(0)
    k = rng.standard_normal((3, size, 24))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a = np.tril(1.9 * k @ k.transpose(0, 2, 1), -1)
    got = jax.jit(chunks.inverse, static_argnums=0)(parts, a.astype(np.float32))
    limit = 1e-6 if parts.a == 0 else 1e-4
    np.testing.assert_allclose(got, np.linalg.inv(np.eye(size) + a), atol=limit)


@pytest.mark.slow
@over_implementations("gated_delta")
def test_sums_bfloat16_in_float32(implementation):
    """Float32 outputs are as exact as operands in two bfloat16 parts."""
    args = problem()
    narrow = {name: jnp.asarray(args[name], jnp.bfloat16) for name in "qkv"}
    dout, dfinal = cotangents()
    dout = np.float32(jnp.asarray(dout, jnp.bfloat16))
    got = runner(implementation)(args | narrow, PADDED, dout, dfinal)
    exact = args | {name: np.float32(x) for name, x in narrow.items()}
    out, final, grads = expected(exact, PADDED, dout, dfinal)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    np.testing.assert_allclose(np.float64(got[0]), out, rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(got[1], final, atol=5e-5)
    for name in NAMES:
        ours, limit = got[2][name], np.abs(grads[name]).max()
        assert ours.dtype == (jnp.bfloat16 if name in "qkv" else jnp.float32)
        error = np.abs(np.float64(ours) - grads[name]).max() / limit
        assert error < (2**-8 if name in "qkv" else 5e-5), (name, error)


@pytest.mark.slow
@over_pallas_forms("gated_delta", slow="gpu")
def test_pallas_forms_have_no_races(name):
    args, d = problem(), cotangents()
    run = runner(race_checked(name))
    first, second = (jax.device_get(run(args, PADDED, *d)) for _ in range(2))
    assert not compat.has_races(name)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_equal(first, expected(args, PADDED, *d))


def test_backward_stores_one_state_per_chunk():
    """2048 states of 32 x 32 would take 8 MB, one per chunk takes 0.13 MB, and an array like v 0.26 MB."""
    rows, scalars = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 2048, 1, 32), (1, 2048, 1)))

    def loss(*args):
        return jnp.sum(gated_delta(*args, implementation="xla")[0])

    shapes = (rows, rows, rows, scalars, scalars)
    compiled = jax.jit(jax.grad(loss, range(5))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 5e6


@pytest.mark.slow
@over_implementations("gated_delta")
def test_vmap_traces_once(implementation):
    args = problem()
    args.pop("state")
    traces = []

    def run(args):
        traces.append(1)
        return gated_delta(**args, chunk=CHUNK, implementation=implementation)

    both = {name: np.stack([x, x[::-1]]) for name, x in args.items()}
    batched = jax.jit(jax.vmap(run))
    out, final = batched(both)
    batched(both)
    assert len(traces) == 1
    for i in range(2):
        single = jax.jit(run)({name: x[i] for name, x in both.items()})
        np.testing.assert_allclose(out[i], single[0], atol=1e-5)
        np.testing.assert_allclose(final[i], single[1], atol=1e-5)


@over_implementations("gated_delta", several_devices=True, slow="xla tpu")
def test_shards_batch_and_heads(implementation):
    axes = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=axes, devices=jax.devices()[:4])
    args, d = problem(), cotangents()
    rows, state, tokens = P("data", None, "tensor"), P("data", "tensor"), P("data")
    specs = {name: state if name == "state" else rows for name in NAMES}
    local = runner(implementation)
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, tokens, rows, state),
        out_specs=(rows, state, specs),
        check_vma=False,
    )
    assert_equal(jax.jit(run)(args, PADDED, *d), expected(args, PADDED, *d))


def test_rejects_mismatched_shapes():
    args = problem()
    args.pop("state")
    with pytest.raises(ValueError, match=r"beta \(2, 43, 3\) with q .* must be \(2, 43, 2\)"):
        gated_delta(**args | {"beta": np.zeros((B, T, 3), np.float32)})
    with pytest.raises(ValueError, match="initial_state"):
        gated_delta(**args, initial_state=np.zeros((B, N, U, H), np.float32))
    with pytest.raises(ValueError, match="chunk 0"):
        gated_delta(**args, chunk=0)


@over_pallas_forms("gated_delta")
def test_pallas_forms_reject_unsupported_inputs(name):
    args = problem()
    args.pop("state")
    run = functools.partial(gated_delta, implementation=interpreted(name))
    with pytest.raises(ValueError, match="a chunk of 20"):
        run(**args, chunk=20)
    with pytest.raises(ValueError, match="all must be"):
        run(**args | {"q": jnp.asarray(args["q"], jnp.bfloat16)}, chunk=CHUNK)
