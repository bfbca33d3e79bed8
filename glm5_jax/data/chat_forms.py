"""Converts lines of conversations in other forms to OpenAI's: ShareGPT's, Alpaca's, and prompts with completions.

    {"conversations": [{"from": "human", "value": "7 * 8?"}, {"from": "gpt", "value": "56"}]}
    {"prompt": "7 * 8?", "completion": "56"}
    {"instruction": "Multiply.", "input": "7 * 8", "output": "56"}

A line in OpenAI's form has `messages`, and stays as it is.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.text.messages import ChatError

# ShareGPT's names of roles, of FastChat, Axolotl and LLaMA-Factory.
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def to_openai_form(line: Mapping) -> Mapping:
    """Returns a line with `messages`, without the fields that they replace.

    Raises ChatError for an unknown form, and for an invalid value of a known one.
    """
    if "messages" in line:
        return line
    for fields, convert in FORMS.items():
        if line.keys() >= set(fields):
            return convert(line)
    have = ", ".join(map(str, line)) or "nothing"
    forms = "; ".join(" and ".join(fields) for fields in FORMS)
    raise ChatError(f"the line has no messages; it has {have}; give messages, or {forms}")


def _from_sharegpt(line: Mapping) -> dict[str, Any]:
    """Converts ShareGPT's form; the line may also have `system` and `tools`, which LLaMA-Factory writes as text."""
    turns = line["conversations"]
    if not isinstance(turns, list):
        raise ChatError(f"conversations is of type {type(turns).__name__}; give a list")
    messages = [_message_of(turn, i) for i, turn in enumerate(turns)]
    if system := line.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    converted = _rest(line, "conversations", "system")
    if isinstance(converted.get("tools"), str):
        converted["tools"] = _parse(converted["tools"], "tools") if converted["tools"] else None
    return converted | {"messages": messages}


def _message_of(turn: Any, i: int) -> Any:
    """Returns the message of a turn. Turns that are messages already stay as they are."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    name, value = turn["from"], turn.get("value")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ChatError(f"turn {i} is from {name!r:.100}; use one of {', '.join(ROLES)}")
    message = _rest(turn, "from", "value") | {"role": role, "content": value}
    if name == "function_call":
        calls = _parse(value, f"turn {i}, a function_call,")
        calls = calls if isinstance(calls, list) else [calls]
        message |= {"content": None, "tool_calls": calls}
    return message


def _from_completion(line: Mapping) -> dict[str, Any]:
    """Converts a prompt and its completion, each a text or messages. Replies of the prompt are not trained on."""
    prompt = _messages(line["prompt"], "user", "prompt")
    prompt = [
        {"weight": 0, **m} if isinstance(m, Mapping) and m.get("role") == "assistant" else m
        for m in prompt
    ]
    messages = prompt + _messages(line["completion"], "assistant", "completion")
    return _rest(line, "prompt", "completion") | {"messages": messages}


def _messages(value: Any, role: str, name: str) -> list:
    """Returns the messages of a field. A text becomes the content of one message. Raises ChatError for another type."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ChatError(f"{name} is of type {type(value).__name__}; give a text or messages")
    return value


def _from_alpaca(line: Mapping) -> dict[str, Any]:
    """Converts an instruction with its input and output; the line may also have `system` and earlier turns, `history`."""
    texts = [line["instruction"], line.get("input") or "", line["output"]]
    if not all(isinstance(text, str) for text in texts):
        raise ChatError("instruction, input and output must be texts")
    instruction, context, output = texts
    messages = [{"role": "system", "content": line["system"]}] if line.get("system") else []
    history = line.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(turn, list) or len(turn) != 2 for turn in history
    ):
        raise ChatError("history is no list of pairs; give [[instruction, output], ...]")
    for question, answer in history:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    question = "\n".join(filter(None, (instruction, context)))
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    rest = _rest(line, "instruction", "input", "output", "system", "history")
    return rest | {"messages": messages}


def _rest(line: Mapping, *names: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in names}


def _parse(text: Any, name: str) -> Any:
    """Returns the value of a JSON text. Raises ChatError with the field's name."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{name} is not JSON: {error}") from None


# Fields that tell a form, and its conversion.
FORMS: dict[tuple[str, ...], Callable[[Mapping], Mapping]] = {
    ("conversations",): _from_sharegpt,
    ("prompt", "completion"): _from_completion,
    ("instruction", "output"): _from_alpaca,
}
