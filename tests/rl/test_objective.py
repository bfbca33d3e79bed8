"""The objective of sampled tokens: against the oracle, and the same however a batch is laid out."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.data.record import TokenRecord
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten
from glm5_jax.rl.algorithm.losses import PolicyConfig, PolicyLoss
from glm5_jax.training.gradients import Rates, gradient_function, loss_function, score_function
from glm5_jax.training.step_config import StepConfig
from tests.mesh import cases
from tests.model.small import one_layer
from tests.oracles import policy as oracle

POLICY = PolicyConfig(correction="double_sided", temperature=0.7, rl=0.9, ref_kl=0.3, ce=0.5)
STEP = StepConfig(mtp_steps=0, balance_weight=0, loss_chunk=50, query_block=16, gather_block=8)
RATES = Rates(np.float64(0), np.float64(0))
STREAMS = ("token_ids", "loss_mask", "ce_weight", *PolicyLoss.streams)
CFG = one_layer(vocab_size=64, dtype="float64")
# With keys that an indexer chooses, and experts.
SPARSE = cases.config(
    num_hidden_layers=1,
    first_k_dense_replace=0,
    indexer_types=("full",),
    index_topk=5,
    num_nextn_predict_layers=0,
    dtype="float64",
)


def named(value):
    """Of a parameter, if it is a model."""
    return {CFG: "dense", SPARSE: "sparse"}.get(value) if isinstance(value, ModelConfig) else None


@functools.cache
def params(cfg=CFG):
    """Weights large enough that no token is like another."""
    if cfg != CFG:
        drawn = cases.params(dataclasses.replace(cfg, dtype="float32"))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), drawn)
    drawn = glm5.init_params(one_layer(vocab_size=64), jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x, np.float64) * (8 if x.ndim > 1 else 1), drawn)


def drawn(count: int = 8):
    """Rollouts of several lengths: a prompt, sampled tokens, a tool's answer among them."""
    rng = np.random.default_rng(3)
    for i in range(count):
        t = int(rng.integers(8, 30))
        mask = np.arange(t) >= rng.integers(2, 5)
        mask[t // 2 : t // 2 + 2] = False
        some = mask / mask.sum()

        def of_sampled(values, otherwise, mask=mask):
            return np.where(mask, values, otherwise)

        yield TokenRecord(
            token_ids=rng.integers(0, 64, t),
            loss_mask=mask,
            rollout_logp=of_sampled(-rng.uniform(2, 6, t), np.nan),
            weight_version=of_sampled(3, -1),
            advantage=of_sampled(rng.standard_normal(), 0),
            rl_weight=some * (i != 1),
            ref_kl_weight=some * (i % 2),
            ref_logp=of_sampled(-rng.uniform(2, 6, t), np.nan),
            ce_weight=some * (i % 3 == 0),
            group_id=str(i // 2),
        )


RECORDS = list(drawn())


def laid_out(rows, length):
    """A batch of float64 and int32 arrays: each row these records, one behind the other."""
    batch = {name: np.zeros((len(rows), length)) for name in STREAMS}
    batch |= {
        name: np.zeros((len(rows), length), np.int32) for name in ("segment_ids", "positions")
    }
    for r, records in enumerate(rows):
        at = 0
        for segment, record in enumerate(records, 1):
            here = slice(at, at + len(record))
            for name in STREAMS:
                batch[name][r, here] = np.nan_to_num(getattr(record, name))
            batch["segment_ids"][r, here] = segment
            batch["positions"][r, here] = np.arange(len(record))
            at += len(record)
    return batch | {"token_ids": batch["token_ids"].astype(np.int32)}


@functools.cache
def program(cfg, rows_per_device, policy, mesh):
    step = dataclasses.replace(STEP, rows_per_device=rows_per_device)
    return jax.jit(gradient_function(cfg, step, mesh, token_loss=PolicyLoss(policy)))


def of(batch, rows_per_device=None, policy=POLICY, mesh=None, weights=None, cfg=CFG):
    """(objective, LossParts, gradients by path) in float64."""
    weights = params(cfg) if weights is None else weights
    with jax.enable_x64(True):
        if mesh is not None:
            weights = jax.device_put(weights, glm5.param_shardings(cfg, mesh))
        found = program(cfg, rows_per_device, policy, mesh)(weights, batch, RATES)
        objective, parts, grads = jax.device_get(found)
    return objective, parts, flatten(grads)


# Both of one shape, for which there is one program.
LENGTH = 48
ALONE = [[record] for record in RECORDS]
PACKED = [[RECORDS[i] for i in row] for row in ((0, 1), (2, 3, 6), (), (4, 5), (7,), (), (), ())]


@functools.cache
def alone(cfg=CFG):
    return of(laid_out(ALONE, LENGTH), cfg=cfg)


@functools.cache
def values(cfg, policy=POLICY, **options):
    """The objective without its gradients; options: of the step."""
    step = dataclasses.replace(STEP, **options)
    return jax.jit(loss_function(cfg, step, token_loss=PolicyLoss(policy)))


def same(got, want, tolerance=1e-9):
    """As far as sums in another order are."""
    assert got[0] == pytest.approx(want[0], rel=tolerance)
    for a, b in zip(*(jax.tree.leaves((x.ce, x.parts, x.stats)) for x in (got[1], want[1]))):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-12)
    for path, gradient in want[2].items():
        np.testing.assert_allclose(
            got[2][path], gradient, rtol=0, atol=tolerance * np.abs(gradient).max(), err_msg=path
        )


forward = jax.jit(glm5.forward, static_argnames="cfg")


def logps(record):
    """Of its tokens under logits / temperature, the first one's 0; in float64."""
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(record)] = record.token_ids
    with jax.enable_x64(True):
        logits = np.asarray(forward(params(), row, cfg=CFG).logits[0, : len(record)])
    logits = logits.astype(np.float64) / POLICY.temperature
    top = logits.max(-1, keepdims=True)
    whole = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.append(0, np.take_along_axis(whole[:-1], record.token_ids[1:, None], 1)[:, 0])


