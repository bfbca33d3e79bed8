"""Reads a user's tasks from a file, for RL and for evaluation.

A .jsonl file has one task per line:

    {"question": "7 * 8?", "answer": "56"}
    {"question": "Which gas do plants take in?", "choices": ["oxygen", "carbon dioxide"], "answer": "B"}
    {"question": "Write a function f that doubles a number.", "tests": "assert f(2) == 4", "names": ["f"]}

- question, or messages: the prompt. Conversations are in OpenAI's form and end with the user's message.
- answer, answers, choices, tests, names, setup, prelude, cases, min_calls: data of the verifier (verifiers.py).
- verifier: one of `verifiers.KINDS`. By default "code" for tests or cases, "science" for choices, "search" for answers,
  "tir" for min_calls, and "math" otherwise.
- tools: names of tools that the policy may call: "calculate", "python".
- id: unique name; by default the number of the line.

A .py file has a function `tasks`, which yields such objects, and may have

- `verify(task, attempt)`, which returns a reward: a number or a `Reward`. It also judges attempts that were cut off;
  their `finish_reason` is "length". Its exceptions count as failures of the environment: the attempt is left out.
- `tools`: a list of functions that the policy may call. The types of their parameters and their docstrings make the
  definitions that the policy reads. A parameter `task` gets the task. A task offers all tools, unless it names some.

Both functions, and the tools, may be coroutine functions; others run in threads.
"""

import asyncio
import dataclasses
import functools
import importlib.util
import inspect
import logging
import math
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from glm5_jax.agents.tools import Tool
from glm5_jax.data.chat_tasks import shop_tools
from glm5_jax.data.conversation import read_json
from glm5_jax.data.sources import is_held_out
from glm5_jax.envs.reasoning import verifiers
from glm5_jax.envs.reasoning.final_answer import LETTERS
from glm5_jax.envs.reasoning.python_tool import PYTHON
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier
from glm5_jax.runtime.files import read_lines
from glm5_jax.text.messages import read_messages

log = logging.getLogger(__name__)

PROMPT_FIELDS = ("id", "question", "messages", "tools", "verifier")
DATA_FIELDS = (
    "answer",
    "answers",
    "choices",
    "tests",
    "names",
    "setup",
    "prelude",
    "cases",
    "min_calls",
)
# Data that a verifier cannot do without; of several names one suffices.
REQUIRED = {
    "math": ("answer",),
    "science": ("answer",),
    "code": ("tests", "cases"),
    "tir": ("answer",),
    "search": ("answers",),
}
JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTasks:
    """Contents of a task file.

    Attributes:
      tasks: all tasks in the order of the file.
      tools: tools that the file implements, by name.
      verifiers: the file's verifier by the kind of its tasks; empty: the tasks have built-in verifiers.
    """

    tasks: tuple[Task, ...]
    tools: Mapping[str, Tool] = dataclasses.field(default_factory=dict)
    verifiers: Mapping[str, Verifier] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskFile:
    """Tasks of a file and their share of the training data. Raises ValueError for values out of range.

    Attributes:
      file: path of a .jsonl or .py file.
      weight: weight of the set among all sets.
      held_out_fraction: share of the tasks that is held out for evaluation, selected by a hash of the prompt.
      instruction: text after every question.
    """

    file: str = ""
    weight: float = 1.0
    held_out_fraction: float = 0.05
    instruction: str = ""

    def __post_init__(self):
        if pathlib.Path(self.file).suffix not in (".jsonl", ".py"):
            raise ValueError(f"file is {self.file!r}; give a .jsonl or .py file of tasks")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}; it must be from 0 to below 1"
            )

    @property
    def name(self) -> str:
        """Returns the beginning of the ids of the tasks."""
        return pathlib.Path(self.file).stem

    def load(self) -> LoadedTasks:
        """Returns the contents of the file. Raises ValueError that names the first invalid task, and OSError."""
        return load_tasks(self.file, self.instruction)

    def tasks_of(self, *, evaluation: bool = False) -> list[Task]:
        """Returns the tasks of one side of the split. Raises ValueError as `load`, and if none is left to train on."""
        tasks = self.load().tasks
        selected = [
            task
            for task in tasks
            if is_held_out(_prompt_text(task), self.held_out_fraction) == evaluation
        ]
        if not (selected or evaluation):
            raise ValueError(
                f"all {len(tasks)} tasks of {self.file} are held out; reduce held_out_fraction ({self.held_out_fraction})"
            )
        return selected


