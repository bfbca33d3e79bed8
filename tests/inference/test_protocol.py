"""Tests how bodies of requests are parsed, and that errors of invalid bodies have one line."""

import json
import typing

import numpy as np
import pytest

from glm5_jax.inference.protocol import Reader
from glm5_jax.inference.request_bodies import EFFORTS, Effort, UpdateRequest
from glm5_jax.runtime.http_server import ApiError, read_json
from glm5_jax.runtime.json_structs import decode
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
READER = Reader(TOKENIZER, model="m", timeout_s=5.0)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**body):
    return READER.chat({"messages": HI, **body}, 3)


def sampling(**body):
    return chat(**body).requests[0].sampling


def test_minimal_chat_has_defaults_of_glm():
    parsed = chat()
    [request] = parsed.requests
    assert list(request.ids) == render_chat(HI, TOKENIZER).ids
    defaults = request.sampling
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens, defaults.seed) == (
        1.0,
        0.95,
        None,
        None,
    )
    assert request.timeout_s == 5.0 and parsed.thinking and not parsed.stream


def test_reads_every_sampling_field():
    params = sampling(
        temperature=0.5,
        top_p=0.7,
        top_k=5,
        min_p=0.1,
        stop="x",
        stop_token_ids=[4],
        seed=-1,
        logit_bias={"7": -3},
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
        ignore_eos=True,
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.7, 5, 0.1)
    assert (params.stop, params.stop_ids, params.max_tokens, params.top_logprobs) == (
        ("x",),
        (4,),
        9,
        2,
    )
    assert params.seed == 2**63 - 1 and params.logit_bias == {7: -3} and params.ignore_eos
    assert sampling(do_sample=False).temperature == 0
    assert sampling(max_tokens=3, max_completion_tokens=4).max_tokens == 4
    assert sampling(stop=["a", "b"]).stop == ("a", "b") and sampling(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    "body, enable, clear",
    [
        ({}, True, True),
        ({"thinking": {"type": "disabled"}}, False, True),
        ({"thinking": {"clear_thinking": False}}, True, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, True),
        ({"chat_template_kwargs": {"clear_thinking": False}}, True, False),
        ({"chat_template_kwargs": {"thinking": False}}, False, True),
        ({"enable_thinking": False}, False, True),
        ({"enable_thinking": True, "thinking": {"clear_thinking": False}}, True, False),
        (
            {
                "thinking": {"type": "enabled", "clear_thinking": False},
                "chat_template_kwargs": {"enable_thinking": True},
            },
            True,
            False,
        ),
    ],
)
def test_reads_thinking_in_all_forms(body, enable, clear):
    messages = [
        *HI,
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "b"},
    ]
    parsed = READER.chat({"messages": messages, **body}, 3)
    want = render_chat(messages, TOKENIZER, enable_thinking=enable, clear_thinking=clear)
    assert list(parsed.requests[0].ids) == want.ids and parsed.thinking == enable


def test_renders_tools_unless_calls_are_disabled():
    with_tools = render_chat(HI, TOKENIZER, tools=[TOOL]).ids
    assert list(chat(tools=[TOOL]).requests[0].ids) == with_tools and chat(tools=[TOOL]).tools
    silent = chat(tools=[TOOL], tool_choice="none")
    assert list(silent.requests[0].ids) == render_chat(HI, TOKENIZER).ids and silent.tools is None


def test_choices_have_different_seeds():
    parsed = chat(n=3, seed=5)
    seeds = [request.sampling.seed for request in parsed.requests]
    assert seeds[0] == 5 and len({*seeds}) == parsed.num_choices == 3
    assert [request.sampling.seed for request in chat(n=2).requests] == [None, None]


def test_ignores_neutral_fields():
    quiet = dict(temperature=None, stop=None, n=None, tools=None, user="me", metadata={"a": 1})
    assert chat(**quiet) == chat()


def test_reads_options_of_stream():
    counted = {"include_usage": True, "continuous_usage_stats": True}
    parsed = chat(stream=True, stream_options=counted)
    assert parsed.stream and parsed.usage and parsed.continuous_usage
    assert not chat(stream=True).usage and not chat(stream=True).continuous_usage


def test_reads_prompts_as_text_or_ids():
    def prompts(value):
        parsed = READER.completion({"prompt": value}, 0)
        return [list(request.ids) for request in parsed.requests]

    ids = TOKENIZER.encode("To be")
    assert prompts("To be") == prompts(ids) == prompts(["To be"]) == prompts([ids]) == [ids]
    assert prompts([[1, 2], [3]]) == [[1, 2], [3]]
    # A spelled-out role marker is text.
    assert TOKENIZER.special_ids["<|user|>"] not in prompts("<|user|>")[0]
    defaults = READER.completion({"prompt": "x"}, 0).requests[0].sampling
    assert (defaults.max_tokens, defaults.temperature, defaults.top_p) == (16, 1.0, 1.0)
    parsed = READER.completion({"prompt": ["a", "b"], "n": 2, "echo": True}, 0)
    assert parsed.echo == ("a", "b") and len(parsed.requests) == 4