@functools.cache
def expected(kind, **options):
    """The parts of the objective, of all records, token by token."""
    sums = {name: np.zeros(2) for name in ("ce", "rl", "ref_kl")}
    mismatch, tokens = 0.0, 0
    for record in RECORDS:
        logp = logps(record)
        for i in np.flatnonzero(record.loss_mask):
            weights = record.ce_weight[i], record.rl_weight[i], record.ref_kl_weight[i]
            losses = (
                -logp[i],
                oracle.token(
                    kind, logp[i], None, record.rollout_logp[i], record.advantage[i], **options
                )[0],
                oracle.token(
                    kind,
                    logp[i],
                    None,
                    record.rollout_logp[i],
                    record.ref_logp[i] - logp[i],
                    **options,
                )[0],
            )
            for name, weight, loss in zip(sums, weights, losses):
                sums[name] += weight * loss, weight
            if weights[1] or weights[2]:
                mismatch, tokens = mismatch + abs(logp[i] - record.rollout_logp[i]), tokens + 1
    return {name: a / b for name, (a, b) in sums.items()} | {"abs_logratio": mismatch / tokens}


@pytest.mark.parametrize("kind", ["icepop", "double_sided"])
def test_the_parts_are_means_of_the_oracle_s_tokens(kind):
    policy = dataclasses.replace(POLICY, correction=kind)
    if policy == POLICY:
        objective, parts, _ = alone()
    else:
        with jax.enable_x64(True):
            found = values(CFG, policy)(params(), laid_out(ALONE, LENGTH), RATES)
            objective, parts = jax.device_get(found)
    want = expected(kind)
    got = {"ce": parts.ce, **parts.parts, "abs_logratio": parts.stats["abs_logratio"]}
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-6), name  # records hold float32
    total = 0.5 * parts.ce + 0.9 * parts.parts["rl"] + 0.3 * parts.parts["ref_kl"]
    assert objective == pytest.approx(total, rel=1e-12)
    assert 0 < parts.stats["clip_frac_low"] + parts.stats["clip_frac_high"] < 0.9


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("cfg", [CFG, slow(SPARSE)], ids=named)
def test_packing_changes_nothing(cfg):
    same(of(laid_out(PACKED, LENGTH), cfg=cfg), alone(cfg))


@pytest.mark.slow
def test_packing_keeps_losses_of_sparse_model():
    packed, apart = (all_parts(laid_out(rows, LENGTH))[1] for rows in (PACKED, ALONE))
    same((0, packed, {}), (0, apart, {}))


@pytest.mark.slow
def test_padding_changes_nothing():
    same(of(laid_out(ALONE, 64)), alone())


