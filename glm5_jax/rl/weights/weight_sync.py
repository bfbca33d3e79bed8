"""Pushes weights from the trainer to its rollout engines. Each push has a version: the number of optimiser steps.

    pusher = NetworkPusher(cfg, ["http://10.0.0.1:8000"], SyncConfig(delta=True))
    result = pusher.push(state["params"], int(state["step"]))      # every K updates
    state = reset_optimizer(state)                                 # GLM-5 4.1.1

    NetworkPusher         over HTTP: engines pull the shards that they need, optionally only the changes
    SharedStoragePusher   through a folder that trainer and engines share
    ReshardPusher         to engines of this process, from device to device (reshard.py)

All pushers give engines the same bits, in the dtype of the engines' computation, and compare checksums of both ends. A
push of weights that an engine has changes nothing. Versions increase. A trainer that went back to a checkpoint pushes its
weights with `rewind` before it samples: engines then drop the later versions, which the trainer will make again with other
numbers.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from glm5_jax.checkpoint.engine_dtypes import transfer_dtypes
from glm5_jax.checkpoint.hf_export import named_tensors, save_hf
from glm5_jax.checkpoint.manifest import FILE, Manifest
from glm5_jax.config import ModelConfig
from glm5_jax.inference.quantize.recipe import WeightConverter
from glm5_jax.inference.request_bodies import (
    CommitPush,
    PullRequest,
    UpdateRequest,
)
from glm5_jax.inference.shards.offer import ArrayOffer, Offer
from glm5_jax.inference.shards.server import ShardLibrary, ShardServer
from glm5_jax.inference.shards.store import Shards
from glm5_jax.parallel import multihost
from glm5_jax.rl.weights.engine_connection import (
    EngineConnection,
    connect_engines,
    without_error,
)
from glm5_jax.rl.weights.offers import make_offer, num_bytes_of
from glm5_jax.rl.weights.pusher import (
    CURRENT,
    EngineAck,
    PushResult,
    SyncConfig,
    make_result,
)
from glm5_jax.runtime.addresses import address_towards, is_loopback, resolve_host
from glm5_jax.runtime.api_keys import load_api_key
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.runtime.http_server import ListenConfig


class _HttpPusher:
    """Base of the pushers to engines that are HTTP servers.

    Attributes:
      engines: URLs of the engines; may be replaced between two pushes.
    """

    def __init__(self, engines: Sequence[str], config: SyncConfig):
        self.engines, self._config = tuple(engines), config
        # Version and checksum of the last push, which all engines should have; None during a push.
        self._pushed: tuple[int, str] | None = None

    def push(self, params: PyTree, version: int, *, rewind: bool = False) -> PushResult:
        raise NotImplementedError

    def refresh(self, params: PyTree, version: int) -> PushResult | None:
        """Sends the weights to the engines that need them; see `Pusher`."""
        pushed, timeout_s = self._pushed, self._config.state_timeout_s
        states = multihost.broadcast_from_first(lambda: run_sync(self._states(timeout_s)))
        responding = [url for url, state in states.items() if "error" not in state]
        outdated = [url for url in responding if _version_of(states[url]) != pushed]
        if not outdated:
            return None
        all_engines = self.engines
        self.engines = tuple(outdated if pushed and pushed[0] == version else responding)
        try:
            return self.push(params, version, rewind=True)
        finally:
            self.engines = all_engines

    async def _states(self, timeout_s: float | None = None) -> dict[str, dict]:
        """Returns the state of each engine by URL; {"error": why} if it does not respond."""
        async with connect_engines(self.engines, self._config) as engines:
            requests = (
                engine.attempt(engine.request("/weights", timeout_s=timeout_s))
                for engine in engines
            )
            states = await asyncio.gather(*requests)
        return {
            engine.url: state or {"error": engine.error} for engine, state in zip(engines, states)
        }

    def _finish(self, result: PushResult) -> PushResult:
        """Records the version that all engines should have, and returns the result with the engines' checksum."""
        self._pushed = (result.version, result.checksum)
        return dataclasses.replace(result, engine_checksum=result.checksum)


