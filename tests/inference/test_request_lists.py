"""Tests that lists in bodies of requests are bounded in number before each item is checked, and read in linear time."""

import json

import pytest
from msgspec import inspect

from glm5_jax.inference import anthropic_protocol, request_bodies, responses_protocol
from glm5_jax.inference.protocol import Reader
from glm5_jax.rl import request_bodies as rl_request_bodies
from glm5_jax.rl.orchestrator import task_registry, task_service
from glm5_jax.runtime.http_server import ApiError, read_json
from glm5_jax.runtime.json_body import MAX_SINGLE_PASS_BYTES, parse
from glm5_jax.runtime.json_structs import JsonStruct, decode
from glm5_jax.text.tokenizer import Tokenizer

READER = Reader(Tokenizer.default(), model="m", max_length=64)
COUNT = 40_000
MODULES = (
    request_bodies,
    anthropic_protocol,
    responses_protocol,
    rl_request_bodies,
    task_registry,
    task_service,
)
KINDS = {
    kind: None
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, JsonStruct) and kind is not JsonStruct
}


@pytest.mark.parametrize("field", ["stop", "tools", "stop_token_ids"])
@pytest.mark.parametrize("item", ["1", "[]", '"a"'])
def test_rejects_long_list_by_length(field, item):
    items = ",".join([item] * COUNT)
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "{field}": [{items}]}}'.encode()
    assert len(body) > MAX_SINGLE_PASS_BYTES
    with pytest.raises(ApiError, match=f"{COUNT} items are too many") as caught:
        READER.chat(read_json(body, READER.limits), 0)
    assert caught.value.status == 400 and caught.value.param == field


def members(kind):
    """Yields a type and all types in it."""
    yield kind
    inner = {
        inspect.UnionType: lambda: kind.types,
        inspect.StructType: lambda: [field.type for field in kind.fields],
        inspect.ListType: lambda: [kind.item_type],
        inspect.VarTupleType: lambda: [kind.item_type],
        inspect.TupleType: lambda: kind.item_types,
        inspect.DictType: lambda: [kind.key_type, kind.value_type],
        inspect.Metadata: lambda: [kind.type],
    }
    for inner_kind in inner.get(type(kind), list)():
        yield from members(inner_kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_bounds_all_lists_and_numbers(kind):
    for member in members(inspect.type_info(kind)):
        match member:
            case inspect.ListType() | inspect.VarTupleType():
                assert member.max_length is not None, member
            case inspect.IntType():
                assert member.ge is not None and member.le is not None, member
            case inspect.FloatType():
                assert (member.ge is not None or member.gt is not None) and member.le is not None


class Rows(JsonStruct, kw_only=True, frozen=True):
    rows: list[dict]


def test_reports_first_of_many_errors():
    """The list has no bound. Collecting all errors of a long list would take a minute."""
    numbers = []

    class CountedList(list):
        def __getitem__(self, index):
            numbers.append(index)
            return super().__getitem__(index)

        def __iter__(self):
            for i, item in enumerate(super().__iter__()):
                numbers.append(i)
                yield item

    with pytest.raises(ApiError, match="rows.0: 1 is not of type 'object'"):
        decode({"rows": CountedList([1] * 5000)}, Rows)
    assert len(numbers) <= 5000 + 100


def test_reads_numbers_of_list_only_in_order():
    """An access by index would parse all earlier numbers, and a validator makes one for each item."""
    numbers = parse(json.dumps({"ids": [1] * COUNT}).encode())["ids"]
    assert len(numbers) == COUNT and sum(numbers) == COUNT
    with pytest.raises(TypeError):
        numbers[0]


@pytest.mark.parametrize("length", [1024, 1025])
def test_limits_length_of_stop_text(length):
    body = {"prompt": "a", "stop": "x" * length}
    if length <= request_bodies.MAX_STOP_CHARACTERS:
        assert READER.completion(body, 0).requests[0].sampling.stop == (body["stop"],)
    else:
        for stop in (body["stop"], [body["stop"]]):
            with pytest.raises(ApiError, match="too long"):
                READER.completion({"prompt": "a", "stop": stop}, 0)


def test_limits_length_of_request_id():
    """Each chunk of a stream repeats the id."""
    body = {"text": "a", "rid": "x" * request_bodies.MAX_RID_CHARACTERS}
    assert READER.generate(body, 0).rid == body["rid"]
    with pytest.raises(ApiError, match="too long") as caught:
        READER.generate(body | {"rid": body["rid"] + "x"}, 0)
    assert caught.value.param == "rid"
