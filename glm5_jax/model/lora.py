"""Low-rank adapters (LoRA, arXiv 2106.09685) of a model's matrices, in the parameter tree and in the forward.

A target W computes with W + (alpha / rank) A B. A is drawn as PEFT draws it and B is zero, so a new adapter changes
nothing. `ModelConfig.lora` holds rank, alpha and the targets.

In the tree. The adapters of `attn/q_b` are the leaves `attn/q_b_lora_a` and `attn/q_b_lora_b` next to it. They are
declared with axis letters like every weight, so that layer stacks, shardings, checkpoints and initial values need no
second tree:

    W   l e IN OUT      A   l e IN o      B   l e o OUT      (`e` for routed experts only, `o` is the rank)

Shared A. k_b and v_b are one matrix in HuggingFace's files, and so are gate and up of the routed experts. Such a pair
has one A (`kv_b_lora_a`, `gate_up_lora_a`) and two B. The adapters thus have PEFT's parameters exactly.

In the forward. `WeightGatherer` gathers W in the compute dtype and both matrices in float32, and then computes the sum
(`adapted`). Every form of attention and every kernel therefore runs unchanged, on every mesh, and gives the result of
merged weights bit by bit. It costs 2 IN rank OUT FLOPs for each layer and microbatch, and one layer's targets in the
compute dtype. The gradient of W exists for one weight at a time on its device; only those of A and B are sent.

Training. All weights except the adapters are frozen (`training.optimizer.groups_of`). They have no gradient, no moments
and no master copy: the tree holds them in the compute dtype, and routers in float32. Adapters are float32.

Serving. `merge_adapters` returns the tree of the model without adapters. An engine always has merged weights.

Adapters are saved and loaded in PEFT's form by checkpoint/peft_adapters.py.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, PyTree

from glm5_jax.config import LoraConfig, ModelConfig
from glm5_jax.parallel.params import Weight
from glm5_jax.parallel.tree import matches_any
from pallas_kernels.numerics import accum_dtype

ADAPTER = r"_lora_[ab]$"  # pattern of the adapters' paths
A, B = "_lora_a", "_lora_b"
# Matrices that have an A in common: a suffix of their path, and the name of the A.
SHARED_A = {
    "attn/k_b": "kv_b",
    "attn/v_b": "kv_b",
    "experts/gate": "gate_up",
    "experts/up": "gate_up",
}
# Weights that an adapter can have as its target: matrices of the decoder's layers. The forward reads the router in
# its stored dtype, and the MTP layer is in no file of PEFT.
_TARGET = re.compile(r"(attn|indexer|mlp|shared|experts)/(?!\w*(norm|bias))\w+")
_LAYER = re.compile(r"(dense|moe)_layers/")


def is_adapter(path: str) -> bool:
    """Returns True if the weight at a path is a matrix of an adapter."""
    return path.endswith((A, B))


def is_target(path: str) -> bool:
    """Returns True if the weight at a path of a layer ("attn/q_b") can have an adapter."""
    return bool(_TARGET.fullmatch(path)) and not is_adapter(path)


def without_adapters(cfg: ModelConfig) -> ModelConfig:
    """Returns the config of the same model without adapters."""
    return dataclasses.replace(cfg, lora=LoraConfig())


def frozen_dtype(path: str, cfg: ModelConfig, dtype: Any) -> Any:
    """Returns the dtype in which a tree of `dtype` stores a weight: frozen ones have that of the computation."""
    if not cfg.lora.rank or is_adapter(path) or "router/" in path:
        return dtype
    return jnp.dtype(cfg.dtype)


def adapters_of(weights: Sequence[Weight], cfg: ModelConfig, dtype: Any) -> list[Weight]:
    """Returns the declarations of the adapters of a model with these weights.

    Raises ValueError for a pattern of `lora.targets` that matches no matrix.
    """
    candidates = [
        w for w in weights if _LAYER.match(w.path) and is_target(w.path.partition("/")[2])
    ]
    for pattern in cfg.lora.targets:
        if not any(re.search(pattern, w.path) for w in candidates):
            paths = ", ".join(w.path for w in candidates)
            raise ValueError(f"lora.targets holds {pattern!r}, which matches none of {paths}")
    adapters: dict[str, Weight] = {}
    for weight in candidates:
        if matches_any(cfg.lora.targets, weight.path):
            for one in _pair_of(weight, cfg.lora.rank, dtype):
                adapters[one.path] = one
    return list(adapters.values())


def _pair_of(weight: Weight, rank: int, dtype: Any) -> tuple[Weight, Weight]:
    """Returns the declarations of A and B of a target."""
    names = weight.letters.split()
    stacked = sum(name in ("l", "e") for name in names)
    inputs = stacked + (2 if weight.path.endswith("attn/o") else 1)
    fan_in = math.prod(weight.shape[stacked:inputs])
    a = dataclasses.replace(
        weight,
        path=a_path(weight.path),
        letters=" ".join([*names[:inputs], "o"]),
        shape=(*weight.shape[:inputs], rank),
        dtype=jnp.dtype(dtype),
        std=(3 * fan_in) ** -0.5,  # the variance of PEFT's uniform distribution
        mean=0.0,
    )
    b = dataclasses.replace(
        a,
        path=weight.path + B,
        letters=" ".join([*names[:stacked], "o", *names[inputs:]]),
        shape=(*weight.shape[:stacked], rank, *weight.shape[inputs:]),
        std=0.0,
    )
    return a, b


def a_path(path: str) -> str:
    """Returns the path of the A of the target at a path."""
    module, name = path.split("/")[-2:]
    shared = SHARED_A.get(f"{module}/{name}", name)
    return path.removesuffix(name) + shared + A


def declare_adapters(
    tree: nnx.Module, weights: Sequence[Weight], cfg: ModelConfig, make: Callable, dtype: Any
) -> None:
    """Adds the adapters of a config to a tree with these weights. make: as in `parallel.params.Declare`."""
    for adapter in adapters_of(weights, cfg, dtype):
        *modules, name = adapter.path.split("/")
        module = functools.reduce(getattr, modules, tree)
        setattr(module, name, nnx.Param(make(adapter), letters=adapter.letters))


def adapted(
    w: Float[Array, "..."], a: Float[Array, "..."], b: Float[Array, "..."], scale: float
) -> Float[Array, "..."]:
    """Returns w + scale * a b in w's dtype. The sum is computed in float32 or wider, and rounded once."""
    batch = a.ndim + b.ndim - w.ndim - 2  # dimensions of layers and experts
    wide = jnp.promote_types(accum_dtype(w.dtype), a.dtype)
    product = lax.dot_general(
        a.astype(wide),
        b.astype(wide),
        (((a.ndim - 1,), (batch,)), (range(batch), range(batch))),
        precision=lax.Precision.HIGHEST,
    )
    return (w.astype(wide) + scale * product).astype(w.dtype)