class SharedStoragePusher(_HttpPusher):
    """Pusher through a folder that trainer and engines see under one path.

    FOLDER/VERSION is a HuggingFace folder with a manifest. It is complete or does not exist. Only one trainer may use the
    folder. On a pod all processes push.

    - engines: URLs of servers that load the weights; without any the folder is only written.
    - tokenizer: saved with every version, so that the folder can be served; None: no tokenizer.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        folder: str | pathlib.Path,
        engines: Sequence[str] = (),
        config: SyncConfig = SyncConfig(),
        tokenizer: Any = None,
    ):
        super().__init__(engines, config)
        self._cfg, self._tokenizer = cfg, tokenizer
        self._folder = pathlib.Path(folder).absolute()

    def push(self, params: PyTree, version: int, *, rewind: bool = False) -> PushResult:
        """Writes the weights to the folder, and makes the engines load them; see `Pusher`.

        Raises OSError or ValueError if they cannot be written; earlier versions are then unchanged.
        """
        jax.block_until_ready(params)
        start, out, self._pushed = time.perf_counter(), self._folder / str(version), None
        multihost.run_on_first(lambda: self._clear(version + 1 if rewind else None))

        # A folder of this version is kept if it has the same numbers.
        is_written = multihost.all_gather_objects(out.exists())[0]
        manifest = Manifest(version, self._cfg.arithmetic)
        if is_written:
            for name, tensor in named_tensors(params, self._cfg, self._dtypes):
                manifest.add(name, tensor)
            is_written = multihost.broadcast_from_first(
                lambda: self._is_same(out, manifest, rewind)
            )
        if not is_written:
            manifest = Manifest(version, self._cfg.arithmetic)
            # Experts that become int4 are written as they are: engines quantise them.
            cfg = dataclasses.replace(
                self._cfg, int4_group=None, dtype=self._config.dtype or self._cfg.dtype
            )
            save_hf(
                params,
                out,
                cfg=cfg,
                tokenizer=self._tokenizer,
                dtype=self._dtypes,
                manifest=manifest,
            )

        def load_on_engines() -> tuple[str, int, list[dict]]:
            acks = run_sync(self._load_on_engines(out, manifest, rewind))
            return manifest.checksum, manifest.num_bytes, [ack._asdict() for ack in acks]

        checksum, num_bytes, acks = _broadcast_result(load_on_engines)
        result = self._finish(
            make_result(
                version=version,
                checksum=checksum,
                sent_bytes=0 if is_written else num_bytes,
                full_bytes=num_bytes,
                start=start,
                acks=[EngineAck(**ack) for ack in acks],
            )
        )
        multihost.run_on_first(self._prune)
        return result

    def _is_same(self, out: pathlib.Path, manifest: Manifest, rewind: bool) -> bool:
        """Returns whether a folder has these numbers. With rewind a folder with others is removed."""
        if manifest.checksum == Manifest.read(out).checksum:
            return True
        if not rewind:
            raise ValueError(
                f"{out} holds version {manifest.version} with other numbers; if the trainer went back and made it "
                "again, set rewind"
            )
        shutil.rmtree(out)
        return False

    @property
    def _dtypes(self) -> dict[str, np.dtype]:
        return transfer_dtypes(self._cfg, self._config.dtype)

    async def _load_on_engines(
        self, out: pathlib.Path, manifest: Manifest, rewind: bool
    ) -> list[EngineAck]:
        """Makes all engines load the folder."""
        body = UpdateRequest(
            path=str(out), version=manifest.version, policy=self._config.policy, rewind=rewind
        )

        async def load(engine: EngineConnection) -> None:
            timeout_s = self._config.load_timeout_s
            state = await engine.request("/update_weights", body, timeout_s=timeout_s)
            engine.check_loaded(state, manifest.checksum)

        async with connect_engines(self.engines, self._config) as engines:
            await asyncio.gather(*(engine.attempt(load(engine)) for engine in engines))
        return [engine.ack for engine in engines]

    def _clear(self, first: int | None) -> None:
        """Removes incomplete folders of killed trainers, and all versions from `first` on; None: no version."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path)
        for version in self._versions():
            if first is not None and version >= first:
                shutil.rmtree(self._folder / str(version))

    def _prune(self) -> None:
        """Removes all but the newest versions."""
        for version in self._versions()[: -self._config.keep]:
            shutil.rmtree(self._folder / str(version))

    def _versions(self) -> list[int]:
        """Returns the versions in the folder, in order."""
        names = (path.parent.name for path in self._folder.glob(f"*/{FILE}"))
        return sorted(int(name) for name in names if name.isdecimal())


