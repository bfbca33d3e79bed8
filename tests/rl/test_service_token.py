"""The key of a run stays among its programs: a registered URL receives the token of its service only."""

import asyncio
import json

import pytest
from aiohttp import web

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.orchestrator.client import JsonClient, OrchestratorClient
from glm5_jax.rl.orchestrator.server import Orchestrator
from glm5_jax.rl.orchestrator.task_registry import SCHEMA, ServiceSpec
from glm5_jax.runtime.http_server import HttpServer, ListenConfig
from tests.rl.fleet import ENGINE, Sums, gateway, orchestrator_config, service_config, until

KEY, TOKEN = "key-of-the-run", "token-of-the-service"


class Elsewhere(HttpServer):
    """Server that records the headers of all requests, and redirects them."""

    def __init__(self):
        super().__init__(ListenConfig(port=0))
        self.headers = []

    def routes(self):
        return {"POST": {"/rollout": self._record_headers, "/cancel": self._record_headers}}

    async def _record_headers(self, request):
        self.headers.append(str(request.headers))
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/elsewhere")


@pytest.fixture
def orchestrator(stack, engine):
    gate = stack.enter_context(gateway(engine, api_key=KEY))
    url = stack.enter_context(Orchestrator(orchestrator_config(gate, api_key=KEY)).running())
    client = OrchestratorClient(url, KEY, patience_s=5.0)
    ENGINE.version = 0
    client.begin(0, 0)
    return url, client


def register(orchestrator_url, **fields):
    """Registers a service with the orchestrator."""
    spec = dict(schema=2, name="elsewhere", weight=1.0, size=9, held_out=0, max_inflight=64)
    body = spec | {"rollout_timeout_s": 5.0, "instance": "i"} | fields
    Client(orchestrator_url, KEY).open("/tasks", json.dumps(body).encode()).close()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_sends_no_key_to_registered_url(stack, orchestrator, token):
    url, _ = orchestrator
    elsewhere = Elsewhere()
    register(url, url=stack.enter_context(elsewhere.running()), token=token)
    until(lambda: len(elsewhere.headers) > 2)
    assert not any(KEY in headers for headers in elsewhere.headers)
    assert all((TOKEN in headers) == (token is not None) for headers in elsewhere.headers)


def test_service_requires_its_token_or_key(stack, orchestrator):
    url, client = orchestrator
    services = [Sums(service_config(url, name, api_key=KEY, max_inflight=8)) for name in ("a", "b")]
    for service in services:
        service.mode = "hangs"
    urls = [stack.enter_context(service.running()) for service in services]
    until(lambda: all(service.requests for service in services))
    tokens = [service.accepted_keys[1] for service in services]
    assert len({KEY, *tokens}) == 3 and KEY not in str(client.status())
    assert not any(token in str(client.status()) for token in tokens)

    def admits(service_url, key):
        with pytest.raises(ServerError) as raised:
            Client(service_url, key).open("/rollout" if service_url != url else "/tasks", b"{}")
        return {400: True, 401: False}[raised.value.status]

    assert admits(urls[0], KEY) and admits(urls[0], tokens[0])
    assert not admits(urls[0], tokens[1]) and not admits(urls[0], None)
    assert not admits(url, tokens[0]), "the orchestrator rejects tokens of services"


def test_spec_hides_token_in_repr():
    spec = ServiceSpec(
        schema=SCHEMA,
        name="t",
        url="http://h",
        weight=1.0,
        size=1,
        held_out=0,
        max_inflight=8,
        rollout_timeout_s=1.0,
        token=TOKEN,
    )
    assert TOKEN not in repr(spec) and spec.replace(size=2).token == TOKEN


def test_asynchronous_client_follows_no_redirect():
    async def send_request(url):
        async with JsonClient(KEY) as client:
            return await client.request("POST", f"{url}/rollout", {}, timeout_s=10)

    with Elsewhere().running() as url, pytest.raises(ServerError) as raised:
        asyncio.run(send_request(url))
    assert raised.value.status == 307


def test_client_follows_no_redirect():
    with Elsewhere().running() as url, pytest.raises(ServerError) as raised:
        Client(url, KEY).open("/rollout", b"{}")
    assert raised.value.status == 307
