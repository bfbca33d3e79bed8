"""The tools search, open and find: their results, and texts for invalid calls."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.search.passages import Corpus, Passage
from glm5_jax.envs.search.tools import SEARCH_TOOLS, SearchConfig, corpus_of, search_tools
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task
from glm5_jax.text.tool_calls import ToolCall

LONG = "Of Velm it is said. " + "And so on. " * 30 + "Velm ends here."
CORPUS = Corpus(
    [
        Passage("Velm", LONG),
        Passage("Orn", "A river\nat Velm."),
        Passage("Quo", "Nothing."),
        Passage("No text", ""),
    ]
)
TASK = Task(
    id="t",
    kind="search",
    messages=({"role": "user", "content": "?"},),
    data={"corpus": "own"},
    tools=SEARCH_TOOLS,
)
CONFIG = SearchConfig(results=2, shown=24, page=100)
BOX = Toolbox(search_tools(CONFIG, {"own": CORPUS}.__getitem__), [TASK])


def call_tool(name, task=TASK, **arguments):
    return asyncio.run(BOX(task, ToolCall(name, arguments, None, "")))


def test_search_shows_ids_titles_and_beginnings():
    assert (
        call_tool("search", query="river VELM")
        == "[1] Orn: A river at Velm.\n[0] Velm: Of Velm it is said. And ..."
    )
    assert (
        call_tool("search", query="nothing at all")
        == "[2] Quo: Nothing.\n[1] Orn: A river at Velm."
    )
    assert call_tool("search", query="xyz") == "No passage has any of these words."


def test_open_shows_passage_by_page():
    assert call_tool("open", id=1) == "[1] Orn\nA river\nat Velm."
    pages = [call_tool("open", id=0, page=page) for page in range(1, 5)]
    assert [page.partition("\n")[0] for page in pages] == [
        f"[0] Velm (page {i} of 4)" for i in range(1, 5)
    ]
    assert "".join(page.partition("\n")[2] for page in pages) == LONG
    assert call_tool("open", id=0) == pages[0] and call_tool("open", id=3) == "[3] No text\n"


def test_find_shows_positions_of_text():
    first, last = call_tool("find", id=0, text=" velm").splitlines()
    assert first == "page 1: Of Velm it is said. ..."
    assert last.startswith("page 4: ... ") and last.endswith("Velm ends here.")
    assert call_tool("find", id=0, text="and so on").splitlines()[-1] == "and 28 more"
    assert call_tool("find", id=2, text="velm") == "Passage 2 does not have this text."
    assert call_tool("find", id=0, text=".*") == "Passage 0 does not have this text."


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("search", {"query": 3}, "query is no text"),
        ("search", {"query": " "}, "query is empty"),
        ("search", {"query": "x" * 501}, "query is longer than 500 characters"),
        ("search", {}, "search needs query"),
        ("open", {"id": 4}, "id must be a whole number from 0 to 3"),
        ("open", {"id": -1}, "id must be"),
        ("open", {"id": "1"}, "id must be"),
        ("open", {"id": True}, "id must be"),
        ("open", {"id": 1.0}, "id must be"),
        ("open", {"id": 0, "page": 5}, "page must be a whole number from 1 to 4"),
        ("open", {"id": 0, "page": 0}, "page must be"),
        ("open", {"id": 0, "page": "2"}, "page must be"),
        ("find", {"id": 9, "text": "x"}, "id must be"),
        ("find", {"id": 0, "text": None}, "text is no text"),
        ("find", {"id": 0}, "find needs text"),
        ("open", {"id": 0, "line": 2}, "open has no line"),
    ],
)
def test_answers_bad_arguments_with_text(name, arguments, why):
    assert call_tool(name, **arguments).startswith(f"Error: {why}")


anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=()), max_size=9)
)


@given(anything, anything, anything)
def test_answers_any_call_with_encodable_text(one, two, three):
    for answer in (
        call_tool("search", query=one),
        call_tool("open", id=one, page=two),
        call_tool("find", id=three, text=one),
    ):
        assert answer.encode()


def test_task_without_passages_raises_tool_error():
    for data in ({}, {"corpus": "poems"}):
        with pytest.raises(ToolError, match="task 'u' has no passages"):
            call_tool(
                "search",
                Task(id="u", kind="search", messages=TASK.messages, data=data, tools=SEARCH_TOOLS),
                query="x",
            )
    with pytest.raises(KeyError, match="poems"):
        corpus_of("poems")


@pytest.mark.parametrize("field", ["results", "shown", "page"])
def test_rejects_numbers_that_are_not_positive(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        SearchConfig(**{field: 0})