class NetworkPusher(_HttpPusher):
    """Pusher over HTTP, from all processes of the trainer to all processes of the engines.

    1. Each process of the trainer copies its shards into host memory, and serves them during the push (offers.py).
    2. Each engine process pulls the boxes that its devices own, from the trainer or from another engine that has pulled
       them (`inference.shards.client`). Engines sample meanwhile.
    3. Engines that have all boxes load them.

    On a pod all processes push, and the first one sends the messages.

    A model with adapters is pushed unmerged (`inference.shards.offer`): engines get its frozen weights once, then the
    adapters only.

    - cfg: config of the pushed parameters.
    - engines: URLs of servers that load weights; may be replaced between two pushes.
    - converter: converts weights to those of quantised engines; None: engines get plain weights, and quantise them if
      they hold quantised ones that are not rotated.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        engines: Sequence[str],
        config: SyncConfig = SyncConfig(),
        converter: WeightConverter | None = None,
    ):
        super().__init__(engines, config)
        if cfg.lora.rank and converter is not None:
            raise ValueError("adapters cannot be pushed to quantised engines; merge them first")
        self._cfg, self._converter = cfg, converter
        self._base: Shards | None = None  # this process's shards of the last push, for deltas
        self._last_offer: Offer | None = None

    def push(self, params: PyTree, version: int, *, rewind: bool = False) -> PushResult:
        """Sends the weights to the engines; see `Pusher`.

        An engine that does not respond in time is in `PushResult.failed_engines`, and delays nothing for longer than
        that. A delta is relative to the last push; an engine with other weights gets all of them.
        """
        if not self.engines:
            raise ValueError(f"version {version} has nowhere to go; give the URL of an engine")
        jax.block_until_ready(params)
        start, self._pushed = time.perf_counter(), None
        states = _broadcast_result(lambda: run_sync(self._states()))
        offer, shards = make_offer(
            params,
            self._cfg,
            version,
            dtype=self._config.dtype,
            base=self._base,
            converter=self._converter,
            frozen=self._frozen_of_all(states),
        )
        self._last_offer = offer
        library = ShardLibrary()
        library.versions[offer.checksum] = shards
        if self._base is not None:
            library.versions[self._base.checksum] = self._base
        with contextlib.ExitStack() as stack:
            urls = self._serve(stack, offer, library)
            acks = _broadcast_result(
                lambda: [ack._asdict() for ack in run_sync(self._send(offer, urls, states, rewind))]
            )
        if self._config.delta and not self._cfg.lora.rank:
            self._base = shards
        return self._finish(
            make_result(
                version=version,
                checksum=offer.checksum,
                sent_bytes=sum(multihost.all_gather_objects(library.sent_bytes)),
                full_bytes=num_bytes_of(offer),
                start=start,
                acks=[EngineAck(**ack) for ack in acks],
            )
        )

    def _frozen_of_all(self, states: Mapping[str, dict]) -> dict[str, ArrayOffer] | None:
        """Returns the frozen arrays of the last push if all engines that respond hold them; None: not all do."""
        last = self._last_offer
        if last is None or last.lora_scale is None:
            return None
        held = {state.get("frozen") for state in states.values() if "error" not in state}
        return last.frozen if held == {last.frozen_checksum} else None

    def _listen_config(self) -> ListenConfig:
        """Returns the options of this process's server, at the address that engines reach."""
        key = load_api_key(self._config)
        host = address_towards(self.engines[0])
        if key is None and not is_loopback(host):
            raise ValueError(
                f"weights would be served at {host} without an API key; give sync.api_key_file"
            )
        return ListenConfig(host=host, port=0, api_key=key)

    def _serve(self, stack: contextlib.ExitStack, offer: Offer, library: ShardLibrary) -> list[str]:
        """Serves this process's shards until the stack closes. Returns the URLs of all processes."""
        url = error = None
        try:
            server = ShardServer(offer, library, self._listen_config())
            url = stack.enter_context(server.running())
        except (ValueError, OSError) as caught:
            error = caught
        multihost.raise_on_all(error)
        return multihost.all_gather_objects(url)

    async def _send(
        self, offer: Offer, sources: Sequence[str], states: Mapping[str, dict], rewind: bool
    ) -> list[EngineAck]:
        """Makes all engines that need the weights pull and load them. Returns the ack of every engine."""
        async with connect_engines(self.engines, self._config) as engines:
            receivers: list[EngineConnection] = []
            for engine in engines:
                state = states[engine.url]
                engine.error = state.get("error")
                if _version_of(state) == (offer.version, offer.checksum):
                    engine.mode = CURRENT
                elif engine.error is None:
                    receivers.append(engine)
            # Engines know the networks of their run, but not the names of the other engines.
            peers = tuple(
                (resolve_host(engine.url), *states[engine.url].get("followers", ()))
                for engine in receivers
            )
            request = PullRequest(
                push=secrets.token_hex(8),
                sources=tuple(sources),
                peers=peers or ((),),
                keep=self._config.delta or offer.lora_scale is not None,
                rewind=rewind,
                max_connections=self._config.max_connections,
                max_part_bytes=self._config.bucket_bytes,
                max_tries=self._config.max_tries,
                timeout_s=self._config.timeout_s,
            )
            try:
                pulls = (
                    engine.attempt(engine.pull(request.replace(engine=i), offer.checksum))
                    for i, engine in enumerate(receivers)
                )
                await asyncio.gather(*pulls)
                commits = (
                    engine.attempt(self._commit(engine, request.push, offer.checksum))
                    for engine in without_error(receivers)
                )
                await asyncio.gather(*commits)
            finally:
                # Engines drop a partial push, also if this one is interrupted.
                aborts = (
                    engine.attempt(engine.abort(request.replace(engine=i)))
                    for i, engine in enumerate(receivers)
                    if engine.has_begun and not engine.has_loaded
                )
                await asyncio.gather(*aborts)
        return [engine.ack for engine in engines]

    async def _commit(self, engine: EngineConnection, push: str, checksum: str) -> None:
        body = CommitPush(push=push, policy=self._config.policy)
        state = await engine.request("/weights/commit", body, timeout_s=self._config.load_timeout_s)
        engine.check_loaded(state, checksum)


def _broadcast_result(action: Callable[[], Any]) -> Any:
    """Runs an action in the first process of a pod, and returns its JSON result in all.

    An error is raised in all processes.
    """
    result = error = None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as caught:
            error = caught
    multihost.raise_on_all(error)
    return multihost.all_gather_objects(result)[0]


def _version_of(state: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Returns the version and the checksum of an engine's weights."""
    return state.get("version"), state.get("checksum")
