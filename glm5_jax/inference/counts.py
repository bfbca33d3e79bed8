"""What an engine counts while it serves."""

import dataclasses


@dataclasses.dataclass
class Counts:
    """What an engine has done. num_overlapped: steps that were sent off while the one before was computed; accepted:
    how often a decode with drafts gave 1, 2, ... tokens."""

    num_steps: int = 0
    num_overlapped: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    read_tokens: int = 0
    new_tokens: int = 0
    host_seconds: float = 0.0
    waiting_seconds: float = 0.0
    accepted: list[int] = dataclasses.field(default_factory=list)
