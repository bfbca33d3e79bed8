"""Tests of the indexers' loss in both stages of DSA, and of the weights that it trains."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import glm5
from glm5_jax.parallel import tree
from glm5_jax.parallel.flops import count_flops
from glm5_jax.training.gradients import Rates, gradient_function, loss_function
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig, TwoPhaseConfig, make_schedule
from glm5_jax.training.step import make_step
from glm5_jax.training.step_config import StepConfig
from pallas_kernels import blocks
from tests.mesh import cases
from tests.model import golden as goldens
from tests.oracles import glm5 as oracle
from tests.oracles.attention import softmax

RATES = Rates(np.float64(0.3), np.float64(0))
ATTENTIONS = ("dense", "sparse")
SHARED = "hf_tiny_b"  # some of its layers reuse the keys of the previous one


def batch_of(golden):
    tokens = golden.tokens
    segments = np.ones_like(tokens)
    segments[:, 17:] = 2
    segments[0, -3:] = 0
    index = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    mask = ((segments != 0) & (index > 0)).astype(np.float64)
    positions = np.where(segments == 2, index - 17, index)
    parts = {"token_ids": tokens, "segment_ids": segments, "positions": positions}
    return parts | {"loss_mask": mask, "ce_weight": np.ones_like(mask)}


@functools.cache
def program(attention: str, target: str, index_weight: float):
    """Returns a compiled parameters -> (objective, parts, gradients)."""
    golden = goldens.load(SHARED)
    cfg = dataclasses.replace(golden.to_float64()[0], attention=attention)
    config = StepConfig(mtp_steps=0, remat="none", index_weight=index_weight, index_target=target)
    gradients = gradient_function(cfg, config)
    return jax.jit(lambda params: gradients(params, batch_of(golden), RATES))


@functools.cache
def loss_and_gradients(attention: str, target: str, index_weight: float = 0.7):
    """Returns (objective, parts, gradients by path) in float64."""
    _, params = goldens.load(SHARED).to_float64()
    with jax.enable_x64(True):
        total, parts, grads = jax.device_get(program(attention, target, index_weight)(params))
    return total, parts, tree.flatten(grads)


@functools.cache
def oracle_outputs(attention: str):
    golden = goldens.load(SHARED)
    config, weights = oracle.load(goldens.FOLDER / SHARED)
    batch = batch_of(golden)
    tokens, segments = batch["token_ids"], batch["segment_ids"]
    return oracle.forward(weights, config, tokens, segments, attention_kind=attention)


def divergence(attention: str, layer: int, indexer: int):
    """Returns the mean over tokens of KL(attention of a layer || softmax of an indexer's scores)."""
    out = oracle_outputs(attention)
    keep, p = out["selected"][layer], out["attention"][layer]
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    guess = softmax(np.where(keep, out["index_scores"][indexer], -np.inf))
    some = keep & (p > 0)
    kl = np.sum(p * np.log(np.where(some, p, 1) / np.where(some, guess, 1)), axis=-1)
    return kl[batch_of(goldens.load(SHARED))["segment_ids"] != 0].mean()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_index_loss_of_each_layer_equals_oracle(attention):
    cfg = goldens.load(SHARED).cfg
    want = [0.0] * cfg.num_hidden_layers
    for place, layer in enumerate(cfg.full_layers):
        want[layer] = divergence(attention, layer, place)
    _, parts, _ = loss_and_gradients(attention, "own_layer")
    np.testing.assert_allclose(parts.index_loss, want, rtol=1e-10)
    assert min(want[layer] for layer in cfg.full_layers) > 1e-3


@pytest.mark.slow
def test_shared_index_loss_is_mean_over_layers():
    attention = "sparse"
    cfg = goldens.load(SHARED).cfg
    _, parts, _ = loss_and_gradients(attention, "shared_layers")
    want = []
    for layer in range(cfg.num_hidden_layers):
        place = sum(full <= layer for full in cfg.full_layers) - 1
        first = cfg.full_layers[place]
        end = (*cfg.full_layers, cfg.num_hidden_layers)[place + 1]
        want.append(divergence(attention, layer, place) / (end - first))
    np.testing.assert_allclose(parts.index_loss, want, rtol=1e-10)


@pytest.fixture(scope="module")
def small_gradients():
    """Returns (objective, parts, gradients) of one layer without the index loss, and with it, weighted by 0.7."""
    cfg = cases.small("sparse")
    steps = [
        dataclasses.replace(cases.STEP, index_weight=weight, remat="none") for weight in (0.0, 0.7)
    ]
    arguments = cases.params(cfg), cases.batch(), cases.RATES
    return [jax.device_get(jax.jit(gradient_function(cfg, step))(*arguments)) for step in steps]


def test_index_loss_has_gradients_of_indexers_only(small_gradients):
    """The slow tests use a golden with shared selections."""
    plain, with_loss = small_gradients
    added = 0.7 * with_loss[1].index_loss.sum()
    np.testing.assert_allclose(with_loss[0] - plain[0], added, rtol=1e-4)
    without = tree.flatten(plain[2])
    for path, gradient in tree.flatten(with_loss[2]).items():
        if "indexer/" in path:
            assert not np.any(without[path]) and np.any(gradient), path
        else:
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(gradient, without[path], rtol=0, atol=1e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "target"),
    [("dense", "own_layer"), ("sparse", "own_layer"), ("sparse", "shared_layers")],
)
def test_losses_of_trunk_and_indexers_are_separate(attention, target):
    """The indexers' loss does not change the trunk's gradient, except for the order of sums."""
    plain, _, without = loss_and_gradients(attention, "own_layer", 0.0)
    total, parts, grads = loss_and_gradients(attention, target)
    np.testing.assert_allclose(total - plain, 0.7 * parts.index_loss.sum(), rtol=1e-9)
    for path, gradient in grads.items():
        if "indexer/" in path:
            assert not np.any(without[path]), path
            assert np.any(gradient), path
        else:
            np.testing.assert_allclose(
                gradient, without[path], rtol=1e-12, atol=1e-13, err_msg=path
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "target"), [("dense", "own_layer"), ("sparse", "shared_layers")]
)
def test_index_gradients_equal_finite_differences(attention, target):
    _, params = goldens.load(SHARED).to_float64()
    rng = np.random.default_rng(1)
    direction = {
        path: ("indexer/" in path) * rng.standard_normal(x.shape) * np.abs(x).mean()
        for path, x in tree.flatten(params).items()
    }

    def moved(scale):
        new = jax.tree.map(lambda x, d: x + scale * d, params, tree.unflatten(direction))
        with jax.enable_x64(True):
            return float(program(attention, target, 0.7)(new)[1].index_loss.sum())

    step = 1e-6
    slope = (moved(step) - moved(-step)) / (2 * step)
    _, _, grads = loss_and_gradients(attention, target)
    got = sum(np.sum(grads[path] * d) for path, d in direction.items())
    np.testing.assert_allclose(0.7 * slope, got, rtol=1e-5)


