"""Quantises a parameter tree by a table of rules.

GLM-5 section 5: attention and ordinary MLP blocks are W8A8, routed experts W4A8. The details are those of OmniInfer's
published W4A8C16 layout:

- 16 bits: projections to latents (q_a, kv_a), index keys and head weights, what multiplies cached latents (kv_b),
  embeddings, head, router and norms;
- 8 bits: q_b, the indexer's q_b, o, dense and shared experts;
- 4 bits: routed experts.

The released FP8 files also keep eh_proj in 16 bits.
"""

import dataclasses
import re

import jax
from jaxtyping import Array, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, map_with_path
from pallas_kernels.quantized_weights import Int4, Int8
from pallas_kernels.w4a8_matmul.quantize import GROUP, quantize_w4, round_w8

W8A8, W4A8, KEEP = "w8a8", "w4a8", "keep"
# Each leaf matches exactly one rule.
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


def rules_of(tree: PyTree) -> dict[str, str]:
    """Returns {path: rule} of all leaves of a parameter tree.

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
    return {path: rule for path, [rule] in matches.items()}


def quantise(
    params: PyTree, cfg: ModelConfig, group: int | None = None
) -> tuple[PyTree, ModelConfig]:
    """Quantises a model's weights by RULES. Returns (parameters, config) for the same `forward`.

    group: inputs of an expert's matrix that share a scale; None: the config's int4_group, else 128. The experts of a
    model that was trained as int4 become the integers that training computed with.

    Raises ValueError if the group does not divide a matrix, for a leaf without a rule, and for parameters that are not
    those of cfg or already quantised.
    """
    group = group or cfg.int4_group or GROUP
    rules, letters = rules_of(glm5.abstract_params(cfg)), flatten(glm5.axis_letters(cfg))
    if odd := sorted(rules.keys() ^ flatten(params).keys()):
        raise ValueError(f"the parameters are not those of the config: {odd[0]} is in one of them")

    def one(path, w):
        if rules[path] == KEEP:
            return w
        if isinstance(w, (Int4, Int8)):
            raise ValueError(f"{path} is quantised already; start from the plain weights")
        return quantised(path, w, letters[path], group)

    return map_with_path(one, params), dataclasses.replace(cfg, int4_group=None)


def quantised(path: str, w: Array, letters: str, group: int | None) -> Int4 | Int8:
    """Returns the plain weight w of a path quantised by its rule.

    letters: its axes. group: rows of a scale in int4; None: the weight becomes int8.
    """
    if re.search(RULES[0][0], path):
        assert group is not None, "an int4 weight has groups"
        packed, scale = _w4(w, group=group)
        return Int4(packed, scale)
    q, scale = _w8(w, axes=summed(letters))
    return Int8(q, scale)


def summed(letters: str) -> tuple[int, ...]:
    """Returns the dimensions that the product with a weight of these axis letters sums over."""
    names = letters.split()
    inputs = ("n", "u") if names[-3:] == ["n", "u", "d"] else names[names[0] == "l" :][:1]
    return tuple(map(names.index, inputs))


_w4 = jax.jit(quantize_w4, static_argnames="group")
_w8 = jax.jit(round_w8, static_argnames="axes")
