"""Whether two programs are the same to the compiler."""

import base64
import hashlib
import re

import jax

from pallas_kernels.compat import without_places

# In the text of a program: a kernel of Mosaic TPU in base64, one of Mosaic GPU as a string, and the hash of this.
_TPU = re.compile(r"(?<=\\22body\\22: \\22)[A-Za-z0-9+/=]+")
_GPU = re.compile(r'(?<= module = ")(?:[^"\\]|\\.)*')
_GPU_HASH = re.compile(r'(?<={kernel_hash = ")(?:[^"\\]|\\.)*')
_ESCAPE = re.compile(rb"\\([0-9A-F]{2}|.)")


def program_hash(lowered: jax.stages.Lowered) -> str:
    """Of a program as it is given to the compiler, where what a pod's compiler was given beforehand (launch.compile) is the
    same. Kernels count without the lines of source that they name, as one more comment makes no other program."""
    text = _TPU.sub(lambda found: without_places(base64.b64decode(found[0])), lowered.as_text())
    text = _GPU.sub(lambda found: without_places(_bytes(found[0])), _GPU_HASH.sub("", text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bytes(string: str) -> bytes:
    """What MLIR writes as this string."""

    def plain(found):
        return bytes.fromhex(found[1].decode()) if len(found[1]) == 2 else found[1]

    return _ESCAPE.sub(plain, string.encode())
