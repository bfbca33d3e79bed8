"""Building by a scripted model: what is recorded, tried, refused and accepted, and instances of what was built."""

import asyncio
import contextlib

import pytest

from glm5_jax.agents.context import TokenCounter
from glm5_jax.envs.swe.agent_builder import AgentBuilder, AgentLimits
from glm5_jax.envs.swe.builder import BuildError
from glm5_jax.envs.swe.recipes import RecipeError, find_recipe
from glm5_jax.envs.swe.recipes.planting import make_draw
from glm5_jax.envs.swe.validation import make_instance
from glm5_jax.text.tokenizer import Tokenizer
from tests.agents.scripted import Scripted
from tests.envs.swe.tiny_project import BASE, FAIL_TO_PASS, draft_of, make_tiny_change

PYTEST = "PYTHONPATH=/tools/python:. python3 -m pytest -q -p no:cacheprovider"
JUNIT = f"{PYTEST} --junitxml=/results/junit.xml tests"
VERBOSE = f"{PYTEST} -vv tests"
PARSER = r"""
import json, re, sys
text = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdin.read()).replace("\r", "")
words = {"PASSED": "pass", "FAILED": "fail", "SKIPPED": "skip"}
print(json.dumps({m[1]: words[m[2]] for m in re.finditer(r"^(\S+::\S+) (PASSED|FAILED|SKIPPED)\b", text, re.M)}))
"""
SET_UP = [
    [("bash", {"command": "false"})],
    [("bash", {"command": "echo 1 > built"})],
    "It is ready.",
]
VERIFY = [[("try_tests", {"test_cmds": [JUNIT], "log_parser": "pytest"})], "None"]


def submit(*commands, parser="pytest", **fields):
    return [("submit", {"test_cmds": list(commands), "log_parser": parser, **fields})]


def agent(builder, replies, traces, **limits) -> AgentBuilder:
    client = Scripted(replies)
    return AgentBuilder(
        builder.store,
        lambda: contextlib.nullcontext(client),
        TokenCounter(Tokenizer.load("bytes")),
        AgentLimits(**limits),
        on_trace=lambda stage, trace: traces.append((stage, trace)),
    )


def answers(traces, stage: str) -> list[str]:
    """Returns what the tools answered in a stage."""
    return [
        m["content"] for s, t in traces if s == stage for m in t.messages if m["role"] == "tool"
    ]


@pytest.mark.slow
def test_builds_project_and_makes_instance(builder):
    traces = []
    replies = [
        *SET_UP,
        *VERIFY,
        submit(f"{PYTEST} --junitxml=/results/junit.xml tests/test_calc.py"),
        submit("true"),
        submit(JUNIT),
        "Done.",
    ]
    model = agent(builder, replies, traces)

    async def make():
        change = await make_tiny_change()
        return await make_instance(draft_of(change), change, model)

    result = asyncio.run(make())

    assert result.invalid_reason is None
    assert result.instance.FAIL_TO_PASS == FAIL_TO_PASS
    assert result.instance.environment.recipe == "agent:python-pytest/1"
    assert result.built.record.setup_layer == ("echo 1 > built",)
    assert [result.gradings[name].reward for name in ("gold", "empty", "last_hunk")] == [1, 0, 0]
    refused = answers(traces, "organise")
    assert "the commands must run every test file" in refused[0]
    assert "no test passes" in refused[1] or "cannot be read" in refused[1]
    assert refused[2].startswith("accepted")
    assert "2 tests pass" in answers(traces, "verify")[0]


@pytest.mark.slow
def test_accepts_generated_parser_after_its_checks(builder):
    traces = []
    literal = PARSER + "\nKNOWN = 'tests/test_calc.py::test_step'\n"
    replies = [
        *SET_UP,
        *VERIFY,
        submit(VERBOSE, parser="generated", log_parser_source="print({})"),
        submit(VERBOSE, parser="generated", log_parser_source=literal),
        submit(VERBOSE, parser="generated", log_parser_source=PARSER),
        "Done.",
    ]

    built = asyncio.run(agent(builder, replies, traces).build(BASE, ["tests/test_calc.py"]))

    assert built.plan.log_parser_source == PARSER
    assert set(built.record.test_status.values()) == {"pass"}
    refused = answers(traces, "organise")
    assert refused[0].startswith("refused: ") and "holds" in refused[1]


@pytest.mark.slow
def test_returns_complaint_to_next_set_up_and_gives_up(builder):
    traces = []
    replies = [*SET_UP, "The library is missing.", *SET_UP, "It is still missing."]

    with pytest.raises(BuildError, match="gave up after 2 trials: It is still missing"):
        asyncio.run(agent(builder, replies, traces).build(BASE))

    second = [trace for stage, trace in traces if stage == "setup"]
    assert len(second) == 2


def test_refuses_malformed_submissions(builder):
    traces = []
    replies = [
        *SET_UP,
        [("try_tests", {"test_cmds": "pytest", "log_parser": "pytest"})],
        [("try_tests", {"test_cmds": ["true"], "log_parser": "nothing"})],
        *VERIFY,
        [("submit", {"test_cmds": [], "log_parser": "pytest"})],
        submit("true", parser="nothing"),
        submit("true", parser="generated"),
        "I give up.",
    ]

    with pytest.raises(BuildError, match="no submission was accepted: a log_parser_source"):
        asyncio.run(agent(builder, replies, traces).build(BASE))

    tried, submitted = answers(traces, "verify"), answers(traces, "organise")
    assert "give a list of commands" in tried[0] and "try a built-in one" in tried[1]
    assert "test_cmds is empty" in submitted[0] and "use one of automake" in submitted[1]


def test_finds_recipe_of_model_without_commands():
    recipe = find_recipe("agent:python-pytest/1")

    assert recipe.language == "python"
    draw = make_draw(BASE, (), 1)
    assert recipe.canaries(BASE, ["tests/test_calc.py"], draw).passing.startswith("test_a")
    with pytest.raises(RecipeError, match="take those of the instance"):
        recipe.plan(BASE, [])


def test_rejects_limits_out_of_range():
    with pytest.raises(ValueError, match="trials is 0"):
        AgentLimits(trials=0)
