"""The parameter tree of a model: its declaration, shapes, axis letters, shardings and initial values.

The tree is a nested dict: `embed, dense_layers, moe_layers, mtp, final_norm, lm_head`. Layer stacks have a leading
`l`; a stack of OWNED_BY_SOME_LAYERS counts only the layers that have it. `unstack` turns stacks into lists of layers.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import lora, quant
from glm5_jax.model.block import Block
from glm5_jax.model.mtp import Mtp
from glm5_jax.parallel import axes, sharding
from glm5_jax.parallel.params import (
    Declare,
    Weight,
    random_values,
    random_values_at_once,
    shapes_only,
)
from glm5_jax.parallel.tree import flatten, map_with_path, matches_any, unflatten

STACKS = ("dense_layers", "moe_layers")
_LAYER = re.compile(r"(?<=_layers)/\d+/")  # layer number in paths of unstacked trees
OWNED_BY_SOME_LAYERS = ("indexer", "gdn")  # their stacks hold only the layers that have them
# Dimensions that stay sharded in the computation. Outputs are summed over these axes, so a gathered copy
# would be counted once per device.
STAY_SHARDED = {
    "tensor": ("intermediate_size", "moe_intermediate_size"),
    "expert": ("n_routed_experts",),
}


class _Table(nnx.Module):
    def __init__(self, declare, letters):
        self.weight = declare.normal("weight", letters)


class ParameterTree(nnx.Module):
    """All weights of a model, without behaviour: shapes, axis letters or values.

    make: function that returns the value of a declared `Weight`. dtype: dtype of the weights that can be trained.
    """

    def __init__(self, cfg: ModelConfig, make: Callable[[Weight], Any], dtype: DTypeLike):
        weights: list[Weight] = []

        def record_and_make(weight: Weight):
            stored = lora.frozen_dtype(weight.path, cfg, weight.dtype)
            weights.append(dataclasses.replace(weight, dtype=stored))
            return make(weights[-1])

        declare = Declare(
            sizes=axes.sizes(cfg),
            make=record_and_make,
            std=cfg.initializer_range,
            dtype=jnp.dtype(dtype),
        )
        self.embed = _Table(declare.child("embed"), "v d")
        for name, layers in stacks(cfg):
            full = [i for i in cfg.full_layers if i in layers]
            stack = declare.child(name).stack(layers)
            gdn = [i for i in cfg.gdn_layers if i in layers]
            setattr(self, name, Block(stack, cfg, name == "moe_layers", full, gdn))
        if cfg.num_nextn_predict_layers:
            self.mtp = Mtp(declare.child("mtp"), cfg)
        self.final_norm = declare.ones("final_norm", "d")
        if not cfg.tie_word_embeddings:
            self.lm_head = _Table(declare.child("lm_head"), "d v")
        if cfg.lora.rank:
            lora.declare_adapters(self, weights, cfg, make, dtype)


def params_of(model: nnx.Module) -> dict[str, Any]:
    """Returns a model's arrays as a nested dict, router biases included. Its paths are used everywhere else."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Variable))


