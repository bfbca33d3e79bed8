"""Measures the size of W4A8 weights, and their effect on perplexity with and without rotation and calibration.

    python -m experiments.benchmarks.quantised [WORKDIR [GROUP]]

Prints the bytes of GLM-5 by part in bf16, W8A8 and W4A8, and the smallest slices that hold them with a tenth left for
caches, in seconds. With the workdir of a trained model (GROUP: inputs of an expert's matrix that share a scale, 32 by
default) it also measures, on held-out Shakespeare and Python in rows of 512 tokens, against the same weights in their
own precision: perplexity, the divergence of next-token distributions (nats per token) and how often the likeliest
token is the same. Weights: as trained, and with planted outliers that do not change the function:

    norms     in four channels of every norm's weight, times 32, and a 32nd in the matrices that read them
    values    in two channels of every head's values, and a 32nd in o
    up-down   in four channels between up and down of every feed-forward, and a 32nd in down

Quantised as they are, rotated (`inference.quantize.rotation`), and rotated with scales between up and down from
eight rows of training text (`calibrate`). About six minutes for :tiny on two cores.

Expected for the last DSA stage of lifecycle.py:tiny: docs/results/serving.md.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.measure import pin
from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import held_out_batches
from glm5_jax.data.mixture import DataConfig, training_documents
from glm5_jax.data.sources import SourceConfig
from glm5_jax.inference.quantize import calibrate, rotation, table
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import first_match, flatten, unflatten
from glm5_jax.runtime.terminal import print_error
from glm5_jax.text.tokenizer import Tokenizer

# (pattern of a path, name of its part); the first match counts.
PARTS = (
    (r"^mtp/", "MTP layer"),
    (r"/experts/", "routed experts"),
    (r"/shared/", "shared experts"),
    (r"/mlp/", "dense feed-forwards"),
    (r"/indexer/", "indexers"),
    (r"/attn/", "attention"),
    (r"^(embed|lm_head)/", "embedding, head"),
    (r"", "routers, norms"),
)
TURN_BACK = (
    "rotation, back"  # further weights: a matrix before the last norm, and one in the MTP layer
)
CHIPS = {  # GB each
    "v5e": 16,
    "v6e": 32,
    "H100": 80,
    "v5p": 95,
    "A3 card": 128,  # Atlas 800T A3: 8 to a node, on which GLM-5 5 puts the whole model
    "H200": 141,
    "tpu7x": 192,
}
SPARE = 0.1
TEXTS, LENGTH, ROWS = ("shakespeare", "stdlib"), 512, 8
BATCHES = 4  # of ROWS rows, of each text
CALIBRATION_ROWS = 4  # of each text
OUTLIER, CHANNELS, HEAD_CHANNELS = 32.0, 4, 2
KINDS = ("norms", "values", "up-down")
ARMS = ("as they are", "rotated", "rotated, calibrated")


def num_bytes(cfg: ModelConfig) -> dict[str, dict[str, int]]:
    """Returns {part: {scheme: bytes}} of a model's weights, scales included."""
    plain = glm5.abstract_params(cfg, "bfloat16")
    quantised = jax.eval_shape(lambda p: table.quantise(p, cfg)[0], plain)
    quantised, rules = flatten(quantised), table.rules_of(plain)
    parts, by_part = flatten(first_match(PARTS, plain)), {}
    for path, w in flatten(plain).items():
        size = by_part.setdefault(parts[path], dict.fromkeys(("bf16", "W8A8", "W4A8"), 0))
        arrays = jax.tree.leaves(quantised[path])
        stored = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        count = math.prod(w.shape)
        size["bf16"] += count * w.dtype.itemsize
        size["W4A8"] += stored
        size["W8A8"] += count + 4 * count // w.shape[-2] if rules[path] == table.W4A8 else stored
    turns = 1 + cfg.num_nextn_predict_layers
    by_part[TURN_BACK] = dict.fromkeys(("W8A8", "W4A8"), turns * 2 * cfg.hidden_size**2) | {
        "bf16": 0
    }
    return by_part


