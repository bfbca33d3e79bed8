"""Scripted ways to attempt tasks of search, by the words of the tools alone."""

import itertools
import re

from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.search.problems import Hop, fill_question
from glm5_jax.envs.search.tools import corpus_of, search_tools
from glm5_jax.envs.search.worlds import RELATIONS
from glm5_jax.rl.types import Attempt
from glm5_jax.text.tool_calls import ToolCall

BOX = Toolbox(search_tools())


async def follow(task, call) -> str:
    """The answer by the hops: each passage is searched for, opened, and its answer found in it. call(name, arguments)
    gives a tool's answer."""
    answers = []
    for hop in (Hop(**hop) for hop in task.data["hops"]):
        question, title = (
            fill_question(hop, answers),
            corpus_of(task.data["corpus"]).passages[hop.passage].title,
        )
        # Last what somebody searches for who believes to know the answer.
        for query in (question, title, f"{title} {question}", f"{question} {hop.answer}"):
            found = await call("search", {"query": query})
            if f"[{hop.passage}] " in found:
                break
        else:
            return "I cannot find it."
        read = await call("open", {"id": hop.passage})
        assert read.startswith(f"[{hop.passage}] {title}\n")
        answers.append(hop.answer)
    for answer in task.data["answers"]:
        if (await call("find", {"id": hop.passage, "text": answer})).startswith("page "):
            break
    return f"The answer is {task.data['answers'][0]}."


async def one_search(task, call) -> str:
    """The answer by one search for the question: all that it shows is read whole, and what is said there is followed as far
    as it goes, then guessed."""
    question = task.messages[0]["content"].splitlines()[0]
    found = await call("search", {"query": question})
    ids = map(int, re.findall(r"(?m)^\[(\d+)\]", found))
    passages = [corpus_of(task.data["corpus"]).passages[i] for i in ids]
    *wanted, name = re.fullmatch(r"What is (.*)\?", question)[1].split(
        " of ", question.count("the ")
    )
    wanted = [one.removeprefix("the ") for one in wanted]
    for relation in reversed(wanted):
        name = said(passages, relation, name)
        if name is None:
            break
    guesses = (said(passages, wanted[0], passage.title) for passage in passages[1:])
    return name or next(filter(None, guesses), "unknown")


def said(passages, asked_for, name):
    """What passages say that stands in a relation to a name."""
    forms = itertools.chain(*(r.templates for r in RELATIONS if r.noun == asked_for))
    for form, passage in itertools.product(forms, passages):
        pattern = re.escape(form).replace(r"\{0\}", re.escape(name)).replace(r"\{1\}", r"([\w ]+?)")
        if found := re.search(rf"(?:^|(?<=\. )){pattern}", passage.text):
            return found[1]
    return None


async def attempt(task, solver) -> Attempt:
    """What a solver makes of a task, with a toolbox."""
    messages = []

    async def call(name, arguments):
        answer = await BOX(task, ToolCall(name, arguments, None, ""))
        calls = [{"function": {"name": name, "arguments": arguments}}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "content": answer})
        return answer

    said = await solver(task, call)
    return Attempt(messages=(*messages, {"role": "assistant", "content": said}))
