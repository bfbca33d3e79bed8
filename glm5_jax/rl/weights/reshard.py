"""Weights to engines of the same process, from the trainer's devices to theirs."""

import functools
import hashlib
import math
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glm5_jax.checkpoint.manifest import transfer_dtypes
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.runner import check_params
from glm5_jax.inference.weights import should_load
from glm5_jax.inference.worker import Worker
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import Lazy, flatten, map_with_path
from glm5_jax.rl.weights.pusher import HELD, WHOLE, NotPushed, Pushed, SyncConfig, Told, reported


class Reshard:
    """To engines of this process, on meshes of their own or on the trainer's devices: leaf by leaf, cast where it
    comes from, so that no second copy of the model exists. Engines served have their `Worker` told, and answer
    between two steps.

    What an engine gets is its own: the trainer may write over its weights at once.
    """

    def __init__(self, engines: Sequence[Engine | Worker], config: SyncConfig = SyncConfig()):
        if not engines:
            raise ValueError("there is no engine; give at least one")
        if jax.process_count() > 1:
            raise ValueError(
                f"this pod has {jax.process_count()} processes, and an engine has one; use SharedStorage or Network"
            )
        self._engines, self._config, self._count = tuple(engines), config, len(engines)
        self._held: dict[int, tuple[int, str]] = {}  # by the engine's place
        self._given: int | None = None  # the version that all should have

    def push(self, params, version: int, *, rewind: bool = False) -> Pushed:
        """The weights on the engines' devices. WeightsLost if the numbers that arrived are not those that were sent:
        the engine has then failed."""
        jax.block_until_ready(params)
        began, self._given = time.perf_counter(), None
        told, checksums = zip(*(self._one(i, params, version, rewind) for i in range(self._count)))
        sent, self._given = sum(own.bytes for own in told), version
        return reported(version, checksums[0], sent, self._size(params, 0), began, told)

    def refresh(self, params, version: int) -> Pushed | None:
        """See `Pusher`: these engines live as long as the trainer, but one may not have taken a push in time."""
        held = {self._inner(i).version for i in range(self._count)}
        return None if held == {self._given} else self.push(params, version, rewind=True)

    def _one(self, place: int, params, version: int, rewind: bool) -> tuple[Told, str]:
        engine, (held, known) = self._inner(place), self._held.get(place, (None, None))
        check_params(params, engine.cfg)
        if held != engine.version:
            known = None  # its weights came otherwise
        same = self._checksum(params, engine) if known and held == version else None
        if not should_load(version, same, engine.version, known, rewind):
            return Told(str(place), HELD, 0), same
        sums: dict[str, np.ndarray] = {}
        lazy, policy = self._lazy(params, engine, sums), self._config.policy
        self._run(place, lambda own: own.update_weights(lazy, version, policy))
        self._held[place] = version, _summed(sums.items())
        return Told(str(place), WHOLE, self._size(params, place)), self._held[place][1]

    def _inner(self, place: int) -> Engine:
        engine = self._engines[place]
        return engine.engine if isinstance(engine, Worker) else engine

    def _run(self, place: int, update) -> None:
        engine = self._engines[place]
        if isinstance(engine, Engine):
            update(engine)
            return
        future, limit = engine.call(update), self._config.load_seconds
        try:
            future.result(limit)
        except TimeoutError:
            future.cancel()
            raise NotPushed(f"the engine has not taken the weights within {limit} s") from None

    def _size(self, params, place: int) -> int:
        """Bytes that travel."""
        kinds = transfer_dtypes(self._inner(place).cfg, self._config.dtype)
        leaves = flatten(params).items()
        return sum(math.prod(x.shape) * kinds[path].itemsize for path, x in leaves)

    def _checksum(self, params, engine: Engine) -> str:
        kinds = transfer_dtypes(engine.cfg, self._config.dtype)
        leaves = flatten(params).items()
        return _summed((path, fingerprint(_cast(x, kinds[path]))) for path, x in leaves)

    def _lazy(self, params, engine: Engine, sums: dict):
        """The parameters as leaves that travel when they are made; sums: gets their fingerprints."""
        computed, kinds = engine.computation, transfer_dtypes(engine.cfg, self._config.dtype)
        if computed.mesh is not None:
            where = flatten(glm5.param_shardings(engine.cfg, computed.mesh))
        else:
            [device] = jax.tree.leaves(computed.params)[0].devices()
            where = dict.fromkeys(kinds, device)

        def leaf(path, x):
            def make():
                own = _cast(x, kinds[path])
                # What is there is not put there: bound to its device, it would be another program's argument.
                there = own.devices() == {where[path]}
                new = own if there else jax.device_put(own, where[path])
                sums[path], arrived = jax.device_get((fingerprint(own), fingerprint(new)))
                if not np.array_equal(sums[path], arrived):
                    raise ValueError(f"{path} has arrived with other numbers than it was sent with")
                return new

            return Lazy(x.shape, kinds[path], make)

        return map_with_path(leaf, params)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(x, dtype):
    """A copy, on x's devices, in a dtype."""
    return jnp.copy(x.astype(dtype))


@jax.jit
def fingerprint(x) -> jax.Array:
    """uint32[2] of an array's bits and their places, the same however it is cut over devices: sums of integers do not
    depend on their order."""
    bits = lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype(jnp.uint32)
    at = jnp.zeros(bits.shape, jnp.uint32)
    for dim, size in enumerate(bits.shape):
        at = at * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    return jnp.stack(
        [
            jnp.sum(_mixed(bits ^ _mixed(at + jnp.uint32(salt))), dtype=jnp.uint32)
            for salt in (1, 0x85EBCA6B)
        ]
    )


def _mixed(h):
    """uint32 whose bits all depend on all of h's (the end of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return h


def _summed(sums: Iterable[tuple[str, np.ndarray]]) -> str:
    """A checksum of leaves' fingerprints."""
    told = sorted(f"{path} {' '.join(map(str, np.asarray(own)))}\n" for path, own in sums)
    return hashlib.sha256("".join(told).encode()).hexdigest()[:32]