@functools.cache  # so that a module runs once, and its tools and its tasks share their state
def load_tasks(file: str, instruction: str = "") -> LoadedTasks:
    """Reads a task file. Raises ValueError that names the first invalid task, and OSError."""
    path = pathlib.Path(file)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"the task file {file} {problem}; give a .jsonl or .py file of tasks")
    if path.suffix == ".py":
        return _load_module(path, instruction)
    rows = _read_rows(path)
    return LoadedTasks(tasks=_make_tasks(path, rows, instruction))


def _read_rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yields (place, object) of the lines of a jsonl file."""
    for line in read_lines(path):
        place = f"{path}:{line.number}"
        try:
            yield place, read_json(line.content)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None


def _load_module(path: pathlib.Path, instruction: str) -> LoadedTasks:
    """Runs a Python file and returns its tasks, tools and verifier."""
    module = _run_file(path)
    make: Callable[[], Iterable] | None = getattr(module, "tasks", None)
    if not callable(make):
        raise ValueError(f"{path} has no function tasks(); write one that yields tasks")
    functions: list[types.FunctionType] = list(getattr(module, "tools", ()))
    definitions = {function.__name__: define_tool(function) for function in functions}
    verify: Callable | None = getattr(module, "verify", None)
    kind = f"file:{path.stem}" if verify else None  # never the kind of a built-in verifier
    return LoadedTasks(
        tasks=_make_tasks(path, _call_tasks(path, make), instruction, definitions, kind),
        tools={function.__name__: _make_tool(function) for function in functions},
        verifiers={kind: _make_verifier(verify)} if kind and verify else {},
    )


def _call_tasks(path: pathlib.Path, make: Callable) -> Iterator[tuple[str, Any]]:
    """Yields (place, object) of the tasks of a module. Raises ValueError if its function raises."""
    number = 0
    try:
        for row in make():
            yield f"{path}: task {number}", row
            number += 1
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path}: tasks() failed after {number} tasks: {type(error).__name__}: {error}"
        ) from error


def _run_file(path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"glm5_tasks_{path.stem}", path)
    assert spec and spec.loader, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from error
    return module


def _make_tasks(
    path: pathlib.Path,
    rows: Iterable[tuple[str, Any]],
    instruction: str,
    definitions: Mapping[str, Mapping] | None = None,
    kind: str | None = None,
) -> tuple[Task, ...]:
    """Returns the tasks of objects.

    Args:
      rows: pairs of an object and its place, for errors.
      definitions: definitions of tools that the file implements, by name; None: none.
      kind: kind of all tasks; None: the verifier's name.
    """
    tasks, places, unused = [], {}, set()
    for number, (place, row) in enumerate(rows):
        try:
            task = make_task(row, f"{path.stem}-{number}", instruction, definitions, kind)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if task.id in places:
            raise ValueError(f"{place}: the id {task.id!r} is that of {places[task.id]} too")
        places[task.id] = place
        tasks.append(task)
        if kind is None:
            unused |= row.keys() - {*PROMPT_FIELDS, *DATA_FIELDS}
    if not tasks:
        raise ValueError(f"{path} has no task; give at least one")
    if unused:
        log.warning("%s: no verifier reads the fields %s", path, ", ".join(sorted(unused)))
    return tuple(tasks)


def make_task(
    row: Any,
    name: str,
    instruction: str = "",
    definitions: Mapping[str, Mapping] | None = None,
    kind: str | None = None,
) -> Task:
    """Returns the task of an object. Raises ValueError that names the field.

    Args:
      row: object in the form that the module docstring describes.
      name: id if the object has none.
      instruction: text after the question.
      definitions: definitions of tools that the file implements, by name; None: none.
      kind: kind of the task, whose data are then not checked; None: the verifier's name.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f'the task is {row!r:.80}; write an object with "question" and "answer"')
    data = {key: value for key, value in row.items() if key not in PROMPT_FIELDS}
    messages = list(_messages(row))
    if kind is None:
        kind = row.get("verifier", _default_verifier(row))
        if not isinstance(kind, str) or kind not in verifiers.KINDS:
            raise ValueError(
                f"verifier is {kind!r}; use one of {', '.join(verifiers.KINDS)}, or a .py file with verify()"
            )
        data, listed = _checked_data(data, kind)
        instruction = listed + instruction
    if instruction:
        last = messages[-1]
        messages[-1] = {**last, "content": f"{last['content']}{instruction}"}
    return Task(
        id=_text(row, "id", name),
        kind=kind,
        messages=tuple(messages),
        data=data,
        tools=_offered_tools(row, definitions or {}),
    )


