"""Compares rollouts from FP8 engines with those from bfloat16 and W4A8 engines of one trained model.

    python -m experiments.benchmarks.fp8_rollouts WORKDIR [GROUP]

WORKDIR is a run of a small model, such as a stage of lifecycle.py:tiny that trains on texts. GROUP is the number of inputs of an expert's
matrix that share a scale in W4A8 (default 32). The trainer computes in the dtype of the run, float32 for :tiny. For each
form of the weights it prints

- the change of perplexity, the divergence of next-token distributions and the share of tokens with the same likeliest
  successor, over the held-out texts of experiments/benchmarks/quantised.py in rows of the run's length;
- for replies that an engine with these weights samples at temperature 1, the absolute difference of the engine's and the
  trainer's log-probs of each token, and the share of tokens that IcePop drops, whose ratio leaves [1/2, 2] (GLM-5 3.2).

Expected for a pre-trained :tiny: docs/results/serving.md.
"""

import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from experiments.benchmarks import quantised
from experiments.benchmarks.measure import pin
from experiments.benchmarks.quantised import QuantisationMetrics, log_probs
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import calibrate, rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.rl.algorithm.losses import PolicyConfig
from glm5_jax.runtime.terminal import print_error

PROMPTS, PROMPT_TOKENS, REPLY_TOKENS = 64, 64, 64
ENGINE = EngineConfig(
    page_size=64,
    max_num_seqs=PROMPTS,
    max_length=PROMPT_TOKENS + REPLY_TOKENS,
    prefill_chunk=16 * PROMPT_TOKENS,
    min_prefill_bucket=PROMPT_TOKENS,
    seed=0,
)


class Form(NamedTuple):
    """Form of an engine's weights.

    Attributes:
      name: name in the table.
      params, cfg: weights, and the model's config.
    """

    name: str
    params: PyTree
    cfg: ModelConfig


def forms(params: PyTree, cfg: ModelConfig, rows: np.ndarray, group: int) -> Iterator[Form]:
    """Yields the forms that are compared. rows: training text, for the calibration of W4A8."""
    narrow = dataclasses.replace(cfg, dtype="bfloat16")
    yield Form(cfg.dtype, params, cfg)
    yield Form("bfloat16", params, narrow)
    yield Form("FP8", *table.quantise(params, cfg, scheme=table.FP8))
    yield Form("FP8, bfloat16", *table.quantise(params, narrow, scheme=table.FP8))
    yield Form("W4A8", *table.quantise(params, cfg, group))
    turned, turned_cfg = rotation.rotate(params, cfg)
    smoothed = calibrate.smooth(turned, turned_cfg, rows, group)
    yield Form("W4A8, rotated, calibrated", *table.quantise(smoothed, turned_cfg, group))


class RolloutMetrics(NamedTuple):
    """Differences of the trainer's log-probs from those of the engine that sampled the tokens.

    Attributes:
      mean, max: absolute difference in nats.
      dropped: share of tokens that IcePop drops.
      num_tokens: number of tokens.
    """

    mean: float
    max: float
    dropped: float
    num_tokens: int

    @classmethod
    def of(cls, trainer: np.ndarray, engine: np.ndarray) -> "RolloutMetrics":
        """Returns the metrics of the log-probs of sampled tokens."""
        difference = np.abs(trainer - engine)
        is_dropped = difference > math.log(PolicyConfig().beta)
        return cls(
            float(difference.mean()),
            float(difference.max()),
            float(is_dropped.mean()),
            difference.size,
        )

    def row(self) -> list[str]:
        """Returns the cells of a table's row."""
        return [f"{self.mean:.4f}", f"{self.max:.3f}", f"{self.dropped:.2%}"]


def sample(form: Form, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of prompts with replies, int[n t], and the engine's log-probs of the replies."""
    engine = Engine(glm5.Glm5(form.cfg, params=form.params), config=ENGINE)
    replies = engine.generate(prompts, Sampling(max_tokens=REPLY_TOKENS, ignore_eos=True))
    tokens = np.array([[*prompt, *reply.ids] for prompt, reply in zip(prompts, replies)], np.int32)
    return tokens, np.array([reply.logprobs for reply in replies])


@functools.partial(jax.jit, static_argnames="cfg")
def trainer_logp(params: PyTree, tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Returns the log-probs of the replies."""
    logits = glm5.forward(params, tokens[:, :-1], cfg).logits[:, PROMPT_TOKENS - 1 :]
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(logp, tokens[:, PROMPT_TOKENS:, None], axis=-1)[..., 0]


def main(arguments: list[str]) -> None:
    """Runs the program. arguments: a workdir, and optionally a group."""
    group = arguments[1] if len(arguments) > 1 else "32"
    if not 1 <= len(arguments) <= 2 or not group.isdigit() or int(group) < 1:
        print("error: give a workdir and the size of a group, as in WORKDIR 32", file=sys.stderr)
        raise SystemExit(2)
    pin()
    jax.config.update("jax_platforms", "cpu")
    try:
        cfg, params, tokenizer = quantised.load(pathlib.Path(arguments[0]))
    except ValueError as error:
        print_error(error)
        raise SystemExit(2) from None
    fields = json.loads((pathlib.Path(arguments[0]) / "config.json").read_text())
    length = fields["data"]["sequence_length"]
    batches, rows = quantised.texts(tokenizer, length)
    before = [np.asarray(log_probs(params, batch, cfg)) for batch in batches]
    texts = np.concatenate([batch["token_ids"] for batch in batches])
    prompts = texts[:PROMPTS, :PROMPT_TOKENS].tolist()
    print("| weights | perplexity | divergence | same token | log-probs, mean | max | dropped |")
    for form in forms(params, cfg, rows, int(group)):
        metrics = QuantisationMetrics.of(
            functools.partial(log_probs, form.params, cfg=form.cfg), batches, before
        )
        tokens, engine_logp = sample(form, prompts)
        rollouts = RolloutMetrics.of(np.asarray(trainer_logp(params, tokens, cfg)), engine_logp)
        print(f"| {' | '.join([form.name, *metrics.row(), *rollouts.row()])} |", flush=True)
    print(f"{rollouts.num_tokens} sampled tokens of each")


if __name__ == "__main__":
    main(sys.argv[1:])
