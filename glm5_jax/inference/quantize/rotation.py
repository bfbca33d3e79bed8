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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel import axes
from glm5_jax.parallel.tree import flatten, unflatten
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
    if cfg.projections != "mla" or {*cfg.layer_kinds} - {"full", "window"}:
        raise ValueError(
            "only a model whose layers all have GLM-5's own attention (MLA) can be rotated, not "
            f"projections {cfg.projections!r} with layers {sorted({*cfg.layer_kinds})}"
        )
    flat = flatten(params)
    if cfg.tie_word_embeddings:
        flat["lm_head/weight"] = flat["embed/weight"].T
        cfg = dataclasses.replace(cfg, tie_word_embeddings=False)
    names = flatten(glm5.axis_letters(cfg))
    blocks: dict[str, range | None] = {name: layers for name, layers in glm5.stacks(cfg)}
    if cfg.num_nextn_predict_layers:
        blocks["mtp/block"] = None
        # Only the embedding's half: the input of the other half is not rotated.
        norm, matrix = flat["mtp/enorm"], flat["mtp/eh_proj"]
        halves = jnp.split(matrix, 2)
        flat["mtp/eh_proj"] = jnp.concatenate([_scaled(halves[0], norm, 0), halves[1]])
        flat["mtp/enorm"] = jnp.ones_like(norm)
    for block, layers in blocks.items():
        for norm, (letter, readers) in READERS.items():
            gain = flat[f"{block}/{norm}"]
            for path in [f"{block}/{reader}" for reader in readers]:
                if path not in flat:
                    continue
                reader_gain = gain
                if layers is not None and "/indexer/" in path:
                    reader_gain = gain[np.array([i in cfg.full_layers for i in layers])]
                flat[path] = _scaled(flat[path], reader_gain, names[path].split().index(letter))
            flat[f"{block}/{norm}"] = jnp.ones_like(gain)
    return unflatten(flat), cfg


@functools.partial(jax.jit, static_argnames="dim")
def _scaled(w, gain, dim: int):
    """Multiplies w by a norm's weight along a dimension; both may have a leading axis l."""
    lead = gain.ndim - 1
    shape = (*gain.shape[:lead], *(1,) * (dim - lead), gain.shape[-1])
    gain = gain.reshape(*shape, *(1,) * (w.ndim - dim - 1))
    inner = accum_dtype(w.dtype)
    return (w.astype(inner) * gain.astype(inner)).astype(w.dtype)


def turn(params: PyTree, cfg: ModelConfig, matrices: dict[str, np.ndarray]) -> PyTree:
    """Rotates spaces: returns parameters of the same function whose vectors x of a space are x @ matrices[space].

    matrices: {axis letter: orthogonal matrix [size size]}; other spaces stay unchanged. The norms' weights must be ones
    (`fold`).
    """
    flat = flatten(params)
    matrices = {letter: np.asarray(m, np.float64) for letter, m in matrices.items()}
    for path, names in flatten(glm5.axis_letters(cfg)).items():
        if path in FINAL_NORMS:
            if "d" in matrices:
                flat[path] = _turned_back(flat[path], matrices["d"])
        elif path not in UNROTATED and not path.endswith("norm"):
            flat[path] = _turned(flat[path], names.split(), matrices, cfg)
    return unflatten(flat)


def _turned(w, names: list[str], matrices, cfg: ModelConfig):
    """Rotates a weight with these axis letters along each dimension that is, or begins with, a space."""
    parts = {"cr": ("c", cfg.kv_lora_rank), "dd": ("d", cfg.hidden_size)}
    for dim, name in enumerate(names):
        letter, size = parts.get(name, (name, w.shape[dim]))
        if letter in matrices:
            matrix = jnp.asarray(matrices[letter], accum_dtype(w.dtype))
            w = _times_matrix(w, matrix, dim=dim, size=size)
    return w


@functools.partial(jax.jit, static_argnames=("dim", "size"))  # one program instead of five
def _times_matrix(w, matrix, *, dim: int, size: int):
    """Multiplies the first `size` numbers along dimension `dim` of a weight by a matrix [size size]."""
    head, tail = jnp.split(w, [size], axis=dim)
    head = jnp.tensordot(head.astype(matrix.dtype), matrix, (dim, 0), precision="highest")
    head = jnp.moveaxis(head, -1, dim).astype(w.dtype)
    return jnp.concatenate([head, tail], axis=dim)


def _turned_back(w, matrix):
    """Returns a final norm that also rotates the stream back."""
    before = w.back if isinstance(w, RotatedNorm) else jnp.eye(len(matrix), dtype=w.dtype)
    inner = accum_dtype(before.dtype)
    back = jnp.matmul(
        jnp.asarray(matrix.T, inner), before.astype(inner), precision="highest"
    ).astype(before.dtype)
    return RotatedNorm(w.weight if isinstance(w, RotatedNorm) else w, back)


def bases(cfg: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a random orthogonal matrix for each of SPACES."""
    sizes = axes.sizes(cfg)
    return {x: orthogonal(sizes[x], [seed, zlib.crc32(x.encode())]) for x in SPACES}


def orthogonal(size: int, seed: int | Sequence[int]) -> Float64[np.ndarray, "size size"]:
    """Returns a random orthogonal matrix float64[size size].

    It is a Hadamard matrix with random signs if one of this size is known, because that spreads a channel evenly.
    Otherwise it is drawn uniformly.
    """
    draw = np.random.default_rng(seed)
    known = hadamard(size)
    if known is not None:
        return draw.choice([-1.0, 1.0], size)[:, None] * known / np.sqrt(size)
    q, r = np.linalg.qr(draw.standard_normal((size, size)))
    return q * np.sign(np.diag(r))


@functools.cache
def hadamard(size: int) -> np.ndarray | None:
    """Returns a Hadamard matrix by Sylvester's doubling or Paley's construction, or None if neither gives one."""
    if size == 1:
        return np.ones((1, 1))
    half = hadamard(size // 2) if size % 2 == 0 else None
    if half is not None:
        return np.block([[half, half], [half, -half]])
    prime = size - 1
    if prime % 4 != 3 or any(prime % i == 0 for i in range(2, int(prime**0.5) + 1)):
        return None
    squares = {i * i % prime for i in range(1, prime)}
    character = np.array([0] + [1 if i in squares else -1 for i in range(1, prime)])
    index = np.arange(prime)
    out = np.ones((size, size))
    out[1:, 0] = -1
    out[1:, 1:] = character[(index[:, None] - index) % prime] + np.eye(prime)
    return out
