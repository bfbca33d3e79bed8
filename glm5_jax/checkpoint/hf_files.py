"""Opens the files of a HuggingFace checkpoint: config.json, the index and the tensors of all .safetensors files."""

import dataclasses
import json
import math
import os
import pathlib
import reprlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from glm5_jax.checkpoint import hf_fp8
from glm5_jax.runtime.files import open_file, read_text

DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
_MAX_LISTED = 5  # lines per kind of problem in an error
_COMPARED_BYTES = 2**24  # bytes that are compared in one step where a tensor repeats another


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTensor:
    """Tensor in a file; indexing with slices reads that part."""

    file: pathlib.Path
    handle: safetensors.safe_open
    name: str
    shape: tuple[int, ...]
    kind: str  # safetensors' name of the dtype
    first_byte: int | None = None  # offset in the file; known for FP8 only

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(DTYPES[self.kind])

    def __getitem__(self, index) -> np.ndarray:
        if self.kind != hf_fp8.KIND:
            return self.handle.get_slice(self.name)[index]
        assert self.first_byte is not None, "tensors in FP8 are opened with their position"
        # safetensors returns NumPy dtypes, and NumPy has no 8-bit float.
        numbers = np.memmap(self.file, np.uint8, "r", self.first_byte, self.shape)
        return np.array(numbers[index]).view(hf_fp8.DTYPE)


def _first_bytes(file: pathlib.Path) -> dict[str, int]:
    """Returns {tensor name: position of its first byte} of a .safetensors file."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def is_same_tensor(a: FileTensor, b: FileTensor) -> bool:
    """Returns True if two stored tensors are bitwise equal; it reads them in blocks of rows."""
    if (a.shape, a.kind) != (b.shape, b.kind):
        return False
    step = max(1, _COMPARED_BYTES // (4 * math.prod(a.shape[1:])))
    blocks = [slice(i, min(i + step, a.shape[0])) for i in range(0, a.shape[0], step)]
    return all(a[rows].tobytes() == b[rows].tobytes() for rows in blocks)


def config_file(path: str | os.PathLike) -> pathlib.Path:
    """Returns the config.json of a checkpoint. Raises ValueError if there is none."""
    file = folder_of(path) / "config.json"
    if not file.exists():
        raise ValueError(f"{file} does not exist; give the folder of a HuggingFace checkpoint")
    return file


def folder_of(path: str | os.PathLike) -> pathlib.Path:
    """Returns the folder of a checkpoint, which may be given by its only .safetensors file."""
    path = pathlib.Path(path)
    return path.parent if path.suffix == ".safetensors" else path


def _files(path: str | os.PathLike) -> tuple[list[pathlib.Path], set[str]]:
    """Returns the files of a checkpoint, and the tensor names in its index."""
    path, folder = pathlib.Path(path), folder_of(path)
    if path.suffix == ".safetensors":
        return [path], set()
    index, promised = folder / "model.safetensors.index.json", {}
    files = [folder / "model.safetensors"]
    if not files[0].exists():
        if not index.exists():
            raise ValueError(
                f"{path} holds neither model.safetensors nor model.safetensors.index.json; "
                "give the folder of a HuggingFace checkpoint"
            )
        promised = _weight_map(index)
        files = [folder / name for name in sorted(set(promised.values()))]
    mtp_file = folder / "mtp.safetensors"
    return files + [f for f in [mtp_file] if f.exists() and f not in files], set(promised)


def read_json_file(file: pathlib.Path) -> Any:
    """Returns the value of a JSON file. Raises ValueError with the file's name if it is not JSON in UTF-8."""
    try:
        return json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); fetch it again") from None


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    """Returns {tensor name: file name} of an index. Raises ValueError unless the files are in the index's folder."""
    content = read_json_file(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(
            f"{index} is not a safetensors index: it holds {reprlib.repr(content)}, "
            "without a weight_map from tensors to files; fetch it again"
        )
    wrong = {f"{name!r:.200}" for name in names.values() if not _is_inside(name)}
    fix = "is no .safetensors file in this folder; fetch the index again"
    raise_problems(index, [f"weight_map: {name} {fix}" for name in sorted(wrong)])
    return names


def _is_inside(name) -> bool:
    """Returns True if an index may name this file: one in its folder, by name (the hub's cache has links)."""
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    path = pathlib.PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def open_tensors(path: str | os.PathLike) -> dict[str, FileTensor]:
    """Returns {name: tensor} of all files; a tensor has shape and dtype, and indexing with slices reads it.

    Raises ValueError with unreadable files and duplicate names.
    """
    files, promised = _files(path)
    stored, problems = {}, []
    for file in files:
        try:
            open_file(file).close()  # rejects pipes, at which safetensors would block forever
            handle = safetensors.safe_open(file, framework="numpy")
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            problems.append(f"{file.name} cannot be read ({error}); fetch it again")
            continue
        first_bytes: dict[str, int] = {}
        for name in handle.keys():
            if name in stored:
                problems.append(f"{name} is both in {stored[name].file.name} and in {file.name}")
            one = handle.get_slice(name)
            shape, kind = tuple(one.get_shape()), one.get_dtype()
            if kind == hf_fp8.KIND and not first_bytes:
                first_bytes = _first_bytes(file)
            first_byte = first_bytes[name] if kind == hf_fp8.KIND else None
            stored[name] = FileTensor(
                file=file, handle=handle, name=name, shape=shape, kind=kind, first_byte=first_byte
            )
    if not problems:
        problems = [f"{n} is in the index but in no file" for n in sorted(promised - set(stored))]
    raise_problems(path, problems)
    return stored


def raise_problems(path: str | os.PathLike, *kinds: list[str]) -> None:
    """Raises ValueError with the lines of all kinds of problems, if there are any."""
    lines = []
    for kind in kinds:
        lines += kind[:_MAX_LISTED]
        if len(kind) > _MAX_LISTED:
            lines.append(f"... and {len(kind) - _MAX_LISTED} more of these")
    if lines:
        raise ValueError(f"{path} cannot be loaded:\n  " + "\n  ".join(lines))
