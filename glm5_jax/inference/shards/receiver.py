"""Receives weights in one process of an engine: pulls what its devices need into host memory, then places it on them."""

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from glm5_jax.checkpoint.engine_dtypes import accepted_dtypes
from glm5_jax.checkpoint.manifest import check_fit
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine_weights import EngineWeights
from glm5_jax.inference.request_bodies import PullRequest
from glm5_jax.inference.shards.client import Puller, empty_shards
from glm5_jax.inference.shards.offer import (
    ArrayOffer,
    Offer,
    join_arrays,
    named_arrays,
    target_shardings,
)
from glm5_jax.inference.shards.server import ShardLibrary
from glm5_jax.inference.shards.store import Shards
from glm5_jax.model.lora import B, adapted, apply_adapters, is_adapter
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel.boxes import box_of, place
from glm5_jax.parallel.fingerprint import read_fingerprint
from glm5_jax.parallel.tree import Lazy, is_compound


class Conflict(ValueError):
    """Raised if another push is running, or if the engine holds other weights than the sender expects."""


class PulledWeights(NamedTuple):
    """Weights that a process has pulled.

    Attributes:
      offer: the trainer's offer.
      shards: boxes of this process's devices.
      targets: sharding of each array.
      is_delta: whether only the changes of the held weights were sent.
      from_trainer, from_engines: bytes received.
    """

    offer: Offer
    shards: Shards
    targets: Mapping[str, Sharding]
    is_delta: bool = False
    from_trainer: int = 0
    from_engines: int = 0


class Pull:
    """Pull of a process.

    Attributes:
      request: message that began it.
      version: version of the weights; None: not known yet.
      weights: weights; None: they have not arrived.
      task: task that receives them.
    """

    def __init__(self, request: PullRequest):
        self.request = request
        self.version: int | None = None
        self.weights: PulledWeights | None = None
        self.task: asyncio.Task[dict] | None = None


class ShardReceiver:
    """Receiver of one process of an engine. Its methods run in one event loop, except `take`.

    Attributes:
      library: shards that it passes on to other engines: those of a running pull, and those that it holds.
      current: pull that was not taken or aborted yet; None: there is none.
    """

    def __init__(self, cfg: ModelConfig, weights: EngineWeights, key: str | None):
        """key: API key of the trainer's processes and of the other engines; None: none is sent."""
        self._cfg, self._weights, self._key = cfg, weights, key
        self.library = ShardLibrary()
        self.current: Pull | None = None
        self._held: PulledWeights | None = None  # base of later pulls

    @property
    def frozen_checksum(self) -> str | None:
        """The checksum of the frozen weights in host memory, which need not be pulled again; None: there are none."""
        return None if self._held is None else self._held.offer.frozen_checksum

    async def pull(
        self, request: PullRequest, check: Callable[[Offer], object] = lambda offer: None
    ) -> dict:
        """Pulls the boxes of this process's devices into host memory. Returns how many bytes have arrived.

        A repeated message waits for the same pull; one with another name ends it. check: raises if the offer must not be
        pulled. Raises ValueError if the weights do not fit the engine, OSError if a process does not send its shards, and
        Conflict if the pull was aborted.
        """
        pull = self.current
        if pull is None or pull.request.push != request.push:
            if pull is not None:
                self.abort(pull.request.push)
            pull = self.current = Pull(request)
            pull.task = asyncio.create_task(self._run(pull, check))
        assert pull.task is not None, "it was created with the pull"
        return await asyncio.shield(pull.task)

    async def _run(self, pull: Pull, check: Callable[[Offer], object]) -> dict:
        loop = asyncio.get_running_loop()
        try:
            weights = await loop.run_in_executor(None, self._open, pull.request)
            pull.version = weights.offer.version
            check(weights.offer)
            weights = await loop.run_in_executor(None, self._receive, weights, pull.request)
        except BaseException:
            if self.current is pull:
                self.current = None
            raise
        if self.current is not pull:
            self._drop(weights)
            raise Conflict(f"the push {pull.request.push!r} was aborted")
        pull.weights = weights
        return {
            "checksum": weights.offer.checksum,
            "delta": weights.is_delta,
            "from_trainer": weights.from_trainer,
            "from_engines": weights.from_engines,
        }

    def abort(self, name: str) -> None:
        """Drops a pull. Raises Conflict if there is none of this name."""
        pull = self.current
        if pull is None or pull.request.push != name:
            raise Conflict(
                f"there is no push {name!r}; it was never pulled, or is over: pull again"
            )
        if pull.weights is not None:
            self._drop(pull.weights)
        self.current = None

    def take(self, name: str) -> PyTree:
        """Ends a pull: returns the parameters as lazy leaves, which are compared with the trainer's as they are placed.

        The boxes stay in host memory if the sender asked for it. Otherwise each is freed as it is placed. Raises
        ValueError if no pull of this name is complete.
        """
        pull = self.current
        if pull is None or pull.request.push != name or pull.weights is None:
            raise ValueError(f"the push {name!r} is not complete; pull it first")
        self.current, pulled, keep = None, pull.weights, pull.request.keep
        if self._held is not None:
            self.library.versions.pop(self._held.offer.checksum, None)
        self._held = pulled if keep else None
        self._drop(pulled)

        def lazy(name: str, array: ArrayOffer) -> Lazy:
            def make() -> jax.Array:
                placed = _place(name, array, pulled)
                # Two targets may have one adapter matrix in common.
                if not keep and not is_adapter(name):
                    pulled.shards.discard(name)
                return placed

            return Lazy(array.shape, jnp.dtype(array.dtype), make)

        offer = pulled.offer
        tree = join_arrays({name: lazy(name, array) for name, array in offer.arrays.items()})
        return tree if offer.lora_scale is None else apply_adapters(tree, offer.lora_scale, _merge)

    def _open(self, request: PullRequest) -> PulledWeights:
        """Reads the trainer's offer, and returns the weights without numbers."""
        offer = asyncio.run(Puller(request, self._key).fetch_offer())
        check_offer(offer, self._cfg, self._weights)
        targets = target_shardings(self._weights, offer.arrays)
        reused, held = self._unchanged(offer), self._held
        shards = empty_shards(offer, targets, reused)
        for name in reused:
            assert held is not None, "the arrays are held"
            shards.reuse(held.shards, name)
        return PulledWeights(offer, shards, targets, is_delta=bool(reused))

    def _unchanged(self, offer: Offer) -> list[str]:
        """Returns the names of the offered arrays whose numbers are in host memory."""
        held = {} if self._held is None else self._held.offer.arrays

        def numbers(array: ArrayOffer) -> tuple:
            return array.dtype, array.shape, array.fingerprint

        return [
            name
            for name, array in offer.arrays.items()
            if name in held and numbers(held[name]) == numbers(array)
        ]

    def _receive(self, pulled: PulledWeights, request: PullRequest) -> PulledWeights:
        """Pulls the numbers, and passes them on to other engines meanwhile."""
        offer, shards, puller = pulled.offer, pulled.shards, Puller(request, self._key)
        held = self._held
        base = held.shards if held is not None and held.offer.checksum == offer.base else None
        self.library.versions[offer.checksum] = shards
        try:
            asyncio.run(puller.pull(offer, shards, base))
        except BaseException:
            self._drop(pulled)
            raise
        return pulled._replace(
            is_delta=pulled.is_delta or base is not None,
            from_trainer=puller.from_trainer,
            from_engines=puller.from_engines,
        )

    def _drop(self, pulled: PulledWeights) -> None:
        """Frees pulled weights, and leaves the held ones for other engines."""
        versions, held = self.library.versions, self._held
        if versions.get(pulled.offer.checksum) is pulled.shards:
            del versions[pulled.offer.checksum]
        if held is not None:
            versions.setdefault(held.offer.checksum, held.shards)


