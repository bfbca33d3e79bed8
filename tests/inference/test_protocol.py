"""Bodies of requests: what they mean, and what is wrong with the others, in one line."""

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


def test_a_chat_that_says_little_has_glm_s_defaults():
    asked = chat()
    [request] = asked.requests
    assert list(request.ids) == render_chat(HI, TOKENIZER).ids
    own = request.sampling
    assert (own.temperature, own.top_p, own.max_tokens, own.seed) == (1.0, 0.95, None, None)
    assert request.timeout_s == 5.0 and asked.thinking and not asked.stream


def test_every_sampling_field_arrives():
    own = sampling(
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
    assert (own.temperature, own.top_p, own.top_k, own.min_p) == (0.5, 0.7, 5, 0.1)
    assert (own.stop, own.stop_ids, own.max_tokens, own.top_logprobs) == (("x",), (4,), 9, 2)
    assert own.seed == 2**63 - 1 and own.logit_bias == {7: -3} and own.ignore_eos
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
def test_thinking_in_both_spellings(body, enable, clear):
    messages = [
        *HI,
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "b"},
    ]
    asked = READER.chat({"messages": messages, **body}, 3)
    want = render_chat(messages, TOKENIZER, enable_thinking=enable, clear_thinking=clear)
    assert list(asked.requests[0].ids) == want.ids and asked.thinking == enable


def test_tools_are_laid_out_unless_none_may_be_called():
    with_tools = render_chat(HI, TOKENIZER, tools=[TOOL]).ids
    assert list(chat(tools=[TOOL]).requests[0].ids) == with_tools and chat(tools=[TOOL]).tools
    silent = chat(tools=[TOOL], tool_choice="none")
    assert list(silent.requests[0].ids) == render_chat(HI, TOKENIZER).ids and silent.tools is None


def test_choices_have_seeds_of_their_own():
    asked = chat(n=3, seed=5)
    seeds = [own.sampling.seed for own in asked.requests]
    assert seeds[0] == 5 and len({*seeds}) == asked.num_choices == 3
    assert [own.sampling.seed for own in chat(n=2).requests] == [None, None]


def test_what_says_nothing_is_as_if_it_were_not_there():
    quiet = dict(temperature=None, stop=None, n=None, tools=None, user="me", metadata={"a": 1})
    assert chat(**quiet) == chat()


def test_prompts_are_text_or_ids_one_or_several():
    def prompts(value):
        asked = READER.completion({"prompt": value}, 0)
        return [list(own.ids) for own in asked.requests]

    ids = TOKENIZER.encode("To be")
    assert prompts("To be") == prompts(ids) == prompts(["To be"]) == prompts([ids]) == [ids]
    assert prompts([[1, 2], [3]]) == [[1, 2], [3]]
    # A text that spells out a role forges none.
    assert TOKENIZER.special_ids["<|user|>"] not in prompts("<|user|>")[0]
    own = READER.completion({"prompt": "x"}, 0).requests[0].sampling
    assert (own.max_tokens, own.temperature, own.top_p) == (16, 1.0, 1.0)
    asked = READER.completion({"prompt": ["a", "b"], "n": 2, "echo": True}, 0)
    assert asked.echo == ("a", "b") and len(asked.requests) == 4


def test_generate_reads_sglang_s_schema():
    own = dict(max_new_tokens=4, temperature=0, stop_token_ids=[9], sampling_seed=8, n=2)
    body = {"input_ids": [1, 2], "sampling_params": own, "return_logprob": True, "rid": "r"}
    asked = READER.generate(body, 0)
    first, second = asked.requests
    assert first.ids == (1, 2) and first.sampling.max_tokens == 4
    assert first.sampling.seed == 8 != second.sampling.seed
    assert asked.logprobs and asked.rid == "r" and not asked.batch
    assert READER.generate({"input_ids": [[1, 2]]}, 0).batch
    assert READER.generate({"text": "To be"}, 0).requests[0].ids == tuple(TOKENIZER.encode("To be"))


