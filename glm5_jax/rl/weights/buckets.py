"""Divides tensors into buckets for a push: safetensors of limited size, of all numbers or only of those that changed.

The format is that of `inference.weights`.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from safetensors.numpy import save

from glm5_jax.checkpoint.manifest import Manifest
from glm5_jax.inference.weights import AT, MASK, VALUES
from glm5_jax.rl.weights.pusher import DELTA

Tensors = dict[str, np.ndarray]


def make_buckets(
    tensors: Iterable[tuple[str, np.ndarray]],
    manifest: Manifest,
    modes: Iterable[str],
    *,
    base: Mapping[str, np.ndarray],
    sent: Tensors | None,
    max_bytes: int,
) -> Iterator[tuple[str, bytes]]:
    """Yields (mode, safetensors) of about `max_bytes`.

    Args:
      tensors: (name, tensor) of all weights.
      manifest: receives the checksums.
      modes: modes that some engine needs, FULL or DELTA.
      base: tensors of the last push, for DELTA.
      sent: receives the tensors; None: they are not stored.
      max_bytes: size of a bucket, in bytes.
    """
    buckets: dict[str, Tensors] = {mode: {} for mode in modes}
    for name, tensor in tensors:
        manifest.add(name, tensor)
        if sent is not None:
            sent[name] = tensor
        for mode, bucket in buckets.items():
            base_tensor = base[name] if mode == DELTA else None
            for piece in split_tensor(name, tensor, base_tensor, max_bytes):
                if bucket and _num_bytes(bucket) + _num_bytes(piece) > max_bytes:
                    yield mode, save(bucket)
                    bucket.clear()
                bucket |= piece
    for mode, bucket in buckets.items():
        if bucket:
            yield mode, save(bucket)


def split_tensor(
    name: str, tensor: np.ndarray, base: np.ndarray | None, max_bytes: int
) -> Iterator[Tensors]:
    """Yields a tensor as safetensors of at most `max_bytes`, in the format that `inference.weights` reads.

    base: tensor that the engine has; None: none. With a base only the pieces that changed are sent, as a bit for each
    number and the new numbers if that is shorter.
    """
    if base is None and tensor.nbytes <= max_bytes:
        yield {name: tensor}
        return
    flat, flat_base = tensor.reshape(-1), None if base is None else base.reshape(-1)
    step = max_bytes // flat.itemsize // 8 * 8
    for start in range(0, flat.size, step):
        part, key = flat[start : start + step], f"{name}{AT}{start}"
        if flat_base is None:
            yield {key: part}
            continue
        changed = _bits(part) != _bits(flat_base[start : start + step])
        if not changed.any():
            continue
        mask, values = np.packbits(changed), part[changed]
        is_shorter = mask.nbytes + values.nbytes < part.nbytes
        yield {key + MASK: mask, key + VALUES: values} if is_shorter else {key: part}


def _bits(x: np.ndarray) -> np.ndarray:
    """Returns the bits as integers, so that zeros of different sign differ and equal NaNs are equal."""
    return x.view(f"u{x.itemsize}")


def _num_bytes(bucket: Tensors) -> int:
    return sum(array.nbytes for array in bucket.values())