def _messages(row: Mapping) -> list[dict]:
    """Returns the prompt of a task. Raises ValueError unless it has a question, or messages that end with a user's."""
    if ("question" in row) == ("messages" in row):
        raise ValueError('the task must have either "question" or "messages"')
    if "question" in row:
        return [{"role": "user", "content": _text(row, "question")}]
    messages = row["messages"]
    is_list = isinstance(messages, list | tuple) and messages
    if not is_list or not all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise ValueError(
            f'messages is {messages!r:.80}; give a list of {{"role": ..., "content": TEXT}}'
        )
    if messages[-1].get("role") != "user":
        raise ValueError(
            f"the last message has the role {messages[-1].get('role')!r}; it must be the user's"
        )
    read_messages(messages)  # raises for what no prompt can show
    return [dict(message) for message in messages]


def _default_verifier(row: Mapping) -> str:
    fields = (
        ("tests", "code"),
        ("cases", "code"),
        ("choices", "science"),
        ("answers", "search"),
        ("min_calls", "tir"),
    )
    return next((kind for field, kind in fields if field in row), "math")


def _checked_data(data: dict[str, Any], kind: str) -> tuple[dict[str, Any], str]:
    """Returns the data of a built-in verifier and the text of the choices that the question must list."""
    data = {
        key: value
        for key, value in data.items()
        if key in DATA_FIELDS and value not in (None, "", [])
    }
    if not data.keys() & set(REQUIRED[kind]):
        names = " or ".join(f'"{name}"' for name in REQUIRED[kind])
        raise ValueError(f"the task has no {names}, which the verifier {kind!r} needs")
    if "answer" in data:
        data["answer"] = _as_text(data["answer"])
    if isinstance(answers := data.get("answers"), list | tuple):
        data["answers"] = [_as_text(answer) for answer in answers]
    for name, value in data.items():
        what, holds = _CHECKS[name]
        if not holds(value):
            raise ValueError(f"{name} is {value!r:.80}; give {what}")
    if kind == "science" and "choices" not in data:
        raise ValueError("the task has no choices; give a list of them")
    if kind == "science" and isinstance(choices := data.get("choices"), list | tuple):
        return _checked_choices(data, [str(choice) for choice in choices])
    return data, ""


def _as_text(answer: Any) -> Any:
    """Returns a finite number as text, and any other value unchanged."""
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    return str(answer) if is_number and math.isfinite(answer) else answer


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_cases(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(case, Mapping)
        and all(isinstance(case.get(end), str) for end in ("input", "output"))
        for case in value
    )


# Field of the data -> what it must be, and a test of it. A verifier would give no attempt a reward for other values.
_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "answer": ("a text or a number", _is_text),
    "answers": ("a list of texts", _are_texts),
    "choices": ("a list", lambda value: isinstance(value, list | tuple) or _is_whole(value)),
    "tests": ("a text", _is_text),
    "names": ("a list of texts", _are_texts),
    "setup": ("a text", _is_text),
    "prelude": ("a text", _is_text),
    "cases": ('a list of {"input": TEXT, "output": TEXT}', _are_cases),
    "min_calls": ("a whole number from 0", _is_whole),
}


