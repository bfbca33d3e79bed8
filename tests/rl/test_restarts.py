"""Engines that were started anew, or that a push did not reach, serve nobody before they have the weights that are wanted."""

import asyncio
import contextlib
import dataclasses

import jax
import pytest
from flax import nnx

from glm5_jax.checkpoint import models
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.rl.rollouts.router import RouterConfig
from glm5_jax.rl.weights.pusher import SyncConfig
from glm5_jax.rl.weights.weight_sync import NetworkPusher
from tests.rl import fleet
from tests.rl.test_gateway import CFG, QUESTION, TOKENIZER, gateway, records, run

OPTIONS = dict(page_size=64, max_num_seqs=2, prefill_chunk=64, max_length=128)
SYNC = SyncConfig(timeout_s=20.0, load_timeout_s=60.0, state_timeout_s=2.0)
# Each of two engines gets every other session.
EVENLY = dict(router=RouterConfig(points=1), max_tokens=8)


@pytest.fixture(scope="module")
def trained():
    """The trainer's weights; engines start from others."""
    return glm5.params_of(glm5.Glm5(CFG, rngs=nnx.Rngs(1)))


@pytest.fixture(scope="module")
def start():
    return glm5.params_of(glm5.Glm5(CFG, rngs=nnx.Rngs(0)))


@contextlib.contextmanager
def engine(params, port=0, version=0, takes=True):
    """takes: whether it takes weights."""
    made = Engine(
        glm5.Glm5(CFG, params=params), TOKENIZER, EngineConfig(**OPTIONS), version=version
    )
    loader = models.make_weight_loader(glm5.Glm5(CFG, params=params)) if takes else None
    with Server(made, TOKENIZER, ServerConfig(port=port, model="tiny"), loader).running() as url:
        yield url


def port_of(url):
    return int(url.rpartition(":")[2])


def want(url, lease, version, checksum=None):
    """The engines that are left, by what the gateway says."""

    async def work(request):
        said = {"lease": lease, "version": version}
        said |= {} if checksum is None else {"checksum": checksum}
        status, told = await request("POST", f"{url}/weights", said)
        assert status == 200, told
        return told

    told = run(work)
    assert told.keys() == {"lease", "version", "checksum"}
    return there(url)


def there(url):
    return set(info(url)["loads"])


def info(url):
    return run(lambda request: request("GET", f"{url}/server_info"))[1]


def chat(url, name="s"):
    """(status, answer) of a session's first chat."""

    async def work(request):
        await request("POST", f"{url}/sessions", {"id": name, "seed": 7})
        path = f"{url}/sessions/{name}/v1/chat/completions"
        return await request("POST", path, {"messages": [QUESTION]})

    return run(work)


def sampled_by(url, name="s"):
    """Versions of a session's tokens."""
    [record] = run(lambda request: records(request, url, name))
    return {int(version) for version in record.weight_version if version >= 0}


def rests():
    """Long enough for several probes."""
    asyncio.run(asyncio.sleep(0.6))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("version", [pytest.param(0, marks=SLOW), 5, pytest.param(9, marks=SLOW)])
def test_an_engine_that_was_started_anew_is_back_once_it_has_the_weights(start, trained, version):
    """Whatever version it thinks that its own are of."""
    with engine(start) as kept, contextlib.ExitStack() as stack:
        lost = stack.enter_context(engine(start))
        pusher = NetworkPusher(CFG, [lost, kept], SYNC)
        with gateway([lost, kept], **EVENLY) as url:
            pushed = pusher.push(trained, 5)
            assert pushed.failed_engines == () and want(url, 1, 5, pushed.engine_checksum) == {
                lost,
                kept,
            }
            assert pusher.refresh(trained, 5) is None
            stack.close()
            # Nobody is asked anything meanwhile, so that nobody sees it go.
            with engine(start, port_of(lost), version):
                for i in range(3):
                    status, told = chat(url, f"s{i}")
                    assert status == 200, told
                    assert sampled_by(url, f"s{i}") == {5}
                assert there(url) == {kept}
                rests()
                assert there(url) == {kept}
                [told] = pusher.refresh(trained, 5).acks
                assert (told.engine, told.mode, told.error) == (lost, "full", None)
                fleet.until(lambda: there(url) == {lost, kept})
                assert pusher.refresh(trained, 5) is None


