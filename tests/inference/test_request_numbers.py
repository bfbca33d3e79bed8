"""Tests every numeric field of every endpoint with values at the limits of number types: none ends the engine."""

import concurrent.futures
import json

import pytest
from msgspec import inspect

from glm5_jax.inference import request_bodies
from glm5_jax.inference.anthropic_protocol import MessagesRequest
from glm5_jax.inference.responses_protocol import ResponsesRequest
from tests.inference.conftest import serving
from tests.inference.test_server import get, post

EDGES = ["2.0", "2147483648", "9223372036854775808", "1e300", "1e-30", "NaN", "-1"]
VALUES = [*EDGES, "2", "1e400", "-2147483649", "true", '"2"', "9" * 500]
HI = [{"role": "user", "content": "hi"}]
# The type of each endpoint's bodies, and a valid one.
ENDPOINTS = {
    "/v1/chat/completions": (
        request_bodies.ChatCompletionRequest,
        {"messages": HI, "max_tokens": 1, "logprobs": True, "thinking": {"type": "disabled"}},
    ),
    "/v1/messages": (MessagesRequest, {"messages": HI, "max_tokens": 1}),
    "/v1/responses": (
        ResponsesRequest,
        {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "none"}},
    ),
    "/v1/completions": (request_bodies.CompletionRequest, {"prompt": "hi", "max_tokens": 1}),
    "/generate": (
        request_bodies.GenerateRequest,
        {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
    ),
    "/update_weights": (request_bodies.UpdateRequest, {"path": "nowhere", "version": 1}),
    "/weights/pull": (
        request_bodies.PullRequest,
        {"push": "p", "sources": ["http://127.0.0.1:9"], "peers": [[]]},
    ),
}


def numeric_fields(kind, path=()):
    """Yields the paths of all numbers of a type, including those in lists and maps."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        yield path
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from numeric_fields(member, path)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from numeric_fields(field.type, (*path, field.name))
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from numeric_fields(kind.item_type, (*path, 0))
    elif isinstance(kind, inspect.DictType):
        yield from numeric_fields(kind.value_type, (*path, "7"))


def body_with(body, path, value):
    """Returns the JSON of a body in which the field at a path has a value. value: JSON text."""
    body = node = json.loads(json.dumps(body))
    for name, following in zip(path, (*path[1:], None)):
        if isinstance(name, int):
            node.append(None)
        inner = [] if isinstance(following, int) else {}
        if following is None:
            node[name] = "VALUE"
        elif isinstance(node, list) or name not in node:
            node[name] = inner
        node = node[name]
    return json.dumps(body).replace('"VALUE"', value).encode()


def cases():
    for path, (kind, body) in ENDPOINTS.items():
        for field in numeric_fields(inspect.type_info(kind)):
            for value in VALUES:
                yield path, body, field, value


def strict_post(server, path, body):
    """Posts a body. The response must be JSON without Infinity and NaN."""
    status, answer = post(server, path, body)
    json.dumps(answer, allow_nan=False)
    return status, answer


def try_all(server, selected, num_clients=8):
    """Sends all cases; returns {(path, field, value): status}."""

    def send(case):
        path, body, field, value = case
        status, answer = strict_post(server, path, body_with(body, field, value))
        if status != 200:
            assert status in (400, 404, 409, 429, 502), (case, answer)
            assert len(answer["error"]["message"]) < 1500, case
        return (path, field, value), status

    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        statuses = dict(pool.map(send, selected))
    assert get(server, "/health") == (200, '{"status":"ok"}')
    assert strict_post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    return statuses


def test_covers_numbers_of_every_kind():
    fields = {(path, field) for path, _, field, _ in cases()}
    assert ("/generate", ("sampling_params", "top_k")) in fields
    assert ("/v1/chat/completions", ("top_logprobs",)) in fields
    assert ("/v1/completions", ("logit_bias", "7")) in fields
    assert ("/v1/completions", ("stop_token_ids", 0)) in fields
    assert ("/weights/pull", ("max_part_bytes",)) in fields
    assert len(fields) > 35


def test_survives_numbers_at_limits(healthy):
    """Tests one endpoint for each field and value. The slow test covers all endpoints, also with drafts."""
    selected = {}
    for path, body, field, value in cases():
        if value in EDGES:
            # Single greedy requests need few programs, and top_k and other fields become arrays anyway.
            greedy = json.loads(json.dumps(body))
            greedy.get("sampling_params", greedy)["temperature"] = 0
            usable = body if path.startswith(("/weights", "/update")) else greedy
            selected[field[-1], value] = (path, usable, field, value)
    statuses = try_all(healthy, selected.values(), num_clients=1)
    assert {status for (*_, value), status in statuses.items() if value == "NaN"} == {400}


@pytest.mark.parametrize(
    "path, field",
    [
        ("/v1/completions", ("logprobs",)),
        ("/v1/completions", ("n",)),
        ("/v1/completions", ("max_tokens",)),
        ("/v1/chat/completions", ("top_logprobs",)),
        ("/generate", ("top_logprobs_num",)),
        ("/generate", ("sampling_params", "top_k")),
        ("/generate", ("sampling_params", "max_new_tokens")),
        ("/generate", ("sampling_params", "stop_token_ids", 0)),
    ],
)
def test_accepts_integral_floats(healthy, path, field):
    body = ENDPOINTS[path][1]
    answers = [strict_post(healthy, path, body_with(body, field, v)) for v in ("2", "2.0")]
    assert [status for status, _ in answers] == [200, 200]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
def test_survives_all_numbers_of_all_endpoints(num_speculative_tokens):
    load = lambda path: {}  # noqa: E731
    with serving(options={"num_speculative_tokens": num_speculative_tokens}, load=load) as server:
        for path, (_, body) in ENDPOINTS.items():
            if path.startswith(("/v1", "/generate")):
                assert post(server, path, body)[0] == 200
        statuses = try_all(server, list(cases()))
        fields = {key[:2] for key in statuses}
        for path, field in fields:
            for value in ("NaN", "1e400", '"2"', "true", "9" * 500):
                assert statuses[path, field, value] == 400, (path, field, value)
            if not path.startswith(("/weights", "/update")):
                assert statuses[path, field, "2"] == statuses[path, field, "2.0"], (path, field)
