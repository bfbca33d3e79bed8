"""Implements the tools `search`, `open` and `find` over a task's passages (named in GLM-5 4.2.4; `python`:
`envs.reasoning.python_tool`).

No tool keeps the open passage as state: `find` takes its id, because a call may follow a context that was
discarded, and attempts at one task share nothing. Errors of a call are returned as its answer.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.agents.tools import Tool
from glm5_jax.data.sources import ASSETS
from glm5_jax.envs.search import worlds
from glm5_jax.envs.search.passages import Corpus, Passage
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task

MUSIQUE = "musique"
MAX_CHARACTERS = 500  # longest query, and longest text to find


def _function(name: str, description: str, **properties: str) -> dict[str, Any]:
    kinds = {"id": "integer", "page": "integer"}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kinds.get(key, "string"), "description": text}
                    for key, text in properties.items()
                },
                "required": [key for key in properties if key != "page"],
            },
        },
    }


# In OpenAI's format of function tools.
SEARCH_TOOLS = (
    _function(
        "search",
        "Search the passages by words. Shows the ids, titles and beginnings of the best.",
        query="What to look for.",
    ),
    _function(
        "open", "Read a passage.", id="The passage's id.", page="Which page of it, 1 by default."
    ),
    _function(
        "find",
        "Show where a text stands in a passage, without regard to case.",
        id="The passage's id.",
        text="What to find.",
    ),
)


@dataclasses.dataclass(kw_only=True, frozen=True)
class SearchConfig:
    """Limits of what the tools show; not given in GLM-5. Raises ValueError for values that are not positive.

    Attributes:
      results: maximum number of results of a search, and of matches that `find` shows.
      shown: length of a result's excerpt and of the text around a match, in characters.
      page: length of a page of a passage that `open` shows, in characters.
    """

    results: int = 5
    shown: int = 160
    page: int = 4000

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@functools.lru_cache(256)  # enough for all tasks of a step
def corpus_of(name: str) -> Corpus:
    """Returns the shipped passages or those of a generated world. Raises KeyError for another name."""
    if name == MUSIQUE:
        return Corpus.read(ASSETS / "musique_passages.jsonl")
    corpus = worlds.corpus_named(name)
    if corpus is None:
        raise KeyError(name)
    return corpus


def search_tools(
    config: SearchConfig = SearchConfig(), corpora: Callable[[str], Corpus] = corpus_of
) -> dict[str, Tool]:
    """Returns the tools by name, for a `Toolbox`.

    Args:
      config: limits of what the tools show.
      corpora: function that returns the passages for task.data["corpus"]; its KeyError for an unknown name
          counts as the environment's failure.
    """
    return {
        "search": functools.partial(_search, config, corpora),
        "open": functools.partial(_open, config, corpora),
        "find": functools.partial(_find, config, corpora),
    }


async def _search(config: SearchConfig, corpora, task: Task, arguments: Mapping[str, Any]) -> str:
    query = arguments.get("query")
    if wrong := _argument_problem("query", query):
        return wrong
    assert isinstance(query, str), "the query was checked"
    corpus = _corpus(corpora, task)
    results = corpus.index.search(query, config.results)
    if not results:
        return "No passage has any of these words."
    return "\n".join(_result(i, corpus.passages[i], config.shown) for i in results)


async def _open(config: SearchConfig, corpora, task: Task, arguments: Mapping[str, Any]) -> str:
    passage = _passage(_corpus(corpora, task), arguments.get("id"))
    if isinstance(passage, str):
        return passage
    page, size = arguments.get("page", 1), config.page
    last = max(1, -(-len(passage.text) // size))
    if type(page) is not int or not 1 <= page <= last:
        return f"Error: page must be a whole number from 1 to {last}"
    of = f" (page {page} of {last})" if last > 1 else ""
    return (
        f"[{arguments['id']}] {passage.title}{of}\n{passage.text[(page - 1) * size : page * size]}"
    )


async def _find(config: SearchConfig, corpora, task: Task, arguments: Mapping[str, Any]) -> str:
    text = arguments.get("text")
    if wrong := _argument_problem("text", text):
        return wrong
    assert isinstance(text, str), "the text was checked"
    passage = _passage(_corpus(corpora, task), arguments.get("id"))
    if isinstance(passage, str):
        return passage
    matches = list(re.finditer(re.escape(text.strip()), passage.text, re.IGNORECASE))
    if not matches:
        return f"Passage {arguments['id']} does not have this text."
    shown = [_around(passage.text, match, config) for match in matches[: config.results]]
    more = len(matches) - len(shown)
    return "\n".join(shown + [f"and {more} more"] * (more > 0))


def _argument_problem(name: str, value: Any) -> str:
    """Returns what is wrong with an argument that must be text, or ""."""
    if not isinstance(value, str):
        return f"Error: {name} is no text"
    if not value.strip():
        return f"Error: {name} is empty"
    if len(value) > MAX_CHARACTERS:
        return f"Error: {name} is longer than {MAX_CHARACTERS} characters"
    return ""


def _corpus(corpora: Callable[[str], Corpus], task: Task) -> Corpus:
    try:
        return corpora(task.data["corpus"])
    except KeyError as error:
        raise ToolError(f"task {task.id!r} has no passages: {error}") from error


def _passage(corpus: Corpus, number: Any) -> Passage | str:
    """Returns a passage, or what is wrong with its id."""
    last = len(corpus.passages) - 1
    if type(number) is not int or not 0 <= number <= last:
        return f"Error: id must be a whole number from 0 to {last}"
    return corpus.passages[number]


def _result(number: int, passage: Passage, limit: int) -> str:
    text = " ".join(passage.text.split())
    text = text if len(text) <= limit else f"{text[:limit].rstrip()} ..."
    return f"[{number}] {passage.title}: {text}"


def _around(text: str, match: re.Match, config: SearchConfig) -> str:
    """Returns a match with the text on both sides of it, and its page."""
    room = config.shown // 2
    first, last = max(0, match.start() - room), min(len(text), match.end() + room)
    page = match.start() // config.page + 1
    excerpt = " ".join(text[first:last].split())
    return f"page {page}: {'... ' * (first > 0)}{excerpt}{' ...' * (last < len(text))}"
