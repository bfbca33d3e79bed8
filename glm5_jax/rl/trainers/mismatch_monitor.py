"""Each step's agreement of engine and learner: which attempts are compared, and what ends the run.

What exact code gives, of models with random weights on a CPU, 690 tokens: in float32 every choice is the same; in
bfloat16 the first gap is half a unit of its precision, and over 12 layers 92% of the keys and 94% of the experts are
the same and log-probs 0.1 nats apart. With other weights in one indexer the first gap is 150 units, and 64% of the
keys are the same.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.runner import Computation
from glm5_jax.rl.trainers.train_inference_mismatch import compare, is_sampled
from glm5_jax.training.metrics import TrainingStopped
from pallas_kernels.quantized_vectors import FORMATS


@dataclasses.dataclass(frozen=True)
class AgreementConfig:
    """What of a batch is compared before it is learnt from, and what ends the run. Construction refuses values out of
    range (ValueError).

    Attributes:
      attempts: so many, in even steps from the longest to the shortest; 0: none.
      tokens: the last so many sampled ones of an attempt are read one by one, as they were drawn; those before in
        chunks, as if they had been given.
      rounding: units of precision (`precision_of`) that agreement/gap may be.
      least: share of the keys, and of the experts, that must be the same.
      most: nats that log-probs may be apart on average.
    """

    attempts: int = 4
    tokens: int = 256
    rounding: float = 32.0
    least: float = 0.75
    most: float = 0.2  # by which a ratio may be off before it is clipped (GLM-5 3.2)

    def __post_init__(self):
        for name, low in (("attempts", 0), ("tokens", 1), ("rounding", 0), ("most", 0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not 0 <= self.least <= 1:
            raise ValueError(f"least is {self.least}; it must be between 0 and 1")


def agreement(
    params,
    records: Sequence[TokenRecord],
    engine: Engine,
    cfg: ModelConfig,
    config: AgreementConfig = AgreementConfig(),
    **options,
) -> dict[str, float]:
    """`compare` of some of a batch's records, as metrics; none if nothing was sampled. TrainingStopped if engine and
    learner are further apart than config says."""
    found = compare(params, chosen(records, config), engine, cfg, **options)
    if found is None:
        return {}
    told = found.metrics
    if faults := exceeded(told, config, precision_of(engine.computation)):
        raise TrainingStopped(
            f"engine and learner are not one model: {', '.join(faults)}; agreement/layer, the first that chose "
            f"otherwise, is {told['agreement/layer']:.0f}. Nothing was learnt from this batch; limits are "
            "--experiment.agreement.rounding, least and most"
        )
    return told


def chosen(records: Iterable[TokenRecord], config: AgreementConfig) -> list[TokenRecord]:
    """The records of a batch that are compared. The longest is among them: it leaves out most keys."""
    sampled = sorted((record for record in records if is_sampled(record).any()), key=len)
    places = np.linspace(len(sampled) - 1, 0, min(config.attempts, len(sampled)))
    return [_read_late(sampled[int(place)], config.tokens) for place in places]


def _read_late(record: TokenRecord, count: int) -> TokenRecord:
    """The record as if all but the last so many of what was sampled had been given."""
    sampled = is_sampled(record)
    late = sampled & (np.cumsum(sampled[::-1])[::-1] <= count)
    return TokenRecord(
        token_ids=record.token_ids,
        loss_mask=late,
        rollout_logp=np.where(late, record.rollout_logp, np.nan),
    )


def exceeded(told: Mapping[str, float], config: AgreementConfig, precision: float) -> list[str]:
    """What of an `Agreement`'s metrics is beyond the limits, in words."""
    most = {"gap": config.rounding * precision}
    most |= dict.fromkeys(("logp_mean", "recorded_mean"), config.most)
    found = []
    # NaN is beyond any limit.
    for name, limit in most.items():
        if not (value := told[f"agreement/{name}"]) <= limit:
            found.append(f"agreement/{name} is {value:.3g}, more than {limit:.3g}")
    for name in ("keys", "experts"):
        if not (value := told.get(f"agreement/{name}", 1.0)) >= config.least:
            found.append(f"agreement/{name} is {value:.3g}, less than {config.least:.3g}")
    return found


def precision_of(made: Computation) -> float:
    """Of the coarsest numbers that an engine's scores go through: its arithmetic's, or those that its pages hold."""
    kept = (made.shape.index_cache, made.shape.latent_cache)
    return max(_unit(FORMATS.get(name, name)) for name in (made.cfg.dtype, *filter(None, kept)))


def _unit(dtype) -> float:
    if jnp.issubdtype(dtype, jnp.integer):
        return 1 / jnp.iinfo(dtype).max
    return float(jnp.finfo(dtype).eps)
