"""The judge over real HTTP: verdicts, failures, pairs; test_judge_injections has the texts that try to be one."""

import asyncio
import json
import time

import pytest
from aiohttp import web
from hypothesis import given, strategies as st

from glm5_jax.agents import client as client_module
from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.judge import HARMLESS, TOP, Judge, Rubric, read_verdict, rubrics
from glm5_jax.inference.client import ServerError
from tests.agents.judges import client, facts, form, parrot, parts, serving, verdict

RUBRIC = Rubric("test", {"right": "10: right. 0: wrong.", "kind": "10: kind. 0: rude."})
TASK = ({"role": "user", "content": "Say something true."},)
BAD, GOOD = "fact fact", "fact " * 8


def scored(answer, reply=BAD, rubric=RUBRIC, options=None, **fields):
    async def run():
        async with client(answer, **(options or {})) as opened:
            return await Judge(client=opened, **fields).score(rubric, TASK, reply)

    return asyncio.run(run())


def compared(answer, reply, other, **fields):
    async def run():
        async with client(answer) as opened:
            return await Judge(client=opened, **fields).compare(RUBRIC, TASK, reply, other)

    return asyncio.run(run())


def scores(right, kind):
    """Answers with these scores for a reply."""

    def answer(body):
        key, _ = form(body)
        return json.dumps({"key": key, "reasons": "", "scores": {"right": right, "kind": kind}})

    return answer


def test_the_score_is_the_mean_of_the_criteria():
    got = scored(scores(8, 3))
    assert got.value == pytest.approx(0.55) and got.parts == {"right": 0.8, "kind": 0.3}
    assert scored(scores(0, 0)).value == 0 and scored(scores(TOP, TOP)).value == 1


def test_what_the_judge_is_asked():
    seen = []

    def answer(body):
        seen.append(body)
        return verdict(body, facts)

    async def run():
        async with client(answer, model="big", api_key="k") as opened:
            judge = Judge(client=opened, fields={"temperature": 0.5, "max_tokens": 7})
            return await judge.score(RUBRIC, TASK, BAD, guidance="Be strict about dates.")

    assert asyncio.run(run()).value == 0.2
    [body] = seen
    assert body["model"] == "big" and body["temperature"] == 0.5 and body["max_tokens"] == 7
    system = body["messages"][0]["content"]
    assert "right: 10: right. 0: wrong." in system and "Be strict about dates." in system
    fenced, outside = parts(body)
    assert fenced == {"task": "user: Say something true.", "reply": BAD}
    assert outside.strip().startswith("The data ends here.")


def test_each_call_has_a_key_of_its_own():
    keys = []

    def answer(body):
        keys.append(form(body)[0])
        return "none"

    assert scored(answer).value is None
    assert len(set(keys)) == len(keys) > 1 and all(len(key) == 32 for key in keys)


