"""Quantises a trained model: attention and feed-forwards to W8A8, routed experts to W4A8 (GLM-5 2.4).

    python -m experiments.quantise CHECKPOINT OUT [--group=128] [--text=FILE] [--plain]

CHECKPOINT is a run's workdir, one of its checkpoints/STEP or a HuggingFace folder. OUT is a new folder, which
experiments/serve.py serves like any other, on one device or a mesh.

1. The weights are rotated (QuaRot).
2. Scales between up and down projections are calibrated on text (by default Shakespeare, which is shipped).
3. The weights are quantised and written.

Weights are read, converted and written one at a time (calibration has those of one layer in memory). OUT also holds the
recipe of the conversion, by which a trainer converts the weights that it pushes to engines of OUT.

--plain leaves out 1 and 2. --group is the number of inputs of an expert's matrix that share a scale (default: the
group of training, else 128). experiments/benchmarks/quantised.py measures the perplexity. A wrong argument prints one
line and gives exit code 2.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping

import numpy as np

from experiments.arguments import Parser
from glm5_jax.checkpoint import models, store
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_names import StoredTensor
from glm5_jax.config import ModelConfig
from glm5_jax.data.sources import SHAKESPEARE
from glm5_jax.inference.quantize import calibrate, streaming, table
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.runtime.terminal import print_error
from glm5_jax.text.tokenizer import Tokenizer

ROWS, LENGTH = 8, 512  # of the calibration text


def main(arguments: list[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        if options.out.is_file():
            raise ValueError(f"{options.out} is a file; give a new folder")
        if options.out.exists() and any(options.out.iterdir()):
            raise ValueError(f"{options.out} is not empty; give a new folder")
        if not options.plain and (options.text.is_dir() or not options.text.exists()):
            raise ValueError(f"no file {options.text} for --text; give a text file")
        tokenizer = models.load_tokenizer(options.checkpoint)
        cfg, weights = models.open_leaves(options.checkpoint)
        group = cfg.int4_group or table.GROUP if options.group is None else options.group
        try:
            dataclasses.replace(cfg, int4_group=group)
        except ValueError as error:
            raise ValueError(f"--group={group}: {error}") from None
        # Rotate, calibrate and quantise.
        recipe = QuantizationRecipe(group=group)
        if not options.plain:
            length = min(LENGTH, cfg.max_position_embeddings)
            tokens = calibration_rows(tokenizer, options.text, length)
            recipe = QuantizationRecipe(group=group, rotation_seed=0)
            recipe = dataclasses.replace(recipe, scales=scales_of(cfg, weights, recipe, tokens))
        converter = WeightConverter(cfg, recipe)
        leaves = streaming.converted_leaves(weights, converter)
        save_hf(leaves, options.out, cfg=converter.cfg, tokenizer=tokenizer)
        if isinstance(weights, store.StoredArrays):
            weights.check_bits()
        recipe.save(options.out)
    except (ValueError, OSError) as error:
        print_error(error)
        return 2
    before, after = streaming.num_bytes_of(weights), streaming.num_bytes_of(leaves)
    print(f"{options.out}: {after:,} bytes of weights, {before:,} before")
    return 0


def scales_of(
    cfg: ModelConfig,
    weights: Mapping[str, StoredTensor],
    recipe: QuantizationRecipe,
    tokens: np.ndarray,
) -> dict[str, np.ndarray]:
    """Returns the calibrated scales between up- and down-projections of the rotated weights.

    The weights of one layer are in memory at a time.
    """
    rotate = WeightConverter(cfg, dataclasses.replace(recipe, group=None))
    rotated = streaming.converted_leaves(weights, rotate)
    assert recipe.group is not None, "the recipe quantises"
    scales = calibrate.smoothing_scales(rotated, rotate.cfg, tokens, recipe.group)
    return {path: np.asarray(scale) for path, scale in scales.items()}


def calibration_rows(tokenizer: Tokenizer, path: pathlib.Path, length: int) -> np.ndarray:
    """Returns int32[8 t]: the first tokens of a text file. Raises ValueError if the file is too short or not UTF-8."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error})") from None
    ids = tokenizer.encode(text[: 40 * ROWS * length])
    if len(ids) < ROWS * length:
        raise ValueError(f"{path} has {len(ids)} tokens; scales need {ROWS * length}")
    return np.array(ids[: ROWS * length], np.int32).reshape(ROWS, length)


def _parser() -> Parser:
    parser = Parser("experiments.quantise", __doc__)
    path = pathlib.Path
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=path, help="the model to quantise")
    parser.add_argument("out", metavar="OUT", type=path, help="a new folder for the result")
    parser.add_argument("--group", type=int, help="inputs of an expert that share a scale")
    parser.add_argument("--text", default=SHAKESPEARE, type=path, help="text for calibration")
    parser.add_argument("--plain", action="store_true", help="skip rotation and calibration")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
