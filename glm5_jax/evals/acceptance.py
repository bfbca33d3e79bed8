"""Measures the accepted length of drafts: tokens per verification step, on held-out text of the training data.

A verification step is one forward of the trunk. It accepts some of the drafted tokens and adds one token (paper Table 2:
2.55 for DeepSeek-V3.2, 2.76 for GLM-5 with 4 speculative steps, on private prompts). The added token counts. So a model
without drafts has accepted length 1, and n drafts give at most n + 1.
"""

import dataclasses

import numpy as np
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import held_out_batches
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Handle, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """Options of the measurement. Raises ValueError if a value is out of range.

    Attributes:
      num_speculative_tokens: drafted tokens per step. Only this value is from the paper (Table 2).
      num_prompts: number of prompts.
      prompt_tokens: length of a prompt, in tokens.
      new_tokens: tokens that are generated per prompt.
      temperature: sampling temperature; 0: greedy.
      seed: random seed of sampling and resampling.
    """

    num_speculative_tokens: int = 4
    num_prompts: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for name in ("num_speculative_tokens", "num_prompts", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.new_tokens < self.num_speculative_tokens + 2:
            raise ValueError(
                f"new_tokens is {self.new_tokens}: no verification could accept all of {self.num_speculative_tokens} "
                f"drafts; use at least {self.num_speculative_tokens + 2}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Result of the measurement.

    Attributes:
      length: tokens per verification step, over all prompts; 1 + the sum of accept_rates.
      low, high: its 95% interval, by resampling prompts.
      accept_rates: share of the steps that accept draft k + 1, by k.
      steps, tokens: verification steps and tokens by prompt, int[p].
    """

    length: float
    low: float
    high: float
    accept_rates: tuple[float, ...]
    steps: np.ndarray
    tokens: np.ndarray


def held_out_prompts(
    data: DataConfig, source: SourceConfig, tokenizer: Tokenizer, config: AcceptanceConfig
) -> np.ndarray:
    """Returns int[p t]: evenly spaced pieces of the source's held-out documents, none across two documents.

    Raises ValueError if the held-out text has too few pieces.
    """
    data = dataclasses.replace(data, sequence_length=config.prompt_tokens, packing="concat")
    rows = []
    for batch in held_out_batches(data, source, tokenizer, config.num_prompts):
        is_single = (batch["segment_ids"] == 1).all(1)
        rows.extend(batch["token_ids"][is_single])
    if len(rows) < config.num_prompts:
        raise ValueError(
            f"source {source.name!r} holds out {len(rows)} pieces of {config.prompt_tokens} tokens; "
            f"num_prompts is {config.num_prompts}; use fewer or shorter prompts"
        )
    chosen = np.arange(config.num_prompts) * len(rows) // config.num_prompts
    return np.stack(rows)[chosen]


def accepted_length(
    params: PyTree, cfg: ModelConfig, prompts: np.ndarray, config: AcceptanceConfig
) -> Acceptance:
    """Continues the prompts int[p t] by an engine with speculative decoding, and counts accepted tokens.

    A text ends with an end token, which counts; accepted tokens after it do not. Steps with too few remaining tokens for
    all drafts to count are left out. Raises ValueError for a model that an engine cannot serve.
    """
    if not cfg.num_nextn_predict_layers:
        steps = np.full(len(prompts), config.new_tokens - 1)
        return Acceptance(length=1.0, low=1.0, high=1.0, accept_rates=(), steps=steps, tokens=steps)
    return count(accepted_tokens(params, cfg, prompts, config), config)


def accepted_tokens(
    params: PyTree, cfg: ModelConfig, prompts: np.ndarray, config: AcceptanceConfig
) -> np.ndarray:
    """Returns the number of tokens of each verification, int[p, rounds]; 0 after the end of a text."""
    options = EngineConfig(
        num_speculative_tokens=config.num_speculative_tokens,
        max_num_seqs=len(prompts),
        max_length=prompts.shape[1] + config.new_tokens,
    )
    engine = Engine(glm5.Glm5(cfg, params=params), config=options)
    lengths: list[list[int]] = []
    for i, prompt in enumerate(prompts.tolist()):
        of_prompt: list[int] = []
        sampling = Sampling(
            max_tokens=config.new_tokens, temperature=config.temperature, seed=config.seed + i
        )

        def record(handle: Handle, of_prompt: list[int] = of_prompt) -> None:
            of_prompt.append(handle.num_tokens)

        engine.submit(Request(prompt, sampling), record)
        lengths.append(of_prompt)
    while engine.step():
        pass
    accepted = np.zeros((len(prompts), max(map(len, lengths)) - 1), int)
    for row, of_prompt in zip(accepted, lengths):
        row[: len(of_prompt) - 1] = np.diff(of_prompt)
    return accepted


def count(accepted: np.ndarray, config: AcceptanceConfig) -> Acceptance:
    """Computes the result from accepted int[p, rounds] of `accepted_tokens`. Raises ValueError if no step counts."""
    before = 1 + np.cumsum(accepted, 1) - accepted
    counted = (accepted > 0) & (config.new_tokens - before > config.num_speculative_tokens)
    accepted = np.where(counted, accepted, 0)
    steps, tokens = counted.sum(1), accepted.sum(1)
    draws = np.random.default_rng(config.seed).integers(len(steps), size=(RESAMPLES, len(steps)))
    resampled = tokens[draws].sum(1) / np.maximum(steps[draws].sum(1), 1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    total = int(steps.sum())
    if not total:
        raise ValueError(
            "every text ended before a verification could be counted; use other prompts"
        )
    rates = [
        float((accepted > k).sum() / total) for k in range(1, config.num_speculative_tokens + 1)
    ]
    return Acceptance(
        length=float(tokens.sum() / total),
        low=float(low),
        high=float(high),
        accept_rates=tuple(rates),
        steps=steps,
        tokens=tokens,
    )