def test_reads_generate_body_of_sglang():
    sampling_params = dict(
        max_new_tokens=4, temperature=0, stop_token_ids=[9], sampling_seed=8, n=2
    )
    body = {
        "input_ids": [1, 2],
        "sampling_params": sampling_params,
        "return_logprob": True,
        "rid": "r",
    }
    parsed = READER.generate(body, 0)
    first, second = parsed.requests
    assert first.ids == (1, 2) and first.sampling.max_tokens == 4
    assert first.sampling.seed == 8 != second.sampling.seed
    assert parsed.logprobs and parsed.rid == "r" and not parsed.batch
    assert READER.generate({"input_ids": [[1, 2]]}, 0).batch
    assert READER.generate({"text": "To be"}, 0).requests[0].ids == tuple(TOKENIZER.encode("To be"))


def test_data_parallel_rank_applies_to_all_requests():
    """sglang-router adds it to every kind of body if it routes by rank."""
    ids = {"input_ids": [[1, 2], [3]], "sampling_params": {"n": 2}}
    for parsed in (
        READER.generate({**ids, "data_parallel_rank": 3}, 0),
        READER.completion({"prompt": "x", "n": 2, "data_parallel_rank": 3.0}, 0),
        chat(n=2, data_parallel_rank=3),
    ):
        assert [repr(request.dp_rank) for request in parsed.requests] == ["3"] * len(
            parsed.requests
        )
    assert (
        READER.generate({"input_ids": [1], "data_parallel_rank": None}, 0).requests[0].dp_rank
        is None
    )
    for wrong in (-1, 1.5, "3", True):
        with pytest.raises(ApiError, match="data_parallel_rank") as caught:
            READER.generate({"input_ids": [1], "data_parallel_rank": wrong}, 0)
        assert caught.value.status == 400


def test_ignores_fields_that_sglang_router_adds():
    """The fields are those of sglang-router 0.3.2."""
    body = dict(no_stop_trim=False, skip_special_tokens=True, return_hidden_states=False)
    added = dict(continue_final_message=False, separate_reasoning=True, stream_reasoning=True)
    assert chat(**body, **added, ignore_eos=False, logprobs=False) == chat()
    assert READER.completion({"prompt": "x", **body}, 0) == READER.completion({"prompt": "x"}, 0)
    added = dict.fromkeys(("return_entropy", "return_bytes", "background", "no_logs"), False)
    added |= dict(model=None, return_text_in_logprobs=False, return_hidden_states=False)
    ids = {"input_ids": [1, 2]}
    assert READER.generate({**ids, **added, "log_metrics": True}, 0) == READER.generate(ids, 0)


