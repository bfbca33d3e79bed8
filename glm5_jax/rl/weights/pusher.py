"""Common parts of all pushers of weights (weight_sync.py, reshard.py): options, interface and results."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxtyping import PyTree

from glm5_jax.inference.engine import POLICIES
from glm5_jax.inference.request_bodies import UpdatePolicy

# Modes: all weights, only the changes since the last push, or nothing because the engine has them already.
FULL, DELTA, CURRENT = "full", "delta", "current"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Options of a pusher. Raises ValueError for values out of range.

    Attributes:
      policy: treatment of running requests of the engines: finish, keep or recompute (`Engine.update_weights`).
      dtype: dtype in which weights are transferred; None: the dtype of the computation.
      timeout_s: time limit of a response of an engine, and of each message with weights, in seconds.
      load_timeout_s: time limit of the responses to a pull and to a commit, in seconds. The engine pulls its shards; then
        it finishes running requests, if that is the policy, and loads the weights.
      state_timeout_s: time limit for reporting the weights in an engine between two pushes, in seconds.
      max_tries: attempts at a request whose connection breaks.
      bucket_bytes: maximum size of a message with weights, in bytes.
      max_connections: maximum concurrent messages with weights to one engine process.
      delta: whether only changes since the last push are sent. Trainer and engines then keep a copy in host memory.
      keep: number of versions that stay in shared storage.
      api_key: key of the engines; None: that of api_key_file, or none. It is no flag, because `ps` shows flags.
      api_key_file: file with the key; None: no file.
    """

    policy: UpdatePolicy = "recompute"  # as miles ("retract"); GLM-5's is not disclosed
    dtype: str | None = None
    timeout_s: float = 60.0  # these and the following are ours
    load_timeout_s: float = 900.0
    state_timeout_s: float = 5.0
    max_tries: int = 2
    bucket_bytes: int = 64 * 2**20
    max_connections: int = 16
    delta: bool = False
    keep: int = 2
    api_key: str | None = dataclasses.field(default=None, repr=False, metadata={"flag": False})
    api_key_file: str | None = None

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; use one of {', '.join(POLICIES)}")
        for name in (
            "timeout_s",
            "load_timeout_s",
            "state_timeout_s",
            "max_tries",
            "max_connections",
            "keep",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.bucket_bytes < 1024:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; use at least 1024")


class EngineAck(NamedTuple):
    """Result of a push at one engine.

    Attributes:
      engine: URL of the engine, or its index in this process.
      mode: FULL, DELTA or CURRENT.
      sent_bytes: bytes sent to the engine, by the trainer and by other engines.
      error: why the engine does not have the weights; None: it has them.
      is_refused: whether the engine refused the push, and would do so again.
    """

    engine: str
    mode: str
    sent_bytes: int
    error: str | None = None
    is_refused: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushResult:
    """Result of a push.

    Attributes:
      version: version of the weights.
      checksum: checksum of the weights. That of `SharedStoragePusher` hashes tensors, others sum arrays on devices.
      sent_bytes: bytes that the trainer sent, or wrote.
      full_bytes: bytes of all weights.
      duration_s: duration of the push, in seconds.
      acks: results by engine.
      engine_checksum: checksum that engines report in GET /weights; None: they report none.
    """

    version: int
    checksum: str
    sent_bytes: int
    full_bytes: int
    duration_s: float
    acks: tuple[EngineAck, ...]
    engine_checksum: str | None = None

    @property
    def failed_engines(self) -> tuple[str, ...]:
        """Returns the engines without the weights. They must get no requests before a later push succeeds."""
        return tuple(ack.engine for ack in self.acks if ack.error is not None)


class PushFailed(Exception):
    """Raised if no engine has the weights. The message has the reason of each engine.

    Attributes:
      is_refused: whether an engine refused the weights, so that the others would too.
    """

    def __init__(self, message: str, is_refused: bool = False):
        super().__init__(message)
        self.is_refused = is_refused


class Pusher(Protocol):
    """Interface of `NetworkPusher`, `SharedStoragePusher` and `ReshardPusher`.

    Its methods raise ValueError if the parameters are of another model, and PushFailed if no engine has the weights.
    """

    def push(self, params: PyTree, version: int, *, rewind: bool = False) -> PushResult:
        """Sends the weights to all engines. rewind: whether the trainer went back to a checkpoint."""
        ...

    def refresh(self, params: PyTree, version: int) -> PushResult | None:
        """Sends the weights, with rewind, to the engines that respond without those of the last push.

        Such engines restarted, or the last push failed for them. If the last push had another version, all engines that
        respond get the weights. Returns None if no engine needs them.
        """
        ...


def make_result(
    *,
    version: int,
    checksum: str,
    full_bytes: int,
    start: float,
    acks: Sequence[EngineAck],
    sent_bytes: int | None = None,
    engine_checksum: str | None = None,
) -> PushResult:
    """Returns the result of a push. Raises PushFailed if no engine has the weights.

    - start: time of `time.perf_counter` at the start of the push.
    - sent_bytes: bytes sent or written; None: the sum over the engines.
    """
    result = PushResult(
        version=version,
        checksum=checksum,
        sent_bytes=sum(ack.sent_bytes for ack in acks) if sent_bytes is None else sent_bytes,
        full_bytes=full_bytes,
        duration_s=time.perf_counter() - start,
        acks=tuple(acks),
        engine_checksum=engine_checksum,
    )
    reasons = "; ".join(f"{ack.engine}: {ack.error}" for ack in acks if ack.error is not None)
    if reasons and len(result.failed_engines) == len(acks):
        is_refused = any(ack.is_refused for ack in acks)
        raise PushFailed(f"no engine has taken version {version}: {reasons}", is_refused)
    _log.info(
        "version %d: %.3f MB in %.2f s; failed: %s",
        version,
        result.sent_bytes / 1e6,
        result.duration_s,
        reasons,
    )
    return result
