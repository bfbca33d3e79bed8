"""Weights pushed to engines: every kind of push loads the same bits and the right version."""

import concurrent.futures
import contextlib
import dataclasses
import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.checkpoint.engine_dtypes import transfer_dtypes
from glm5_jax.checkpoint.manifest import Manifest
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.worker import Worker
from glm5_jax.parallel.tree import flatten
from glm5_jax.rl.weights.pusher import EngineAck, PushFailed, SyncConfig
from glm5_jax.rl.weights.reshard import ReshardPusher, fingerprint
from glm5_jax.rl.weights.weight_sync import NetworkPusher, SharedStoragePusher
from tests.rl.pushing import (
    CFG,
    DELTA,
    DENSE,
    NARROW,
    SMALL,
    bits,
    bits_after_update,
    make_engine,
    params,
    perturb,
    serving,
)

KINDS = {
    "float32": CFG,
    "bfloat16": NARROW,
    "experts as int4": dataclasses.replace(NARROW, int4_group=16),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind",
    ["float32", *(pytest.param(kind, marks=SLOW) for kind in ("bfloat16", "experts as int4"))],
)
def test_all_pushers_load_same_bits(kind, tmp_path):
    cfg, weights = KINDS[kind], params()
    expected = bits_after_update(weights, cfg)
    assert expected != bits_after_update(params(0), cfg)
    resharded = make_engine(cfg)
    pushes = [ReshardPusher([resharded], SMALL).push(weights, 5)]
    assert bits(resharded) == expected and resharded.version == 5
    with serving(cfg) as first, serving(cfg) as second:
        pushes.append(SharedStoragePusher(cfg, tmp_path, [first.url], SMALL).push(weights, 5))
        pushes.append(NetworkPusher(cfg, [first.url, second.url], SMALL).push(weights, 6))
        assert first.bits == second.bits == expected
        assert first.version_and_checksum == second.version_and_checksum == (6, pushes[2].checksum)
    size = sum(x.size * transfer_dtypes(cfg)[path].itemsize for path, x in flatten(weights).items())
    for push in pushes:
        assert push.full_bytes == size and push.duration_s > 0 and push.failed_engines == ()
    assert pushes[0].sent_bytes == pushes[1].sent_bytes == size
    # The trainer sends each number to one of the two engines, which passes it on.
    assert pushes[2].sent_bytes == size and [ack.sent_bytes for ack in pushes[2].acks] == [size] * 2


def test_delta_push_loads_same_weights(served_engine):
    first, changed_weights = params(), perturb(params())
    pusher = NetworkPusher(CFG, [served_engine.url], DELTA)
    full_push = pusher.push(first, 1)
    [ack] = (delta_push := pusher.push(changed_weights, 2)).acks
    assert (full_push.acks[0].mode, ack.mode) == ("full", "delta")
    assert served_engine.bits == bits_after_update(
        changed_weights
    ) and served_engine.version_and_checksum == (
        2,
        delta_push.checksum,
    )
    assert (
        full_push.checksum != delta_push.checksum
        and delta_push.sent_bytes < full_push.sent_bytes / 10
    )
    # A push without any change sends no weights.
    assert pusher.push(changed_weights, 3).sent_bytes == 0
    assert served_engine.version_and_checksum == (
        3,
        delta_push.checksum,
    ) and served_engine.bits == bits_after_update(changed_weights)


def test_sends_full_weights_to_engine_with_other_base(served_engine):
    with serving() as steady:
        pusher = NetworkPusher(CFG, [steady.url, served_engine.url], DELTA)
        pusher.push(params(), 1)
        # Another pusher changes the weights of one engine.
        NetworkPusher(CFG, [served_engine.url], SMALL).push(perturb(params(), 3), 2)
        changed_weights = perturb(params())
        assert [ack.mode for ack in pusher.push(changed_weights, 3).acks] == ["delta", "full"]
        assert steady.bits == served_engine.bits == bits_after_update(changed_weights)
        assert served_engine.version_and_checksum == steady.version_and_checksum


def test_sends_full_weights_to_restarted_engine():
    with serving() as server:
        port = int(server.url.rpartition(":")[2])
        pusher = NetworkPusher(CFG, [server.url], DELTA)
        pusher.push(params(), 4)
    with serving(port=port) as server:
        assert server.version_and_checksum == (0, None)
        pushed = pusher.push(perturb(params()), 5)
        assert pushed.acks[0].mode == "full" and server.version_and_checksum == (5, pushed.checksum)


