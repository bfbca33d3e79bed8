"""Counters of an engine."""

import dataclasses


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """Counters of an engine since its start.

    Attributes:
      num_steps: launched steps.
      num_overlapped: steps that were launched before the previous one had finished.
      num_requests: submitted requests.
      prompt_tokens: tokens of their prompts.
      cached_tokens: prompt tokens read from the cache.
      read_tokens: prompt tokens computed by prefills.
      received_tokens: prompt tokens whose pages came from another engine.
      new_tokens: tokens of replies.
      host_seconds: time of the host's part of steps, in seconds.
      waiting_seconds: time that the host waited for the device, in seconds.
      accepted: number of decodes with drafts that gave 1, 2, ... tokens.
    """

    num_steps: int = 0
    num_overlapped: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    read_tokens: int = 0
    received_tokens: int = 0
    new_tokens: int = 0
    host_seconds: float = 0.0
    waiting_seconds: float = 0.0
    accepted: list[int] = dataclasses.field(default_factory=list)
