"""Tests the judge over real HTTP: verdicts, failures and pairs.

Texts that imitate verdicts are in test_judge_injections.
"""

import asyncio
import json
import time

import pytest
from aiohttp import web
from hypothesis import given, settings, strategies as st

from glm5_jax.agents import client as client_module
from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.judge import HARMLESS, TOP, Judge, Rubric, read_verdict, rubrics
from glm5_jax.inference.client import ServerError
from tests.agents.judges import client, facts, form, parrot, parts, serving, verdict

RUBRIC = Rubric("test", {"right": "10: right. 0: wrong.", "kind": "10: kind. 0: rude."})
TASK = ({"role": "user", "content": "Say something true."},)
BAD, GOOD = "fact fact", "fact " * 8


def score_reply(answer, reply=BAD, rubric=RUBRIC, options=None, **fields):
    async def run():
        async with client(answer, **(options or {})) as chat_client:
            return await Judge(client=chat_client, **fields).score(rubric, TASK, reply)

    return asyncio.run(run())


def compare_replies(answer, reply, other, **fields):
    async def run():
        async with client(answer) as chat_client:
            return await Judge(client=chat_client, **fields).compare(RUBRIC, TASK, reply, other)

    return asyncio.run(run())


def scores(right, kind):
    """Returns an answer function that gives these scores to a reply."""

    def answer(body):
        key, _ = form(body)
        return json.dumps({"key": key, "reasons": "", "scores": {"right": right, "kind": kind}})

    return answer


def test_score_is_mean_of_criteria():
    reward = score_reply(scores(8, 3))
    assert reward.value == pytest.approx(0.55) and reward.parts == {"right": 0.8, "kind": 0.3}
    assert score_reply(scores(0, 0)).value == 0 and score_reply(scores(TOP, TOP)).value == 1


def test_sends_rubric_guidance_and_fenced_texts():
    seen = []

    def answer(body):
        seen.append(body)
        return verdict(body, facts)

    async def run():
        async with client(answer, model="big", api_key="k") as chat_client:
            judge = Judge(client=chat_client, fields={"temperature": 0.5, "max_tokens": 7})
            return await judge.score(RUBRIC, TASK, BAD, guidance="Be strict about dates.")

    assert asyncio.run(run()).value == 0.2
    [body] = seen
    assert body["model"] == "big" and body["temperature"] == 0.5 and body["max_tokens"] == 7
    system = body["messages"][0]["content"]
    assert "right: 10: right. 0: wrong." in system and "Be strict about dates." in system
    fenced, outside = parts(body)
    assert fenced == {"task": "user: Say something true.", "reply": BAD}
    assert outside.strip().startswith("The data ends here.")


def test_uses_new_key_for_each_call():
    keys = []

    def answer(body):
        keys.append(form(body)[0])
        return "none"

    assert score_reply(answer).value is None
    assert len(set(keys)) == len(keys) > 1 and all(len(key) == 32 for key in keys)


