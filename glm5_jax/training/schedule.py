"""What changes while a run goes on: learning rate by step; batch size and loss weights by tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass
class ScheduleConfig:
    """Learning rate of steps 0 .. total_steps - 1; the defaults are pre-training's (GLM-5 App. A).

    Step warmup_steps runs at peak and the last step at end, as do all after it. Mid-training is
    "linear" from 4e-5 to 1e-5, the indexer warm-up of DSA falls from 5e-3 to 2e-4 (its shape is not
    printed), sparse adaptation is "constant" at 1e-5.
    """

    kind: str = "cosine"  # from peak to end: "cosine", "linear", or "constant" (end is not used)
    peak: float = 2e-4
    end: float = 4e-5
    warmup_steps: int = 2000  # not printed; 0.5% of pre-training's steps
    total_steps: int = 413_095  # num_steps of the default batch ramp and 27e12 tokens

    def __post_init__(self):
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}; it must be positive")


def make_schedule(config: ScheduleConfig) -> optax.Schedule:
    """step -> learning rate. The first step of a warm-up is above zero, so no step is wasted."""
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


@dataclasses.dataclass
class SwitchConfig:
    """A value that changes once, after so many tokens."""

    before: float
    after: float
    tokens: float = 15e12  # GLM-4.5 2.4, for both below


def bias_update_rate() -> SwitchConfig:
    """Step of the loss-free balancing bias (GLM-4.5 2.4)."""
    return SwitchConfig(1e-3, 0.0)


def mtp_weight() -> SwitchConfig:
    """Weight of the multi-token-prediction loss (GLM-4.5 2.4)."""
    return SwitchConfig(0.3, 0.1)


def switched(config: SwitchConfig, tokens_seen) -> jax.Array:
    """float32[]: the value while a batch is trained on, with tokens_seen before it.

    tokens_seen may be traced; pass it as float32, since 15e12 does not fit an int32.
    """
    return jnp.where(tokens_seen < config.tokens, config.before, config.after).astype(jnp.float32)


@dataclasses.dataclass
class BatchRampConfig:
    """Tokens per batch, rising linearly with the tokens seen (GLM-4.5 2.4: 16M to 64M over 500B).

    Batches are multiples of `multiple` tokens (whole rows on every device), which is not disclosed: each size compiles
    a step of its own, so the default makes 4 of them. M is read as 2^20, whole rows of 4096 tokens.
    """

    start: int = 16 << 20
    end: int = 64 << 20
    ramp_tokens: float = 500e9  # 0: `end` from the first batch on
    multiple: int = 16 << 20


def batch_tokens(config: BatchRampConfig, tokens_seen: int) -> int:
    """Tokens of the batch that follows so many tokens, rounded down to the multiple."""
    _check(config)
    if tokens_seen >= config.ramp_tokens:
        return config.end
    raised = (config.end - config.start) * tokens_seen / config.ramp_tokens
    return config.start + int(raised) // config.multiple * config.multiple


def num_steps(config: BatchRampConfig, tokens: int) -> int:
    """Steps until at least so many tokens are seen: the total_steps of a run of so many.

    The default total_steps is that of the default ramp and 27e12, pre-training's tokens.
    """
    taken = seen = 0
    while seen < min(tokens, config.ramp_tokens):
        taken, seen = taken + 1, seen + batch_tokens(config, seen)
    return taken + max(0, -(-(tokens - seen) // config.end))


def _check(config: BatchRampConfig):
    if config.multiple < 1 or config.start % config.multiple or config.end % config.multiple:
        raise ValueError(
            f"batch ramp {config.start} -> {config.end}: both must be multiples of {config.multiple}"
        )
    if not 0 < config.start <= config.end:
        raise ValueError(f"batch ramp {config.start} -> {config.end} must rise from above 0")
