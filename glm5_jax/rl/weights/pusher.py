"""What all ways to push weights have in common (weight_sync.py, reshard.py): how, and what came of it."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from glm5_jax.inference.engine import POLICIES, RECOMPUTE

WHOLE, CHANGES, HELD = "whole", "changes", "held"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SyncConfig:
    """How weights are pushed. Construction refuses values out of range (ValueError).

    Attributes:
      policy: for what engines have under way: finish, keep or recompute (`Engine.update_weights`).
      dtype: in which weights travel; None: in which the model computes.
      seconds: that an engine has for any answer but the last, after which it is lost.
      load_seconds: for the last one, until which it ends what is under way, if that is the policy, and loads.
      look_seconds: that it has to tell what it holds, between two pushes.
      tries: of a message whose connection breaks.
      bucket_bytes: of a message; an engine's `ServerConfig.max_part_bytes` must be more.
      delta: whether only what changed since the last push travels. Trainer and engines then keep a copy in host memory.
      keep: versions that stay in shared storage.
      api_key: key that engines want; None: that of api_key_file, or none. No flag sets it, as `ps` shows flags.
      api_key_file: file that holds the key; None: no file.
    """

    policy: str = RECOMPUTE  # as miles ("retract"); GLM-5's is not disclosed
    dtype: str | None = None
    seconds: float = 60.0  # these and the following are ours
    load_seconds: float = 900.0
    look_seconds: float = 5.0
    tries: int = 2
    bucket_bytes: int = 64 * 2**20
    delta: bool = False
    keep: int = 2
    api_key: str | None = dataclasses.field(default=None, repr=False, metadata={"flag": False})
    api_key_file: str | None = None

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; use one of {', '.join(POLICIES)}")
        for name in ("seconds", "load_seconds", "look_seconds", "tries", "keep"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.bucket_bytes < 1024:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; use at least 1024")


class Told(NamedTuple):
    """What became of a push at one engine. how: "whole", "changes" or "held", which it did already; bytes: sent to
    it; error: why it has not taken it, None if it has; refused: it says so itself, and would again."""

    engine: str
    how: str
    bytes: int
    error: str | None = None
    refused: bool = False


@dataclasses.dataclass(frozen=True)
class Pushed:
    """Attributes:
    version, checksum: of the weights. Checksums of `Reshard` are sums over leaves on devices, others hashes of tensors.
    bytes: that travelled, to all engines, or were written.
    whole_bytes: of all weights, once.
    seconds: in all.
    engines: one by one.
    shown: the checksum, if engines tell it of what they hold (GET /weights).
    """

    version: int
    checksum: str
    bytes: int
    whole_bytes: int
    seconds: float
    engines: tuple[Told, ...]
    shown: str | None = None

    @property
    def lost(self) -> tuple[str, ...]:
        """Engines that have not taken it: nothing may be asked of them before a later push does."""
        return tuple(own.engine for own in self.engines if own.error is not None)


class NotPushed(Exception):
    """No engine has taken the weights; the message says why, of each. refused: one has refused them, and the others would
    when they are there again."""

    def __init__(self, message: str, refused: bool = False):
        super().__init__(message)
        self.refused = refused


class Pusher(Protocol):
    """`Network`, `SharedStorage` and `Reshard`. ValueError if the parameters are of another model; NotPushed."""

    def push(self, params, version: int, *, rewind: bool = False) -> Pushed: ...

    def refresh(self, params, version: int) -> Pushed | None:
        """Between two pushes: as `push`, with rewind, if engines that answer do not hold what was pushed last, as those that
        were started anew, or were not reached; if it was another version, to all that answer. None: all hold it."""


def reported(
    version: int, checksum: str, sent: int, whole: int, began: float, told: Sequence[Told]
) -> Pushed:
    """What came of a push that began at that time (`time.perf_counter`); NotPushed if no engine has taken it."""
    seconds = time.perf_counter() - began
    pushed = Pushed(version, checksum, int(sent), int(whole), seconds, tuple(told))
    reasons = "; ".join(f"{own.engine}: {own.error}" for own in told if own.error is not None)
    if reasons and len(pushed.lost) == len(told):
        refused = any(own.refused for own in told)
        raise NotPushed(f"no engine has taken version {version}: {reasons}", refused)
    _log.info("version %d: %.3f MB in %.2f s; lost: %s", version, sent / 1e6, seconds, reasons)
    return pushed