def test_without_an_engine_that_has_the_weights_nothing_is_kept(start, trained):
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(engine(start))
        pusher = NetworkPusher(CFG, [one], dataclasses.replace(SYNC, delta=True))
        with gateway([one], **EVENLY) as url:
            want(url, 1, 5, pusher.push(trained, 5).engine_checksum)
            stack.close()
            with engine(start, port_of(one), 5):
                status, told = chat(url)
                assert status == 502, told
                assert "no engine that has the weights of version 5" in told["error"]["message"]
                assert run(lambda r: r("GET", f"{url}/sessions/s"))[1]["turns"] == 0
                assert pusher.refresh(trained, 5).acks[0].mode == "full"
                fleet.until(lambda: there(url) == {one})
                assert chat(url)[0] == 200 and sampled_by(url) == {5}
                # What is pushed next goes to it as to any other.
                moved = jax.tree.map(lambda x: x * 1.5, trained)
                [told] = (pushed := pusher.push(moved, 6)).acks
                assert told.mode == "delta" and want(url, 1, 6, pushed.engine_checksum) == {one}


def test_an_engine_that_a_push_has_not_reached_is_lost_at_once(start, trained):
    with engine(start) as reached, engine(start, takes=False) as other:
        pusher = NetworkPusher(CFG, [reached, other], SYNC)
        with gateway([reached, other], **EVENLY) as url:
            assert want(url, 1, 0) == {reached, other}
            pushed = pusher.push(trained, 1)
            assert pushed.failed_engines == (other,)
            # It is what is wanted that counts, not what has been pushed.
            assert there(url) == {reached, other}
            assert want(url, 1, 1, pushed.engine_checksum) == {reached}


# -- what is wanted, of engines that answer at random ----------------------------------------------------------


@pytest.fixture
def engines():
    """(engine, URL) of two."""
    with contextlib.ExitStack() as stack:
        made = [fleet.Engine(), fleet.Engine()]
        yield [(own, stack.enter_context(own.running())) for own in made]


def test_what_is_pushed_before_it_is_wanted_is_another_trainer_s_or_newer(engines):
    (one, first), (two, second) = engines
    with gateway([first, second], **EVENLY) as url:
        assert there(url) == {first, second}
        assert want(url, 7, 0) == {first, second}
        one.version = 1  # a push that has not reached the other yet
        assert want(url, 7, 0) == {first, second}
        two.version = 1
        assert want(url, 7, 1) == {first, second}
        two.version = 2
        run(lambda r: r("POST", f"{url}/sessions", {"weights": {"lease": 7, "version": 1}}))
        assert there(url) == {first, second}
        one.version = 3
        # The same with the next session, had nobody told it.
        run(lambda r: r("POST", f"{url}/sessions", {"weights": {"lease": 7, "version": 3}}))
        assert there(url) == {first}
        # What is heard late changes nothing.
        assert want(url, 7, 2) == {first} and want(url, 6, 9) == {first}
        # A trainer that went back: newer versions are of one that is no more.
        two.version = 2
        assert want(url, 8, 2) == {second}
        one.version = 2
        fleet.until(lambda: there(url) == {first, second})
        one.checksum, two.checksum = "a", "b"
        assert want(url, 9, 2, "b") == {second}
        assert info(url)["weights"] == {"lease": 9, "version": 2, "checksum": "b"}


def test_a_reply_of_other_weights_is_none(engines):
    """Older ones, or of a process that was started anew meanwhile."""
    (one, first), (two, second) = engines
    for change in ({"version": 3}, {"instance": "another"}):
        one.version = two.version = 4
        with gateway([first, second], **EVENLY) as url:
            assert want(url, 1, 4) == {first, second}
            for name, value in change.items():
                setattr(one, name, value)
            for i in range(4):
                assert chat(url, f"s{i}")[0] == 200 and sampled_by(url, f"s{i}") == {4}
            if "version" in change:
                assert there(url) == {second}
            else:  # it has the weights, and is seen to
                fleet.until(lambda: there(url) == {first, second})


def test_a_gateway_that_was_killed_knows_what_is_wanted(engines, tmp_path):
    (one, first), (two, second) = engines
    one.version = two.version = 2
    options = dict(journal=str(tmp_path), **EVENLY)
    with gateway([first, second], **options) as url:
        assert want(url, 3, 2) == {first, second}
    two.version = 0  # it was started anew in between
    with gateway([first, second], **options) as url:
        assert there(url) == {first}
    one.version = 0
    with gateway([first, second], **options) as url:
        assert there(url) == set()  # and is well, as whoever has the weights may wait for it
        assert run(lambda r: r("GET", f"{url}/health")) == (200, {"status": "no engine"})
    one.version = 2
    with gateway([first, second], **options) as url:
        assert want(url, 3, 1) == {first}
        two.version = 2
        fleet.until(lambda: there(url) == {first, second})


def test_engines_that_tell_no_weights_serve_whoever_wants_none():
    class Old(fleet.Engine):
        def routes(self):
            own = super().routes()
            return own | {"GET": {"/health": self._health}}

    with Old().running() as one, gateway([one], **EVENLY) as url:
        assert chat(url)[0] == 200
        assert want(url, 1, 0) == set()
        assert run(lambda r: r("GET", f"{url}/health")) == (200, {"status": "no engine"})