@pytest.mark.parametrize("delta", [pytest.param(False, marks=SLOW), True])
def test_repeated_push_changes_nothing(served_engine, delta):
    pusher = NetworkPusher(CFG, [served_engine.url], DELTA if delta else SMALL)
    first = pusher.push(params(), 3)
    before = served_engine.engine.computation.params
    repeated = pusher.push(params(), 3)
    assert repeated.acks == (EngineAck(served_engine.url, "current", 0, None),)
    assert (repeated.sent_bytes, repeated.checksum) == (0, first.checksum)
    assert served_engine.engine.computation.params is before
    # A new pusher also sends nothing.
    assert NetworkPusher(CFG, [served_engine.url], SMALL).push(params(), 3).sent_bytes == 0


def test_reshard_repeats_no_push():
    engine = make_engine()
    pusher = ReshardPusher([engine])
    pusher.push(params(), 3)
    before = engine.computation.params
    repeated = pusher.push(params(), 3)
    assert repeated.acks[0].mode == "current" and engine.computation.params is before
    with pytest.raises(ValueError, match="version 3 is held with other numbers"):
        pusher.push(params(2), 3)
    with pytest.raises(ValueError, match="version 3 is held, 2 is older"):
        pusher.push(params(2), 2)
    pusher.push(params(2), 2, rewind=True)
    assert engine.version == 2 and bits(engine) == bits_after_update(params(2))


@pytest.mark.parametrize("way", ["network", pytest.param("storage", marks=SLOW)])
def test_refreshes_only_engines_without_weights(way, tmp_path):
    """Also engines whose version is newer, and engines that missed the last push."""
    with serving() as steady, contextlib.ExitStack() as stack:
        other = stack.enter_context(serving())
        urls = [steady.url, other.url, "http://127.0.0.1:9"]
        pusher = {
            "network": lambda: NetworkPusher(CFG, urls, SMALL),
            "storage": lambda: SharedStoragePusher(CFG, tmp_path, urls, SMALL),
        }[way]()
        first = pusher.push(params(), 5)
        assert first.engine_checksum == first.checksum
        assert pusher.refresh(params(), 5) is None
        before, port = steady.engine.computation.params, int(other.url.rpartition(":")[2])
        stack.close()
        with serving(port=port, version=9) as restarted:
            refreshed = pusher.refresh(params(), 5)
            assert [ack.engine for ack in refreshed.acks] == [restarted.url]
            assert refreshed.checksum == first.checksum and restarted.bits == bits_after_update(
                params()
            )
            assert (
                restarted.version_and_checksum == steady.version_and_checksum
                and steady.engine.computation.params is before
            )
            assert pusher.refresh(params(), 5) is None and pusher.engines == (*urls,)
            # New weights go to all engines.
            restarted.engine.version = 4
            assert pusher.refresh(params(2), 6).failed_engines == ()
            assert (
                steady.version_and_checksum == restarted.version_and_checksum
                and steady.bits == restarted.bits == bits_after_update(params(2))
            )
        with pytest.raises(PushFailed):
            pusher.engines = urls[2:]
            pusher.push(params(2), 7)
        assert pusher.refresh(params(2), 7) is None  # no engine answers
        pusher.engines = urls
        assert (
            pusher.refresh(params(2), 7).failed_engines == ()
            and steady.version_and_checksum[0] == 7
        )


def test_refreshes_local_engines_that_missed_push():
    engines = [make_engine(), make_engine()]
    pusher = ReshardPusher(engines)
    assert pusher.push(params(), 3).engine_checksum is None and pusher.refresh(params(), 3) is None
    engines[1].update_weights(params(2), 2)
    modes = [ack.mode for ack in pusher.refresh(params(), 3).acks]
    assert modes == ["current", "full"] and bits(engines[1]) == bits_after_update(params())


def test_accepts_older_version_only_with_rewind(served_engine, tmp_path):
    """The trainer resumed from a checkpoint: its new weights have the same versions and other values."""
    network = NetworkPusher(CFG, [served_engine.url], SMALL)
    storage = SharedStoragePusher(CFG, tmp_path, [served_engine.url], SMALL)
    storage.push(params(0), 6)
    storage.push(params(1), 8)
    before = served_engine.bits
    for pusher in (network, storage):
        with pytest.raises(PushFailed, match="version 8 is held, 7 is older; if the trainer went"):
            pusher.push(params(2), 7)
    with pytest.raises(PushFailed, match="version 8 is held with other numbers"):
        network.push(params(2), 8)
    with pytest.raises(ValueError, match="holds version 8 with other numbers"):
        storage.push(params(2), 8)
    assert served_engine.version_and_checksum[0] == 8 and served_engine.bits == before
    storage.push(params(2), 7, rewind=True)
    assert served_engine.version_and_checksum[0] == 7 and served_engine.bits == bits_after_update(
        params(2)
    )
    # The newer versions are also removed from the folder.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]
    assert network.push(
        params(0), 8
    ).failed_engines == () and served_engine.bits == bits_after_update(params(0))
    network.push(params(1), 8, rewind=True)
    assert served_engine.bits == bits_after_update(params(1))


# -- in the middle of replies ------------------------------------------------------------------------------


