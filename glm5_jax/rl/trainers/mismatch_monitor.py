"""Checks before each update that engine and learner compute the same model, and ends the run if they do not.

Reference values of correct code, for models with random weights on a CPU, 690 tokens:

- float32: every choice is the same.
- bfloat16: the first gap is half a unit of its precision. Over 12 layers 92% of the keys and 94% of the experts are the
  same, and log-probs differ by 0.1 nats.
- Other weights in one indexer: the first gap is 150 units, and 64% of the keys are the same.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.runner import Computation
from glm5_jax.rl.trainers.record_replay import is_sampled
from glm5_jax.rl.trainers.train_inference_mismatch import compare_choices
from glm5_jax.training.metrics import TrainingStopped
from pallas_kernels.quantized_vectors import FORMATS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """Comparison of engine and learner on a part of each batch, and the limits that end the run.

    Raises ValueError if a value is out of range.

    Attributes:
      attempts: number of attempts compared, in even steps from the longest to the shortest; 0: no comparison.
      tokens: number of sampled tokens at the end of an attempt that are decoded one by one, as they were sampled. The
        tokens before them are read in prefill chunks.
      max_gap_eps: maximum of mismatch/gap, in units of precision (`precision_of`).
      min_match_rate: minimum share of the keys, and of the experts, that are the same.
      max_logp_diff: maximum mean difference of log-probs, in nats.
    """

    attempts: int = 4
    tokens: int = 256
    max_gap_eps: float = 32.0
    min_match_rate: float = 0.75
    max_logp_diff: float = 0.2  # a ratio that is off by more is clipped (GLM-5 3.2)

    def __post_init__(self):
        for name, low in (("attempts", 0), ("tokens", 1), ("max_gap_eps", 0), ("max_logp_diff", 0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not 0 <= self.min_match_rate <= 1:
            raise ValueError(f"min_match_rate is {self.min_match_rate}; it must be between 0 and 1")


def check_mismatch(
    params: PyTree,
    records: Sequence[TokenRecord],
    engine: Engine,
    cfg: ModelConfig,
    config: MismatchConfig = MismatchConfig(),
    **options: Any,
) -> dict[str, float]:
    """Returns the mismatch metrics of some of a batch's records; none if no token was sampled.

    options are those of `compare_choices`. Raises TrainingStopped if a limit of config is exceeded.
    """
    mismatch = compare_choices(params, select_records(records, config), engine, cfg, **options)
    if mismatch is None:
        return {}
    metrics = mismatch.metrics
    if faults := exceeded_limits(metrics, config, precision_of(engine.computation)):
        raise TrainingStopped(
            f"engine and learner are not one model: {', '.join(faults)}; mismatch/layer, the first layer with a "
            f"different choice, is {metrics['mismatch/layer']:.0f}. This batch was not trained on; the limits are "
            "--experiment.mismatch.max_gap_eps, min_match_rate and max_logp_diff"
        )
    return metrics


def select_records(records: Iterable[TokenRecord], config: MismatchConfig) -> list[TokenRecord]:
    """Returns the records that are compared. The longest is always one, because it leaves out the most keys."""
    sampled = sorted((record for record in records if is_sampled(record).any()), key=len)
    indices = np.linspace(len(sampled) - 1, 0, min(config.attempts, len(sampled)))
    return [_keep_last_sampled(sampled[int(i)], config.tokens) for i in indices]


def _keep_last_sampled(record: TokenRecord, count: int) -> TokenRecord:
    """Returns the record with all but its last `count` sampled tokens marked as prompt."""
    sampled = is_sampled(record)
    is_last = sampled & (np.cumsum(sampled[::-1])[::-1] <= count)
    assert record.rollout_logp is not None  # some token is sampled
    return TokenRecord(
        token_ids=record.token_ids,
        loss_mask=is_last,
        rollout_logp=np.where(is_last, record.rollout_logp, np.nan),
    )


def exceeded_limits(
    metrics: Mapping[str, float], config: MismatchConfig, precision: float
) -> list[str]:
    """Returns one sentence for each metric of a `Mismatch` that exceeds its limit. NaN exceeds every limit."""
    maxima = {"gap": config.max_gap_eps * precision}
    maxima |= dict.fromkeys(("logp_mean", "recorded_mean"), config.max_logp_diff)
    faults = []
    for name, limit in maxima.items():
        if not (value := metrics[f"mismatch/{name}"]) <= limit:
            faults.append(f"mismatch/{name} is {value:.3g}, more than {limit:.3g}")
    limit = config.min_match_rate
    for name in ("key_match_rate", "expert_match_rate"):
        if not (value := metrics.get(f"mismatch/{name}", 1.0)) >= limit:
            faults.append(f"mismatch/{name} is {value:.3g}, less than {limit:.3g}")
    return faults


def precision_of(computation: Computation) -> float:
    """Returns the unit of the coarsest numbers in an engine's scores: its arithmetic's, or its caches'."""
    shape = computation.shape
    names = (computation.cfg.dtype, *filter(None, (shape.index_cache, shape.latent_cache)))
    return max(_unit(FORMATS.get(name, name)) for name in names)


def _unit(dtype: DTypeLike) -> float:
    if jnp.issubdtype(dtype, jnp.integer):
        return 1 / jnp.iinfo(dtype).max
    return float(jnp.finfo(dtype).eps)