# Invalid verdicts, each as a change of a valid one.
INVALID = {
    "not JSON": lambda v: "The score is 10.",
    "in a fence": lambda v: f"```json\n{json.dumps(v)}\n```",
    "prose before": lambda v: f"Here it is: {json.dumps(v)}",
    "prose after": lambda v: f"{json.dumps(v)} Good.",
    "two": lambda v: json.dumps(v) * 2,
    "a list": lambda v: json.dumps([v]),
    "no key": lambda v: json.dumps({k: x for k, x in v.items() if k != "key"}),
    "another key": lambda v: json.dumps(v | {"key": "0" * 32}),
    "no reasons": lambda v: json.dumps({k: x for k, x in v.items() if k != "reasons"}),
    "more fields": lambda v: json.dumps(v | {"bonus": 1}),
    "a winner": lambda v: json.dumps(v | {"winner": "A"}),
    "a criterion less": lambda v: json.dumps(v | {"scores": {"right": 3}}),
    "a criterion more": lambda v: json.dumps(v | {"scores": v["scores"] | {"x": 3}}),
    "too high": lambda v: json.dumps(v | {"scores": {"right": 11, "kind": 1}}),
    "too low": lambda v: json.dumps(v | {"scores": {"right": -1, "kind": 1}}),
    "a fraction": lambda v: json.dumps(v | {"scores": {"right": 9.5, "kind": 1}}),
    "a text": lambda v: json.dumps(v | {"scores": {"right": "9", "kind": 1}}),
    "a truth": lambda v: json.dumps(v | {"scores": {"right": True, "kind": 1}}),
    "no number": lambda v: json.dumps(v | {"scores": {"right": float("nan"), "kind": 1}}),
    "a field twice": lambda v: json.dumps(v)[:-1] + ', "scores": {"right": 10, "kind": 10}}',
    "scores of two": lambda v: json.dumps(v | {"scores": {"A": v["scores"], "B": v["scores"]}}),
    "nothing": lambda v: None,
    "cut off": lambda v: {"message": {"content": json.dumps(v)}, "finish_reason": "length"},
}


def answer_of(body, change):
    return change(json.loads(verdict(body, facts)))


@pytest.mark.parametrize("name", INVALID)
def test_retries_invalid_verdict(name):
    requests = []

    def never(body):
        requests.append(body)
        return answer_of(body, INVALID[name])

    reward = score_reply(never)
    # Three attempts on the reply, and three on a harmless reply.
    assert (
        reward.value is None
        and [parts(body)[0]["reply"] for body in requests] == [BAD] * 3 + [HARMLESS] * 3
    )
    assert reward.error.startswith("the judge gave no verdict: ")

    def once(body):
        requests.append(body)
        return answer_of(body, INVALID[name]) if len(requests) == 1 else verdict(body, facts)

    requests = []
    assert score_reply(once).value == 0.2 and len(requests) == 2
    requests = []
    assert score_reply(once, attempts=1).value == 0 and len(requests) == 2


def fails_on(text, how):
    """Returns a judge that fails, by `how`, on texts that contain a text."""

    def answer(body):
        fenced, _ = parts(body)
        return how(body) if text in "".join(fenced.values()) else verdict(body, facts)

    return answer


def error_response(status):
    return lambda body: web.json_response({"error": {"message": "no"}}, status=status)


@pytest.mark.parametrize(
    "how",
    [
        lambda body: "no",
        lambda body: answer_of(body, INVALID["cut off"]),
        error_response(400),
        error_response(413),
        error_response(422),
    ],
)
def test_scores_zero_if_reply_breaks_judge(how):
    """Without a reward, as for other failures, breaking the judge would pay for bad replies."""
    judge = fails_on("poison", how)
    reward = score_reply(judge, "fact poison")
    assert reward.value == 0 and reward.parts == {}
    assert reward.error.startswith("of this reply alone the judge gave no verdict: ")
    for other, value in ((GOOD, 0), ("fact poison", None)):
        assert compare_replies(judge, "fact poison", other).value == value
    assert compare_replies(judge, BAD, "fact poison").value is None, (
        "the other reply broke the judge"
    )


def test_scores_zero_despite_server_failure_on_other_side():
    """Holds on either side, so the order of the requests does not matter."""
    for side in "AB":

        def answer(body, side=side):
            fenced, _ = parts(body)
            if "poison" not in "".join(fenced.values()):
                return verdict(body, facts)
            return "no" if "poison" in fenced[side] else error_response(503)(body)

        assert compare_replies(answer, "fact poison", GOOD).value == 0


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_gives_no_reward_if_server_fails_on_reply(status):
    assert score_reply(fails_on("poison", error_response(status)), "fact poison").value is None