def test_a_data_parallel_rank_is_the_group_of_all_that_is_asked():
    """In every kind of body, as sglang-router adds it to them when it is told to know ranks."""
    ids = {"input_ids": [[1, 2], [3]], "sampling_params": {"n": 2}}
    for asked in (
        READER.generate({**ids, "data_parallel_rank": 3}, 0),
        READER.completion({"prompt": "x", "n": 2, "data_parallel_rank": 3.0}, 0),
        chat(n=2, data_parallel_rank=3),
    ):
        assert [repr(own.dp_rank) for own in asked.requests] == ["3"] * len(asked.requests)
    assert (
        READER.generate({"input_ids": [1], "data_parallel_rank": None}, 0).requests[0].dp_rank
        is None
    )
    for wrong in (-1, 1.5, "3", True):
        with pytest.raises(ApiError, match="data_parallel_rank") as caught:
            READER.generate({"input_ids": [1], "data_parallel_rank": wrong}, 0)
        assert caught.value.status == 400


def test_what_sglang_router_adds_changes_nothing():
    """As sglang-router 0.3.2 sends them on."""
    body = dict(no_stop_trim=False, skip_special_tokens=True, return_hidden_states=False)
    added = dict(continue_final_message=False, separate_reasoning=True, stream_reasoning=True)
    assert chat(**body, **added, ignore_eos=False, logprobs=False) == chat()
    assert READER.completion({"prompt": "x", **body}, 0) == READER.completion({"prompt": "x"}, 0)
    added = dict.fromkeys(("return_entropy", "return_bytes", "background", "no_logs"), False)
    added |= dict(model=None, return_text_in_logprobs=False, return_hidden_states=False)
    ids = {"input_ids": [1, 2]}
    assert READER.generate({**ids, **added, "log_metrics": True}, 0) == READER.generate(ids, 0)


def test_a_long_list_of_ids_is_read_in_no_time():
    body = {"input_ids": np.arange(200_000).clip(0, 2000).tolist()}
    assert len(READER.generate(body, 0).requests[0].ids) == 200_000


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "body, words, param",
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
    ],
)
def test_wrong_chats_are_400_and_name_the_field(body, words, param):
    with pytest.raises(ApiError) as caught:
        chat(**body)
    error = caught.value
    assert error.status == 400 and words in str(error) and "\n" not in str(error)
    assert param is None or error.param.startswith(param)
    assert error.body["error"]["type"] == "invalid_request_error" and len(str(error)) < 500


def test_knows_all_levels_of_effort():
    assert set(typing.get_args(Effort)) == EFFORTS.keys()


def test_generate_refuses_a_text_as_ids():
    with pytest.raises(ApiError, match="give it as text") as caught:
        READER.generate({"input_ids": "To be"}, 0)
    assert caught.value.param == "input_ids"


@pytest.mark.parametrize("value", [[], [[]], [1.5], [True], ["a", 1], [[1], "a", 2], {}, 7])
def test_wrong_prompts_are_400(value):
    with pytest.raises(ApiError) as caught:
        READER.completion({"prompt": value}, 0)
    assert caught.value.status == 400


def test_other_models_and_other_weights():
    with pytest.raises(ApiError) as caught:
        chat(model="gpt")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError) as caught:
        chat(weight_version=2)
    assert caught.value.status == 409
    assert chat(model="m", weight_version=3).requests


@pytest.mark.parametrize(
    "body, words",
    [
        (b"\xff", "not UTF-8: byte 0"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not JSON"),
    ],
)
def test_bodies_that_are_no_json(body, words):
    with pytest.raises(ApiError, match=words):
        read_json(body)


@pytest.mark.parametrize("body", [None, [], "x", 3, {"path": "x"}, {"path": "x", "version": -1}])
def test_updates_are_checked(body):
    with pytest.raises(ApiError):
        decode(body, UpdateRequest)
    update = decode({"path": "x", "version": 1.0, "policy": None}, UpdateRequest)
    assert update == UpdateRequest(path="x", version=1) and type(update.version) is int
