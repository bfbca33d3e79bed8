"""Hashes lowered programs, to compare what a compiler receives."""

import base64
import hashlib
import re

import jax

# Parts of a program's text: a Mosaic TPU kernel in base64, a Mosaic GPU kernel as a string, and the hash of the latter.
_TPU = re.compile(r"(?<=\\22body\\22: \\22)[A-Za-z0-9+/=]+")
_GPU = re.compile(r'(?<= module = ")(?:[^"\\]|\\.)*')
_GPU_HASH = re.compile(r'(?<={kernel_hash = ")(?:[^"\\]|\\.)*')
# jax 0.11 numbers the kernels of a process.
_GPU_NUMBER = re.compile(r'mosaic_gpu\.dump_basename = "[^"]*"')
_ESCAPE = re.compile(rb"\\([0-9A-F]{2}|.)")


def program_hash(lowered: jax.stages.Lowered) -> str:
    """Returns the hash of a lowered program.

    It is equal for a program of a running pod and the same program compiled ahead of time (launch.compile). Source
    locations in kernels are left out, so that a new comment does not change the hash.
    """
    # Imported late, because this imports Pallas's compilers for GPUs.
    from pallas_kernels.compat import strip_locations

    text = _TPU.sub(lambda match: strip_locations(base64.b64decode(match[0])), lowered.as_text())
    text = _GPU.sub(lambda match: strip_locations(_bytes(match[0])), _GPU_HASH.sub("", text))
    text = _GPU_NUMBER.sub("", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bytes(string: str) -> bytes:
    """Returns the bytes that MLIR writes as this string."""

    def unescape(match):
        return bytes.fromhex(match[1].decode()) if len(match[1]) == 2 else match[1]

    return _ESCAPE.sub(unescape, string.encode())