def make_stage_step(attention: str, frozen=(), **changes):
    still = {
        "index_target": "own_layer",
        "bias_update_rate": TwoPhaseConfig(before=0.0, after=0.0),
        "remat": "none",
    }
    config = dataclasses.replace(cases.STEP, index_weight=1.0, **still, **changes)
    rates = make_schedule(ScheduleConfig(kind="constant", peak=5e-3, warmup_steps=0, total_steps=9))
    optimizer = OptimizerConfig(frozen=frozen, ns_dtype="float32")
    return make_step(cases.small(attention), config, optimizer, rates)


@pytest.mark.slow
def test_warm_up_changes_indexers_only():
    step = make_stage_step("dense", frozen=(r"^(?!.*indexer/)",))
    params = jax.tree.map(jnp.asarray, cases.params(cases.small("dense")))
    # Adding zero would change the sign of -0.0.
    params["embed"]["weight"] = params["embed"]["weight"].at[0, 0].set(-0.0)
    before = jax.device_get(tree.flatten(params))
    state, losses = step.initialise(jax.random.key(0), params), []
    for _ in range(6):
        state, metrics = step.train(state, cases.batch())
        losses.append(float(metrics["loss"]["indexer"]))
    after = jax.device_get(tree.flatten(state["params"]))
    for path, old in before.items():
        same = old.tobytes() == after[path].tobytes()
        assert same == ("indexer/" not in path), path
    assert losses[-1] < 0.9 * losses[0]
    assert set(metrics["grad_norm"]) == {"indexer"}