def test_gives_no_reward_after_mixed_failures():
    responses = iter([error_response(400), error_response(503), error_response(400)])
    reward = score_reply(lambda body: next(responses, lambda body: verdict(body, facts))(body))
    assert reward.value is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda body: web.json_response({"error": {"message": "full"}}, status=503), "full"),
        (
            lambda body: web.Response(text="<html>", status=502),
            r"not the JSON of an API \(502.*: <html>",
        ),
        (lambda body: web.json_response({"choices": []}), "not a chat completion"),
        (lambda body: web.json_response([1]), "not a chat completion"),
        (lambda body: web.json_response({"choices": [{"message": "x"}]}), "not a chat completion"),
        (lambda body: web.Response(text="x" * 5000), "longer than 4096 bytes"),
    ],
)
def test_gives_no_reward_on_server_error(answer, error, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BYTES", 4096)
    reward = score_reply(answer)
    assert reward.value is None and reward.parts == {}
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(reward.error)


def test_gives_no_reward_on_timeout():
    async def answer(body):
        await asyncio.sleep(60)

    started = time.monotonic()
    reward = score_reply(answer, options={"timeout_s": 0.2})
    assert reward.value is None and "has not answered within 0.2 s" in reward.error
    assert time.monotonic() - started < 10


def test_gives_no_reward_without_server():
    async def run():
        async with serving(parrot) as url:
            pass
        async with ChatClient(url) as chat_client:
            return await Judge(client=chat_client).score(RUBRIC, TASK, BAD)

    reward = asyncio.run(run())
    assert reward.value is None and "no server answers at" in reward.error


def test_limits_concurrent_requests():
    running, max_running = 0, 0

    async def answer(body):
        nonlocal running, max_running
        running, max_running = running + 1, max(max_running, running + 1)
        await asyncio.sleep(0.01)
        running -= 1
        return verdict(body, facts)

    async def run():
        # The last requests wait for a slot for longer than timeout_s.
        async with client(answer, concurrency=3, timeout_s=0.3) as chat_client:
            judge = Judge(client=chat_client)
            return await asyncio.gather(*(judge.score(RUBRIC, TASK, BAD) for _ in range(120)))

    assert {reward.value for reward in asyncio.run(run())} == {0.2} and max_running == 3


def test_rejects_invalid_client_options():
    with pytest.raises(ValueError, match="timeout_s is 0 and concurrency 16; make both positive"):
        ChatClient("http://x", timeout_s=0)
    with pytest.raises(ValueError, match="concurrency 0"):
        ChatClient("http://x", concurrency=0)
    with pytest.raises(RuntimeError, match="use it within `async with`"):
        asyncio.run(ChatClient("http://x").chat([]))


def test_server_error_has_status():
    async def run():
        answer = web.json_response({"error": {"message": "no"}}, status=429)
        async with client(lambda body: answer) as chat_client:
            await chat_client.chat([])

    with pytest.raises(ServerError, match="^no$") as caught:
        asyncio.run(run())
    assert caught.value.status == 429


# Pairs


def test_compares_pair_in_both_orders():
    def honest(body):
        return verdict(body, facts)

    reward = compare_replies(honest, GOOD, BAD)
    assert reward.value == 1 and reward.parts == {
        "first": 1,
        "second": 1,
        "right": 0.8,
        "kind": 0.8,
    }
    reward = compare_replies(honest, BAD, GOOD)
    assert reward.value == 0 and reward.parts == {
        "first": 0,
        "second": 0,
        "right": 0.2,
        "kind": 0.2,
    }
    reward = compare_replies(honest, GOOD, GOOD)
    assert reward.value == 0.5 and reward.parts["first"] == reward.parts["second"] == 0.5


@pytest.mark.parametrize("side", "AB")
def test_cancels_preference_for_side(side):
    reward = compare_replies(lambda body: verdict(body, facts, side), GOOD, BAD)
    assert reward.value == 0.5 and {reward.parts["first"], reward.parts["second"]} == {0.0, 1.0}


def test_averages_criteria_over_both_orders():
    def answer(body):
        value = json.loads(verdict(body, facts, "tie"))
        value["scores"] = {"A": {"right": 8, "kind": 1}, "B": {"right": 2, "kind": 6}}
        return json.dumps(value)

    reward = compare_replies(answer, GOOD, BAD)
    assert reward.parts == {"first": 0.5, "second": 0.5, "right": 0.5, "kind": 0.35}


@given(st.lists(st.integers(0, TOP), min_size=2, max_size=2), st.integers(-3, 3))
def test_swapping_sides_keeps_ranking(counts, bias):
    """The judge adds a bias to the first side. A reply never wins in one order and loses in the other."""

    class Biased:
        async def chat(self, messages, **fields):
            body = {"messages": messages}
            fenced, _ = parts(body)
            first, second = facts(fenced["A"]) + bias, facts(fenced["B"])
            winner = "tie" if first == second else "A" if first > second else "B"
            return {"message": {"content": verdict(body, facts, winner)}, "finish_reason": "stop"}

    async def run(a, b):
        return (await Judge(client=Biased()).compare(RUBRIC, TASK, a, b)).value

    a, b = ("fact " * count + "." for count in counts)
    forth, back = asyncio.run(run(a, b)), asyncio.run(run(b, a))
    assert forth == 1 - back
    assert (forth - 0.5) * (counts[0] - counts[1]) >= 0
    if abs(counts[0] - counts[1]) > abs(bias):
        assert forth == (counts[0] > counts[1])


def test_counts_tie_in_one_order_as_tie():
    def answer(body):
        fenced, _ = parts(body)
        return verdict(body, facts, "A" if fenced["A"] == GOOD else "tie")

    assert compare_replies(answer, GOOD, BAD).value == 0.5


def test_gives_no_reward_without_both_verdicts():
    def answer(body):
        fenced, _ = parts(body)
        return verdict(body, facts) if fenced["A"] == GOOD else "no"

    reward = compare_replies(answer, GOOD, BAD)
    assert reward.value is None and "no verdict" in reward.error


@pytest.mark.parametrize(
    "change",
    [
        {"winner": "C"},
        {"winner": None},
        {"winner": ["A"]},
        {"scores": {"A": {"right": 1, "kind": 1}}},
        {"scores": {"right": 1, "kind": 1}},
        {"scores": {"A": {"right": 1, "kind": 1}, "B": {"right": 1}}},
    ],
)
def test_rejects_invalid_pair_verdict(change):
    reward = compare_replies(
        lambda body: json.dumps(json.loads(verdict(body, facts)) | change), GOOD, BAD
    )
    assert reward.value is None


def test_truncates_long_reply_with_note():
    seen = {}

    def answer(body):
        seen.update(parts(body)[0])
        return verdict(body, facts)

    assert score_reply(answer, "fact " * 3 + "x" * 100, max_characters=12).value == 0.2
    assert seen["reply"] == "fact fact fa [103 characters left out]"


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_rejects_any_text_without_key(text):
    with pytest.raises(ValueError):
        read_verdict(text, RUBRIC, "k", ["reply"])


def test_rejects_invalid_judge_and_rubric():
    with pytest.raises(ValueError, match="attempts is 0; make it at least 1"):
        Judge(client=None, attempts=0)
    with pytest.raises(ValueError, match="max_characters is 0"):
        Judge(client=None, max_characters=0)
    with pytest.raises(ValueError, match="rubric 'x' has no criteria"):
        Rubric("x", {})
    with pytest.raises(ValueError, match="criterion 'a' of rubric 'x' has no text"):
        Rubric("x", {"a": " "})


def test_reads_shipped_rubrics():
    assert set(rubrics()) == {"general", "safety", "creativity", "emotional"}
    for rubric in rubrics().values():
        assert 3 <= len(rubric.criteria) <= 5
        assert all("10: " in text and " 0: " in text for text in rubric.criteria.values())
    assert rubrics()["safety"].criteria.keys() >= {"harmless", "not_overcautious"}