def apply_adapters(tree: PyTree, scale: float, apply: Callable = adapted) -> PyTree:
    """Returns any part of a parameter tree with its adapters added to their targets, and without them.

    apply: computes one sum, as `adapted`.
    """
    if isinstance(tree, list):
        return [apply_adapters(one, scale, apply) for one in tree]
    if not isinstance(tree, dict):
        return tree
    out = {}
    for name, value in tree.items():
        if is_adapter(name):
            continue
        if (b := tree.get(name + B)) is not None:
            a = tree[_a_name(name, tree)]
            value = apply(value, a, b, scale)
        out[name] = apply_adapters(value, scale, apply)
    return out


def _a_name(name: str, module: dict) -> str:
    """Returns the name of a target's A in its module."""
    shared = {path.split("/")[1]: of for path, of in SHARED_A.items()}
    return name + A if name + A in module else shared[name] + A


def merge_adapters(params: PyTree, cfg: ModelConfig) -> PyTree:
    """Returns the tree of `without_adapters(cfg)` that computes what params compute.

    Leaves without an adapter are those of params. Merged leaves are sharded like their targets.
    """
    return apply_adapters(params, cfg.lora.scale, _merged) if cfg.lora.rank else params


def _merged(w: Array, a: Array, b: Array, scale: float) -> Array:
    add = functools.partial(adapted, scale=scale)
    return jax.jit(add, out_shardings=w.sharding)(w, a, b)
