"""Objective of sampled tokens: compared with the oracle, and equal under any layout of a batch."""

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
# One MoE layer, with keys that an indexer selects.
SPARSE = cases.config(
    num_hidden_layers=1,
    first_k_dense_replace=0,
    indexer_types=("full",),
    index_topk=5,
    num_nextn_predict_layers=0,
    dtype="float64",
)


def case_id(value):
    """Returns the id of a model config; None for other parameters."""
    return {CFG: "dense", SPARSE: "sparse"}.get(value) if isinstance(value, ModelConfig) else None


@functools.cache
def params(cfg=CFG):
    """Returns weights that are large enough to make all tokens differ."""
    if cfg != CFG:
        values = cases.params(dataclasses.replace(cfg, dtype="float32"))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), values)
    values = glm5.init_params(one_layer(vocab_size=64), jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x, np.float64) * (8 if x.ndim > 1 else 1), values)


def random_records(count: int = 8):
    """Yields rollouts of several lengths, with tool results among the sampled tokens."""
    rng = np.random.default_rng(3)
    for i in range(count):
        t = int(rng.integers(8, 30))
        mask = np.arange(t) >= rng.integers(2, 5)
        mask[t // 2 : t // 2 + 2] = False
        weights = mask / mask.sum()

        def where_sampled(values, otherwise, mask=mask):
            return np.where(mask, values, otherwise)

        yield TokenRecord(
            token_ids=rng.integers(0, 64, t),
            loss_mask=mask,
            rollout_logp=where_sampled(-rng.uniform(2, 6, t), np.nan),
            weight_version=where_sampled(3, -1),
            advantage=where_sampled(rng.standard_normal(), 0),
            rl_weight=weights * (i != 1),
            ref_kl_weight=weights * (i % 2),
            ref_logp=where_sampled(-rng.uniform(2, 6, t), np.nan),
            ce_weight=weights * (i % 3 == 0),
            group_id=str(i // 2),
        )


RECORDS = list(random_records())


def make_batch(rows, length):
    """Returns a batch of float64 and int32 arrays; each row holds its records one after the other."""
    batch = {name: np.zeros((len(rows), length)) for name in STREAMS}
    batch |= {
        name: np.zeros((len(rows), length), np.int32) for name in ("segment_ids", "positions")
    }
    for row_index, records in enumerate(rows):
        start = 0
        for segment, record in enumerate(records, 1):
            columns = slice(start, start + len(record))
            for name in STREAMS:
                batch[name][row_index, columns] = np.nan_to_num(getattr(record, name))
            batch["segment_ids"][row_index, columns] = segment
            batch["positions"][row_index, columns] = np.arange(len(record))
            start += len(record)
    return batch | {"token_ids": batch["token_ids"].astype(np.int32)}


@functools.cache
def program(cfg, rows_per_device, policy, mesh):
    """Returns the compiled gradient function."""
    step = dataclasses.replace(STEP, rows_per_device=rows_per_device)
    return jax.jit(gradient_function(cfg, step, mesh, token_loss=PolicyLoss(policy)))


def evaluate(batch, rows_per_device=None, policy=POLICY, mesh=None, weights=None, cfg=CFG):
    """Returns (objective, LossParts, gradients by path) in float64."""
    weights = params(cfg) if weights is None else weights
    with jax.enable_x64(True):
        if mesh is not None:
            weights = jax.device_put(weights, glm5.param_shardings(cfg, mesh))
        result = program(cfg, rows_per_device, policy, mesh)(weights, batch, RATES)
        objective, parts, grads = jax.device_get(result)
    return objective, parts, flatten(grads)


# Both layouts have one shape, so that one program serves both.
LENGTH = 48
ONE_PER_ROW = [[record] for record in RECORDS]
PACKED = [[RECORDS[i] for i in row] for row in ((0, 1), (2, 3, 6), (), (4, 5), (7,), (), (), ())]


@functools.cache
def evaluate_alone(cfg=CFG):
    """Evaluates one record per row."""
    return evaluate(make_batch(ONE_PER_ROW, LENGTH), cfg=cfg)


@functools.cache
def values(cfg, policy=POLICY, **options):
    """Returns the compiled objective without gradients; options: fields of the step."""
    step = dataclasses.replace(STEP, **options)
    return jax.jit(loss_function(cfg, step, token_loss=PolicyLoss(policy)))


def check_equal(result, expected_result, tolerance=1e-9):
    """Checks that two results are equal up to the order of sums."""
    assert result[0] == pytest.approx(expected_result[0], rel=tolerance)
    for a, b in zip(
        *(jax.tree.leaves((x.ce, x.parts, x.stats)) for x in (result[1], expected_result[1]))
    ):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-12)
    for path, gradient in expected_result[2].items():
        np.testing.assert_allclose(
            result[2][path], gradient, rtol=0, atol=tolerance * np.abs(gradient).max(), err_msg=path
        )


forward = jax.jit(glm5.forward, static_argnames="cfg")


def reference_logp(record):
    """Returns the float64 log-prob of each token under logits / temperature; that of the first token is 0."""
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(record)] = record.token_ids
    with jax.enable_x64(True):
        logits = np.asarray(forward(params(), row, cfg=CFG).logits[0, : len(record)])
    logits = logits.astype(np.float64) / POLICY.temperature
    top = logits.max(-1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.append(0, np.take_along_axis(log_probs[:-1], record.token_ids[1:, None], 1)[:, 0])


@functools.cache
def expected(kind, **options):
    """Returns the parts of the objective over all records, computed token by token."""
    sums = {name: np.zeros(2) for name in ("ce", "rl", "ref_kl")}
    mismatch, tokens = 0.0, 0
    for record in RECORDS:
        logp = reference_logp(record)
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
def test_parts_equal_means_of_oracle(kind):
    policy = dataclasses.replace(POLICY, correction=kind)
    if policy == POLICY:
        objective, parts, _ = evaluate_alone()
    else:
        with jax.enable_x64(True):
            result = values(CFG, policy)(params(), make_batch(ONE_PER_ROW, LENGTH), RATES)
            objective, parts = jax.device_get(result)
    expected_parts = expected(kind)
    actual = {"ce": parts.ce, **parts.parts, "abs_logratio": parts.stats["abs_logratio"]}
    for name, value in expected_parts.items():
        assert actual[name] == pytest.approx(value, rel=1e-6), name  # records hold float32
    total = 0.5 * parts.ce + 0.9 * parts.parts["rl"] + 0.3 * parts.parts["ref_kl"]
    assert objective == pytest.approx(total, rel=1e-12)
    assert 0 < parts.stats["clip_frac_low"] + parts.stats["clip_frac_high"] < 0.9


def slow(*case):
    """Returns a case that is slow."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("cfg", [CFG, slow(SPARSE)], ids=case_id)
def test_packing_keeps_result(cfg):
    check_equal(evaluate(make_batch(PACKED, LENGTH), cfg=cfg), evaluate_alone(cfg))


@pytest.mark.slow
def test_packing_keeps_losses_of_sparse_model():
    packed, separate = (
        evaluate_all_parts(make_batch(rows, LENGTH))[1] for rows in (PACKED, ONE_PER_ROW)
    )
    check_equal((0, packed, {}), (0, separate, {}))


@pytest.mark.slow
def test_padding_keeps_result():
    check_equal(evaluate(make_batch(ONE_PER_ROW, 64)), evaluate_alone())


@pytest.mark.parametrize(("cfg", "count"), [slow(CFG, 2), (CFG, 4), slow(SPARSE, 2)], ids=case_id)
def test_micro_batches_keep_result(cfg, count):
    check_equal(
        evaluate(make_batch(ONE_PER_ROW, LENGTH), len(ONE_PER_ROW) // count, cfg=cfg),
        evaluate_alone(cfg),
    )


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
    ids=case_id,
)
def test_sharding_keeps_result(cfg, axes):
    check_equal(
        evaluate(make_batch(ONE_PER_ROW, LENGTH), mesh=make_mesh(axes), cfg=cfg),
        evaluate_alone(cfg),
        1e-6,
    )


def test_gradient_equals_finite_difference():
    """Only for the parts whose advantage does not depend on the policy: the rewards without the ratio, and
    cross-entropy."""
    batch = make_batch(PACKED, LENGTH)
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

    def evaluate_at(scale):
        weights = jax.tree.map(lambda x, d: x + scale * d, params(), direction)
        return evaluate(batch, policy=policy, weights=weights)

    step = 1e-6
    _, _, grads = evaluate_at(0)
    slope = sum(np.sum(grads[path] * d) for path, d in flatten(direction).items())
    difference = (evaluate_at(step)[0] - evaluate_at(-step)[0]) / (2 * step)
    assert difference == pytest.approx(slope, rel=1e-5)


def test_scores_equal_log_probs_of_tokens():
    with jax.enable_x64(True):
        score = jax.jit(score_function(CFG, STEP, temperature=POLICY.temperature))
        scores = np.asarray(score(params(), make_batch(PACKED, LENGTH)))
    for row, records in zip(scores, PACKED):
        expected_scores = np.concatenate([[], *(reference_logp(record) for record in records)])
        np.testing.assert_allclose(row[: len(expected_scores)], expected_scores, atol=1e-9)


# Auxiliary losses of a training step, each with a different coefficient.
ALL_PARTS = dataclasses.replace(SPARSE, num_nextn_predict_layers=1)
AUXILIARY_OPTIONS = {
    "query_block": 32,
    "gather_block": 32,
    "mtp_steps": 2,
    "balance_weight": 0.02,
    "z_weight": 0.03,
    "index_weight": 0.7,
}


def evaluate_all_parts(batch):
    """Returns (objective, LossParts) of a sparse model with all auxiliary losses."""
    with jax.enable_x64(True):
        rates = RATES._replace(mtp_weight=np.float64(0.4))
        return jax.device_get(
            values(ALL_PARTS, **AUXILIARY_OPTIONS)(params(ALL_PARTS), batch, rates)
        )


def test_auxiliary_losses_have_their_coefficients():
    objective, parts = evaluate_all_parts(make_batch(ONE_PER_ROW, LENGTH))
    sampled = 0.5 * parts.ce + 0.9 * parts.parts["rl"] + 0.3 * parts.parts["ref_kl"]
    auxiliary = 0.4 * parts.mtp + 0.02 * parts.balance + 0.03 * parts.z
    total = sampled + auxiliary + 0.7 * np.sum(parts.index_loss)
    assert objective == pytest.approx(total, rel=1e-12)
    assert min(parts.mtp, parts.balance, parts.z, *parts.index_loss) > 1e-3


def test_unsampled_tokens_get_no_gradient():
    """Values at the prompt and at tool results make no difference, and a zero-variance group has no gradient."""
    batch, expected_result = make_batch(ONE_PER_ROW, LENGTH), evaluate_alone()
    rng = np.random.default_rng(9)
    for name in ("ce_weight", *PolicyLoss.streams):
        noise = rng.standard_normal(batch[name].shape)
        batch[name] = np.where(batch["loss_mask"] == 1, batch[name], noise)
    check_equal(evaluate(batch), expected_result, 1e-12)
    without_weights = make_batch(ONE_PER_ROW, LENGTH)
    for name in ("advantage", "ce_weight", "ref_kl_weight"):
        without_weights[name][:] = 0
    assert not any(gradient.any() for gradient in evaluate(without_weights)[2].values())


def test_part_without_weights_adds_nothing():
    batch, expected_result = make_batch(ONE_PER_ROW, LENGTH), evaluate_alone()
    batch["ce_weight"][:] = 0
    objective, parts, gradients = evaluate(batch)
    assert parts.ce == 0 and parts.parts == expected_result[1].parts
    total = 0.9 * parts.parts["rl"] + 0.3 * parts.parts["ref_kl"]
    assert objective == pytest.approx(total, rel=1e-12)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
