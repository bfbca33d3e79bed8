"""Questions over passages: following the hops answers all of them, and other solvers answer none."""

import asyncio
import collections
import dataclasses
import re

import numpy as np
import pytest

from glm5_jax.agents.context import ContextConfig, TokenCounter
from glm5_jax.agents.loop import ChatAgent, LoopConfig
from glm5_jax.envs.reasoning.task_sources import BOXED, TaskConfig, tasks
from glm5_jax.envs.reasoning.verifiers import VerifierConfig, verifier_for
from glm5_jax.envs.search import worlds
from glm5_jax.envs.search.answers import exact, f1, normalize
from glm5_jax.envs.search.passages import says
from glm5_jax.envs.search.problems import check
from glm5_jax.rl.types import Attempt
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import ToolCall
from tests.agents.scripted import Scripted
from tests.envs.search_solvers import BOX, attempt, follow, one_search

VERIFY = verifier_for("search")


def make_tasks(kind, size, **options):
    return list(tasks(TaskConfig(kind=kind, size=size, held_out_fraction=0, **options)))


def scores(some, solver, verify=VERIFY):
    async def all_of_them():
        return [(await verify(task, await attempt(task, solver))).value for task in some]

    return np.array(asyncio.run(all_of_them()))


async def nothing(task, call):
    return ""


