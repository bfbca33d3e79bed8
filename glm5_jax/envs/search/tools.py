"""The tools `search`, `open` and `find` over a task's passages (GLM-5 4.2.4 names them, and `python`).

Which passage is open is no state: `find` names it, as a call may come behind a context that was discarded, and attempts
at one task share nothing. What is wrong with a call is said in its answer.
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
from glm5_jax.rl.rollout import ToolError
from glm5_jax.rl.types import Task

MUSIQUE = "musique"
MOST_CHARACTERS = 500  # of a query, and of what is to be found


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


# As OpenAI describes functions.
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


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """How much is shown; GLM-5 says nothing of it. Construction refuses what is not positive (ValueError).

    Attributes:
      results: of a search; also of places that `find` shows.
      shown: characters of a result's beginning, and of what stands around a place.
      page: characters of a passage that `open` shows at once.
    """

    results: int = 5
    shown: int = 160
    page: int = 4000

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@functools.lru_cache(256)  # all of a step's tasks
def corpus_of(name: str) -> Corpus:
    """The shipped passages or those of a made-up world. KeyError for another name."""
    if name == MUSIQUE:
        return Corpus.read(ASSETS / "musique_passages.jsonl")
    corpus = worlds.corpus_named(name)
    if corpus is None:
        raise KeyError(name)
    return corpus


def search_tools(
    config: SearchConfig = SearchConfig(), corpora: Callable[[str], Corpus] = corpus_of
) -> dict[str, Tool]:
    """By name, for a `Toolbox`. corpora: the passages by task.data["corpus"]; KeyError for a name that it does not know,
    which is the environment's failure."""
    return {
        "search": functools.partial(_search, config, corpora),
        "open": functools.partial(_open, config, corpora),
        "find": functools.partial(_find, config, corpora),
    }


async def _search(config: SearchConfig, corpora, task: Task, arguments: Mapping[str, Any]) -> str:
    query = arguments.get("query")
    if wrong := _wrong("query", query):
        return wrong
    corpus = _corpus(corpora, task)
    found = corpus.index.search(query, config.results)
    if not found:
        return "No passage has any of these words."
    return "\n".join(_result(i, corpus.passages[i], config.shown) for i in found)


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
    if wrong := _wrong("text", text):
        return wrong
    passage = _passage(_corpus(corpora, task), arguments.get("id"))
    if isinstance(passage, str):
        return passage
    places = list(re.finditer(re.escape(text.strip()), passage.text, re.IGNORECASE))
    if not places:
        return f"Passage {arguments['id']} does not have this text."
    shown = [_around(passage.text, place, config) for place in places[: config.results]]
    more = len(places) - len(shown)
    return "\n".join(shown + [f"and {more} more"] * (more > 0))


def _wrong(name: str, value: Any) -> str:
    """What is wrong with an argument that must be text, "" if nothing."""
    if not isinstance(value, str):
        return f"Error: {name} is no text"
    if not value.strip():
        return f"Error: {name} is empty"
    if len(value) > MOST_CHARACTERS:
        return f"Error: {name} is longer than {MOST_CHARACTERS} characters"
    return ""


def _corpus(corpora: Callable[[str], Corpus], task: Task) -> Corpus:
    try:
        return corpora(task.data["corpus"])
    except KeyError as error:
        raise ToolError(f"task {task.id!r} has no passages: {error}") from error


def _passage(corpus: Corpus, number: Any) -> Passage | str:
    """Or what is wrong with the id."""
    last = len(corpus.passages) - 1
    if type(number) is not int or not 0 <= number <= last:
        return f"Error: id must be a whole number from 0 to {last}"
    return corpus.passages[number]


def _result(number: int, passage: Passage, most: int) -> str:
    text = " ".join(passage.text.split())
    text = text if len(text) <= most else f"{text[:most].rstrip()} ..."
    return f"[{number}] {passage.title}: {text}"


def _around(text: str, place: re.Match, config: SearchConfig) -> str:
    """A place and what stands on both sides of it."""
    room = config.shown // 2
    first, last = max(0, place.start() - room), min(len(text), place.end() + room)
    page = place.start() // config.page + 1
    said = " ".join(text[first:last].split())
    return f"page {page}: {'... ' * (first > 0)}{said}{' ...' * (last < len(text))}"
