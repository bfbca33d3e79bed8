"""Accepted length of drafts: tokens per verification step, on held-out text of the model's own domain.

A verification step is one forward of the trunk. It keeps some of the drafted tokens and adds one of
its own (paper Table 2: 2.55 for DeepSeek-V3.2, 2.76 for GLM-5 with 4 speculative steps, on private
prompts). That one is counted, so a model without drafts has accepted length 1 and n drafts give at
most n + 1.
"""

import dataclasses

import jax
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import held_out_batches
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.model.draft import speculate
from glm5_jax.text.tokenizer import Tokenizer

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class AcceptanceConfig:
    """How much is drafted. Only num_draft is from the paper (Table 2); it does not print the rest."""

    num_draft: int = 4
    num_prompts: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 64
    temperature: float = 0.0  # 0: greedy
    seed: int = 0

    def __post_init__(self):
        for name in ("num_draft", "num_prompts", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.new_tokens < self.num_draft + 2:
            raise ValueError(
                f"new_tokens is {self.new_tokens}: no verification could keep all of {self.num_draft} "
                f"drafts; use at least {self.num_draft + 2}"
            )


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """length: tokens per verification step, over all prompts; low, high: its 95% interval by resampling
    prompts. kept[k]: in which share of the steps draft k + 1 was kept; length = 1 + sum of kept.
    steps int[p] and tokens int[p], by prompt, are what it is computed from."""

    length: float
    low: float
    high: float
    kept: tuple[float, ...]
    steps: np.ndarray
    tokens: np.ndarray


def held_out_prompts(
    data: DataConfig, source: SourceConfig, tokenizer: Tokenizer, config: AcceptanceConfig
) -> np.ndarray:
    """int[p t]: evenly spaced pieces of the source's held-out documents, none across two documents.

    ValueError if the held-out text has too few of them.
    """
    data = dataclasses.replace(data, sequence_length=config.prompt_tokens, packing="concat")
    rows = []
    for batch in held_out_batches(data, source, tokenizer, config.num_prompts):
        whole = (batch["segment_ids"] == 1).all(1)
        rows.extend(batch["token_ids"][whole])
    if len(rows) < config.num_prompts:
        raise ValueError(
            f"source {source.name!r} holds out {len(rows)} pieces of {config.prompt_tokens} tokens; "
            f"num_prompts is {config.num_prompts}; ask for fewer or shorter ones"
        )
    chosen = np.arange(config.num_prompts) * len(rows) // config.num_prompts
    return np.stack(rows)[chosen]


def accepted_length(params, cfg: ModelConfig, prompts, config: AcceptanceConfig) -> Acceptance:
    """Continues the prompts int[p t], all at once, by speculative decoding and counts.

    A text ends with an end token, which counts; what was kept behind it does not. Steps begun with so
    few tokens to go that not all drafts could have counted are left out. ValueError as `speculate`.
    """
    if not cfg.num_nextn_predict_layers:
        steps = np.full(len(prompts), config.new_tokens - 1)
        return Acceptance(1.0, 1.0, 1.0, (), steps, steps)
    accepted = speculate(
        params,
        prompts,
        cfg,
        config.new_tokens,
        num_draft=config.num_draft,
        temperature=config.temperature,
        key=jax.random.key(config.seed),
    ).accepted
    return count(accepted, config)


def count(accepted, config: AcceptanceConfig) -> Acceptance:
    """The figures of accepted int[p, rounds], as `speculate` gives it."""
    before = 1 + np.cumsum(accepted, 1) - accepted
    counted = (accepted > 0) & (config.new_tokens - before > config.num_draft)
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
    kept = [float((accepted > k).sum() / total) for k in range(1, config.num_draft + 1)]
    return Acceptance(
        float(tokens.sum() / total), float(low), float(high), tuple(kept), steps, tokens
    )
