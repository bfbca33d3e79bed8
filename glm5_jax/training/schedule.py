"""Schedules: learning rate by step; batch size and loss weights by tokens seen."""

import dataclasses

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


@dataclasses.dataclass(kw_only=True)
class ScheduleConfig:
    """Learning rate of steps 0 .. total_steps - 1. The defaults are pre-training's (GLM-5 App. A).

    A run may have only a part of the curve: it begins at first_step, and ends at total_steps or, with `train.steps`, before.
    Step warmup_steps runs at peak, the last step and all later ones at end. Other stages of the paper:

    - Mid-training is "linear" from 4e-5 to 1e-5.
    - The indexer warm-up of DSA falls from 5e-3 to 2e-4; its shape is not printed.
    - Sparse adaptation is "constant" at 1e-5.

    Attributes:
      kind: curve from peak to end: "cosine", "linear", or "constant" (end is not used).
      peak: highest learning rate.
      end: last learning rate.
      warmup_steps: steps from 0 to peak. Not printed; the default is 0.5% of pre-training's steps.
      total_steps: steps of the schedule; the default is `num_steps` of the default batch ramp and 27e12 tokens.
      first_step: steps of the curve that earlier runs have trained.
    """

    kind: str = "cosine"
    peak: float = 2e-4
    end: float = 4e-5
    warmup_steps: int = 2000
    total_steps: int = 413_095
    first_step: int = 0

    def __post_init__(self):
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}; it must be positive")
        if not 0 <= self.first_step < self.total_steps:
            raise ValueError(
                f"first_step is {self.first_step}; it must be in 0 .. total_steps - 1 ({self.total_steps - 1})"
            )

    @property
    def num_steps(self) -> int:
        """Steps from first_step to the end of the curve."""
        return self.total_steps - self.first_step


def make_schedule(config: ScheduleConfig) -> optax.Schedule:
    """Returns step of the run -> learning rate. The first step of a warm-up is above zero, so that no step is wasted.

    Raises ValueError if the numbers of steps or the rates contradict each other.
    """
    curve = _make_curve(config)
    if not config.first_step:
        return curve
    return lambda step: curve(step + config.first_step)


def _make_curve(config: ScheduleConfig) -> optax.Schedule:
    """Returns step of the curve -> learning rate."""
    falling = config.total_steps - 1 - config.warmup_steps  # steps from peak to end
    if config.warmup_steps < 0 or falling < 0:
        raise ValueError(
            f"warmup_steps {config.warmup_steps} must be in 0 .. total_steps - 1 "
            f"({config.total_steps - 1}); make the run longer or the warm-up shorter"
        )
    if not config.peak > 0 or config.end < 0:
        raise ValueError(f"peak {config.peak} must be positive and end {config.end} not negative")
    falling = max(falling, 1)
    if config.kind == "cosine":
        fall = optax.cosine_decay_schedule(config.peak, falling, config.end / config.peak)
    elif config.kind == "linear":
        fall = optax.linear_schedule(config.peak, config.end, falling)
    elif config.kind == "constant":
        fall = optax.constant_schedule(config.peak)
    else:
        raise ValueError(f"kind is {config.kind!r}; use 'cosine', 'linear' or 'constant'")
    if config.warmup_steps == 0:
        return fall
    first = config.peak / (config.warmup_steps + 1)
    rise = optax.linear_schedule(first, config.peak, config.warmup_steps)
    return optax.join_schedules([rise, fall], [config.warmup_steps])


@dataclasses.dataclass(kw_only=True)
class TwoPhaseConfig:
    """Value that changes once, after a number of tokens.

    Attributes:
      before: value until then.
      after: value from then on.
      tokens: tokens seen at the change. The default is that of bias_update_rate and mtp_weight (GLM-4.5 2.4).
    """

    before: float
    after: float
    tokens: float = 15e12


def bias_update_rate() -> TwoPhaseConfig:
    """Returns the step size of the loss-free balancing bias (GLM-4.5 2.4)."""
    return TwoPhaseConfig(before=1e-3, after=0.0)


def mtp_weight() -> TwoPhaseConfig:
    """Returns the weight of the multi-token-prediction loss (GLM-4.5 2.4)."""
    return TwoPhaseConfig(before=0.3, after=0.1)


def value_at(config: TwoPhaseConfig, tokens_seen: Float[Array, ""] | float) -> Float[Array, ""]:
    """Returns the value for a batch, as float32, with tokens_seen before that batch.

    tokens_seen may be traced. Pass it as float32, because 15e12 does not fit into an int32.
    """
    return jnp.where(tokens_seen < config.tokens, config.before, config.after).astype(jnp.float32)


@dataclasses.dataclass(kw_only=True)
class BatchRampConfig:
    """Tokens per batch, which rise linearly with the tokens seen (GLM-4.5 2.4: 16M to 64M over 500B).

    - Batches are multiples of `multiple` tokens, full rows on every device. The paper does not disclose it.
      Each size compiles another step; the default gives 4 sizes.
    - M is read as 2^20, full rows of 4096 tokens.

    Attributes:
      start: tokens of the first batch.
      end: tokens of a batch after the ramp.
      ramp_tokens: tokens seen at the end of the ramp; 0: `end` from the first batch on.
      multiple: number of tokens of which every batch is a multiple.
    """

    start: int = 16 << 20
    end: int = 64 << 20
    ramp_tokens: float = 500e9
    multiple: int = 16 << 20


def batch_tokens(config: BatchRampConfig, tokens_seen: int) -> int:
    """Returns the tokens of the batch after tokens_seen, rounded down to the multiple."""
    _check(config)
    if tokens_seen >= config.ramp_tokens:
        return config.end
    raised = (config.end - config.start) * tokens_seen / config.ramp_tokens
    return config.start + int(raised) // config.multiple * config.multiple


def num_steps(config: BatchRampConfig, tokens: int) -> int:
    """Returns the steps until at least `tokens` are seen, which is the total_steps of such a run.

    The default total_steps is that of the default ramp and 27e12, pre-training's tokens.
    """
    steps = seen = 0
    while seen < min(tokens, config.ramp_tokens):
        steps, seen = steps + 1, seen + batch_tokens(config, seen)
    return steps + max(0, -(-(tokens - seen) // config.end))


def num_tokens(config: BatchRampConfig, steps: int) -> int:
    """Returns the tokens of the first steps, the inverse of `num_steps`."""
    seen = 0
    for step in range(steps):
        if seen >= config.ramp_tokens:
            return seen + (steps - step) * config.end
        seen += batch_tokens(config, seen)
    return seen


def _check(config: BatchRampConfig):
    if config.multiple < 1 or config.start % config.multiple or config.end % config.multiple:
        raise ValueError(
            f"batch.start is {config.start} and batch.end {config.end}; both must be multiples of batch.multiple, "
            f"{config.multiple}"
        )
    if not 0 < config.start <= config.end:
        raise ValueError(f"batch ramp {config.start} -> {config.end} must rise from above 0")