def num_chips(size: int, chip: int) -> int:
    """Returns the least power of two of chips of `chip` GB that hold `size` bytes with SPARE left."""
    return 1 << max(0, math.ceil(math.log2(size / ((1 - SPARE) * chip * 1e9))))


def load(workdir: pathlib.Path) -> tuple[ModelConfig, PyTree, Tokenizer]:
    """Returns (config, parameters, tokenizer) of a trained model. Raises ValueError if there is none."""
    model = models.load_model(workdir)
    return model.cfg, glm5.params_of(model), models.load_tokenizer(workdir)


def texts(tokenizer: Tokenizer, length: int = LENGTH) -> tuple[list[dict], np.ndarray]:
    """Returns (held-out batches, int[b t] rows of training text). length: tokens of a row."""
    batches, rows = [], []
    for kind in TEXTS:
        source = SourceConfig(kind=kind)
        data = DataConfig(sources=(source,), sequence_length=length)
        max_rows = ROWS * BATCHES
        batches += held_out_batches(data, source, tokenizer, ROWS, max_rows=max_rows)
        documents = itertools.chain.from_iterable(training_documents(data, source, tokenizer))
        ids = np.fromiter(itertools.islice(documents, CALIBRATION_ROWS * length), np.int32)
        rows.append(ids.reshape(CALIBRATION_ROWS, length))
    return batches, np.concatenate(rows)


