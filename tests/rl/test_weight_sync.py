"""Weights pushed to engines: the same bits by every way, of the version that they are told."""

import concurrent.futures
import contextlib
import dataclasses
import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.checkpoint.manifest import Manifest, transfer_dtypes
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.worker import Worker
from glm5_jax.parallel.tree import flatten
from glm5_jax.rl.weights.pusher import EngineAck, PushFailed, SyncConfig
from glm5_jax.rl.weights.reshard import ReshardPusher, fingerprint
from glm5_jax.rl.weights.weight_sync import NetworkPusher, SharedStoragePusher, split_tensor
from tests.rl.pushing import (
    CFG,
    DELTA,
    DENSE,
    NARROW,
    SMALL,
    begun,
    bits,
    loaded,
    made,
    moved,
    params,
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
def test_every_way_delivers_the_bits_that_the_engine_would_compute_with(kind, tmp_path):
    cfg, weights = KINDS[kind], params()
    want = loaded(weights, cfg)
    assert want != loaded(params(0), cfg)
    resharded = made(cfg)
    told = [ReshardPusher([resharded], SMALL).push(weights, 5)]
    assert bits(resharded) == want and resharded.version == 5
    with serving(cfg) as one, serving(cfg) as two:
        told.append(SharedStoragePusher(cfg, tmp_path, [one.url], SMALL).push(weights, 5))
        told.append(NetworkPusher(cfg, [one.url, two.url], SMALL).push(weights, 6))
        assert one.bits == two.bits == want
        assert one.held == two.held == (6, told[2].checksum)
    assert told[1].checksum == told[2].checksum
    size = sum(x.size * transfer_dtypes(cfg)[path].itemsize for path, x in flatten(weights).items())
    for own in told:
        assert own.full_bytes == size and own.duration_s > 0 and own.failed_engines == ()
    assert told[0].sent_bytes == told[1].sent_bytes == size
    assert 2 * size < told[2].sent_bytes < 2.1 * size  # to two engines, with the names of tensors


def test_changes_alone_travel_and_make_the_same_weights(served):
    first, then = params(), moved(params())
    pusher = NetworkPusher(CFG, [served.url], DELTA)
    whole = pusher.push(first, 1)
    [told] = (changed := pusher.push(then, 2)).acks
    assert (whole.acks[0].mode, told.mode) == ("full", "delta")
    assert served.bits == loaded(then) and served.held == (2, changed.checksum)
    assert whole.checksum != changed.checksum and changed.sent_bytes < whole.sent_bytes / 10
    # What did not change at all costs a message and no weight.
    assert pusher.push(then, 3).sent_bytes == 0
    assert served.held == (3, changed.checksum) and served.bits == loaded(then)


def test_an_engine_that_holds_another_base_gets_all(served):
    with serving() as steady:
        pusher = NetworkPusher(CFG, [steady.url, served.url], DELTA)
        pusher.push(params(), 1)
        NetworkPusher(CFG, [served.url], SMALL).push(moved(params(), 3), 2)  # somebody else's
        then = moved(params())
        assert [own.mode for own in pusher.push(then, 3).acks] == ["delta", "full"]
        assert steady.bits == served.bits == loaded(then)
        assert served.held == steady.held


def test_an_engine_that_was_started_anew_gets_all():
    with serving() as one:
        port = int(one.url.rpartition(":")[2])
        pusher = NetworkPusher(CFG, [one.url], DELTA)
        pusher.push(params(), 4)
    with serving(port=port) as one:
        assert one.held == (0, None)
        pushed = pusher.push(moved(params()), 5)
        assert pushed.acks[0].mode == "full" and one.held == (5, pushed.checksum)


def test_the_base_is_what_the_engine_verifies(served):
    """Changes of other weights than it holds are refused, whatever the sender thinks."""
    NetworkPusher(CFG, [served.url], DELTA).push(params(), 1)
    said = begun(2) | {"base": {"version": 1, "checksum": "0" * 32}}
    status, told = served.ask("/weights/begin", said)
    assert status == 409 and "changes of version 1 cannot be applied" in told["error"]["message"]


@pytest.mark.parametrize("delta", [pytest.param(False, marks=SLOW), True])
def test_a_push_of_what_is_held_changes_nothing(served, delta):
    pusher = NetworkPusher(CFG, [served.url], DELTA if delta else SMALL)
    first = pusher.push(params(), 3)
    before = served.engine.computation.params
    again = pusher.push(params(), 3)
    assert again.acks == (EngineAck(served.url, "current", 0, None),)
    assert (again.sent_bytes, again.checksum) == (0, first.checksum)
    assert served.engine.computation.params is before
    # Another pusher, which knows nothing, finds out as much.
    assert NetworkPusher(CFG, [served.url], SMALL).push(params(), 3).sent_bytes == 0


def test_reshard_pushes_what_is_held_once():
    engine = made()
    pusher = ReshardPusher([engine])
    pusher.push(params(), 3)
    before = engine.computation.params
    again = pusher.push(params(), 3)
    assert again.acks[0].mode == "current" and engine.computation.params is before
    with pytest.raises(ValueError, match="version 3 is held with other numbers"):
        pusher.push(params(2), 3)
    with pytest.raises(ValueError, match="version 3 is held, 2 is older"):
        pusher.push(params(2), 2)
    pusher.push(params(2), 2, rewind=True)
    assert engine.version == 2 and bits(engine) == loaded(params(2))


@pytest.mark.parametrize("way", ["network", pytest.param("storage", marks=SLOW)])
def test_who_lost_the_weights_gets_them_again_and_nobody_else(way, tmp_path):
    """Also those that think that theirs are newer, and those that the last push did not reach."""
    with serving() as steady, contextlib.ExitStack() as stack:
        lost = stack.enter_context(serving())
        urls = [steady.url, lost.url, "http://127.0.0.1:9"]
        pusher = {
            "network": lambda: NetworkPusher(CFG, urls, SMALL),
            "storage": lambda: SharedStoragePusher(CFG, tmp_path, urls, SMALL),
        }[way]()
        first = pusher.push(params(), 5)
        assert first.engine_checksum == first.checksum
        assert pusher.refresh(params(), 5) is None
        before, port = steady.engine.computation.params, int(lost.url.rpartition(":")[2])
        stack.close()
        with serving(port=port, version=9) as anew:
            again = pusher.refresh(params(), 5)
            assert [own.engine for own in again.acks] == [anew.url]
            assert again.checksum == first.checksum and anew.bits == loaded(params())
            assert anew.held == steady.held and steady.engine.computation.params is before
            assert pusher.refresh(params(), 5) is None and pusher.engines == (*urls,)
            # Other weights than those that were pushed last are for all that there are.
            anew.engine.version = 4
            assert pusher.refresh(params(2), 6).failed_engines == ()
            assert steady.held == anew.held and steady.bits == anew.bits == loaded(params(2))
        with pytest.raises(PushFailed):
            pusher.engines = urls[2:]
            pusher.push(params(2), 7)
        assert pusher.refresh(params(2), 7) is None  # nobody answers
        pusher.engines = urls
        assert pusher.refresh(params(2), 7).failed_engines == () and steady.held[0] == 7


def test_engines_of_the_trainer_s_process_are_refreshed_if_they_have_not_taken_a_push():
    engines = [made(), made()]
    pusher = ReshardPusher(engines)
    assert pusher.push(params(), 3).engine_checksum is None and pusher.refresh(params(), 3) is None
    engines[1].update_weights(params(2), 2)
    hows = [own.mode for own in pusher.refresh(params(), 3).acks]
    assert hows == ["current", "full"] and bits(engines[1]) == loaded(params())


def test_versions_go_back_only_when_the_trainer_says_so(served, tmp_path):
    """It went back to a checkpoint: what it makes anew has the same versions and other numbers."""
    network = NetworkPusher(CFG, [served.url], SMALL)
    storage = SharedStoragePusher(CFG, tmp_path, [served.url], SMALL)
    storage.push(params(0), 6)
    storage.push(params(1), 8)
    before = served.bits
    for pusher in (network, storage):
        with pytest.raises(PushFailed, match="version 8 is held, 7 is older; if the trainer went"):
            pusher.push(params(2), 7)
    with pytest.raises(PushFailed, match="version 8 is held with other numbers"):
        network.push(params(2), 8)
    with pytest.raises(ValueError, match="holds version 8 with other numbers"):
        storage.push(params(2), 8)
    assert served.held[0] == 8 and served.bits == before
    storage.push(params(2), 7, rewind=True)
    assert served.held[0] == 7 and served.bits == loaded(params(2))
    # The other lineage is gone from the folder, too.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]
    assert network.push(params(0), 8).failed_engines == () and served.bits == loaded(params(0))
    network.push(params(1), 8, rewind=True)
    assert served.bits == loaded(params(1))


# -- in the middle of replies ------------------------------------------------------------------------------


def drawn(prompt, count, seed):
    """Greedy, by an engine with one version of the weights alone."""
    sampling = Sampling(max_tokens=count, temperature=0, ignore_eos=True)
    return made(DENSE, params(seed, DENSE)).generate([prompt], sampling)[0]


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
def test_a_push_in_the_middle_of_a_reply(way, policy, tmp_path, monkeypatch):
    """Each token tells the version of the weights that drew it, and what it stands on is as the policy says."""
    config = dataclasses.replace(SMALL, policy=policy)
    prompt, count = [5, 9, 2, 7], 30
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    engine = made(DENSE, params(0, DENSE))
    gate = Gate(engine, 16, monkeypatch)
    with serving(DENSE, engine=engine) as one, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pusher = {
            "network": lambda: NetworkPusher(DENSE, [one.url], config),
            "storage": lambda: SharedStoragePusher(DENSE, tmp_path, [one.url], config),
            "reshard": lambda: ReshardPusher([one.server.worker], config),
        }[way]()
        waiting = pool.submit(one.ask, "/generate", body)
        assert gate.reached.wait(60)
        pushed = pusher.push(params(1, DENSE), 7)
        status, told = waiting.result()
        assert status == 200 and pushed.failed_engines == ()
        after = one.ask("/generate", body | {"return_logprob": False})[1]
    ids, meta = told["output_ids"], told["meta_info"]
    versions = meta["weight_versions"]
    assert after["meta_info"]["weight_versions"] == [7] * count
    assert after["output_ids"] == drawn(prompt, count, 1).ids
    if policy == "finish":
        assert versions == [0] * count and ids == drawn(prompt, count, 0).ids
        return
    old = versions.count(0)
    assert versions == [0] * old + [7] * (count - old) and 8 <= old < count
    assert ids[:old] == drawn(prompt, count, 0).ids[:old]
    anew = drawn(prompt + ids[:old], count - old, 1)
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    if policy == "recompute":
        assert ids[old:] == anew.ids
        np.testing.assert_allclose(logprobs[old:], anew.logprobs, atol=1e-4)
    else:  # the first token drawn after it still stands on the old weights' latents
        assert not np.isclose(logprobs[old], anew.logprobs[0], atol=1e-3)


class Gate:
    """Holds an engine after so many steps, in the middle of a reply, until something else is asked of it."""

    def __init__(self, engine, count, monkeypatch):
        self.reached, self._asked, self._count = threading.Event(), threading.Event(), count
        step, call = engine.step, Worker.call

        def held():
            self._count -= 1
            if not self._count:
                self.reached.set()
                assert self._asked.wait(60)
            return step()

        def watched(worker, function):
            found = call(worker, function)
            if self.reached.is_set():
                self._asked.set()
            return found

        engine.step = held
        monkeypatch.setattr(Worker, "call", watched)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_fingerprints_tell_a_bit_and_a_place(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (4, 3, 8)), dtype)
    own = tuple(np.asarray(fingerprint(x)))
    assert tuple(np.asarray(fingerprint(jnp.copy(x)))) == own
    swapped = x.at[0, 0, 0].set(x[1, 2, 3]).at[1, 2, 3].set(x[0, 0, 0])
    assert x[0, 0, 0] != x[1, 2, 3]
    others = [x.at[2, 1, 5].add(1), swapped, x.reshape(3, 4, 8).swapaxes(0, 1), x * 0]
    assert len({own, *(tuple(np.asarray(fingerprint(other))) for other in others)}) == 5
    zeros = jnp.zeros(3, "float32")
    assert not np.array_equal(fingerprint(zeros), fingerprint(-zeros))


