"""QuaRot rotations (arXiv 2404.00456), fused into the weights: the same function with its outliers spread.

A channel far larger than the others sets the scale of its token's int8 row and leaves the rest few of its
steps. In a random orthogonal basis every channel has about the same share. Four spaces are turned, each
between weights alone, so that nothing is multiplied that was not before:

    d   the residual stream, once the norms' weights are in the matrices that read them
    q   the query latent, and c the key/value latent (not its rotary part, which positions turn)
    u   each head's values, between v_b and o

At the end the stream is turned back (`model.turned`): d * d more weights before the last norm, 0.1% of what
GLM-5's forward multiplies with. Down-projections' inputs are the one space that only a product per token and
expert could turn; experiments/LOG.md has what that would gain.
"""

import dataclasses
import functools
import zlib

import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.core import axes
from glm5_jax.core.tree import flatten, unflatten
from glm5_jax.model import glm5
from glm5_jax.model.turned import Turned
from pallas_kernels.numerics import wide

SPACES = "dqcu"
# Below each block: {norm: (the letter that it scales, the matrices that read it)}.
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
# In the stream's own basis: the hidden state, behind the norms that turn it back.
OWN_BASIS = ("lm_head/weight", "mtp/hnorm")
READ_OUT = ("final_norm", "mtp/norm")


def rotate(params, cfg: ModelConfig, seed: int = 0):
    """(parameters, config) of the same function in random bases: `fold`, then `turn` by `bases`."""
    params, cfg = fold(params, cfg)
    return turn(params, cfg, bases(cfg, seed)), cfg


def fold(params, cfg: ModelConfig):
    """(parameters, config) of the same function, whose norms' weights are ones and in the matrices behind them.

    The norms before the head and before the MTP layer keep theirs. A tied head becomes a weight of its own, as
    the embedding is about to be turned and the head is not. ValueError for another attention than MLA's.
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
    names = flatten(glm5.letters(cfg))
    blocks = {name: layers for name, layers in glm5.stacks(cfg)}
    if cfg.num_nextn_predict_layers:
        blocks["mtp/block"] = None
        # The embedding's half alone: what the other reads is not turned.
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
                own = gain
                if layers is not None and "/indexer/" in path:
                    own = gain[np.array([i in cfg.full_layers for i in layers])]
                flat[path] = _scaled(flat[path], own, names[path].split().index(letter))
            flat[f"{block}/{norm}"] = jnp.ones_like(gain)
    return unflatten(flat), cfg


def _scaled(w, gain, dim: int):
    """w times a norm's weight along a dimension; both may have a leading `l`."""
    lead = gain.ndim - 1
    shape = (*gain.shape[:lead], *(1,) * (dim - lead), gain.shape[-1])
    gain = gain.reshape(*shape, *(1,) * (w.ndim - dim - 1))
    inner = wide(w.dtype)
    return (w.astype(inner) * gain.astype(inner)).astype(w.dtype)


def turn(params, cfg: ModelConfig, matrices: dict[str, np.ndarray]):
    """The parameters of the same function whose vectors x of a space are x @ matrices[space], orthogonal
    [size size]. Its norms' weights must be ones (`fold`); spaces without a matrix stay as they are."""
    flat = flatten(params)
    matrices = {letter: np.asarray(m, np.float64) for letter, m in matrices.items()}
    for path, names in flatten(glm5.letters(cfg)).items():
        if path in READ_OUT:
            if "d" in matrices:
                flat[path] = _turned_back(flat[path], matrices["d"])
        elif path not in OWN_BASIS and not path.endswith("norm"):
            flat[path] = _turned(flat[path], names.split(), matrices, cfg)
    return unflatten(flat)


def _turned(w, names: list[str], matrices, cfg: ModelConfig):
    """A weight with these letters, along each dimension that is of a space or begins with one."""
    parts = {"cr": ("c", cfg.kv_lora_rank), "dd": ("d", cfg.hidden_size)}
    for dim, name in enumerate(names):
        letter, size = parts.get(name, (name, w.shape[dim]))
        if letter in matrices:
            head, tail = jnp.split(w, [size], axis=dim)
            inner = wide(w.dtype)
            matrix = jnp.asarray(matrices[letter], inner)
            head = jnp.tensordot(head.astype(inner), matrix, (dim, 0), precision="highest")
            head = jnp.moveaxis(head, -1, dim).astype(w.dtype)
            w = jnp.concatenate([head, tail], axis=dim)
    return w


def _turned_back(w, matrix):
    before = w.back if isinstance(w, Turned) else jnp.eye(len(matrix), dtype=w.dtype)
    inner = wide(before.dtype)
    back = jnp.matmul(
        jnp.asarray(matrix.T, inner), before.astype(inner), precision="highest"
    ).astype(before.dtype)
    return Turned(w.weight if isinstance(w, Turned) else w, back)


def bases(cfg: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """A random orthogonal matrix for each of SPACES."""
    sizes = axes.sizes(cfg)
    return {x: orthogonal(sizes[x], [seed, zlib.crc32(x.encode())]) for x in SPACES}


def orthogonal(size: int, seed) -> np.ndarray:
    """float64[size size]: rows of a Hadamard matrix with random signs where one is known, which spreads a single
    channel evenly; else drawn uniformly from the orthogonal ones."""
    draw = np.random.default_rng(seed)
    known = hadamard(size)
    if known is not None:
        return draw.choice([-1.0, 1.0], size)[:, None] * known / np.sqrt(size)
    q, r = np.linalg.qr(draw.standard_normal((size, size)))
    return q * np.sign(np.diag(r))


@functools.cache
def hadamard(size: int) -> np.ndarray | None:
    """[size size] of 1 and -1 with orthogonal rows, by Sylvester's doubling or Paley's construction, or None."""
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