@functools.lru_cache(maxsize=32)
def abstract_params(cfg: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Returns the parameter tree as `jax.ShapeDtypeStruct`s, without allocating memory."""
    return params_of(ParameterTree(cfg, shapes_only, dtype))


@functools.lru_cache(maxsize=32)
def axis_letters(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the parameter tree with every leaf's axis letters ("l q n hr")."""
    return params_of(ParameterTree(cfg, lambda weight: weight.letters, "float32"))


@functools.lru_cache(maxsize=8192)
def weight_letters(cfg: ModelConfig, path: str) -> tuple[str, str]:
    """Returns (name, axis letters) of the weight at a path.

    A path of an `unstack`ed tree has the name of the stack, and letters without its `l`.
    """
    name = _LAYER.sub("/", path)
    letters = flatten(axis_letters(cfg))[name]
    return name, letters if name == path else letters.removeprefix("l ")


def param_shardings(
    cfg: ModelConfig,
    mesh: Mesh | AbstractMesh,
    params: PyTree | None = None,
    replicated: Sequence[str] = (),
) -> PyTree:
    """Returns the tree of NamedShardings of the parameters on a mesh.

    Args:
      params: parameter tree, or its shapes, where some weights are quantised or layers are unstacked;
        None: `abstract_params`.
      replicated: patterns as in `ExecutionConfig.replicated_weights`.

    Raises ValueError if the mesh cannot shard the model.
    """
    params = abstract_params(cfg) if params is None else params
    for axis, names in STAY_SHARDED.items():
        for name in names:
            if (size := getattr(cfg, name)) % mesh.shape[axis]:
                raise ValueError(
                    f"mesh axis {axis}={mesh.shape[axis]} does not divide {name} {size}; choose a "
                    "divisor"
                )

    def sharding_of(path, w):
        name, letters = weight_letters(cfg, path)
        return sharding.sharding_of(w, letters, mesh, matches_any(replicated, name))

    shardings = map_with_path(sharding_of, params)
    quant.check_shards(cfg, params, shardings)
    return shardings


def init_params(
    cfg: ModelConfig,
    key: Array,
    dtype="float32",
    mesh: Mesh | AbstractMesh | None = None,
    paths: Collection[str] | None = None,
) -> PyTree:
    """Returns new weights, each drawn on the devices that hold it. Values are the same on every mesh.

    paths: paths of the weights to draw, which are then the only leaves; None: all.
    """

    def draw(values):
        make = values if paths is None else lambda w: values(w) if w.path in paths else None
        return unflatten(flatten(params_of(ParameterTree(cfg, make, dtype))))

    if mesh is None:
        # A caller's jit or eval_shape (`nnx.jit(lambda: Glm5(...))`) has no values yet.
        is_traced = isinstance(key, Tracer)
        return draw(random_values(key) if is_traced else random_values_at_once(key))
    shardings = flatten(param_shardings(cfg, mesh))
    wanted = unflatten({p: s for p, s in shardings.items() if paths is None or p in paths})
    return jax.jit(lambda key: draw(random_values(key)), out_shardings=wanted)(key)


def unstack(params: PyTree, cfg: ModelConfig) -> PyTree:
    """Returns the tree, or any part of it, with each layer stack as a list of layers.

    `forward` accepts both forms. A step that slices its weights out of a stack copies them: decoding on CPU
    is then half as fast, and XLA:TPU holds copies of 18 layers' experts at once.
    """
    out = dict(params)
    for name, layers in stacks(cfg):
        if isinstance(stack := params.get(name), dict):
            out[name] = [layer_of(stack, cfg, layers, layer) for layer in layers]
    return out


def layer_of(
    stack: Mapping[str, Any], cfg: ModelConfig, layers: Sequence[int], layer: int
) -> dict[str, Any]:
    """Returns the weights of one layer of a stack of these layers."""
    weights = {}
    for part, values in stack.items():
        owners = layers_with(cfg, part, layers) if part in OWNED_BY_SOME_LAYERS else layers
        if layer in owners:
            index = list(owners).index(layer)
            weights[part] = jax.tree.map(lambda x, i=index: x[i], values)
    return weights


def layers_with(cfg: ModelConfig, part: str, layers: Sequence[int]) -> list[int]:
    """Returns the layers of a stack that have a part of OWNED_BY_SOME_LAYERS."""
    owners = {"indexer": cfg.full_layers, "gdn": cfg.gdn_layers}[part]
    return [i for i in layers if i in owners]


def stacks(cfg: ModelConfig) -> list[tuple[str, range]]:
    """Returns (name, absolute layer numbers) of the layer stacks that exist."""
    first = cfg.first_k_dense_replace
    parts = zip(STACKS, (range(first), range(first, cfg.num_hidden_layers)))
    return [(name, layers) for name, layers in parts if layers]