def greedy_reply(prompt, count, seed):
    """Returns the greedy reply of an engine with weights of one seed."""
    sampling = Sampling(max_tokens=count, temperature=0, ignore_eos=True)
    return make_engine(DENSE, params(seed, DENSE)).generate([prompt], sampling)[0]


WAYS, POLICIES = ("network", "storage", "reshard"), ("finish", "keep", "recompute")


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        *zip(WAYS, POLICIES),
        *(
            pytest.param(way, policy, marks=SLOW)
            for way in WAYS
            for policy in POLICIES
            if (way, policy) not in zip(WAYS, POLICIES)
        ),
    ],
)
def test_push_in_middle_of_reply(way, policy, tmp_path, monkeypatch):
    """Each token has the version of the weights that sampled it, and its context is computed as the policy says."""
    config = dataclasses.replace(SMALL, policy=policy)
    prompt, count = [5, 9, 2, 7], 30
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    engine = make_engine(DENSE, params(0, DENSE))
    gate = StepGate(engine, 16, monkeypatch)
    with serving(DENSE, engine=engine) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pusher = {
            "network": lambda: NetworkPusher(DENSE, [server.url], config),
            "storage": lambda: SharedStoragePusher(DENSE, tmp_path, [server.url], config),
            "reshard": lambda: ReshardPusher([server.server.worker], config),
        }[way]()
        waiting = pool.submit(server.request, "/generate", body)
        assert gate.reached.wait(60)
        pushed = pusher.push(params(1, DENSE), 7)
        status, response = waiting.result()
        assert status == 200 and pushed.failed_engines == ()
        after = server.request("/generate", body | {"return_logprob": False})[1]
    ids, meta = response["output_ids"], response["meta_info"]
    versions = meta["weight_versions"]
    assert after["meta_info"]["weight_versions"] == [7] * count
    assert after["output_ids"] == greedy_reply(prompt, count, 1).ids
    if policy == "finish":
        assert versions == [0] * count and ids == greedy_reply(prompt, count, 0).ids
        return
    num_old = versions.count(0)
    assert versions == [0] * num_old + [7] * (count - num_old) and 8 <= num_old < count
    assert ids[:num_old] == greedy_reply(prompt, count, 0).ids[:num_old]
    continuation = greedy_reply(prompt + ids[:num_old], count - num_old, 1)
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    if policy == "recompute":
        assert ids[num_old:] == continuation.ids
        np.testing.assert_allclose(logprobs[num_old:], continuation.logprobs, atol=1e-4)
    else:  # the first token after the push still depends on latents of the old weights
        assert not np.isclose(logprobs[num_old], continuation.logprobs[0], atol=1e-3)


class StepGate:
    """Stops an engine after `count` steps, in the middle of a reply, until the worker gets another call."""

    def __init__(self, engine, count, monkeypatch):
        self.reached, self._called, self._count = threading.Event(), threading.Event(), count
        step, call = engine.step, Worker.call

        def gated_step():
            self._count -= 1
            if not self._count:
                self.reached.set()
                assert self._called.wait(60)
            return step()

        def recorded_call(worker, function):
            result = call(worker, function)
            if self.reached.is_set():
                self._called.set()
            return result

        engine.step = gated_step
        monkeypatch.setattr(Worker, "call", recorded_call)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_fingerprints_depend_on_bits_and_positions(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (4, 3, 8)), dtype)
    expected = tuple(np.asarray(fingerprint(x)))
    assert tuple(np.asarray(fingerprint(jnp.copy(x)))) == expected
    swapped = x.at[0, 0, 0].set(x[1, 2, 3]).at[1, 2, 3].set(x[0, 0, 0])
    assert x[0, 0, 0] != x[1, 2, 3]
    others = [x.at[2, 1, 5].add(1), swapped, x.reshape(3, 4, 8).swapaxes(0, 1), x * 0]
    assert len({expected, *(tuple(np.asarray(fingerprint(other))) for other in others)}) == 5
    zeros = jnp.zeros(3, "float32")
    assert not np.array_equal(fingerprint(zeros), fingerprint(-zeros))


@pytest.mark.parametrize(
    "field, value",
    [
        ("policy", "soon"),
        ("timeout_s", 0),
        ("load_timeout_s", -1.0),
        ("max_tries", 0),
        ("max_connections", 0),
        ("keep", 0),
        ("bucket_bytes", 10),
    ],
)
def test_rejects_config_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        SyncConfig(**{field: value})


def test_manifest_is_equal_after_reading(tmp_path):
    manifest = Manifest(3, {"a": (1, 2)})
    manifest.add("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    manifest.save(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["checksum"] == manifest.checksum
    assert Manifest.read(tmp_path).checksum == manifest.checksum
    other = Manifest(3, {})
    other.add("x", np.arange(6, dtype=np.float32).reshape(3, 2))
    assert other.checksum != manifest.checksum