def _place(name: str, array: ArrayOffer, pulled: PulledWeights) -> jax.Array:
    """Places an array on the devices. Raises ValueError if its numbers or their positions are not the trainer's."""

    def read(ranges: list[slice]) -> np.ndarray:
        part = pulled.shards.read(name, box_of(ranges, array.shape))
        assert part is not None, "the boxes of the process's devices were pulled"
        return part

    placed = place(array.shape, read, pulled.targets[name])
    if read_fingerprint(placed) != array.fingerprint:
        raise ValueError(f"{name} has arrived with other numbers than it was sent with")
    return placed


def check_offer(offer: Offer, cfg: ModelConfig, weights: EngineWeights) -> None:
    """Raises ValueError with the differences, unless an engine can load the offered weights."""
    expected = {}
    for path, leaf in weights.abstract.items():
        if is_compound(leaf) and path not in offer.arrays:
            # The arrays of a norm are cast when they are loaded, like plain weights.
            is_norm = isinstance(leaf, RotatedNorm)
            expected |= {
                name: (x.shape, accepted_dtypes(path, cfg) if is_norm else (x.dtype.name,))
                for name, x in named_arrays(path, leaf).items()
            }
        else:
            expected[path] = tuple(leaf.shape), accepted_dtypes(path, cfg)
    check_fit(offer, offer.frozen, expected, cfg)
    tree = join_arrays(
        {n: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for n, x in offer.arrays.items()}
    )
    weights.check(_merged_shapes(tree, offer))


def _merged_shapes(tree: PyTree, offer: Offer) -> PyTree:
    """Returns the shapes of the merged weights. Raises ValueError if the adapters do not fit their targets."""
    adapters = offer.arrays.keys() - offer.frozen.keys()
    targets = {name.removesuffix(B) for name in adapters if name.endswith(B)}
    if odd := sorted(targets - offer.arrays.keys()):
        raise ValueError(f"the adapters of {odd[0]} have no target")
    if bool(adapters) != (offer.lora_scale is not None):
        raise ValueError("adapters are offered without lora_scale, or lora_scale without adapters")
    try:
        return apply_adapters(
            tree, offer.lora_scale or 0.0, lambda *arrays: jax.eval_shape(adapted, *arrays)
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the adapters do not fit their targets: {error}") from None


def _merge(w: Lazy, a: Lazy, b: Lazy, scale: float) -> Lazy:
    """Returns the merged weight, which is computed on the engine's devices when it is placed there."""

    def make() -> jax.Array:
        base = w.make()
        add = functools.partial(adapted, scale=scale)
        return jax.jit(add, out_shardings=base.sharding)(base, a.make(), b.make())

    return Lazy(w.shape, w.dtype, make)