@pytest.mark.parametrize(("cfg", "count"), [slow(CFG, 2), (CFG, 4), slow(SPARSE, 2)], ids=named)
def test_micro_batches_change_nothing(cfg, count):
    same(of(laid_out(ALONE, LENGTH), len(ALONE) // count, cfg=cfg), alone(cfg))


AXES = {"fsdp": 2, "expert": 2, "context": 2}


@pytest.mark.parametrize(
    ("cfg", "axes"),
    [
        (CFG, AXES),
        slow(CFG, {"data": 2, "tensor": 4}),
        slow(CFG, {"data": 2, "expert": 4}),
        slow(SPARSE, AXES),
        slow(SPARSE, {"data": 2, "expert": 4}),
    ],
    ids=named,
)
def test_devices_change_nothing(cfg, axes):
    same(of(laid_out(ALONE, LENGTH), mesh=make_mesh(axes), cfg=cfg), alone(cfg), 1e-6)


def test_the_gradient_is_the_slope():
    """Where no advantage hangs on the policy: of the rewards' part, without the ratio, and of cross-entropy."""
    batch = laid_out(PACKED, LENGTH)
    policy = dataclasses.replace(POLICY, correction="icepop", ref_kl=0.0, beta=1e9)
    rng = np.random.default_rng(1)
    direction = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            0 * x
            if any(name in str(path) for name in ("indexer", "bias"))
            else rng.standard_normal(x.shape) * np.abs(x).mean()
        ),
        params(),
    )
    with jax.enable_x64(True):
        old = jax.jit(score_function(CFG, STEP, temperature=POLICY.temperature))(params(), batch)
        batch["old_logp"] = np.asarray(old)

    def moved(scale):
        weights = jax.tree.map(lambda x, d: x + scale * d, params(), direction)
        return of(batch, policy=policy, weights=weights)

    step = 1e-6
    _, _, grads = moved(0)
    slope = sum(np.sum(grads[path] * d) for path, d in flatten(direction).items())
    difference = (moved(step)[0] - moved(-step)[0]) / (2 * step)
    assert difference == pytest.approx(slope, rel=1e-5)


def test_scores_are_the_log_probs_of_each_token():
    with jax.enable_x64(True):
        score = jax.jit(score_function(CFG, STEP, temperature=POLICY.temperature))
        got = np.asarray(score(params(), laid_out(PACKED, LENGTH)))
    for row, records in zip(got, PACKED):
        want = np.concatenate([[], *(logps(record) for record in records)])
        np.testing.assert_allclose(row[: len(want)], want, atol=1e-9)


# Of what a training step has beside the losses of tokens; each coefficient is another one.
ALL_PARTS = dataclasses.replace(SPARSE, num_nextn_predict_layers=1)
BESIDE = {
    "query_block": 32,
    "gather_block": 32,
    "mtp_steps": 2,
    "balance_weight": 0.02,
    "z_weight": 0.03,
    "index_weight": 0.7,
}


def all_parts(batch):
    """(objective, LossParts) of a sparse model with all of them."""
    with jax.enable_x64(True):
        rates = RATES._replace(mtp_weight=np.float64(0.4))
        return jax.device_get(values(ALL_PARTS, **BESIDE)(params(ALL_PARTS), batch, rates))


def test_what_is_learnt_beside_the_losses_of_tokens_has_its_coefficient():
    objective, parts = all_parts(laid_out(ALONE, LENGTH))
    sampled = 0.5 * parts.ce + 0.9 * parts.parts["rl"] + 0.3 * parts.parts["ref_kl"]
    beside = 0.4 * parts.mtp + 0.02 * parts.balance + 0.03 * parts.z
    total = sampled + beside + 0.7 * np.sum(parts.index_loss)
    assert objective == pytest.approx(total, rel=1e-12)
    assert min(parts.mtp, parts.balance, parts.z, *parts.index_loss) > 1e-3


def test_what_is_not_sampled_gets_no_gradient():
    """A prompt's tokens, a tool's answer and a group that tells nothing: whatever stands there, nothing changes."""
    batch, want = laid_out(ALONE, LENGTH), alone()
    rng = np.random.default_rng(9)
    for name in ("ce_weight", *PolicyLoss.streams):
        noise = rng.standard_normal(batch[name].shape)
        batch[name] = np.where(batch["loss_mask"] == 1, batch[name], noise)
    same(of(batch), want, 1e-12)
    quiet = laid_out(ALONE, LENGTH)
    for name in ("advantage", "ce_weight", "ref_kl_weight"):
        quiet[name][:] = 0
    assert not any(gradient.any() for gradient in of(quiet)[2].values())


def test_a_part_that_no_token_has_a_weight_for_adds_nothing():
    batch, want = laid_out(ALONE, LENGTH), alone()
    batch["ce_weight"][:] = 0
    objective, parts, gradients = of(batch)
    assert parts.ce == 0 and parts.parts == want[1].parts
    total = 0.9 * parts.parts["rl"] + 0.3 * parts.parts["ref_kl"]
    assert objective == pytest.approx(total, rel=1e-12)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