@pytest.mark.parametrize("changed", [0, 3, 400, 1000])
def test_pieces_of_changes_are_the_shorter_of_two_forms(changed):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((40, 25)).astype(jnp.bfloat16)
    new = base.copy()
    new.reshape(-1)[rng.choice(1000, changed, replace=False)] += 1
    found = list(split_tensor("x", new, base, 512))
    size = sum(array.nbytes for piece in found for array in piece.values())
    assert size <= new.nbytes and (changed > 0) == bool(found)
    if changed == 3:
        assert size <= 3 * (32 + 3 * 2)
    whole = list(split_tensor("x", new, None, 512))
    assert [key for piece in whole for key in piece] == [f"x@{i}" for i in range(0, 1000, 256)]
    assert all(array.nbytes <= 512 for piece in whole for array in piece.values())


@pytest.mark.parametrize(
    "field, value",
    [
        ("policy", "soon"),
        ("timeout_s", 0),
        ("load_timeout_s", -1.0),
        ("max_tries", 0),
        ("keep", 0),
        ("bucket_bytes", 10),
    ],
)
def test_a_config_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        SyncConfig(**{field: value})


def test_a_manifest_says_the_same_in_a_file(tmp_path):
    manifest = Manifest(3, {"a": (1, 2)})
    manifest.add("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    manifest.save(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["checksum"] == manifest.checksum
    assert Manifest.read(tmp_path).checksum == manifest.checksum
    other = Manifest(3, {})
    other.add("x", np.arange(6, dtype=np.float32).reshape(3, 2))
    assert other.checksum != manifest.checksum
