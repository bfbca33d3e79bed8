"""Requests on their way from an engine that reads prompts to one that decodes."""

import dataclasses
from typing import NamedTuple

from glm5_jax.inference.scheduler import Sequence
from glm5_jax.inference.slot_cache import KVState
from glm5_jax.inference.stop_checker import StopChecker


@dataclasses.dataclass
class LiveRequest:
    """State of a request in addition to its sequence: its rank (None during a transfer) and its stop conditions."""

    dp_rank: int | None
    stops: StopChecker

    @property
    def rank(self) -> int:
        """Rank of a request that is not in transfer."""
        assert self.dp_rank is not None, "the request is in transfer"
        return self.dp_rank


class RequestTransfer(NamedTuple):
    """Request on its way between two engines.

    Attributes:
      sequence: the request's tokens.
      live: its stop conditions.
      kv_state: its cache.
      version: version of the weights that read its prompt.
    """

    sequence: Sequence
    live: LiveRequest
    kv_state: KVState
    version: int
