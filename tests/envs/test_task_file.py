"""Tests of task files: jsonl lines and Python modules to tasks, tools and verifiers."""

import asyncio
import json
import textwrap

import pytest

from experiments.rl_reasoning import Verifiers, make_toolbox
from glm5_jax.envs.reasoning.task_file import TaskFile, define_tool, load_tasks
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.rl.types import Attempt, Task
from glm5_jax.text.tool_calls import ToolCall


def write(folder, rows, name="mine.jsonl"):
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_module(folder, code, name="mine.py"):
    file = folder / name
    file.write_text(textwrap.dedent(code))
    return str(file)


def reply(text, **fields):
    return Attempt(messages=({"role": "assistant", "content": text},), **fields)


def judge(share, task, attempt):
    verifiers = Verifiers(VerifierConfig(), False, (share,))
    try:
        return asyncio.run(verifiers(task, attempt))
    finally:
        verifiers.close()


def test_selects_verifier_by_fields(tmp_path):
    rows = [
        {"question": "7 * 8?", "answer": 56},
        {"question": "Which?", "choices": ["a", "b"], "answer": "b"},
        {"question": "Write f.", "tests": "assert f(2) == 4", "names": ["f"]},
        {"question": "Add.", "cases": [{"input": "1", "output": "2"}]},
        {"question": "Who?", "answers": ["Euler"]},
        {"question": "8 * 9?", "answer": "72", "min_calls": 1, "tools": ["calculate"]},
        {"messages": [{"role": "user", "content": "1?"}], "answer": "1", "verifier": "math"},
    ]
    tasks = load_tasks(write(tmp_path, rows)).tasks
    kinds = ["math", "science", "code", "code", "search", "tir", "math"]
    assert [task.kind for task in tasks] == kinds
    assert [task.id for task in tasks] == [f"mine-{n}" for n in range(7)]
    assert tasks[0].data == {"answer": "56"}
    assert tasks[1].data == {"choices": 2, "answer": "B"}
    assert tasks[1].messages[-1]["content"] == "Which?\nA) a\nB) b"
    assert [tool["function"]["name"] for tool in tasks[5].tools] == ["calculate"]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"answer": "1"}, '"question" or "messages"'),
        ({"question": "1?", "messages": []}, '"question" or "messages"'),
        ({"question": " ", "answer": "1"}, "question is ' '"),
        ({"question": "1?"}, 'no "answer"'),
        ({"question": "1?", "answer": ["1"]}, "answer is ['1']"),
        ({"question": "1?", "answer": "1", "verifier": "mathematics"}, "use one of math"),
        ({"question": "1?", "answer": "c", "choices": ["a", "b"]}, "A to B"),
        ({"question": "1?", "answer": "a", "choices": ["a"]}, "give 2 to"),
        ({"question": "1?", "answer": "1", "tools": ["search_web"]}, "calculate, python"),
        ({"question": "1?", "answer": "1", "tools": [["calculate"]]}, "calculate, python"),
        ({"question": "1?", "answer": "1", "tools": "calculate"}, "give a list of names"),
        ({"question": "1?", "answer": "1", "tools": None}, "give a list of names"),
        ({"messages": [{"role": "assistant", "content": "1"}], "answer": "1"}, "'assistant'"),
        ({"messages": "1?", "answer": "1"}, "messages is '1?'"),
        (
            {
                "messages": [
                    {"role": "wizard", "content": "1?"},
                    {"role": "user", "content": "2?"},
                ],
                "answer": "1",
            },
            "wizard",
        ),
        ({"question": "1?", "answer": "1", "verifier": ["math"]}, "verifier is ['math']"),
        ({"question": "1?", "answers": "Oslo"}, "answers is 'Oslo'"),
        ({"question": "1?", "answers": [None]}, "answers is [None]"),
        ({"question": "1?", "tests": "assert f()", "names": "f"}, "names is 'f'"),
        ({"question": "1?", "cases": [{"input": 1, "output": "1"}]}, "cases is [{"),
        ({"question": "1?", "answer": "1", "min_calls": "2"}, "min_calls is '2'"),
        ({"question": "1?", "answer": "A", "choices": {"A": "x", "B": "y"}}, "choices is {'A'"),
        ({"question": "1?", "answer": "A", "verifier": "science"}, "no choices"),
        ("1?", "write an object"),
    ],
)
def test_names_line_and_field_of_invalid_task(tmp_path, row, part):
    file = write(tmp_path, [{"question": "0?", "answer": "0"}, row])
    with pytest.raises(ValueError) as raised:
        load_tasks(file)
    assert f"{file}:2: " in str(raised.value) and part in str(raised.value)


def test_rejects_equal_ids_and_empty_file(tmp_path):
    rows = [{"id": "a", "question": f"{n}?", "answer": "1"} for n in range(2)]
    with pytest.raises(ValueError, match="the id 'a' is that of"):
        load_tasks(write(tmp_path, rows))
    with pytest.raises(ValueError, match="has no task"):
        load_tasks(write(tmp_path, [], "empty.jsonl"))
    with pytest.raises(ValueError, match="file is 'tasks.csv'"):
        TaskFile(file="tasks.csv")