def test_frozen_trunk_has_no_optimizer_state():
    """The optimizer's state belongs to the indexers only."""
    step = make_stage_step("dense", frozen=(r"^(?!.*indexer/)",))
    moments = [p for p in tree.flatten(step.abstract["optimizer"]) if "embed" in p or "attn" in p]
    assert not moments


def test_rejects_index_loss_without_indexer():
    cfg = dataclasses.replace(
        cases.config("dense"), index_topk=None, indexer_types=None, model_type="glm4_moe_lite"
    )
    with pytest.raises(ValueError, match=r"index_weight is 0\.5, but the model has no indexer"):
        loss_function(cfg, StepConfig(index_weight=0.5))


def largest_array(jaxpr) -> int:
    """Returns the elements of the largest array of a jaxpr, including kernels and loops."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "size")]
    for eqn in jaxpr.eqns:
        for leaf in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(leaf, "eqns"):
                sizes.append(largest_array(getattr(leaf, "jaxpr", leaf)))
    return max(sizes, default=0)


@pytest.mark.parametrize("attention", [pytest.param("dense", marks=pytest.mark.slow), "sparse"])
def test_step_never_materializes_all_scores(attention, monkeypatch):
    """Masks count too, because JAX would store those that a scan over layers computes from constants."""
    monkeypatch.setattr(blocks, "EXTENTS", 1)  # one length of keys, to trace faster
    t = 2048
    cfg = cases.small(attention, max_position_embeddings=t)
    config = dataclasses.replace(
        cases.STEP, index_weight=1.0, query_block=64, gather_block=16, loss_chunk=1024
    )
    params = glm5.abstract_params(cfg, "float32")
    batch = {name: jax.ShapeDtypeStruct((1, t), x.dtype) for name, x in cases.batch().items()}
    rates = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype), cases.RATES)
    jaxpr = jax.make_jaxpr(gradient_function(cfg, config))(params, batch, rates).jaxpr
    assert largest_array(jaxpr) < t * t / 2


@pytest.mark.slow
def test_layers_with_shared_keys_compute_no_index_loss():
    def flops(layers, weight):
        types = ("full", *("shared",) * (layers - 1))
        fields = dict(first_k_dense_replace=1, num_nextn_predict_layers=0, indexer_types=types)
        cfg = cases.config("dense", num_hidden_layers=layers, **fields)
        options = dict(query_block=cases.LENGTH, index_target="own_layer", remat="none")
        config = dataclasses.replace(cases.STEP, index_weight=weight, **options)
        gradients = gradient_function(cfg, config)
        params = glm5.abstract_params(cfg, "float32")
        return count_flops(gradients, params, cases.batch(), cases.RATES, while_trips=1)

    one_layer, four_layers = (flops(layers, 1.0) - flops(layers, 0.0) for layers in (1, 4))
    assert one_layer == four_layers > 0


@pytest.mark.slow
def test_warm_up_with_full_remat_computes_attention_once(monkeypatch):
    """The index gradients are stored, so the backward recomputes no attention."""
    monkeypatch.setattr(blocks, "EXTENTS", 2)
    t = 512
    cfg = cases.small("dense", max_position_embeddings=t)
    params = glm5.abstract_params(cfg, "float32")
    frozen = [path for path in tree.flatten(params) if "indexer/" not in path]
    batch = {name: jax.ShapeDtypeStruct((1, t), x.dtype) for name, x in cases.batch().items()}

    def flops(remat):
        config = dataclasses.replace(
            cases.STEP, query_block=64, remat=remat, index_target="own_layer"
        )
        gradients = gradient_function(cfg, config, frozen=frozen)
        return count_flops(gradients, params, batch, cases.RATES, while_trips=1)

    assert flops("full") < 1.2 * flops("none")
