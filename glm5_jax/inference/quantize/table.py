"""Which weights are quantised to what, and a parameter tree in which they are.

GLM-5 section 5: attention and ordinary MLP blocks W8A8, routed experts W4A8. Which of the attention's weights
is taken from the published W4A8C16 layout of OmniInfer: what makes latents (q_a, kv_a), index keys and head
weights, and what the latents are multiplied with after they are cached (kv_b) stays in 16 bits, like embeddings,
head, router and norms; q_b, the indexer's q_b, o, dense and shared experts have 8 bits and routed experts 4.
The released FP8 files keep eh_proj too.
"""

import dataclasses
import re

import jax

from glm5_jax.config import ModelConfig
from glm5_jax.core.tree import flatten, map_with_path
from glm5_jax.model import glm5
from pallas_kernels.quantised import Int4, Int8
from pallas_kernels.w4a8_matmul.quantize import GROUP, quantize_w4, round_w8

W8A8, W4A8, KEEP = "w8a8", "w4a8", "keep"
# Each leaf is found by exactly one.
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


def rules_of(tree) -> dict[str, str]:
    """{path: rule} of every leaf of a parameter tree. ValueError names each leaf that no rule, or more than one,
    finds."""
    found = {path: [rule for at, rule in RULES if re.search(at, path)] for path in flatten(tree)}
    if wrong := [f"{path} ({len(rules)})" for path, rules in found.items() if len(rules) != 1]:
        raise ValueError(
            f"leaves with a number of rules other than one: {', '.join(wrong)}; GLM-5's own attention (MLA) can "
            "be quantised, its alternatives cannot"
        )
    return {path: rule for path, [rule] in found.items()}


def quantise(params, cfg: ModelConfig, group: int | None = None):
    """(parameters, config) of a model with its weights quantised by RULES, which the same `forward` takes.

    group: inputs of an expert's matrix that share a scale (default: those that it was trained with, the config's
    int4_group, else 128); the experts of a model that was trained as int4 become the integers that it computed
    with. ValueError if the group does not divide, for a leaf without a rule, and for parameters that are not
    those of cfg or quantised already.
    """
    group = group or cfg.int4_group or GROUP
    rules, letters = rules_of(glm5.abstract(cfg)), flatten(glm5.letters(cfg))
    if odd := sorted(rules.keys() ^ flatten(params).keys()):
        raise ValueError(f"the parameters are not those of the config: {odd[0]} is in one of them")

    def one(path, w):
        if rules[path] == KEEP:
            return w
        if isinstance(w, (Int4, Int8)):
            raise ValueError(f"{path} is quantised already; start from the plain weights")
        return quantised(path, w, letters[path], group)

    return map_with_path(one, params), dataclasses.replace(cfg, int4_group=None)


def quantised(path: str, w, letters: str, group: int) -> Int4 | Int8:
    """The plain weight w at a path, with these letters, as its rule has it; group: of int4 ones."""
    if re.search(RULES[0][0], path):
        return Int4(*_w4(w, group=group))
    return Int8(*_w8(w, axes=summed(letters)))


def summed(letters: str) -> tuple[int, ...]:
    """The dimensions of a weight with these letters that its product sums over."""
    names = letters.split()
    inputs = ("n", "u") if names[-3:] == ["n", "u", "d"] else names[names[0] == "l" :][:1]
    return tuple(map(names.index, inputs))


_w4 = jax.jit(quantize_w4, static_argnames="group")
_w8 = jax.jit(round_w8, static_argnames="axes")
