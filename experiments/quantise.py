"""Makes a quantised model of a trained one: attention and feed-forwards W8A8, routed experts W4A8 (GLM-5 2.4).

    python -m experiments.quantise CHECKPOINT OUT [--group=128] [--text=FILE] [--plain]

CHECKPOINT is a run's workdir, one of its checkpoints/STEP or a HuggingFace folder, OUT a new folder, which
experiments/serve.py serves like any other, on one device or a mesh. The weights are rotated first (QuaRot), and scales between up and down
are found on text (by default Shakespeare, which is shipped); --plain leaves out both. --group: inputs of an expert's
matrix that share a scale (default: those it was trained with, else 128). What it costs in perplexity:
experiments/benchmarks/quantised.py. A wrong argument is one line and exit code 2.
"""

import dataclasses
import pathlib
import sys

import jax
import numpy as np

from experiments.arguments import Parser
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.core.tree import flatten, is_compound
from glm5_jax.data.sources import SHAKESPEARE
from glm5_jax.inference.quantize import calibrate, rotation, table
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer

ROWS, LENGTH = 8, 512  # of text that scales are found on


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments."""
    try:
        options = _parser().parse_args(arguments)
        if options.out.is_file():
            raise ValueError(f"{options.out} is a file; give a new folder")
        if options.out.exists() and any(options.out.iterdir()):
            raise ValueError(f"{options.out} is not empty; give a new folder")
        if not options.plain and (options.text.is_dir() or not options.text.exists()):
            raise ValueError(f"no file {options.text} for --text; give a text file")
        tokenizer = models.load_tokenizer(options.checkpoint)
        model = models.load_model(options.checkpoint)
        params, cfg = glm5.params_of(model), model.cfg
        if any(map(is_compound, flatten(params).values())):
            raise ValueError(
                f"{options.checkpoint} is quantised already; give the model it was made of"
            )
        before = size_of(params)
        group = cfg.int4_group or table.GROUP if options.group is None else options.group
        try:
            dataclasses.replace(cfg, int4_group=group)
        except ValueError as error:
            raise ValueError(f"--group={group}: {error}") from None
        if not options.plain:
            tokens = rows(tokenizer, options.text, min(LENGTH, cfg.max_position_embeddings))
            params, cfg = rotation.rotate(params, cfg)
            params = calibrate.smooth(params, cfg, tokens, group)
        params, cfg = table.quantise(params, cfg, group)
        save_hf(params, options.out, cfg=cfg, tokenizer=tokenizer)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"{options.out}: {size_of(params):,} bytes of weights, {before:,} before")
    return 0


def size_of(params) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(params))


def rows(tokenizer: Tokenizer, path: pathlib.Path, length: int) -> np.ndarray:
    """int32[8 t] of a text's beginning; ValueError if it is shorter."""
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
    path = {"type": pathlib.Path}
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="what is quantised", **path)
    parser.add_argument("out", metavar="OUT", help="a new folder for it", **path)
    parser.add_argument("--group", type=int, help="inputs of an expert that share a scale")
    parser.add_argument("--text", default=SHAKESPEARE, help="that scales are found on", **path)
    parser.add_argument("--plain", action="store_true", help="neither rotated nor scaled")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
