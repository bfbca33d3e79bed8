"""Pushes weights from the trainer to its rollout engines. Each push has a version: the number of optimiser steps.

    pusher = NetworkPusher(cfg, ["http://10.0.0.1:8000"], SyncConfig(delta=True))
    result = pusher.push(state["params"], int(state["step"]))      # every K updates
    state = reset_optimizer(state)                                 # GLM-5 4.1.1

    NetworkPusher         over HTTP in buckets, optionally only the changes
    SharedStoragePusher   through a folder that trainer and engines share
    ReshardPusher         to engines of this process, from device to device (reshard.py)

All pushers give engines the same bits, in the dtype of the engines' computation, and compare checksums of both ends. A
push of weights that an engine has changes nothing. Versions increase. A trainer that went back to a checkpoint pushes its
weights with `rewind` before it samples: engines then drop the later versions, which the trainer will make again with other
numbers.
"""

import asyncio
import dataclasses
import pathlib
import secrets
import shutil
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from glm5_jax.checkpoint.hf_export import named_tensors, save_hf
from glm5_jax.checkpoint.manifest import FILE, Manifest, transfer_dtypes
from glm5_jax.config import ModelConfig
from glm5_jax.inference.request_bodies import (
    AbortPush,
    BeginPush,
    CommitPush,
    UpdateRequest,
    WeightBase,
)
from glm5_jax.parallel import multihost
from glm5_jax.rl.weights.buckets import Tensors, make_buckets
from glm5_jax.rl.weights.engine_connection import (
    EngineConnection,
    EngineError,
    connect_engines,
    without_error,
)
from glm5_jax.rl.weights.pusher import (
    CURRENT,
    DELTA,
    FULL,
    EngineAck,
    PushResult,
    SyncConfig,
    make_result,
)
from glm5_jax.runtime.coroutines import run_sync


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
            engine.check_loaded(state, manifest)

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
    """Pusher over HTTP, to all engines at once.

    One pass over the weights sends them in buckets, one at a time in memory. An engine loads them after it has received
    all. On a pod all processes push, and the first one sends.

    engines: URLs of servers that load weights; may be replaced between two pushes.
    """

    def __init__(self, cfg: ModelConfig, engines: Sequence[str], config: SyncConfig = SyncConfig()):
        super().__init__(engines, config)
        self._cfg = cfg
        # Manifest and tensors of the last push; None: unknown, or there are no delta pushes.
        self._base: tuple[Manifest, Tensors] | None = None

    def push(self, params: PyTree, version: int, *, rewind: bool = False) -> PushResult:
        """Sends the weights to the engines; see `Pusher`.

        An engine that does not respond in time is in `PushResult.failed_engines`, and delays nothing for longer than
        that. A delta is relative to the last push; an engine with another version gets all weights.
        """
        if not self.engines:
            raise ValueError(f"version {version} has nowhere to go; give the URL of an engine")
        jax.block_until_ready(params)
        start, self._pushed = time.perf_counter(), None
        manifest = Manifest.of(self._cfg, version, self._config.dtype)
        states = _broadcast_result(lambda: run_sync(self._states()))
        # Whether an engine with this version has the same numbers, only the checksum of all tensors shows.
        if any(state.get("version") == version for state in states.values()):
            for name, tensor in self._tensors(params):
                manifest.add(name, tensor)
        tensors = self._tensors(params)

        def send() -> tuple[str, list[dict]]:
            checksum, acks = run_sync(self._send(tensors, manifest, states, rewind))
            return checksum, [ack._asdict() for ack in acks]

        checksum, acks = _broadcast_result(send, tensors)
        return self._finish(
            make_result(
                version=version,
                checksum=checksum,
                full_bytes=manifest.num_bytes,
                start=start,
                acks=[EngineAck(**ack) for ack in acks],
            )
        )

    def _tensors(self, params: PyTree) -> Iterator[tuple[str, np.ndarray]]:
        return named_tensors(params, self._cfg, transfer_dtypes(self._cfg, self._config.dtype))

    async def _send(
        self,
        tensors: Iterator[tuple[str, np.ndarray]],
        manifest: Manifest,
        states: Mapping[str, dict],
        rewind: bool,
    ) -> tuple[str, list[EngineAck]]:
        """Sends the weights to all engines that need them. Returns the checksum and the ack of every engine."""
        has_checksums = None not in {tensor.checksum for tensor in manifest.tensors.values()}
        checksum = manifest.checksum if has_checksums else None
        async with connect_engines(self.engines, self._config) as engines:
            # Choose the mode of each engine by its state.
            receivers: list[EngineConnection] = []
            for engine in engines:
                state = states[engine.url]
                engine.error = state.get("error")
                if checksum is not None and state.get("checksum") == checksum:
                    is_current = state.get("version") == manifest.version
                    engine.mode = CURRENT if is_current else FULL
                elif self._base is not None and _can_apply_delta(state, self._base[0]):
                    engine.mode = DELTA
                if engine.error is None and engine.mode != CURRENT:
                    receivers.append(engine)
            if not receivers:
                return manifest.checksum, [engine.ack for engine in engines]

            # Announce the tensors, send them, and commit.
            push_id, sent = secrets.token_hex(8), None
            try:
                begins = (
                    engine.attempt(self._begin(engine, push_id, manifest, rewind))
                    for engine in receivers
                )
                await asyncio.gather(*begins)
                sent = await self._stream(tensors, manifest, receivers, push_id)
                await self._commit(receivers, push_id, manifest)
            finally:
                # Engines drop a partial push, also if this one is interrupted.
                aborts = (
                    engine.attempt(engine.request("/weights/abort", AbortPush(push=push_id)))
                    for engine in receivers
                    if engine.has_begun and not engine.has_loaded
                )
                await asyncio.gather(*aborts)
            if sent is not None:
                self._base = (manifest, sent)
        return manifest.checksum, [engine.ack for engine in engines]

    async def _begin(
        self, engine: EngineConnection, push_id: str, manifest: Manifest, rewind: bool
    ) -> None:
        """Announces a push to an engine. If its weights are not the base of the delta, it gets all weights."""
        body = BeginPush(
            push=push_id,
            version=manifest.version,
            arithmetic=dict(manifest.arithmetic),
            tensors={name: (x.dtype, x.shape) for name, x in manifest.tensors.items()},
            keep=self._config.delta,
            rewind=rewind,
        )
        if engine.mode == DELTA and self._base is not None:
            manifest_of_base = self._base[0]
            base = WeightBase(version=manifest_of_base.version, checksum=manifest_of_base.checksum)
            try:
                await engine.request("/weights/begin", body.replace(base=base))
                engine.has_begun = True
                return
            except EngineError as error:
                if error.status != 409:
                    raise
                engine.mode = FULL  # its weights have changed since it reported them
        await engine.request("/weights/begin", body)
        engine.has_begun = True

    async def _stream(
        self,
        tensors: Iterator[tuple[str, np.ndarray]],
        manifest: Manifest,
        engines: Sequence[EngineConnection],
        push_id: str,
    ) -> Tensors | None:
        """Sends all tensors. Returns them if they are the base of later deltas, else None."""
        if not without_error(engines):
            return None
        sent = {} if self._config.delta else None
        modes = {engine.mode for engine in without_error(engines)}
        buckets = make_buckets(
            tensors,
            manifest,
            modes,
            base={} if self._base is None else self._base[1],
            sent=sent,
            max_bytes=self._config.bucket_bytes,
        )
        loop = asyncio.get_running_loop()
        # The next bucket is made in another thread while this one is sent.
        pending = loop.run_in_executor(None, next, buckets, None)
        try:
            while (bucket := await pending) is not None:
                mode, data = bucket
                pending = loop.run_in_executor(None, next, buckets, None)
                targets = [engine for engine in without_error(engines) if engine.mode == mode]
                sends = (engine.attempt(engine.send(push_id, data)) for engine in targets)
                await asyncio.gather(*sends)
                if not without_error(engines):
                    return None
        finally:
            # A generator cannot be closed while another thread runs it.
            await asyncio.wait([pending])
        return sent

    async def _commit(
        self, engines: Sequence[EngineConnection], push_id: str, manifest: Manifest
    ) -> None:
        """Makes the engines without an error load what they have received."""
        checksums = [tensor.checksum or "" for tensor in manifest.tensors.values()]
        body = CommitPush(push=push_id, checksums=checksums, policy=self._config.policy)

        async def commit(engine: EngineConnection) -> None:
            timeout_s = self._config.load_timeout_s
            state = await engine.request("/weights/commit", body, timeout_s=timeout_s)
            engine.check_loaded(state, manifest)

        await asyncio.gather(*(engine.attempt(commit(engine)) for engine in without_error(engines)))


def _broadcast_result(action: Callable[[], Any], tensors: Iterable = ()) -> Any:
    """Runs an action in the first process of a pod, and returns its JSON result in all.

    An error is raised in all processes. tensors: all processes iterate over them, because gathering a tensor is a
    collective operation, whether or not the action uses them.
    """
    result = error = None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as caught:
            error = caught
    if jax.process_count() > 1:
        for _ in tensors:
            pass
    multihost.raise_on_all(error)
    return multihost.all_gather_objects(result)[0]


def _can_apply_delta(state: Mapping[str, Any], base: Manifest) -> bool:
    """Returns whether an engine has the base, in memory where changes can be applied."""
    return bool(state.get("base")) and _version_of(state) == (base.version, base.checksum)


def _version_of(state: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Returns the version and the checksum of an engine's weights."""
    return state.get("version"), state.get("checksum")
