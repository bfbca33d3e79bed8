"""Tests of the parameter tree and its module: axis letters, initial values, errors."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel import axes
from glm5_jax.parallel.flops import count_flops
from glm5_jax.parallel.tree import flatten
from tests.model import golden as goldens

CFG = dataclasses.replace(
    presets.tiny(),
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    indexer_types=("full", "full", "shared", "full"),
    attention_bias=True,
)
CONFIGS = {name: presets.get(name) for name in presets.PRESETS}
MIXED = dict(layer_attention=("gdn", "window", "gdn", "simple_gdn"))
CONFIGS |= {
    "gdn on mla": dataclasses.replace(presets.ablation("mla"), **MIXED),
    "gdn on gqa": dataclasses.replace(presets.ablation("gqa"), **MIXED),
}
CONFIGS |= {name: goldens.load(name).cfg for name in goldens.NAMES} | {"biased": CFG}


@pytest.mark.parametrize("name", CONFIGS)
def test_axis_letters_match_shapes(name):
    cfg = CONFIGS[name]
    letters, shapes = flatten(glm5.axis_letters(cfg)), flatten(glm5.abstract_params(cfg))
    assert letters.keys() == shapes.keys()
    widths = {
        "mlp": cfg.intermediate_size,
        "experts": cfg.moe_intermediate_size,
        "shared": cfg.moe_intermediate_size * cfg.n_shared_experts,
    }
    for path, names in letters.items():
        folders = path.split("/")[:-1]
        sizes = axes.sizes(cfg) | {"f": widths.get(folders[-1] if folders else None)}
        if names.startswith("l "):
            layers = set(dict(glm5.stacks(cfg))[folders[0]])
            owners = {"indexer": cfg.full_layers, "gdn": cfg.gdn_layers}.get(folders[-1], layers)
            sizes["l"] = len(layers & set(owners))
        assert shapes[path].shape == tuple(sizes[x] for x in names.split()), path


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_parameters_of_every_preset(name):
    cfg = CONFIGS[name]
    sizes = {
        path: math.prod(leaf.shape) for path, leaf in flatten(glm5.abstract_params(cfg)).items()
    }
    assert cfg.num_stored_parameters == sum(sizes.values())
    inner = {path: size for path, size in sizes.items() if not path.startswith("mtp/")}
    assert cfg.num_parameters == sum(n for p, n in inner.items() if not p.endswith("router/bias"))


def test_goldens_have_declared_shapes():
    for name in goldens.NAMES:
        golden = goldens.load(name)
        declared = glm5.abstract_params(golden.cfg)
        jax.tree.map(lambda x, y: x.shape == y.shape or pytest.fail(), golden.params, declared)


@pytest.fixture(scope="module")
def fresh():
    return jax.device_get(flatten(glm5.init_params(CFG, jax.random.key(7))))


def test_initializes_normal_ones_and_zeros(fresh):
    """Matrices are normal(0, 0.02), norms are ones, biases are zeros."""
    for path, value in fresh.items():
        name = path.rsplit("/")[-1]
        if name.endswith("bias"):
            assert not value.any(), path
        elif "norm" in name and value.ndim <= 2:
            assert (value == 1).all(), path
        else:
            error = 4 / np.sqrt(2 * value.size)
            assert value.std() == pytest.approx(0.02, rel=error), path
            assert abs(value.mean()) < 4 * 0.02 / np.sqrt(value.size), path
    assert fresh["moe_layers/router/bias"].dtype == jnp.float32


def test_initializes_distinct_weights(fresh):
    drawn = {path: v for path, v in fresh.items() if v.std() > 0}
    heads = [v.reshape(-1)[:8].tobytes() for v in drawn.values()]
    assert len(set(heads)) == len(heads)
    gate = drawn["moe_layers/experts/gate"]
    assert (gate[0] != gate[1]).all() and (gate[:, 0] != gate[:, 1]).all()


def test_initial_values_do_not_depend_on_depth(fresh):
    deeper = dataclasses.replace(
        CFG,
        num_hidden_layers=6,
        indexer_types=("full",) * 6,
        num_nextn_predict_layers=0,
        attention_bias=False,
        n_shared_experts=0,
    )
    other = jax.device_get(flatten(glm5.init_params(deeper, jax.random.key(7))))
    shared = set(fresh) & set(other)
    assert len(shared) > 20
    for path in shared:
        a, b = fresh[path], other[path]
        if path.startswith("moe_layers/indexer"):
            b = b[[0, 2]]  # layers 1 and 3
        np.testing.assert_array_equal(a, b[: len(a)], err_msg=path)


@pytest.mark.slow
def test_initial_values_use_key_and_dtype(fresh):
    other = jax.device_get(flatten(glm5.init_params(CFG, jax.random.key(8), "bfloat16")))
    assert other["moe_layers/attn/q_b"].dtype == jnp.bfloat16
    assert other["moe_layers/router/bias"].dtype == jnp.float32
    assert (other["embed/weight"] != fresh["embed/weight"]).mean() > 0.9


def test_module_equals_function():
    golden = goldens.load("hf_tiny_a")
    model = glm5.Glm5(golden.cfg, params=golden.params)
    tree = glm5.params_of(model)
    jax.tree.map(np.testing.assert_array_equal, tree, golden.params)
    logits = jax.eval_shape(lambda: model(golden.tokens))
    assert logits.shape == golden.arrays["logits"].shape and logits.dtype == jnp.float32
    buffers = flatten(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert not any("router/bias" in path for path in buffers)


def test_new_module_uses_rngs(fresh):
    one = glm5.Glm5(CFG, rngs=nnx.Rngs(0))
    two = glm5.Glm5(CFG, rngs=nnx.Rngs(0), param_dtype="bfloat16")
    assert (one.embed.weight[...].astype("bfloat16") == two.embed.weight[...]).all()
    assert one.lm_head.weight.letters == "d v"


def test_module_requires_one_weight_source(fresh):
    with pytest.raises(ValueError, match="either rngs .new weights. or params"):
        glm5.Glm5(CFG)
    with pytest.raises(ValueError, match="either rngs"):
        glm5.Glm5(CFG, rngs=nnx.Rngs(0), params={})


def test_module_names_invalid_parameter():
    golden = goldens.load("hf_tiny_a")
    params = {k: v for k, v in golden.params.items() if k != "final_norm"}
    with pytest.raises(ValueError, match="parameter final_norm is missing"):
        glm5.Glm5(golden.cfg, params=params)
    with pytest.raises(
        ValueError, match=r"parameter final_norm has shape \(3,\), expected \(64,\)"
    ):
        glm5.Glm5(golden.cfg, params=params | {"final_norm": np.ones(3)})


def test_rejects_too_long_sequence():
    tokens = np.zeros((1, 1025), np.int32)
    with pytest.raises(ValueError, match="1025 exceeds max_position_embeddings 1024; shorten"):
        glm5.forward(glm5.abstract_params(CFG), tokens, CFG)


def test_rejects_drafting_without_mtp_layer():
    golden = goldens.load("hf_tiny_b")
    hidden = np.zeros((1, 4, golden.cfg.hidden_size), np.float32)
    with pytest.raises(ValueError, match="no MTP layer"):
        glm5.forward_mtp(golden.params, hidden, np.zeros((1, 4), np.int32), golden.cfg)


def gradient_flops(remat, **changes):
    cfg = dataclasses.replace(CFG, num_hidden_layers=1, first_k_dense_replace=0, indexer_types=None)
    cfg = dataclasses.replace(cfg, **changes)
    execution = ExecutionConfig(remat=remat, query_block=64, gather_block=64)

    def loss(params, tokens):
        return glm5.forward(params, tokens, cfg, execution=execution).logits.sum()

    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    return count_flops(jax.grad(loss), glm5.abstract_params(cfg), tokens, while_trips=2)


def test_full_remat_recomputes_layers():
    dense = dict(attention="dense", index_topk=None)
    assert gradient_flops("none", **dense) < gradient_flops("full", **dense)


@pytest.mark.slow
def test_remat_kinds_order_flops():
    none, full, topk, dots = (gradient_flops(kind) for kind in ("none", "full", "topk", "dots"))
    assert none < dots < full
    assert gradient_flops("offload") == topk
    assert none < topk < full  # the selection's scores are not computed again


def test_rejects_unknown_remat():
    with pytest.raises(
        ValueError, match="remat is 'some'; use one of none, full, topk, dots, offload"
    ):
        ExecutionConfig(remat="some")


def test_routes_no_padding_to_experts():
    """All padding would go to one expert, because it is all equal."""
    cfg = dataclasses.replace(
        CFG, num_hidden_layers=2, indexer_types=None, attention="dense", index_topk=None
    )
    params = glm5.init_params(cfg, jax.random.key(0))
    moe = dict(params["moe_layers"])
    other = params | {
        "moe_layers": moe | {"experts": jax.tree.map(lambda w: 2 * w, moe["experts"])}
    }
    tokens, segments = (
        np.arange(12).reshape(2, 6),
        np.array([[1, 1, 0, 0, 2, 0], [0, 0, 3, 3, 3, 3]]),
    )
    run = jax.jit(lambda weights: glm5.forward(weights, tokens, cfg, segment_ids=segments).hidden)
    one, two = (np.asarray(run(weights)) for weights in (params, other))
    np.testing.assert_array_equal(one[segments == 0], two[segments == 0])
    assert (one != two)[segments != 0].any(-1).all()