@functools.partial(jax.jit, static_argnames="cfg")
def log_probs(params: PyTree, batch: dict, cfg: ModelConfig) -> jax.Array:
    """Returns float32[b t v] of the next token."""
    inputs = {name: batch[name] for name in ("positions", "segment_ids")}
    return jax.nn.log_softmax(glm5.forward(params, batch["token_ids"], cfg, **inputs).logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisationMetrics:
    """Differences to the unquantised model over n tokens.

    Attributes:
      perplexity, error: relative change of perplexity and its standard error.
      divergence: mean divergence in nats.
      agreement: share of tokens with the same likeliest successor.
    """

    perplexity: float
    error: float
    divergence: float
    agreement: float

    @classmethod
    def of(
        cls, log_probs_of: Callable, batches: list[dict], before: list[np.ndarray]
    ) -> "QuantisationMetrics":
        """Returns the metrics of log_probs_of(batch): float32[b t v]; before: those of the unquantised model, for each batch."""
        losses, divergences, same = [], [], []
        for batch, want in zip(batches, before):
            counted = batch["loss_mask"][:, 1:] > 0
            targets = batch["token_ids"][:, 1:, None]
            want, got = (x[:, :-1] for x in (want, np.asarray(log_probs_of(batch))))
            loss = np.take_along_axis(want - got, targets, -1)[..., 0]
            losses.append(loss[counted])
            divergences.append((np.exp(want) * (want - got)).sum(-1)[counted])
            same.append((want.argmax(-1) == got.argmax(-1))[counted])
        loss, divergence, same = map(np.concatenate, (losses, divergences, same))
        change = float(np.expm1(loss.mean()))
        error = float(loss.std() / len(loss) ** 0.5)
        return cls(
            perplexity=change,
            error=error,
            divergence=float(divergence.mean()),
            agreement=float(same.mean()),
        )

    def row(self) -> list[str]:
        """Returns the cells of a table's row."""
        change = f"{self.perplexity:+.2%} (se {self.error:.2%})"
        return [change, f"{self.divergence:.4f}", f"{self.agreement:.1%}"]


def with_outliers(
    params: PyTree, cfg: ModelConfig, kinds: Sequence[str] = KINDS, seed: int = 0
) -> PyTree:
    """Returns the parameters of the same function with outliers of these kinds."""
    rng, names = np.random.default_rng(seed), flatten(glm5.axis_letters(cfg))
    flat = {path: np.asarray(w) for path, w in flatten(params).items()}

    def scaled(size: int, count: int):
        out = np.ones(size, np.float32)
        out[rng.choice(size, count, replace=False)] = OUTLIER
        return out

    def times(path, letter, scale):
        dim = names[path].split().index(letter)
        flat[path] = flat[path] * scale.reshape(-1, *(1,) * (flat[path].ndim - dim - 1))

    for block in ("dense_layers", "moe_layers", "mtp/block"):
        for norm, (letter, readers) in rotation.READERS.items():
            if "norms" in kinds and f"{block}/{norm}" in flat:
                scale = scaled(flat[f"{block}/{norm}"].shape[-1], CHANNELS)
                times(f"{block}/{norm}", letter, scale)
                for path in [f"{block}/{reader}" for reader in readers]:
                    if path in flat:
                        times(path, letter, 1 / scale)
        pairs = [("values", "attn/v_b", "attn/o", "u", HEAD_CHANNELS)]
        pairs += [
            ("up-down", f"{part}/up", f"{part}/down", "f", CHANNELS)
            for part in ("mlp", "shared", "experts")
        ]
        for kind, writer, reader, letter, count in pairs:
            if kind in kinds and f"{block}/{writer}" in flat:
                scale = scaled(flat[f"{block}/{writer}"].shape[-1], count)
                times(f"{block}/{writer}", letter, scale)
                times(f"{block}/{reader}", letter, 1 / scale)
    return jax.tree.map(jnp.asarray, unflatten(flat))


def quantised_arms(
    params: PyTree, cfg: ModelConfig, rows: np.ndarray, group: int
) -> Iterator[tuple[str, PyTree, ModelConfig]]:
    """Yields (name, quantised parameters, config) of every arm."""
    turned, turned_cfg = rotation.rotate(params, cfg)
    yield ARMS[0], *table.quantise(params, cfg, group)
    yield ARMS[1], *table.quantise(turned, turned_cfg, group)
    smoothed = calibrate.smooth(turned, turned_cfg, rows, group)
    yield ARMS[2], *table.quantise(smoothed, turned_cfg, group)


def show_bytes(cfg: ModelConfig) -> None:
    """Prints bytes by part, and slices."""
    bytes_by_part = num_bytes(cfg)
    schemes = list(next(iter(bytes_by_part.values())))
    by_part, slices = Table("part", *(f"{s} GB" for s in schemes)), Table("chip", *schemes)
    total = {s: sum(part[s] for part in bytes_by_part.values()) for s in schemes}
    for part, sizes in (bytes_by_part | {"all": total}).items():
        by_part.add_row(part, *(f"{sizes[s] / 1e9:.2f}" for s in schemes))
    for chip, size in CHIPS.items():
        slices.add_row(f"{chip}, {size} GB", *(str(num_chips(total[s], size)) for s in schemes))
    Console().print(by_part, slices)


def main(arguments: list[str]) -> None:
    """Runs the program. arguments: nothing, or a workdir and a group."""
    group = arguments[1] if len(arguments) > 1 else "32"
    if len(arguments) > 2 or not group.isdigit() or int(group) < 1:
        print("error: give a workdir and the size of a group, as in WORKDIR 32", file=sys.stderr)
        raise SystemExit(2)
    pin()
    jax.config.update("jax_platforms", "cpu")
    show_bytes(presets.glm5())
    if not arguments:
        return
    try:
        cfg, params, tokenizer = load(pathlib.Path(arguments[0]))
    except ValueError as error:
        print_error(error)
        raise SystemExit(2) from None
    batches, rows = texts(tokenizer)
    before = [np.asarray(log_probs(params, batch, cfg)) for batch in batches]
    count = sum(int((batch["loss_mask"][:, 1:] > 0).sum()) for batch in batches)
    names = ("weights", "quantised", "perplexity", "divergence", "same token")
    out = Table(*names, title=f"W4A8, groups of {group}, over {count} tokens")
    for weights, kinds in (("trained", ()), *((k, (k,)) for k in KINDS), ("all three", KINDS)):
        planted = with_outliers(params, cfg, kinds)
        for arm, quantised, arm_cfg in quantised_arms(planted, cfg, rows, int(group)):
            arm_log_probs = functools.partial(log_probs, quantised, cfg=arm_cfg)
            row = [weights, arm, *QuantisationMetrics.of(arm_log_probs, batches, before).row()]
            out.add_row(*row)
            print(f"| {' | '.join(row)} |", flush=True)
    Console().print(out)


if __name__ == "__main__":
    main(sys.argv[1:])