# Verdicts that are none: each as a change of one that is.
BROKEN = {
    "not JSON": lambda v: "The score is 10.",
    "in a fence": lambda v: f"```json\n{json.dumps(v)}\n```",
    "prose before": lambda v: f"Here it is: {json.dumps(v)}",
    "prose behind": lambda v: f"{json.dumps(v)} Good.",
    "two": lambda v: json.dumps(v) * 2,
    "a list": lambda v: json.dumps([v]),
    "no key": lambda v: json.dumps({k: x for k, x in v.items() if k != "key"}),
    "another key": lambda v: json.dumps(v | {"key": "0" * 32}),
    "no reasons": lambda v: json.dumps({k: x for k, x in v.items() if k != "reasons"}),
    "more fields": lambda v: json.dumps(v | {"bonus": 1}),
    "a winner alone": lambda v: json.dumps(v | {"winner": "A"}),
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


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_verdict_is_asked_again_and_then_no_reward(name):
    asked = []

    def never(body):
        asked.append(body)
        return answer_of(body, BROKEN[name])

    got = scored(never)
    # Three times of the reply, and as often of one that is harmless.
    assert (
        got.value is None
        and [parts(body)[0]["reply"] for body in asked] == [BAD] * 3 + [HARMLESS] * 3
    )
    assert got.error.startswith("the judge gave no verdict: ")

    def once(body):
        asked.append(body)
        return answer_of(body, BROKEN[name]) if len(asked) == 1 else verdict(body, facts)

    asked = []
    assert scored(once).value == 0.2 and len(asked) == 2
    asked = []
    assert scored(once, attempts=1).value == 0 and len(asked) == 2


def chokes(on, how):
    """A judge that gives no verdict of what holds a text."""

    def answer(body):
        found, _ = parts(body)
        return how(body) if on in "".join(found.values()) else verdict(body, facts)

    return answer


def refusal(status):
    return lambda body: web.json_response({"error": {"message": "no"}}, status=status)


@pytest.mark.parametrize(
    "how",
    [
        lambda body: "no",
        lambda body: answer_of(body, BROKEN["cut off"]),
        refusal(400),
        refusal(413),
        refusal(422),
    ],
)
def test_a_reply_that_leaves_the_judge_speechless_is_worth_nothing(how):
    """Not left out, as what fails by itself: or bad replies had better make the judge fail."""
    judge = chokes("poison", how)
    got = scored(judge, "fact poison")
    assert got.value == 0 and got.parts == {}
    assert got.error.startswith("of this reply alone the judge gave no verdict: ")
    for other, worth in ((GOOD, 0), ("fact poison", None)):
        assert compared(judge, "fact poison", other).value == worth
    assert compared(judge, BAD, "fact poison").value is None, "it is the other one's doing"


def test_from_one_side_speechless_and_from_the_other_without_a_server():
    """Whichever comes first, it is known what the reply is worth."""
    for side in "AB":

        def answer(body, side=side):
            found, _ = parts(body)
            if "poison" not in "".join(found.values()):
                return verdict(body, facts)
            return "no" if "poison" in found[side] else refusal(503)(body)

        assert compared(answer, "fact poison", GOOD).value == 0


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_a_server_that_fails_at_a_reply_is_no_fault_of_it(status):
    assert scored(chokes("poison", refusal(status)), "fact poison").value is None


def test_one_failure_of_the_server_among_others_leaves_it_open():
    said = iter([refusal(400), refusal(503), refusal(400)])
    got = scored(lambda body: next(said, lambda body: verdict(body, facts))(body))
    assert got.value is None


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
def test_a_failure_of_the_server_is_no_reward(answer, error, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BYTES", 4096)
    got = scored(answer)
    assert got.value is None and got.parts == {}
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(got.error)


def test_a_judge_that_hangs_is_no_reward():
    async def answer(body):
        await asyncio.sleep(60)

    started = time.monotonic()
    got = scored(answer, options={"timeout_s": 0.2})
    assert got.value is None and "has not answered within 0.2 s" in got.error
    assert time.monotonic() - started < 10


def test_a_server_that_is_gone_is_no_reward():
    async def run():
        async with serving(parrot) as url:
            pass
        async with ChatClient(url) as opened:
            return await Judge(client=opened).score(RUBRIC, TASK, BAD)

    got = asyncio.run(run())
    assert got.value is None and "no server answers at" in got.error


def test_no_more_requests_at_once_than_allowed():
    now, most = 0, 0

    async def answer(body):
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.01)
        now -= 1
        return verdict(body, facts)

    async def run():
        # The last ones wait longer for a place than a request may take.
        async with client(answer, concurrency=3, timeout_s=0.3) as opened:
            judge = Judge(client=opened)
            return await asyncio.gather(*(judge.score(RUBRIC, TASK, BAD) for _ in range(120)))

    assert {reward.value for reward in asyncio.run(run())} == {0.2} and most == 3


def test_a_client_says_how_it_is_used():
    with pytest.raises(ValueError, match="timeout_s is 0 and concurrency 16; make both positive"):
        ChatClient("http://x", timeout_s=0)
    with pytest.raises(ValueError, match="concurrency 0"):
        ChatClient("http://x", concurrency=0)
    with pytest.raises(RuntimeError, match="use it within `async with`"):
        asyncio.run(ChatClient("http://x").chat([]))


def test_the_error_of_a_server_has_its_status():
    async def run():
        answer = web.json_response({"error": {"message": "no"}}, status=429)
        async with client(lambda body: answer) as opened:
            await opened.chat([])

    with pytest.raises(ServerError, match="^no$") as caught:
        asyncio.run(run())
    assert caught.value.status == 429


# Pairs


def test_pairs_are_judged_from_both_sides():
    def honest(body):
        return verdict(body, facts)

    got = compared(honest, GOOD, BAD)
    assert got.value == 1 and got.parts == {"first": 1, "second": 1, "right": 0.8, "kind": 0.8}
    got = compared(honest, BAD, GOOD)
    assert got.value == 0 and got.parts == {"first": 0, "second": 0, "right": 0.2, "kind": 0.2}
    got = compared(honest, GOOD, GOOD)
    assert got.value == 0.5 and got.parts["first"] == got.parts["second"] == 0.5


@pytest.mark.parametrize("side", "AB")
def test_a_judge_that_favours_a_side_says_nothing(side):
    got = compared(lambda body: verdict(body, facts, side), GOOD, BAD)
    assert got.value == 0.5 and {got.parts["first"], got.parts["second"]} == {0.0, 1.0}


def test_criteria_of_a_pair_are_means_of_both_sides():
    def answer(body):
        value = json.loads(verdict(body, facts, "tie"))
        value["scores"] = {"A": {"right": 8, "kind": 1}, "B": {"right": 2, "kind": 6}}
        return json.dumps(value)

    got = compared(answer, GOOD, BAD)
    assert got.parts == {"first": 0.5, "second": 0.5, "right": 0.5, "kind": 0.35}


@given(st.lists(st.integers(0, TOP), min_size=2, max_size=2), st.integers(-3, 3))
def test_sides_exchanged_give_the_same_ranking(said, favour):
    """Of a judge that adds to the first side; nobody wins who would lose on the other side."""

    class Biased:
        async def chat(self, messages, **fields):
            body = {"messages": messages}
            found, _ = parts(body)
            first, second = facts(found["A"]) + favour, facts(found["B"])
            winner = "tie" if first == second else "A" if first > second else "B"
            return {"message": {"content": verdict(body, facts, winner)}, "finish_reason": "stop"}

    async def run(a, b):
        return (await Judge(client=Biased()).compare(RUBRIC, TASK, a, b)).value

    a, b = ("fact " * count + "." for count in said)
    forth, back = asyncio.run(run(a, b)), asyncio.run(run(b, a))
    assert forth == 1 - back
    assert (forth - 0.5) * (said[0] - said[1]) >= 0
    if abs(said[0] - said[1]) > abs(favour):
        assert forth == (said[0] > said[1])


def test_a_tie_from_one_side_is_a_tie():
    def answer(body):
        found, _ = parts(body)
        return verdict(body, facts, "A" if found["A"] == GOOD else "tie")

    assert compared(answer, GOOD, BAD).value == 0.5


def test_a_pair_needs_both_verdicts():
    def answer(body):
        found, _ = parts(body)
        return verdict(body, facts) if found["A"] == GOOD else "no"

    got = compared(answer, GOOD, BAD)
    assert got.value is None and "no verdict" in got.error


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
def test_a_pair_s_verdict_is_read_as_strictly(change):
    got = compared(lambda body: json.dumps(json.loads(verdict(body, facts)) | change), GOOD, BAD)
    assert got.value is None


def test_what_is_too_long_is_cut_and_said():
    seen = {}

    def answer(body):
        seen.update(parts(body)[0])
        return verdict(body, facts)

    assert scored(answer, "fact " * 3 + "x" * 100, max_characters=12).value == 0.2
    assert seen["reply"] == "fact fact fa [103 characters left out]"


@given(st.text(max_size=60))
def test_no_text_is_a_verdict(text):
    with pytest.raises(ValueError):
        read_verdict(text, RUBRIC, "k", ["reply"])


def test_judges_and_rubrics_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="attempts is 0; make it at least 1"):
        Judge(client=None, attempts=0)
    with pytest.raises(ValueError, match="max_characters is 0"):
        Judge(client=None, max_characters=0)
    with pytest.raises(ValueError, match="rubric 'x' has no criteria"):
        Rubric("x", {})
    with pytest.raises(ValueError, match="criterion 'a' of rubric 'x' has no text"):
        Rubric("x", {"a": " "})


def test_shipped_rubrics():
    assert set(rubrics()) == {"general", "safety", "creativity", "emotional"}
    for rubric in rubrics().values():
        assert 3 <= len(rubric.criteria) <= 5
        assert all("10: " in text and " 0: " in text for text in rubric.criteria.values())
    assert rubrics()["safety"].criteria.keys() >= {"harmless", "not_overcautious"}
