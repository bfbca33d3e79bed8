"""Pushes weights to engines of the same process, from the trainer's devices to the engines' devices."""

import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from glm5_jax.checkpoint.engine_dtypes import transfer_dtypes
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.engine_weights import check_params
from glm5_jax.inference.weights import should_load
from glm5_jax.inference.worker import Worker
from glm5_jax.model import glm5
from glm5_jax.parallel.fingerprint import fingerprint
from glm5_jax.parallel.tree import Lazy, flatten, map_with_path
from glm5_jax.rl.weights.pusher import (
    CURRENT,
    FULL,
    EngineAck,
    PushFailed,
    PushResult,
    SyncConfig,
    make_result,
)


class ReshardPusher:
    """Pusher to engines of this process, on other meshes or on the trainer's devices.

    Leaves are cast on the trainer's devices and transferred one at a time, so that no second copy of the model exists.
    An engine with a `Worker` loads them between two steps. The engines' arrays are copies: the trainer may overwrite its
    weights at once.
    """

    def __init__(self, engines: Sequence[Engine | Worker], config: SyncConfig = SyncConfig()):
        if not engines:
            raise ValueError("there is no engine; give at least one")
        if jax.process_count() > 1:
            raise ValueError(
                f"this pod has {jax.process_count()} processes, and an engine has one; use SharedStoragePusher or "
                "NetworkPusher"
            )
        self._engines, self._config, self._count = tuple(engines), config, len(engines)
        self._loaded: dict[int, tuple[int, str]] = {}  # version and checksum by the engine's index
        self._pushed_version: int | None = None  # version that all engines should have

    def push(self, params: PyTree, version: int, *, rewind: bool = False) -> PushResult:
        """Loads the weights into all engines; see `Pusher`.

        Raises WeightsLost if an array arrived with other numbers than were sent; the engine has then failed.
        """
        jax.block_until_ready(params)
        start, self._pushed_version = time.perf_counter(), None
        acks, checksums = zip(
            *(self._push_to(i, params, version, rewind) for i in range(self._count))
        )
        self._pushed_version = version
        return make_result(
            version=version,
            checksum=checksums[0],
            full_bytes=self._num_bytes(params, 0),
            start=start,
            acks=acks,
        )

    def refresh(self, params: PyTree, version: int) -> PushResult | None:
        """Pushes again if an engine has not taken the last push in time; see `Pusher`."""
        versions = {self._engine(i).version for i in range(self._count)}
        if versions == {self._pushed_version}:
            return None
        return self.push(params, version, rewind=True)

    def _push_to(
        self, index: int, params: PyTree, version: int, rewind: bool
    ) -> tuple[EngineAck, str]:
        """Loads the weights into one engine unless it has them. Returns its ack and the checksum of the weights."""
        engine = self._engine(index)
        loaded_version, loaded_checksum = self._loaded.get(index, (None, None))
        check_params(params, engine.cfg)
        if loaded_version != engine.version:
            loaded_checksum = None  # the weights are from another source
        checksum = None
        if loaded_checksum and loaded_version == version:
            checksum = self._checksum(params, engine)
        is_outdated = should_load(version, checksum, engine.version, loaded_checksum, rewind)
        if checksum is not None and not is_outdated:
            return EngineAck(str(index), CURRENT, 0), checksum
        fingerprints: dict[str, np.ndarray] = {}
        lazy, policy = self._lazy_params(params, engine, fingerprints), self._config.policy
        self._run(index, lambda engine: engine.update_weights(lazy, version, policy))
        checksum = _checksum_of(fingerprints.items())
        self._loaded[index] = version, checksum
        return EngineAck(str(index), FULL, self._num_bytes(params, index)), checksum

    def _engine(self, index: int) -> Engine:
        engine = self._engines[index]
        return engine.engine if isinstance(engine, Worker) else engine

    def _run(self, index: int, update: Callable[[Engine], None]) -> None:
        """Runs an update of an engine, in the thread of its worker if it has one."""
        engine = self._engines[index]
        if isinstance(engine, Engine):
            update(engine)
            return
        future, timeout_s = engine.call(update), self._config.load_timeout_s
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise PushFailed(f"the engine has not taken the weights within {timeout_s} s") from None

    def _num_bytes(self, params: PyTree, index: int) -> int:
        """Returns the bytes of all weights as they are transferred."""
        dtypes = transfer_dtypes(self._engine(index).cfg, self._config.dtype)
        leaves = flatten(params).items()
        return sum(math.prod(x.shape) * dtypes[path].itemsize for path, x in leaves)

    def _checksum(self, params: PyTree, engine: Engine) -> str:
        """Returns the checksum of the weights as they are transferred."""
        dtypes = transfer_dtypes(engine.cfg, self._config.dtype)
        leaves = flatten(params).items()
        return _checksum_of((path, fingerprint(_cast(x, dtypes[path]))) for path, x in leaves)

    def _lazy_params(
        self, params: PyTree, engine: Engine, fingerprints: dict[str, np.ndarray]
    ) -> PyTree:
        """Returns the parameters as lazy leaves, which are transferred when they are materialized.

        fingerprints: receives the fingerprint of each leaf by its path.
        """
        computation = engine.computation
        dtypes = transfer_dtypes(engine.cfg, self._config.dtype)
        if computation.mesh is not None:
            targets = flatten(glm5.param_shardings(engine.cfg, computation.mesh))
        else:
            [device] = jax.tree.leaves(computation.params)[0].devices()
            targets = dict.fromkeys(dtypes, device)

        def make_lazy(path: str, x: Array) -> Lazy:
            def transfer() -> jax.Array:
                source = _cast(x, dtypes[path])
                # An array on its target is not put there: an array bound to a device is another program's argument.
                is_local = source.devices() == {targets[path]}
                copy = source if is_local else jax.device_put(source, targets[path])
                fingerprints[path], arrived = jax.device_get(
                    (fingerprint(source), fingerprint(copy))
                )
                if not np.array_equal(fingerprints[path], arrived):
                    raise ValueError(f"{path} has arrived with other numbers than it was sent with")
                return copy

            return Lazy(x.shape, dtypes[path], transfer)

        return map_with_path(make_lazy, params)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(x: Array, dtype: np.dtype) -> Array:
    """Returns a copy of an array in another dtype, on the same devices."""
    return jnp.copy(x.astype(dtype))


def _checksum_of(fingerprints: Iterable[tuple[str, Array | np.ndarray]]) -> str:
    """Returns the checksum of the leaves' fingerprints."""
    lines = sorted(f"{path} {' '.join(map(str, np.asarray(f)))}\n" for path, f in fingerprints)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]