@pytest.mark.parametrize("name", ["no.py", "no.jsonl"])
def test_names_missing_file(name, tmp_path):
    with pytest.raises(ValueError, match=f"the task file .*{name} does not exist; give a"):
        TaskFile(file=str(tmp_path / name)).load()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"the task file .*{name} is a folder; give a"):
        TaskFile(file=str(tmp_path / name)).load()


def test_reports_fields_that_no_verifier_reads(tmp_path, caplog):
    load_tasks(write(tmp_path, [{"question": "1?", "answer": "1", "difficulty": 3}]))
    assert "no verifier reads the fields difficulty" in caplog.text


def test_splits_tasks_by_prompt(tmp_path):
    share = TaskFile(
        file=write(tmp_path, [{"question": f"{n}?", "answer": "1"} for n in range(100)]),
        held_out_fraction=0.3,
    )
    train, held_out = share.tasks_of(), share.tasks_of(evaluation=True)
    assert len(train) + len(held_out) == 100 and 15 < len(held_out) < 45
    assert not {task.id for task in train} & {task.id for task in held_out}


def test_judges_tasks_of_jsonl_by_builtin_verifier(tmp_path):
    share = TaskFile(file=write(tmp_path, [{"question": "1/2 + 1/4?", "answer": "3/4"}]))
    [task] = share.load().tasks
    assert judge(share, task, reply("It is \\boxed{0.75}.")).value == 1.0
    assert judge(share, task, reply("\\boxed{0.5}")).value == 0.0


MODULE = """
    stock = {"tea": 3}

    def look_up(item: str, task) -> str:
        "Returns the number of items in stock."
        return stock[item]

    async def order(item: str, count: int = 1) -> str:
        "Orders items."
        stock[item] += count
        return f"ordered {count}"

    tools = [look_up, order]

    def tasks():
        yield {"question": "How much tea is there?", "number": 3}

    def verify(task, attempt):
        if attempt.finish_reason == "length":
            return 0.25
        return attempt.reply == str(task.data["number"])
"""


def test_module_has_tasks_tools_and_verifier(tmp_path):
    share = TaskFile(file=write_module(tmp_path, MODULE), held_out_fraction=0.0)
    [task] = share.tasks_of()
    assert [tool["function"]["name"] for tool in task.tools] == ["look_up", "order"]
    parameters = task.tools[1]["function"]["parameters"]
    assert parameters["properties"] == {"item": {"type": "string"}, "count": {"type": "integer"}}
    assert parameters["required"] == ["item"]

    box = make_toolbox([task], (share,))

    def call(name, arguments):
        return asyncio.run(box(task, ToolCall(name, arguments, None, "")))

    assert call("order", {"item": "tea", "count": 2}) == "ordered 2"
    assert call("look_up", {"item": "tea"}) == "5"
    assert call("look_up", {"item": "salt"}) == "Error: KeyError: 'salt'"
    assert call("look_up", {"item": "tea", "task": "x"}) == "Error: look_up has no task"

    assert judge(share, task, reply("3")).value == 1.0
    assert judge(share, task, reply("3", finish_reason="length")).value == 0.25
    assert judge(share, task, reply("", finish_reason="failed")).value is None
    broken = judge(share, task, reply("3", error="the call cannot be parsed"))
    assert broken.value == 0.0 and "parsed" in broken.error


def test_verifier_that_raises_gives_no_reward(tmp_path):
    code = """
        def tasks():
            yield {"question": "1?"}
        def verify(task, attempt):
            return {"1": 1.0, "2": float("nan")}[attempt.reply]
    """
    share = TaskFile(file=write_module(tmp_path, code))
    [task] = share.load().tasks
    assert judge(share, task, reply("1")).value == 1.0
    for text, error in (("2", "nan"), ("3", "KeyError")):
        reward = judge(share, task, reply(text))
        assert reward.value is None and error in reward.error


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("x = 1", r"no function tasks\(\)"),
        ("x = (", "does not run: SyntaxError"),
        ("def tasks(): yield {'answer': '1'}", "task 0: .*question"),
        ("def tasks():\n yield {'question': '1?', 'answer': 1}\n 1 / 0", "after 1 tasks: Zero"),
        ("def tasks(): pass", "after 0 tasks: TypeError"),
        ("def t(x: str): pass\ntools = [t]\ndef tasks(): yield {}", "t has no docstring"),
        ("def t(x): 'Does.'\ntools = [t]\ndef tasks(): yield {}", "parameter x of the tool t"),
    ],
)
def test_rejects_invalid_module(tmp_path, code, part):
    with pytest.raises(ValueError, match=part):
        load_tasks(write_module(tmp_path, code))


def test_module_verifier_skips_builtin_kinds(tmp_path):
    code = "def tasks(): yield {'question': '1?'}\ndef verify(task, attempt): return 1.0"
    share = TaskFile(file=write_module(tmp_path, code, "math.py"))
    task = Task(
        id="sum", kind="math", messages=({"role": "user", "content": "1+1?"},), data={"answer": "2"}
    )
    assert judge(share, task, reply("\\boxed{3}")).value == 0.0


def test_defines_tool_from_signature():
    def find(words: list[str], limit: int = 3) -> str:
        """Finds documents.

        Returns their titles.
        """
        return f"{words} {limit}"

    function = define_tool(find)["function"]
    assert function["description"] == "Finds documents.\n\nReturns their titles."
    assert function["parameters"]["properties"]["words"] == {"type": "array"}
