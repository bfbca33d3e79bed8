"""Measures the host memory that quantising takes at the widths of GLM-5, on a sparse stand-in for its checkpoint.

    python -m experiments.benchmarks.host_memory [EXPERTS]

The stand-in has one dense layer, one MoE layer, the MTP layer, embedding and head of GLM-5, in bfloat16, and EXPERTS routed
experts in each MoE layer (default 16: 8 GB; 256: 44 GB). Its file consists of holes, which take no disk and read as zeros.
experiments/quantise.py rotates, calibrates and quantises it in another process, whose anonymous memory is sampled every
50 ms. Pages of the mapped file are not counted, because the system drops them when memory is short.

Layers and experts are read one at a time, so that neither more layers nor more experts take more memory. A file is in memory
until it is written. With 16 experts the larger of two files has 3.7 GB; those of the full model have up to 5 GB.

Expected: docs/results/serving.md.
"""

import dataclasses
import json
import math
import pathlib
import re
import sys
import tempfile
import time

from glm5_jax import presets
from glm5_jax.checkpoint import hf_config, hf_names
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.runtime.process import ChildProcess
from glm5_jax.text.tokenizer import Tokenizer

LIMIT_GB = 20  # target for the 744B model
POSITIONS = 16  # tokens of a row of calibration text
SAMPLING_S = 0.05


def stand_in_config(experts: int) -> ModelConfig:
    """Returns the config of the stand-in."""
    return dataclasses.replace(
        presets.glm5(),
        num_hidden_layers=2,
        first_k_dense_replace=1,
        indexer_types=None,
        n_routed_experts=experts,
        num_experts_per_tok=min(8, experts),
        max_position_embeddings=POSITIONS,
    )


def write_stand_in(folder: pathlib.Path, cfg: ModelConfig) -> int:
    """Writes a checkpoint of zeros without their bytes. Returns the bytes of its weights."""
    pieces = hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg))
    header, end = {}, 0
    for name, [piece, *_] in hf_names.by_name(pieces).items():
        shape = piece.view.shape
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(cfg)))
    Tokenizer.default().save(folder)
    return end


def peak_memory(command: list[str], log: pathlib.Path) -> tuple[int, float]:
    """Runs a command. Returns the largest anonymous memory of its process, in bytes, and the seconds it took.

    log: file for its output.
    """
    began, peak = time.monotonic(), 0
    process = ChildProcess(command, log=log)
    try:
        status = pathlib.Path(f"/proc/{process.pid}/status")
        while (code := process.exit_code()) is None:
            if match := re.search(r"RssAnon:\s+(\d+) kB", status.read_text()):
                peak = max(peak, 1024 * int(match[1]))
            time.sleep(SAMPLING_S)
    finally:
        process.kill()
    if code:
        raise SystemExit(log.read_text())
    return peak, time.monotonic() - began


def main(arguments: list[str]) -> int:
    """Runs the program. Returns 1 if the memory exceeds the target."""
    experts = int(arguments[0]) if arguments else 16
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "plain").mkdir()
        size = write_stand_in(folder / "plain", stand_in_config(experts))
        out = folder / "quantised"
        command = [sys.executable, "-m", "experiments.quantise", str(folder / "plain"), str(out)]
        peak, seconds = peak_memory(command, folder / "log")
        written = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{size / 1e9:.1f} GB of weights with {experts} experts a layer, {written / 1e9:.1f} GB quantised: at most "
        f"{peak / 1e9:.1f} GB of memory (target {LIMIT_GB}), {seconds:.0f} s"
    )
    return int(peak > LIMIT_GB * 1e9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
