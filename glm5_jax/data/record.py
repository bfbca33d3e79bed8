"""Defines `TokenRecord`, tokens with their per-token streams, which every kind of training consumes.

Pre-training, SFT, RL and distillation fill the same record, and the learner does not know its origin. Entry i of every
stream describes token i given the tokens before it, so entry 0 is masked.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

STATUSES = ("completed", "truncated", "aborted", "failed")
MAX_VERSION = 2**31 - 1  # of weights, because `weight_version` is int32

# Per-token streams in their order, with their dtype.
STREAMS = {
    "token_ids": np.int32,
    "loss_mask": np.float32,
    "rollout_logp": np.float32,
    "weight_version": np.int32,
    "advantage": np.float32,
    "rl_weight": np.float32,
    "ce_weight": np.float32,
    "ref_kl_weight": np.float32,
    "ref_logp": np.float32,
}
WEIGHTS = ("rl_weight", "ce_weight", "ref_kl_weight")
LOG_PROBS = ("rollout_logp", "ref_logp")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenRecord:
    """One sequence of t tokens; its streams are read-only arrays [t], None until filled.

    Attributes:
      token_ids: int32.
      loss_mask: float32, 1 where the token is trained on, 0 elsewhere and at entry 0.
      rollout_logp: float32, nats; log-prob under the weights that sampled the token, at the
        sampling temperature; NaN where the token was not sampled.
      weight_version: int32, optimiser step of the sampling weights; -1 where the token was not sampled.
      advantage: float32.
      rl_weight, ce_weight, ref_kl_weight: float32, weights of the token's policy-gradient,
        cross-entropy and reference-KL terms.
      ref_logp: float32, nats, under the reference or teacher; NaN where it was not computed.
      group_id, rollout_id, task_id: ids of the prompt's group, the rollout and the task.
      rewards: reward by part; None marks an environment failure (no reward, not a reward of 0).
      status: "completed", "truncated", "aborted" or "failed".
      fail_reason: reason of a failure; empty: none.
      spans: (start, end, kind) of token ranges [start, end), for example a tool's result.

    Raises ValueError for streams of unequal length or wrong kind, a trained entry 0, a trained
    RL token without log-prob, and a log-prob on an untrained token.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logp: np.ndarray | None = None
    weight_version: np.ndarray | None = None
    advantage: np.ndarray | None = None
    rl_weight: np.ndarray | None = None
    ce_weight: np.ndarray | None = None
    ref_kl_weight: np.ndarray | None = None
    ref_logp: np.ndarray | None = None
    group_id: str = ""
    rollout_id: str = ""
    task_id: str = ""
    rewards: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    status: str = "completed"
    fail_reason: str = ""
    spans: Sequence[tuple[int, int, str]] = ()

    def __post_init__(self):
        for name, dtype in STREAMS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _stream(name, value, dtype))
        for name, stream in self.streams().items():
            if len(stream) != len(self):
                raise ValueError(f"{name} has {len(stream)} entries, token_ids has {len(self)}")
        if not len(self) or self.token_ids.min() < 0:
            raise ValueError("token_ids must hold at least one token and no negative id")
        if not ((self.loss_mask == 0) | (self.loss_mask == 1)).all():
            raise ValueError("loss_mask must hold only 0 and 1; put weights into ce_weight")
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is 1, but nothing precedes token 0 to predict it from")
        self._check_weights()
        self._check_rollout()
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}; use one of {', '.join(STATUSES)}")
        for start, end, kind in self.spans:
            if not 0 <= start <= end <= len(self):
                raise ValueError(f"span {(start, end, kind)} leaves the {len(self)} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    def streams(self) -> dict[str, np.ndarray]:
        """Returns the filled streams by name, in the order of `STREAMS`."""
        values = {name: getattr(self, name) for name in STREAMS}
        return {name: value for name, value in values.items() if value is not None}

    def _check_weights(self):
        for name in WEIGHTS:
            weight = getattr(self, name)
            if weight is not None and not np.isfinite(weight).all():
                raise ValueError(f"{name} holds NaN or infinity at {_first(~np.isfinite(weight))}")

    def _check_rollout(self):
        trained = self.loss_mask == 1
        sampled = np.zeros(len(self), bool)
        if self.rollout_logp is not None:
            sampled = ~np.isnan(self.rollout_logp)
            if np.isinf(self.rollout_logp).any():
                raise ValueError(
                    f"rollout_logp is infinite at {_first(np.isinf(self.rollout_logp))}"
                )
            if (sampled & ~trained).any():
                raise ValueError(
                    f"token {_first(sampled & ~trained)} has a rollout_logp but loss_mask 0; set "
                    "its log-prob to NaN, or train on it"
                )
        if self.rl_weight is not None and (trained & (self.rl_weight != 0) & ~sampled).any():
            at = _first(trained & (self.rl_weight != 0) & ~sampled)
            raise ValueError(
                f"token {at} is trained by RL (rl_weight {self.rl_weight[at]}) but has no "
                "rollout_logp; keep the sampler's log-probs or set its rl_weight to 0"
            )
        if self.weight_version is not None and (sampled != (self.weight_version >= 0)).any():
            at = _first(sampled != (self.weight_version >= 0))
            raise ValueError(
                f"token {at} has weight_version {self.weight_version[at]}; tokens with a "
                "rollout_logp have the step of their weights, all others -1"
            )


def plain_record(token_ids: Sequence[int] | np.ndarray) -> TokenRecord:
    """Returns a record that trains on every token except the first, with cross-entropy weight 1."""
    loss_mask = np.ones(len(token_ids), np.float32)
    loss_mask[:1] = 0
    return TokenRecord(token_ids=np.asarray(token_ids), loss_mask=loss_mask, ce_weight=loss_mask)


def _stream(name: str, value: object, dtype: type) -> np.ndarray:
    array = np.asarray(value)
    if (
        array.dtype == dtype
        and array.base is None
        and not array.flags.writeable
        and array.ndim == 1
    ):
        return array  # the read-only array of another record
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be [t]")
    if np.issubdtype(dtype, np.integer) and array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} is {array.dtype}; it must hold integers")
    array = np.array(array, dtype)
    array.setflags(write=False)
    return array


def _first(condition: np.ndarray) -> int:
    return int(np.flatnonzero(condition)[0])
