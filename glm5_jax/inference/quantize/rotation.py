"""Rotates weights by QuaRot (arXiv 2404.00456): the same function, with outliers spread over all channels.

A channel far larger than the others sets the scale of a token's int8 row and leaves few steps for the rest. In a random
orthogonal basis all channels have about the same size. Four spaces are rotated, each between two weights, so that the
forward has no additional products:

    d   the residual stream, after the norms' weights are folded into the matrices that read them
    q   the query latent, and c the key/value latent (not its rotary part, which positions rotate)
    u   each head's values, between v_b and o

At the end the stream is rotated back (`model.rotated_norm`): d * d more weights before the last norm, 0.1% of the
products of GLM-5's forward. Only a product per token and expert could rotate the inputs of down-projections;
docs/results/serving.md has what that would gain.
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.inference.quantize.hadamard import Basis, random_basis, times_basis
from glm5_jax.model import glm5
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel import axes
from glm5_jax.parallel.tree import flatten, map_with_path, unflatten
from pallas_kernels.numerics import accum_dtype

SPACES = "dqcu"
# {norm of a block: (axis letter that it scales, matrices that read it)}.
READERS = {
    "attn_norm": ("d", ("attn/q_a", "attn/kv_a", "indexer/k", "indexer/weights")),
    "mlp_norm": (
        "d",
        tuple(f"{part}/{w}" for part in ("mlp", "shared", "experts") for w in ("gate", "up"))
        + ("router/weight",),
    ),
    "attn/q_a_norm": ("q", ("attn/q_b", "indexer/q_b")),
    "attn/kv_a_norm": ("c", ("attn/k_b", "attn/v_b")),
}
# Weights that read the hidden state after the norms that rotate it back.
UNROTATED = ("lm_head/weight", "mtp/hnorm")
FINAL_NORMS = ("final_norm", "mtp/norm")


def rotate(params: PyTree, cfg: ModelConfig, seed: int = 0) -> tuple[PyTree, ModelConfig]:
    """Returns (parameters, config) of the same function in random bases: `fold`, then `turn` by `bases`."""
    params, cfg = fold(params, cfg)
    return turn(params, cfg, bases(cfg, seed)), cfg


def fold(params: PyTree, cfg: ModelConfig) -> tuple[PyTree, ModelConfig]:
    """Folds the norms' weights into the matrices that read them. Returns (parameters, config) of the same function.

    The folded norms' weights become ones. The norms before the head and before the MTP layer keep theirs. A tied head
    becomes a separate weight, because the embedding is rotated and the head is not. Raises ValueError for attention
    other than MLA.
    """
    rotated_cfg, flat = rotated_config(cfg), flatten(params)
    if cfg.tie_word_embeddings:
        flat["lm_head/weight"] = flat["embed/weight"].T
    norms = dict(flat)
    for path, fold_of_path in folds(cfg).items():
        gain = norms[fold_of_path.norm]
        if fold_of_path.layers is not None:
            gain = gain[np.array(fold_of_path.layers)]
        flat[path] = fold_weight(path, flat[path], gain, fold_of_path.dim)
        flat[fold_of_path.norm] = jnp.ones_like(norms[fold_of_path.norm])
    return unflatten(flat), rotated_cfg


def rotated_config(cfg: ModelConfig) -> ModelConfig:
    """Returns the config of the rotated model. Raises ValueError for attention other than MLA."""
    if cfg.projections != "mla" or {*cfg.layer_kinds} - {"full", "window"}:
        raise ValueError(
            "only a model whose layers all have GLM-5's own attention (MLA) can be rotated, not "
            f"projections {cfg.projections!r} with layers {sorted({*cfg.layer_kinds})}"
        )
    return dataclasses.replace(cfg, tie_word_embeddings=False)


class Fold(NamedTuple):
    """Norm whose weight is folded into a matrix.

    Attributes:
      norm: path of the norm.
      dim: dimension of the matrix that the norm scales, with a leading `l` in a stack of layers.
      layers: index in the norm's stack of each layer of the matrix's; None: there is no stack.
    """

    norm: str
    dim: int
    layers: tuple[int, ...] | None


def folds(cfg: ModelConfig) -> dict[str, Fold]:
    """Returns the norm that is folded into each matrix, by the matrix's path."""
    names = flatten(glm5.axis_letters(cfg))
    blocks: dict[str, range | None] = {name: layers for name, layers in glm5.stacks(cfg)}
    if cfg.num_nextn_predict_layers:
        blocks["mtp/block"] = None
    out = {"mtp/eh_proj": Fold("mtp/enorm", 0, None)} if cfg.num_nextn_predict_layers else {}
    for block, layers in blocks.items():
        for norm, (letter, readers) in READERS.items():
            for path in [f"{block}/{reader}" for reader in readers]:
                if path not in names:
                    continue
                positions = None
                if layers is not None:
                    positions = tuple(
                        i
                        for i, layer in enumerate(layers)
                        if "/indexer/" not in path or layer in cfg.full_layers
                    )
                out[path] = Fold(f"{block}/{norm}", names[path].split().index(letter), positions)
    return out


