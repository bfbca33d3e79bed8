"""Engines that restarted, or missed a push, serve nothing before they have the required weights."""

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
# Sessions alternate between two engines.
EVENLY = dict(router=RouterConfig(points=1), max_tokens=8)


@pytest.fixture(scope="module")
def trained_params():
    """Returns the trainer's weights; engines start from others."""
    return glm5.params_of(glm5.Glm5(CFG, rngs=nnx.Rngs(1)))


@pytest.fixture(scope="module")
def initial_params():
    """Returns the weights that engines start from."""
    return glm5.params_of(glm5.Glm5(CFG, rngs=nnx.Rngs(0)))


@contextlib.contextmanager
def engine(params, port=0, version=0, accepts_weights=True):
    """Serves an engine, and returns its URL. accepts_weights: whether it accepts pushes."""
    inner_engine = Engine(
        glm5.Glm5(CFG, params=params), TOKENIZER, EngineConfig(**OPTIONS), version=version
    )
    loader = models.make_weight_loader(glm5.Glm5(CFG, params=params)) if accepts_weights else None
    with Server(
        inner_engine, TOKENIZER, ServerConfig(port=port, model="tiny"), loader
    ).running() as url:
        yield url


def port_of(url):
    """Returns the port of a URL."""
    return int(url.rpartition(":")[2])


def require_weights(url, lease, version, checksum=None):
    """Requires weights of the engines, and returns the ready ones."""

    async def work(request):
        weights = {"lease": lease, "version": version}
        weights |= {} if checksum is None else {"checksum": checksum}
        status, response = await request("POST", f"{url}/weights", weights)
        assert status == 200, response
        return response

    assert run(work).keys() == {"lease", "version", "checksum"}
    return ready_engines(url)


def ready_engines(url):
    """Returns the URLs of the engines that are ready."""
    return set(info(url)["loads"])


def info(url):
    """Returns the status of a gateway."""
    return run(lambda request: request("GET", f"{url}/server_info"))[1]


def chat(url, name="s"):
    """Returns (status, response) of a session's first chat."""

    async def work(request):
        await request("POST", f"{url}/sessions", {"id": name, "seed": 7})
        path = f"{url}/sessions/{name}/v1/chat/completions"
        return await request("POST", path, {"messages": [QUESTION]})

    return run(work)


def sampled_by(url, name="s"):
    """Returns the weight versions of a session's tokens."""
    [record] = run(lambda request: records(request, url, name))
    return {int(version) for version in record.weight_version if version >= 0}


def wait_for_probes():
    """Waits for several probes."""
    asyncio.run(asyncio.sleep(0.6))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("version", [pytest.param(0, marks=SLOW), 5, pytest.param(9, marks=SLOW)])
def test_restarted_engine_returns_after_it_gets_weights(initial_params, trained_params, version):
    """The version that an engine reports after the restart makes no difference."""
    with engine(initial_params) as other, contextlib.ExitStack() as stack:
        restarted = stack.enter_context(engine(initial_params))
        pusher = NetworkPusher(CFG, [restarted, other], SYNC)
        with gateway([restarted, other], **EVENLY) as url:
            pushed = pusher.push(trained_params, 5)
            assert pushed.failed_engines == () and require_weights(
                url, 1, 5, pushed.engine_checksum
            ) == {
                restarted,
                other,
            }
            assert pusher.refresh(trained_params, 5) is None
            stack.close()
            # No request arrives meanwhile, so that the gateway does not notice the restart.
            with engine(initial_params, port_of(restarted), version):
                for i in range(3):
                    status, response = chat(url, f"s{i}")
                    assert status == 200, response
                    assert sampled_by(url, f"s{i}") == {5}
                assert ready_engines(url) == {other}
                wait_for_probes()
                assert ready_engines(url) == {other}
                [ack] = pusher.refresh(trained_params, 5).acks
                assert (ack.engine, ack.mode, ack.error) == (restarted, "full", None)
                fleet.until(lambda: ready_engines(url) == {restarted, other})
                assert pusher.refresh(trained_params, 5) is None


def test_refuses_chats_without_ready_engine(initial_params, trained_params):
    with contextlib.ExitStack() as stack:
        engine_url = stack.enter_context(engine(initial_params))
        pusher = NetworkPusher(CFG, [engine_url], dataclasses.replace(SYNC, delta=True))
        with gateway([engine_url], **EVENLY) as url:
            require_weights(url, 1, 5, pusher.push(trained_params, 5).engine_checksum)
            stack.close()
            with engine(initial_params, port_of(engine_url), 5):
                status, response = chat(url)
                assert status == 502, response
                assert "no engine that has the weights of version 5" in response["error"]["message"]
                assert run(lambda r: r("GET", f"{url}/sessions/s"))[1]["turns"] == 0
                assert pusher.refresh(trained_params, 5).acks[0].mode == "full"
                fleet.until(lambda: ready_engines(url) == {engine_url})
                assert chat(url)[0] == 200 and sampled_by(url) == {5}
                # The next push reaches it like any other engine.
                changed_params = jax.tree.map(lambda x: x * 1.5, trained_params)
                [ack] = (pushed := pusher.push(changed_params, 6)).acks
                assert ack.mode == "delta" and require_weights(
                    url, 1, 6, pushed.engine_checksum
                ) == {engine_url}