def test_reads_long_list_of_ids_quickly():
    body = {"input_ids": np.arange(200_000).clip(0, 2000).tolist()}
    assert len(READER.generate(body, 0).requests[0].ids) == 200_000


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "body, expected_error, param",
    [
        (dict(temperature=-1), "-1 is ", "temperature"),
        (dict(temperature="hot"), "'hot' is not of type 'number'", "temperature"),
        (dict(top_p=0), "0 is ", "top_p"),
        (dict(n=0), "0 is ", "n"),
        (dict(n=1000), "1000 is ", "n"),
        (dict(max_tokens=0), "0 is ", "max_tokens"),
        (dict(stop=["a"] * 17), "", "stop"),
        (dict(stop=""), "stop is", "stop"),
        (dict(logit_bias={"x": 1}), "", "logit_bias"),
        (dict(logit_bias={"5\n": 1}), "", "logit_bias"),
        (dict(logit_bias={"05": 1}), "", "logit_bias"),
        (dict(logit_bias={"1": 1000}), "", "logit_bias"),
        (dict(colour="red"), "colour: no such field", "colour"),
        (dict(stream_options={"colour": 1}), "", "stream_options"),
        (dict(messages=[]), "messages is empty", "messages"),
        (dict(messages="hi"), "'hi' is not of type 'array'", "messages"),
        (dict(messages=[{"role": "wizard"}]), "message 0 has role 'wizard'", "messages"),
        (dict(messages=[{"role": "user", "content": DEEP}]), "", "messages"),
        (dict(messages=[{"role": "user", "content": "\ud800"}]), "surrogate", "messages"),
        (
            dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "a part of type 'image_url'; this model reads text only",
            "messages",
        ),
        (dict(tools=[{"type": "function"}]), "", "tools"),
        (dict(tool_choice="required"), "'required', and there are no tools", "tool_choice"),
        (dict(tool_choice="all", tools=[TOOL]), "'all'; use one of auto, none", "tool_choice"),
        (
            dict(tool_choice={"type": "function", "function": {"name": "g"}}, tools=[TOOL]),
            "names 'g'; the tools are f",
            "tool_choice",
        ),
        (dict(response_format={"type": "xml"}), "'xml' is not one of", "response_format"),
        (dict(response_format={"type": "json_schema"}), "add it", "response_format"),
        (
            dict(response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
            "cannot be enforced",
            "response_format",
        ),
        (
            dict(response_format={"type": "json_object"}, ignore_eos=True),
            "leave ignore_eos out",
            "ignore_eos",
        ),
        (
            dict(response_format={"type": "json_object"}, tool_choice="required", tools=[TOOL]),
            "leave one of them out",
            "response_format",
        ),
        (dict(thinking={"budget_tokens": -1}), "-1 is ", "thinking.budget_tokens"),
        (
            dict(thinking={"budget_tokens": 1}, thinking_token_budget=2),
            "differ; leave one of them out",
            "thinking",
        ),
        (dict(continue_final_message=True), "message 0 has role 'user'", "messages"),
        (
            dict(add_generation_prompt=False),
            "leave add_generation_prompt out",
            "add_generation_prompt",
        ),
        (dict(modalities=["audio"]), "['text'] was expected", "modalities"),
        (dict(separate_reasoning=1), "True was expected", "separate_reasoning"),
        (
            dict(repetition_penalty=1.1),
            "1.1 is not supported, 1 was expected",
            "repetition_penalty",
        ),
        (dict(top_logprobs=3), "top_logprobs needs logprobs", "top_logprobs"),
        (dict(top_logprobs=21, logprobs=True), "21 is ", "top_logprobs"),
        (dict(frequency_penalty=1), "0 was expected", "frequency_penalty"),
        (dict(reasoning_effort="off"), "'off' is not one of ['high', ", "reasoning_effort"),
        (
            dict(thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False}),
            "have different values of enable_thinking",
            "thinking",
        ),
        (
            dict(enable_thinking=True, chat_template_kwargs={"enable_thinking": False}),
            "chat_template_kwargs and enable_thinking have different values",
            "chat_template_kwargs",
        ),
        (dict(include_reasoning=False), "True was expected", "include_reasoning"),
        (dict(think=False), "True was expected", "think"),
    ],
)
def test_rejects_invalid_chat_naming_field(body, expected_error, param):
    with pytest.raises(ApiError) as caught:
        chat(**body)
    error = caught.value
    assert error.status == 400 and expected_error in str(error) and "\n" not in str(error)
    assert param is None or error.param.startswith(param)
    assert error.body["error"]["type"] == "invalid_request_error" and len(str(error)) < 500


def test_knows_all_levels_of_effort():
    assert set(typing.get_args(Effort)) == EFFORTS.keys()


def test_rejects_text_as_ids():
    with pytest.raises(ApiError, match="give it as text") as caught:
        READER.generate({"input_ids": "To be"}, 0)
    assert caught.value.param == "input_ids"


@pytest.mark.parametrize("value", [[], [[]], [1.5], [True], ["a", 1], [[1], "a", 2], {}, 7])
def test_rejects_invalid_prompts(value):
    with pytest.raises(ApiError) as caught:
        READER.completion({"prompt": value}, 0)
    assert caught.value.status == 400


def test_rejects_other_models_and_weight_versions():
    with pytest.raises(ApiError) as caught:
        chat(model="gpt")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError) as caught:
        chat(weight_version=2)
    assert caught.value.status == 409
    assert chat(model="m", weight_version=3).requests


@pytest.mark.parametrize(
    "body, expected_error",
    [
        (b"\xff", "not UTF-8: byte 0"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not JSON"),
    ],
)
def test_rejects_bodies_that_are_not_json(body, expected_error):
    with pytest.raises(ApiError, match=expected_error):
        read_json(body)


@pytest.mark.parametrize("body", [None, [], "x", 3, {"path": "x"}, {"path": "x", "version": -1}])
def test_validates_update_requests(body):
    with pytest.raises(ApiError):
        decode(body, UpdateRequest)
    update = decode({"path": "x", "version": 1.0, "policy": None}, UpdateRequest)
    assert update == UpdateRequest(path="x", version=1) and type(update.version) is int