def fold_weight(path: str, w: Array, gain: Array, dim: int) -> Array:
    """Multiplies a matrix by a norm's weight along a dimension; both may have a leading axis l."""
    if path != "mtp/eh_proj":
        return _scaled(w, gain, dim)
    # Only the embedding's half: the input of the other half is not rotated.
    embedded, hidden = jnp.split(w, 2)
    return jnp.concatenate([_scaled(embedded, gain, dim), hidden])


@functools.partial(jax.jit, static_argnames="dim")
def _scaled(w, gain, dim: int):
    """Multiplies w by a norm's weight along a dimension; both may have a leading axis l."""
    lead = gain.ndim - 1
    shape = (*gain.shape[:lead], *(1,) * (dim - lead), gain.shape[-1])
    gain = gain.reshape(*shape, *(1,) * (w.ndim - dim - 1))
    inner = accum_dtype(w.dtype)
    return (w.astype(inner) * gain.astype(inner)).astype(w.dtype)


def turn(params: PyTree, cfg: ModelConfig, spaces: Mapping[str, Basis]) -> PyTree:
    """Rotates spaces: returns parameters of the same function whose vectors x of a space are x @ spaces[space].matrix.

    spaces: {axis letter: basis}; other spaces stay unchanged. The norms' weights must be ones (`fold`).
    """
    letters = flatten(glm5.axis_letters(cfg))
    return map_with_path(lambda path, w: turn_weight(path, w, letters[path], cfg, spaces), params)


def turn_weight(path: str, w: Any, letters: str, cfg: ModelConfig, spaces: Mapping[str, Basis]):
    """Rotates a weight with these axis letters along each dimension that is, or begins with, a space.

    The final norms also rotate the stream back.
    """
    if path in FINAL_NORMS:
        return _turned_back(w, spaces["d"].matrix) if "d" in spaces else w
    for dim, letter, size in turned_dims(path, letters, cfg):
        if letter in spaces:
            w = times_basis(w, spaces[letter], dim=dim, size=size)
    return w


def turned_dims(path: str, letters: str, cfg: ModelConfig) -> list[tuple[int, str, int]]:
    """Returns (dimension, space, size of the space) of the dimensions along which a weight is rotated."""
    if path in (*UNROTATED, *FINAL_NORMS) or path.endswith("norm"):
        return []
    sizes = axes.sizes(cfg)
    names = [{"cr": "c", "dd": "d"}.get(name, name) for name in letters.split()]
    return [(dim, name, sizes[name]) for dim, name in enumerate(names) if name in SPACES]


def _turned_back(w, matrix: np.ndarray) -> RotatedNorm:
    """Returns a final norm that also rotates the stream back."""
    before = w.back if isinstance(w, RotatedNorm) else jnp.eye(len(matrix), dtype=w.dtype)
    inner = accum_dtype(before.dtype)
    back = jnp.matmul(
        jnp.asarray(matrix.T, inner), before.astype(inner), precision="highest"
    ).astype(before.dtype)
    return RotatedNorm(w.weight if isinstance(w, RotatedNorm) else w, back)


def bases(cfg: ModelConfig, seed: int = 0) -> dict[str, Basis]:
    """Returns a random orthogonal basis for each of SPACES."""
    sizes = axes.sizes(cfg)
    return {x: random_basis(sizes[x], [seed, zlib.crc32(x.encode())]) for x in SPACES}