def test_removes_engine_that_missed_push(initial_params, trained_params):
    with engine(initial_params) as reached, engine(initial_params, accepts_weights=False) as other:
        pusher = NetworkPusher(CFG, [reached, other], SYNC)
        with gateway([reached, other], **EVENLY) as url:
            assert require_weights(url, 1, 0) == {reached, other}
            pushed = pusher.push(trained_params, 1)
            assert pushed.failed_engines == (other,)
            # The required weights count, not the pushed ones.
            assert ready_engines(url) == {reached, other}
            assert require_weights(url, 1, 1, pushed.engine_checksum) == {reached}


# -- required weights, with engines that answer at random ----------------------------------------------------------


@pytest.fixture
def engines():
    """Returns (engine, URL) of two engines."""
    with contextlib.ExitStack() as stack:
        pair = [fleet.Engine(), fleet.Engine()]
        yield [(engine, stack.enter_context(engine.running())) for engine in pair]


def test_accepts_newer_weights_of_same_trainer_only(engines):
    (first, first_url), (second, second_url) = engines
    with gateway([first_url, second_url], **EVENLY) as url:
        assert ready_engines(url) == {first_url, second_url}
        assert require_weights(url, 7, 0) == {first_url, second_url}
        first.version = 1  # a push that has not reached the other yet
        assert require_weights(url, 7, 0) == {first_url, second_url}
        second.version = 1
        assert require_weights(url, 7, 1) == {first_url, second_url}
        second.version = 2
        run(lambda r: r("POST", f"{url}/sessions", {"weights": {"lease": 7, "version": 1}}))
        assert ready_engines(url) == {first_url, second_url}
        first.version = 3
        # A new session may name newer weights than the last request.
        run(lambda r: r("POST", f"{url}/sessions", {"weights": {"lease": 7, "version": 3}}))
        assert ready_engines(url) == {first_url}
        # Requests that arrive late change nothing.
        assert require_weights(url, 7, 2) == {first_url} and require_weights(url, 6, 9) == {
            first_url
        }
        # A trainer resumed at an earlier version: newer versions are of a trainer that ended.
        second.version = 2
        assert require_weights(url, 8, 2) == {second_url}
        first.version = 2
        fleet.until(lambda: ready_engines(url) == {first_url, second_url})
        first.checksum, second.checksum = "a", "b"
        assert require_weights(url, 9, 2, "b") == {second_url}
        assert info(url)["weights"] == {"lease": 9, "version": 2, "checksum": "b"}


def test_discards_reply_of_other_weights(engines):
    """Replies of older weights, or of a process that restarted meanwhile."""
    (first, first_url), (second, second_url) = engines
    for change in ({"version": 3}, {"instance": "another"}):
        first.version = second.version = 4
        with gateway([first_url, second_url], **EVENLY) as url:
            assert require_weights(url, 1, 4) == {first_url, second_url}
            for name, value in change.items():
                setattr(first, name, value)
            for i in range(4):
                assert chat(url, f"s{i}")[0] == 200 and sampled_by(url, f"s{i}") == {4}
            if "version" in change:
                assert ready_engines(url) == {second_url}
            else:  # it has the weights, and a probe readmits it
                fleet.until(lambda: ready_engines(url) == {first_url, second_url})


def test_restarted_gateway_keeps_required_weights(engines, tmp_path):
    (first, first_url), (second, second_url) = engines
    first.version = second.version = 2
    options = dict(journal=str(tmp_path), **EVENLY)
    with gateway([first_url, second_url], **options) as url:
        assert require_weights(url, 3, 2) == {first_url, second_url}
    second.version = 0  # it restarted in between
    with gateway([first_url, second_url], **options) as url:
        assert ready_engines(url) == {first_url}
    first.version = 0
    with gateway([first_url, second_url], **options) as url:
        assert (
            ready_engines(url) == set()
        )  # and reports health, because a trainer with the weights may wait for it
        assert run(lambda r: r("GET", f"{url}/health")) == (200, {"status": "no engine"})
    first.version = 2
    with gateway([first_url, second_url], **options) as url:
        assert require_weights(url, 3, 1) == {first_url}
        second.version = 2
        fleet.until(lambda: ready_engines(url) == {first_url, second_url})


def test_engine_without_weights_report_serves_until_weights_are_required():
    class EngineWithoutWeights(fleet.Engine):
        def routes(self):
            routes = super().routes()
            return routes | {"GET": {"/health": self._health}}

    with EngineWithoutWeights().running() as engine_url, gateway([engine_url], **EVENLY) as url:
        assert chat(url)[0] == 200
        assert require_weights(url, 1, 0) == set()
        assert run(lambda r: r("GET", f"{url}/health")) == (200, {"status": "no engine"})
