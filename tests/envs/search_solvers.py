"""Scripted solvers of search tasks, which use only the texts of the tools."""

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
    """Returns the answer by the hops: searches and opens each passage, and finds the answer in it.

    call: call(name, arguments) returns the result of a tool.
    """
    answers = []
    for hop in (Hop(**hop) for hop in task.data["hops"]):
        question, title = (
            fill_question(hop, answers),
            corpus_of(task.data["corpus"]).passages[hop.passage].title,
        )
        # The last query contains the answer, as of a searcher who believes to know it.
        for query in (question, title, f"{title} {question}", f"{question} {hop.answer}"):
            results = await call("search", {"query": query})
            if f"[{hop.passage}] " in results:
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
    """Returns the answer by one search for the question.

    Reads all results in full, follows their relations as far as possible, and then guesses.
    """
    question = task.messages[0]["content"].splitlines()[0]
    results = await call("search", {"query": question})
    ids = map(int, re.findall(r"(?m)^\[(\d+)\]", results))
    passages = [corpus_of(task.data["corpus"]).passages[i] for i in ids]
    *wanted, name = re.fullmatch(r"What is (.*)\?", question)[1].split(
        " of ", question.count("the ")
    )
    wanted = [one.removeprefix("the ") for one in wanted]
    for relation in reversed(wanted):
        name = related_entity(passages, relation, name)
        if name is None:
            break
    guesses = (related_entity(passages, wanted[0], passage.title) for passage in passages[1:])
    return name or next(filter(None, guesses), "unknown")


def related_entity(passages, asked_for, name):
    """Returns the entity that the passages relate to a name, or None."""
    forms = itertools.chain(*(r.templates for r in RELATIONS if r.noun == asked_for))
    for form, passage in itertools.product(forms, passages):
        pattern = re.escape(form).replace(r"\{0\}", re.escape(name)).replace(r"\{1\}", r"([\w ]+?)")
        if match := re.search(rf"(?:^|(?<=\. )){pattern}", passage.text):
            return match[1]
    return None


async def attempt(task, solver) -> Attempt:
    """Returns the attempt of a solver at a task, with a toolbox."""
    messages = []

    async def call(name, arguments):
        answer = await BOX(task, ToolCall(name, arguments, None, ""))
        calls = [{"function": {"name": name, "arguments": arguments}}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "content": answer})
        return answer

    answer_text = await solver(task, call)
    return Attempt(messages=(*messages, {"role": "assistant", "content": answer_text}))
