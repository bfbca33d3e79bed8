"""Tests grammars and thinking budgets of replies in a real engine, with and without drafts, next to unconstrained
replies.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from glm5_jax.inference.constraints import ReplyConstraint, ReplyRules
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.grammars import GrammarError, compile_grammar, reply_source
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling, draw, param_rows, probabilities
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply
from tests.inference.conftest import long_model
from tests.model.small import one_layer

TOKENIZER = Tokenizer.default()
THINK_END = TOKENIZER.special_ids["</think>"]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
PROMPT = TOKENIZER.encode("To be, or not to be")


def drafting_model():
    """Returns a one-layer model with an MTP layer."""
    cfg = one_layer(max_position_embeddings=512, num_nextn_predict_layers=1)
    return glm5.Glm5(cfg, params=glm5.init_params(cfg, jax.random.key(3)))


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "drafts"])
def engine(request):
    """Returns an engine with one shape of programs, without drafts and with them."""
    options = EngineConfig(
        page_size=32,
        max_num_seqs=4,
        prefill_chunk=32,
        max_length=128,
        num_speculative_tokens=request.param,
    )
    return Engine(drafting_model() if request.param else long_model(), TOKENIZER, options)


def complete(engine, requests):
    handles = [engine.submit(request) for request in requests]
    while engine.step():
        pass
    return [handle.completion for handle in handles]


def sampling(**changes):
    return Sampling(**dict(max_tokens=80, temperature=1.0, seed=1) | changes)


def json_grammar():
    return compile_grammar(reply_source(schema=SCHEMA), TOKENIZER)


@pytest.mark.parametrize("engine", [0, pytest.param(2, marks=pytest.mark.slow)], indirect=True)
def test_replies_follow_grammar_next_to_free_replies(engine):
    free = Request(PROMPT, sampling(max_tokens=24, temperature=0.0, ignore_eos=True))
    [reference] = complete(engine, [free])
    rules = ReplyRules(grammar=json_grammar())
    constrained = [Request(PROMPT, sampling(seed=seed), rules=rules) for seed in range(3)]
    *replies, other = complete(engine, [*constrained, free])
    assert other.ids == reference.ids
    for reply in replies:
        assert reply.finish_reason == "stop" and reply.ids[-1] in TOKENIZER.eos_ids
        value = json.loads(TOKENIZER.decode(reply.ids[:-1]))
        assert value.keys() == {"n", "b"} and 0 <= value["n"] <= 99


def test_applies_grammar_after_thinking_budget(engine):
    source = reply_source([TOOL], is_single=True)
    rules = ReplyRules(
        grammar=compile_grammar(source, TOKENIZER), thinking_budget=7, thinking_end=THINK_END
    )
    [reply] = complete(engine, [Request(PROMPT, sampling(), rules=rules)])
    assert reply.ids.index(THINK_END) <= 7
    parsed = parse_reply(reply.ids, [TOOL], tokenizer=TOKENIZER)
    [call] = parsed.tool_calls
    assert call.problem is None and call.arguments.keys() == {"n", "b"} and not parsed.content


def test_thinking_does_not_depend_on_grammar(engine):
    """A step in flight at the end of the thinking gives no token."""
    rules = ReplyRules(grammar=json_grammar(), thinking_end=THINK_END)
    options = [sampling(seed=seed, logit_bias={THINK_END: 5.0}) for seed in range(4)]
    constrained = complete(
        engine, [Request(PROMPT, options_of_request, rules=rules) for options_of_request in options]
    )
    free = complete(engine, [Request(PROMPT, options_of_request) for options_of_request in options])
    num_ended = 0
    for reply, other in zip(constrained, free):
        if THINK_END not in other.ids:
            continue
        num_ended += 1
        end = other.ids.index(THINK_END) + 1
        assert reply.ids[:end] == other.ids[:end]
        assert reply.finish_reason == "stop"
        assert json.loads(TOKENIZER.decode(reply.ids[end:-1])).keys() == {"n", "b"}
    assert num_ended > 1


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_budget_ends_thinking(engine, budget):
    rules = ReplyRules(thinking_budget=budget, thinking_end=THINK_END)
    # The bias keeps the model from ending its thinking.
    options = sampling(max_tokens=12, ignore_eos=True, logit_bias={THINK_END: -100})
    [reply] = complete(engine, [Request(PROMPT, options, rules=rules)])
    assert reply.ids.index(THINK_END) == budget and len(reply.ids) == 12


@pytest.mark.parametrize("engine", [0], indirect=True)
def test_logprobs_do_not_depend_on_mask(engine):
    rules = ReplyRules(grammar=json_grammar())
    [reply] = complete(engine, [Request(PROMPT, sampling(temperature=0.0), rules=rules)])
    forced = reply.ids[0]
    [plain] = complete(
        engine, [Request(PROMPT, sampling(max_tokens=1, temperature=0.0, top_logprobs=20))]
    )
    assert plain.ids[0] != forced and reply.logprobs[0] < plain.top[0][-1][1]


def test_samples_only_unmasked_tokens():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 70)).astype(np.float32)
    mask = np.zeros((3, 3), np.uint32)
    allowed = [[3, 33, 69], [64], list(range(70))]
    for row, ids in enumerate(allowed):
        for i in ids:
            mask[row, i // 32] |= np.uint32(1 << (i % 32))
    samplings = [Sampling(top_p=0.5), Sampling(top_k=1), Sampling(temperature=0)]
    rows = param_rows(samplings, [1, 2, 3], [0, 0, 0])
    probs = np.asarray(probabilities(logits, rows, True, mask))
    assert [set(np.flatnonzero(p)) <= set(ids) for p, ids in zip(probs, allowed)] == [True] * 3
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    output = draw(logits, rows, mask=mask)
    assert output.tokens[1] == 64 and output.tokens[2] == logits[2].argmax()
    assert output.tokens[0] in allowed[0]
    np.testing.assert_array_equal(output.logprobs[2], draw(logits, rows).logprobs[2])


def test_waits_only_for_tokens_that_decide_mask():
    free = ReplyConstraint(ReplyRules(thinking_budget=4, thinking_end=THINK_END), 2048)
    assert not free.must_wait(3) and free.must_wait(4) and not free.must_wait(0)
    assert free.max_tokens(1) == 3 and not free.applies(1, 1) and free.applies(1, 4)
    free.accept([5, 6, THINK_END])
    assert not free.must_wait(9) and free.max_tokens(1) is None
    constrained = ReplyConstraint(ReplyRules(grammar=json_grammar(), thinking_end=THINK_END), 2048)
    assert (
        not constrained.must_wait(1)
        and constrained.mask is None
        and constrained.last_token == THINK_END
    )
    constrained.accept([5, THINK_END])
    assert constrained.must_wait(1)
    assert (
        constrained.mask is not None
        and constrained.max_tokens(0) == 1
        and constrained.last_token is None
    )
    with pytest.raises(ValueError, match="the grammar does not allow the token 5"):
        constrained.accept([5])


@pytest.mark.parametrize(
    "schema", [{"not": {}}, {"type": "wizard"}, {"$ref": "#/nowhere"}, {"enum": ["x" * 300_000]}]
)
def test_rejects_schemas_that_cannot_be_enforced(schema):
    with pytest.raises(GrammarError):
        compile_grammar(reply_source(schema=schema), TOKENIZER)


CYCLE = {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}, {"type": "integer"}]}}


@pytest.mark.parametrize(
    ("parameters", "value", "is_allowed"),
    [
        ({"properties": {"a": {"type": "string"}}}, "any <b> text", True),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": CYCLE}, "12", True),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": CYCLE}, "twelve", False),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"enum": ["x"]}]}}}, "x", True),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "no list", True),
        ({"properties": {"b": {}}}, "1", False),
        ({}, "1", True),
        ({"additionalProperties": False}, "1", False),
    ],
)
def test_grammar_of_calls_follows_schema(parameters, value, is_allowed):
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    text = f"<tool_call>look<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    ids = TOKENIZER.encode(text, parse_special=True)
    matcher = compile_grammar(reply_source([tool]), TOKENIZER).matcher()
    assert (matcher.try_consume_tokens(ids) == len(ids)) == is_allowed


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": 5}},
        {"properties": {"a": {"enum": 5}}},
        {"required": 5, "properties": {"a": {}}},
        {
            "properties": {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/x"}} for i in range(999)},
            "$defs": {"x": {"type": "integer"}, "y": {"enum": ["z" * 9999]}},
        },
    ],
)  # fmt: skip
def test_rejects_tools_whose_schema_cannot_be_enforced(parameters):
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    with pytest.raises(GrammarError):
        compile_grammar(reply_source([tool]), TOKENIZER)


@pytest.mark.parametrize("engine", [0], indirect=True)
def test_engine_survives_failing_grammar(engine):
    """A token that the grammar does not allow ends the request only."""
    rules = ReplyRules(grammar=json_grammar())
    failing = dataclasses.replace(rules, grammar=_Failing(rules.grammar))
    [reply] = complete(engine, [Request(PROMPT, sampling(), rules=failing)])
    assert reply.finish_reason == "failed"
    [after] = complete(engine, [Request(PROMPT, sampling(), rules=rules)])
    assert after.finish_reason == "stop"


class _Failing:
    """Grammar whose matcher rejects the second token."""

    def __init__(self, grammar):
        self._grammar = grammar

    def matcher(self):
        matcher, tokens = self._grammar.matcher(), []

        class Matcher:
            def consume_token(self, token):
                tokens.append(token)
                return len(tokens) < 2 and matcher.consume_token(token)

            def compute_bitmask(self):
                return matcher.compute_bitmask()

            def is_error(self):
                return False

        return Matcher()