@pytest.mark.parametrize("hops", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_generated_worlds_need_hops(hops):
    some = make_tasks("worlds", 50, hops=hops, instruction=BOXED)
    assert (scores(some, follow) == 1).all()
    assert (scores(some, nothing) == 0).all()
    assert (scores(some, one_search) == 0).mean() >= 0.95


def test_hops_solve_all_of_musique():
    some = make_tasks("musique", 100)
    assert len(some) == 46 and (scores(some, follow) == 1).all()
    assert (scores(some, nothing) == 0).all()


def test_one_search_solver_reads_its_results():
    """It is no straw man: if all passages are found together, it has the answer."""
    [task] = make_tasks("worlds", 1, hops=3)
    ids = [hop["passage"] for hop in task.data["hops"]]

    async def call(name, arguments):
        return "\n".join(f"[{i}] x" for i in ids)

    assert asyncio.run(one_search(task, call)) == task.data["answers"][0]


@pytest.mark.parametrize("hops", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_hop_is_needed(hops):
    for number in range(30):
        problem = worlds.problem(hops, 5, number)
        corpus = worlds.corpus_named(worlds.world_name(hops, 5, number))
        check(problem, corpus)
        [*ids] = corpus.index.search(problem.question, 5)
        assert not {hop.passage for hop in problem.hops} <= set(ids)
        # Without its passage, the known entities do not lead to a hop's answer.
        ways = [
            corpus.passages[problem.hops[0].passage].title,
            *(hop.answer for hop in problem.hops),
        ]
        for at, text in enumerate(corpus.plain_texts):
            positions = [i for i, name in enumerate(ways) if says(text, name)]
            assert len(positions) < 2 or positions[1] - positions[0] == 1 and len(positions) == 2, (
                problem,
                at,
            )
        assert [says(corpus.plain_texts[h.passage], h.answer) for h in problem.hops] == [
            True
        ] * hops


def test_world_depends_on_name_and_is_unique():
    one = worlds.corpus_named("world2-seed0-0")
    assert one.passages == worlds.corpus_named("world2-seed0-0").passages
    others = ["world3-seed0-0", "world2-seed1-0", "world2-seed0-1"]
    for other in others:
        shared = {p.title for p in one.passages} & {
            p.title for p in worlds.corpus_named(other).passages
        }
        assert len(shared) < 8
    assert worlds.corpus_named("musique") is None
    words = [w for p in one.passages for w in p.title.split() if w not in ("Songs", "of", "Works")]
    assert len(words) == len(set(words)) and len(one.passages) == 80


@pytest.mark.parametrize("size", [200, pytest.param(600, marks=pytest.mark.slow)])
def test_answers_are_not_guessable(size):
    some = make_tasks("worlds", size)
    answers = collections.Counter(task.data["answers"][0] for task in some)
    assert answers.most_common(1)[0][1] <= 5
    relations = collections.Counter(
        re.match(r"What is the (.*?) of", t.messages[0]["content"])[1] for t in some
    )
    assert (
        len(relations) == 10 and max(relations.values()) < size / 5
    )  # works of authors are never an end


def test_solves_with_discarded_contexts():
    """An agent that uses its notes answers although all results of its tools were discarded."""
    [task] = make_tasks("worlds", 1, hops=4)
    counter = TokenCounter(Tokenizer.default())
    wants = []

    async def call(name, arguments):
        wants.append((name, arguments))
        return await BOX(task, ToolCall(name, arguments, None, ""))

    answer = asyncio.run(follow(task, call))
    client = Scripted([[want] for want in wants] + [answer])
    config = LoopConfig(
        context=ContextConfig(keep_rounds=2, max_prompt_tokens=counter.prompt(task) + 400)
    )
    trace = asyncio.run(ChatAgent(client=client, tools=BOX, counter=counter, config=config)(task))
    assert trace.restarts and trace.ended == "answer" and not trace.failures
    results = [m["content"] for m in trace.messages if m["role"] == "tool"]
    assert len(results) == len(wants) > 8 and not any(text.startswith("Error") for text in results)
    assert asyncio.run(VERIFY(task, trace.attempt)).value == 1


TASK = make_tasks("musique", 1)[0]


def reward(
    reply,
    config=VerifierConfig(),
    finish_reason="stop",
    answers=("the Anglican Communion", "C. of E."),
):
    task = dataclasses.replace(TASK, data={"answers": list(answers)})
    sample = Attempt(
        messages=({"role": "assistant", "content": reply},), finish_reason=finish_reason
    )
    return asyncio.run(verifier_for("search", config)(task, sample))


@pytest.mark.parametrize(
    ("reply", "right", "share"),
    [
        ("the Anglican Communion", 1, 1),
        ("Anglican   communion.", 1, 1),
        ("It is old. Answer: Anglican Communion", 1, 1),
        ("So \\boxed{\\text{an Anglican Communion}}", 1, 1),
        ("**C of E**", 1, 1),
        ("Anglican", 0, 2 / 3),
        ("the Anglican Anglican Communion", 0, 4 / 5),
        ("Is it the Anglican Communion?", 0, 2 * 2 / (4 + 2)),
        ("Anglican Communion or Rome or Constantinople", 0, 2 * 2 / (6 + 2)),
        ("Rome", 0, 0),
        ("", 0, 0),
        ("the", 0, 0),
        ("\\boxed{Rome} not Anglican Communion", 0, 0),
    ],
)
def test_compares_answers_like_squad(reply, right, share):
    graded = reward(reply)
    assert graded.value == graded.parts["right"] == right
    assert graded.parts["f1"] == pytest.approx(share)
    assert reward(reply, VerifierConfig(search="f1")).value == pytest.approx(share)


def test_incomplete_attempts_score_zero_or_nothing():
    for config in (VerifierConfig(), VerifierConfig(search="f1")):
        assert reward("the Anglican Communion", config, "length").value == 0
        assert reward("the Anglican Communion", config, "failed").value is None
        assert reward("x", config, answers=()).value is None
    assert reward("").error == "the reply claims nothing"
    with pytest.raises(ValueError, match="search is 'bleu'"):
        VerifierConfig(search="bleu")


def test_equals_vectors_of_squad():
    assert normalize("The  Cat, (a) cat's An-them!") == "cat cats anthem"
    assert exact("a cat", ["Cat!"]) and not exact("", ["Cat"])
    assert f1("cat cat dog", ["cat", "cat cat cat cow"]) == pytest.approx(4 / 7)
    assert f1("x", ["y"]) == 0 and f1("", ["y"]) == 0


@pytest.mark.parametrize(
    ("known", "wrong", "right"),
    [
        ("3.5", "35", "3.5."),
        ("-5", "5", "(-5)"),
        ("$1,200.50", "$1,20050", "1200.50"),
        ("C++", "C#", "c++"),
        ("1990-95", "1990.95", "1990-95"),
        ("U.S.", "S.U.", "US"),
        ("O'Brien", "Brian", "O’Brien"),
        ("-7", "7", "−7"),
        ("Jean-Luc", "Luc", "“Jean–Luc”。"),
    ],
)
def test_keeps_signs_that_make_another_answer(known, wrong, right):
    assert not exact(wrong, [known]) and f1(wrong, [known]) == 0
    assert exact(right, [known])


@pytest.mark.parametrize("claim", ["", " ", "an", ".", "the a"])
def test_answer_without_words_scores_zero(claim):
    """SQuAD's normalisation turns "The The" and "!!!" into nothing, like an empty answer."""
    known = ["The The", "!!!"]
    assert not exact(claim, known) and f1(claim, known) == 0
    assert exact(" the the", known) and f1("!!!", known) == 1
