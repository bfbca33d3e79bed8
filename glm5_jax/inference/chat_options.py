"""Reads the options of a chat: thinking, its budget, which tools the reply may or must call, and the format of its content."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from glm5_jax.inference.grammars import GrammarError, reply_source
from glm5_jax.inference.request_bodies import EFFORTS, ChatCompletionRequest, ResponseFormat
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.messages import ChatError, describe, read_tools

_CHOICES = ("auto", "none", "required")


class ToolOptions(NamedTuple):
    """Tools of a chat.

    Attributes:
      shown: tools in the prompt; None: the reply may call none.
      forced: tools of which the reply must call one; empty: it may also have content.
      is_single: whether the reply may have only one call.
    """

    shown: tuple[Mapping, ...] | None
    forced: tuple[Mapping, ...] = ()
    is_single: bool = False


def thinking_of(chat: ChatCompletionRequest) -> tuple[bool, bool]:
    """Returns (enable_thinking, clear_thinking) from all fields that set them. Raises ApiError if these contradict."""
    thinking, template = chat.thinking, chat.chat_template_kwargs
    fields = {
        "thinking": None if thinking.type is None else thinking.type == "enabled",
        "chat_template_kwargs": template.enable_thinking,
        "chat_template_kwargs.thinking": template.thinking,
        "enable_thinking": chat.enable_thinking,
    }
    enable = _agreed("enable_thinking", fields)
    fields = {
        "thinking": thinking.clear_thinking,
        "chat_template_kwargs": template.clear_thinking,
    }
    clear = _agreed("clear_thinking", fields)
    effort = chat.reasoning_effort
    if effort is not None and EFFORTS[effort] is None:
        if enable:
            raise ApiError(
                f"reasoning_effort is {effort!r}, which means no thinking, and thinking is enabled; leave one of them "
                "out",
                param="reasoning_effort",
            )
        enable = False
    return enable is not False, clear is not False


def _agreed(option: str, fields: Mapping[str, bool | None]) -> bool | None:
    """Returns the value of an option that several fields can set; None: none does. Raises ApiError if they differ."""
    values = {field: value for field, value in fields.items() if value is not None}
    if len(set(values.values())) > 1:
        raise ApiError(
            f"{' and '.join(values)} have different values of {option}", param=next(iter(values))
        )
    return next(iter(values.values()), None)


def thinking_budget_of(chat: ChatCompletionRequest) -> int | None:
    """Returns the maximum tokens of the thinking; None: no limit. Raises ApiError if two fields differ."""
    budgets = {
        "thinking.budget_tokens": chat.thinking.budget_tokens,
        "thinking_token_budget": chat.thinking_token_budget,
    }
    values = {value for value in budgets.values() if value is not None}
    if len(values) > 1:
        raise ApiError(f"{' and '.join(budgets)} differ; leave one of them out", param="thinking")
    return next(iter(values), None)


def tools_of(chat: ChatCompletionRequest) -> ToolOptions:
    """Returns the tools that a reply may or must call. Raises ApiError for an invalid `tools` or `tool_choice`."""
    tools, choice = tuple(chat.tools or ()), chat.tool_choice
    is_single = not chat.parallel_tool_calls
    try:
        names = [function["name"] for function in read_tools(tools)]
    except ChatError as error:
        raise ApiError(str(error), param="tools") from None
    if choice == "none":
        return ToolOptions(None)
    if choice == "auto":
        return ToolOptions(tools or None, is_single=is_single)
    if not tools:
        raise ApiError(
            f"tool_choice is {describe(choice)}, and there are no tools; give tools or leave it out",
            param="tool_choice",
        )
    if choice == "required":
        return ToolOptions(tools, tools, is_single)
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            allowed, must_call, is_single = [name], True, True
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*entries]}}:
            allowed, must_call = [_name_of(entry) for entry in entries], mode == "required"
        case _:
            raise ApiError(
                f"tool_choice is {describe(choice)}; use one of {', '.join(_CHOICES)}, or "
                '{"type": "function", "function": {"name": NAME}}',
                param="tool_choice",
            )
    for name in allowed:
        if name not in names:
            raise ApiError(
                f"tool_choice names {describe(name)}; the tools are {', '.join(names)[:200]}",
                param="tool_choice",
            )
    chosen = tuple(tool for tool, name in zip(tools, names) if name in allowed)
    if must_call:
        return ToolOptions(tools, chosen, is_single)
    return ToolOptions(chosen, is_single=is_single)


def _name_of(entry) -> object:
    match entry:
        case {"function": {"name": name}}:
            return name
    return entry


def reply_grammar_of(chat: ChatCompletionRequest, tools: ToolOptions) -> str | None:
    """Returns the grammar of the reply after its thinking; None: it may be any text. Raises ApiError."""
    schema = _schema_of(chat.response_format)
    if schema is None and not tools.forced:
        return None
    if schema is not None and tools.forced:
        raise ApiError(
            "response_format needs content, and tool_choice a call; leave one of them out",
            param="response_format",
        )
    callable_tools = tools.forced or tools.shown or ()
    try:
        return reply_source(callable_tools, schema, is_single=tools.is_single)
    except GrammarError as error:
        raise ApiError(f"tools: the schema cannot be enforced ({error})", param="tools") from None
    except RecursionError:
        name = "tools" if tools.forced else "response_format"
        raise ApiError(f"{name}: the schema is nested too deeply", param=name) from None


def refuse_constraints(chat: ChatCompletionRequest, tools: ToolOptions) -> None:
    """Raises ApiError for options that constrain which tokens a reply may have, because samples are trained on."""
    constraints: Sequence[tuple[str, bool]] = (
        ("tool_choice", bool(tools.forced)),
        ("parallel_tool_calls", tools.is_single and bool(tools.shown)),
        ("thinking", thinking_budget_of(chat) is not None),
    )
    for name, is_constrained in constraints:
        if is_constrained:
            raise ApiError(
                f"{name} is {describe(msgspec.to_builtins(getattr(chat, name)))}, which constrains the reply; leave it out, because replies are "
                "trained on as the model samples them",
                param=name,
            )


def _schema_of(response_format: ResponseFormat) -> Mapping | None:
    """Returns the JSON schema of the content; None: the content is any text. Raises ApiError."""
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
    if response_format.json_schema is None:
        raise ApiError(
            "response_format has type 'json_schema' and no json_schema; add it",
            param="response_format",
        )
    schema = response_format.json_schema.schema
    return {"type": "object"} if schema is None else schema
