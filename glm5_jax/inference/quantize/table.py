"""Quantises a parameter tree by a table of rules: to W4A8, or to FP8.

W4A8 (GLM-5 section 5): attention and ordinary MLP blocks are W8A8, routed experts W4A8. The details are those of OmniInfer's
published W4A8C16 layout:

- 16 bits: projections to latents (q_a, kv_a), index keys and head weights, what multiplies cached latents (kv_b),
  embeddings, head, router and norms;
- 8 bits: q_b, the indexer's q_b, o, dense and shared experts;
- 4 bits: routed experts.

The released FP8 files also keep eh_proj in 16 bits.

FP8 (GLM-5 3.6.2, `pallas_kernels.fp8_blocks`): all matrices that the released FP8 files hold in 8 bits, except kv_b, since
engines multiply its parts with cached latents in 16 bits.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, is_compound, map_with_path
from pallas_kernels.fp8_blocks import BLOCK, quantize_blocks
from pallas_kernels.quantized_weights import Fp8, Int4, Int8
from pallas_kernels.w4a8_matmul.quantize import GROUP, quantize_w4, round_w8

W8A8, W4A8, FP8, KEEP = "w8a8", "w4a8", "fp8", "keep"
# Each leaf matches exactly one rule of W4A8.
RULES = (
    (r"/experts/(gate|up|down)$", W4A8),
    (r"/(mlp|shared)/(gate|up|down)$", W8A8),
    (r"/attn/(q_b|o)$", W8A8),
    (r"/indexer/q_b$", W8A8),
    (r"/attn/(q_a|kv_a|k_b|v_b)$", KEEP),
    (r"/indexer/(k|weights)$", KEEP),
    (r"/router/(weight|bias)$", KEEP),
    (r"^(embed|lm_head)/weight$", KEEP),
    (r"^mtp/eh_proj$", KEEP),
    (r"norm(_bias)?$", KEEP),
    (r"/attn/(q_a|kv_a|o)_bias$", KEEP),
)
# Further matrices that become FP8, in addition to those that RULES quantise.
FP8_ONLY = r"/attn/(q_a|kv_a)$|/indexer/k$"
RULE_OF_KIND = {Int8: W8A8, Int4: W4A8, Fp8: FP8}


def rules_of(tree: PyTree, scheme: str = W4A8) -> dict[str, str]:
    """Returns {path: rule} of all leaves of a parameter tree. scheme: W4A8 or FP8.

    Raises ValueError that names each leaf which no rule, or more than one, matches.
    """
    matches = {
        path: [rule for pattern, rule in RULES if re.search(pattern, path)]
        for path in flatten(tree)
    }
    if wrong := [f"{path} ({len(rules)})" for path, rules in matches.items() if len(rules) != 1]:
        raise ValueError(
            f"leaves with a number of rules other than one: {', '.join(wrong)}; only GLM-5's attention (MLA) can "
            "be quantised"
        )
    rules = {path: rule for path, [rule] in matches.items()}
    if scheme == W4A8:
        return rules
    return {
        path: FP8 if rule != KEEP or re.search(FP8_ONLY, path) else KEEP
        for path, rule in rules.items()
    }


def check_scheme(cfg: ModelConfig, scheme: str) -> None:
    """Raises ValueError for FP8 of a model that was trained as int4."""
    if scheme == FP8 and cfg.int4_group is not None:
        raise ValueError(
            f"the model was trained with experts as int4 in groups of {cfg.int4_group}, which FP8 would change; serve it "
            "as W4A8 (experiments/quantise.py), or in its own dtype"
        )


def quantise(
    params: PyTree, cfg: ModelConfig, group: int | None = None, scheme: str = W4A8
) -> tuple[PyTree, ModelConfig]:
    """Quantises a model's weights by `rules_of`. Returns (parameters, config) for the same `forward`.

    group: inputs of an expert's matrix that share a scale, or side of a block of FP8; None: the config's int4_group, else
    128. The experts of a model that was trained as int4 become the integers that training computed with.

    Raises ValueError if the group does not divide a matrix of int4, for a leaf without a rule, for FP8 of a model that was
    trained as int4, and for parameters that are not those of cfg or already quantised.
    """
    check_scheme(cfg, scheme)
    group = group or (BLOCK if scheme == FP8 else cfg.int4_group or GROUP)
    rules, letters = rules_of(glm5.abstract_params(cfg), scheme), flatten(glm5.axis_letters(cfg))
    if odd := sorted(rules.keys() ^ flatten(params).keys()):
        raise ValueError(f"the parameters are not those of the config: {odd[0]} is in one of them")

    def one(path, w):
        if rules[path] == KEEP:
            return w
        if is_compound(w):
            raise ValueError(f"{path} is quantised already; start from the plain weights")
        return quantised(rules[path], w, letters[path], group, cfg.dtype)

    return map_with_path(one, params), dataclasses.replace(cfg, int4_group=None)


def quantised(
    rule: str, w: Array, letters: str, group: int | None, dtype: DTypeLike
) -> Int4 | Int8 | Fp8:
    """Returns the plain weight w quantised by a rule.

    letters: its axes. group: rows of a scale in int4, or side of a block of FP8; int8 has none. dtype: that in which the
    model computes; FP8 is made of the weight in that dtype, so that weights which were sent in it give the same bits.
    """
    if rule == W8A8:
        q, scale = _w8(w, axes=summed(letters))
        return Int8(q, scale)
    assert group is not None, "int4 weights have groups, FP8 weights have blocks"
    if rule == FP8:
        values, scale = _fp8(w.astype(dtype), dims=blocked(letters), block=group)
        return Fp8(values, scale)
    packed, scale = _w4(w, group=group)
    return Int4(packed, scale)


def quantise_model(model: glm5.Glm5, scheme: str | None) -> glm5.Glm5:
    """Returns the model that an engine with this `EngineConfig.quantization` runs. None: the model itself.

    Weights that were quantised so when they were loaded stay. Raises ValueError for weights in another form.
    """
    if scheme is None:
        return model
    params = glm5.params_of(model)
    kinds = {type(leaf) for leaf in flatten(params).values() if is_compound(leaf)}
    if kinds == {Fp8}:
        return model
    if kinds:
        raise ValueError(
            f"quantization is {scheme!r}, and the checkpoint is quantised already; leave it out, or serve the checkpoint "
            "before quantisation"
        )
    params, cfg = quantise(params, model.cfg, scheme=scheme)
    return glm5.Glm5(cfg, params=params, mesh=model.mesh)


def make_leaf_converter(scheme: str | None) -> Callable[[ModelConfig, str, Array], Any] | None:
    """Returns a function of (config, path, weight) that quantises one weight of a model; None: weights stay plain."""
    if scheme is None:
        return None

    def convert(cfg: ModelConfig, path: str, w: Array) -> Any:
        check_scheme(cfg, scheme)
        rule = rules_of(glm5.abstract_params(cfg), scheme)[path]
        if rule == KEEP:
            return w
        return quantised(rule, w, flatten(glm5.axis_letters(cfg))[path], BLOCK, cfg.dtype)

    return convert


def blocked(letters: str) -> tuple[int, int]:
    """Returns the dimensions with blocks of an FP8 weight of these axis letters: its last input and its last output."""
    names = letters.split()
    last_input = len(names) - 2 if "e" in names else summed(letters)[-1]
    return last_input, len(names) - 1


def summed(letters: str) -> tuple[int, ...]:
    """Returns the dimensions that the product with a weight of these axis letters sums over."""
    names = letters.split()
    inputs = ("n", "u") if names[-3:] == ["n", "u", "d"] else names[names[0] == "l" :][:1]
    return tuple(map(names.index, inputs))


_w4 = jax.jit(quantize_w4, static_argnames="group")
_w8 = jax.jit(round_w8, static_argnames="axes")
_fp8 = jax.jit(quantize_blocks, static_argnames=("dims", "block"))