def _checked_choices(data: dict[str, Any], choices: list[str]) -> tuple[dict[str, Any], str]:
    """Returns the data with the letter of the answer, and the text of the choices."""
    if not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"there are {len(choices)} choices; give 2 to {len(LETTERS)}")
    answer, letters = data["answer"], LETTERS[: len(choices)]
    if choices.count(answer) == 1:
        answer = letters[choices.index(answer)]
    if answer not in tuple(letters):
        raise ValueError(
            f"answer is {answer!r}; give one of the choices, or its letter ({letters[0]} to {letters[-1]})"
        )
    listed = "".join(f"\n{letter}) {choice}" for letter, choice in zip(letters, choices))
    return {**data, "answer": answer, "choices": len(choices)}, listed


def _offered_tools(row: Mapping, definitions: Mapping[str, Mapping]) -> tuple[Mapping, ...]:
    """Returns the definitions of the tools that a task names; by default those of all tools of the file."""
    if "tools" not in row:
        return tuple(definitions.values())
    known, tools = {**_builtin_tools(), **definitions}, []
    if not isinstance(row["tools"], list | tuple):
        raise ValueError(f"tools is {row['tools']!r:.80}; give a list of names")
    for name in row["tools"]:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"there is no tool {name!r:.80}; the tools are {', '.join(known)}")
        tools.append(known[name])
    return tuple(tools)


@functools.cache
def _builtin_tools() -> dict[str, Mapping]:
    [calculate] = (tool for tool in shop_tools() if tool["function"]["name"] == "calculate")
    return {"calculate": calculate, "python": PYTHON}


def _text(row: Mapping, name: str, default: str = "") -> str:
    value = row.get(name, default)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r:.80}; give a text")
    return value


def _prompt_text(task: Task) -> str:
    return "\n".join(message["content"] for message in task.messages).strip()


# -- Functions of a Python file ------------------------------------------------------------------------------


def define_tool(function: Callable) -> dict[str, Any]:
    """Returns the definition of a tool in OpenAI's form, from the signature and the docstring of a function.

    Raises ValueError for a function without a docstring, and for parameters without a type that JSON has.
    """
    name, description = function.__name__, inspect.getdoc(function)
    if not description:
        raise ValueError(f"the tool {name} has no docstring; the policy reads it")
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "task":
            continue
        kind = hints.get(parameter.name)
        json_type = JSON_TYPES.get(typing.get_origin(kind) or kind)
        if json_type is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            known = ", ".join(one.__name__ for one in JSON_TYPES)
            raise ValueError(
                f"the parameter {parameter.name} of the tool {name} has the type {kind}; annotate it with one of {known}"
            )
        properties[parameter.name] = {"type": json_type}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    definition = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": definition}


def _make_tool(function: Callable) -> Tool:
    """Returns the tool of a function. An exception becomes an error message for the policy, except ToolError."""
    takes_task = "task" in inspect.signature(function).parameters

    async def call(task: Task, arguments: Mapping[str, Any]) -> str:
        fields = {**arguments, "task": task} if takes_task else arguments
        try:
            return str(await _call(function, **fields))
        except ToolError:
            raise
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}"

    return call


def _make_verifier(verify: Callable) -> Verifier:
    """Returns the verifier of a function."""

    async def judge(task: Task, attempt: Attempt) -> Reward:
        if attempt.finish_reason == "failed":
            return Reward(None, error=attempt.error or "the environment failed")
        if attempt.error:
            return Reward(0.0, error=attempt.error)
        try:
            reward = await _call(verify, task, attempt)
            if isinstance(reward, Reward):
                return reward
            value = float(reward)
            if not math.isfinite(value):
                raise ValueError(f"verify returned {reward!r}; return a finite number")
            return Reward(value)
        except Exception as error:
            return Reward(None, error=f"verify: {type(error).__name__}: {error}")

    return judge


async def _call(function: Callable, *arguments: Any, **fields: Any) -> Any:
    """Calls a function, in a thread unless it is a coroutine function."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **fields)
    return await asyncio.to_thread(function, *arguments, **fields)
