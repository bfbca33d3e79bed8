"""Tests of pulls over HTTP between processes with different shardings, without a model."""

import asyncio
import concurrent.futures
import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.inference.request_bodies import PullRequest
from glm5_jax.inference.shards.client import Puller, PullFailed, empty_shards
from glm5_jax.inference.shards.offer import ArrayOffer, Offer
from glm5_jax.inference.shards.server import ShardLibrary, ShardServer
from glm5_jax.inference.shards.store import Shards
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.runtime.http_server import HttpServer, ListenConfig

SHAPE = (12, 8)
LISTEN = ListenConfig(port=0, api_key="secret")


def arrays(seed=0):
    """Returns two arrays by name."""
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(SHAPE).astype(np.float32) for name in ("x", "y")}


def grid(rows, columns):
    """Returns the boxes of a division into rows and columns of boxes."""
    height, width = SHAPE[0] // rows, SHAPE[1] // columns
    return [
        ((i * height, (i + 1) * height), (j * width, (j + 1) * width))
        for i in range(rows)
        for j in range(columns)
    ]


def offer_of(values, boxes, num_processes, base=None):
    """Returns the offer of arrays whose boxes processes hold in turn, and the shards of each process."""
    owners = [i % num_processes for i in range(len(boxes))]
    described = {
        name: ArrayOffer(
            dtype="float32",
            shape=SHAPE,
            fingerprint=(int(np.abs(value).sum() * 1000), 0),
            boxes=tuple(boxes),
            owners=tuple((owner,) for owner in owners),
        )
        for name, value in values.items()
    }
    offer = Offer(version=1, arithmetic={}, arrays=described, base=base)
    held = [
        Shards(
            offer.checksum,
            {
                name: {
                    box: value[tuple(slice(*bounds) for bounds in box)]
                    for box, owner in zip(boxes, owners)
                    if owner == process
                }
                for name, value in values.items()
            },
        )
        for process in range(num_processes)
    ]
    return offer, held


@contextlib.contextmanager
def trainer(offer, held, base=None):
    """Serves the shards of all processes of a trainer. Returns their servers and URLs."""
    with contextlib.ExitStack() as stack:
        servers, urls = [], []
        for i, shards in enumerate(held):
            library = ShardLibrary()
            library.versions[offer.checksum] = shards
            if base is not None:
                library.versions[offer.base] = base[i]
            servers.append(ShardServer(offer, library, LISTEN))
            urls.append(stack.enter_context(servers[-1].running()))
        yield servers, urls


class EngineServer(HttpServer):
    """Server of an engine that only passes shards on."""

    def __init__(self):
        super().__init__(LISTEN)
        self.library = ShardLibrary()

    def routes(self):
        return {"GET": {"/weights/shard": self.library.answer}}


def sharding(axes, spec):
    count = int(np.prod([*axes.values()]))
    return NamedSharding(make_mesh(axes, devices=jax.devices()[:count]), spec)


TARGET = sharding({"fsdp": 2, "expert": 2}, P("expert", "fsdp"))


def pull(offer, request, library=None, base=None, target=TARGET):
    """Pulls as one engine. Returns its puller and its shards."""
    puller = Puller(request, "secret")
    shards = empty_shards(offer, dict.fromkeys(offer.arrays, target))
    if library is not None:
        library.versions[offer.checksum] = shards
    assert asyncio.run(puller.fetch_offer()) == offer
    asyncio.run(puller.pull(offer, shards, base))
    return puller, shards


def assert_holds(shards, values):
    for name, box in shards.missing():
        index = tuple(slice(*bounds) for bounds in box)
        np.testing.assert_array_equal(shards.read(name, box), values[name][index])


def request_of(urls, **fields):
    return PullRequest(
        push="a", sources=tuple(urls), **{"peers": ((),), "max_part_bytes": 64} | fields
    )


@pytest.mark.parametrize(("rows", "columns", "processes"), [(3, 2, 3), (1, 1, 1), (12, 4, 2)])
def test_pulls_boxes_of_other_sharding(rows, columns, processes):
    values = arrays()
    offer, held = offer_of(values, grid(rows, columns), processes)
    with trainer(offer, held) as (servers, urls):
        puller, shards = pull(offer, request_of(urls))
    assert_holds(shards, values)
    size = sum(value.nbytes for value in values.values())
    assert shards.num_bytes == puller.from_trainer == size and puller.from_engines == 0
    assert sum(server.library.sent_bytes for server in servers) == size


@pytest.mark.parametrize("num_engines", [2, 3])
def test_trainer_sends_each_number_once(num_engines):
    values = arrays()
    offer, held = offer_of(values, grid(3, 2), 2)
    size = sum(value.nbytes for value in values.values())
    with contextlib.ExitStack() as stack:
        servers, urls = stack.enter_context(trainer(offer, held))
        engines = [EngineServer() for _ in range(num_engines)]
        peers = tuple((stack.enter_context(engine.running()),) for engine in engines)
        with concurrent.futures.ThreadPoolExecutor(num_engines) as pool:
            pulls = [
                pool.submit(pull, offer, request_of(urls, peers=peers, engine=i), engine.library)
                for i, engine in enumerate(engines)
            ]
            results = [one.result() for one in pulls]
    for puller, shards in results:
        assert_holds(shards, values)
        assert puller.from_trainer + puller.from_engines == size
        assert 0 < puller.from_trainer < size
    assert sum(server.library.sent_bytes for server in servers) == size
    sent_by_engines = [engine.library.sent_bytes for engine in engines]
    assert sum(sent_by_engines) == (num_engines - 1) * size and min(sent_by_engines) > 0


def test_pulls_changes_of_held_weights():
    old, new = arrays(), arrays()
    new["x"][3, 4:] += 1
    boxes = grid(3, 2)
    old_offer, old_held = offer_of(old, boxes, 2)
    offer, held = offer_of(new, boxes, 2, base=old_offer.checksum)
    with trainer(old_offer, old_held) as (_, urls):
        _, base = pull(old_offer, request_of(urls))
    with trainer(offer, held, base=old_held) as (servers, urls):
        puller, shards = pull(offer, request_of(urls, max_part_bytes=384), base=base)
    assert_holds(shards, new)
    # One part has four changes, and those without any are empty.
    assert puller.from_trainer == sum(s.library.sent_bytes for s in servers) < 40


def test_names_box_that_no_process_sends():
    values = arrays()
    offer, held = offer_of(values, grid(1, 2), 2)
    held[1].discard("y")
    with trainer(offer, held) as (_, urls):
        with pytest.raises(PullFailed, match="y .*4:.* did not arrive: .*is not held here"):
            pull(offer, request_of(urls))
        with pytest.raises(PullFailed, match="answers 401"):
            asyncio.run(Puller(request_of(urls), "other").fetch_offer())


def test_pulls_from_trainer_what_engine_with_other_sharding_lacks():
    """The other engine has other boxes, and answers at once that it lacks the pieces of this one."""
    values, rows = arrays(), sharding({"expert": 2}, P("expert", None))
    offer, held = offer_of(values, grid(2, 2), 1)
    with contextlib.ExitStack() as stack:
        _, urls = stack.enter_context(trainer(offer, held))
        other = EngineServer()
        peers = ((), (stack.enter_context(other.running()),))
        part = {"x": {((0, 1), (0, 8)): np.zeros((1, 8), np.float32)}}
        other.library.versions[offer.checksum] = Shards(offer.checksum, part)
        puller, shards = pull(offer, request_of(urls, peers=peers), target=rows)
    assert_holds(shards, values)
    assert puller.from_trainer + puller.from_engines == shards.num_bytes
