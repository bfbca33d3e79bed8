"""Defines the chat layouts of the GLM family, by name and as Jinja templates.

`VARIANTS` has "glm5" (and GLM-4.7), "glm4.5", "glm5.1" and "glm5.2". Sources: the published templates of GLM-4.7 and 5.2,
and the renderers of PrimeIntellect-ai/renderers.
"""

import dataclasses
import json
import pathlib

_TEMPLATE = pathlib.Path(__file__).with_name("chat_template.jinja")
BEFORE_TOOLS = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_CALLS = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""
_CALL = (
    "<tool_call>{function-name}",
    "<arg_key>{arg-key-1}</arg_key>",
    "<arg_value>{arg-value-1}</arg_value>",
    "<arg_key>{arg-key-2}</arg_key>",
    "<arg_value>{arg-value-2}</arg_value>",
    "...",
    "</tool_call>",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatLayout:
    """Chat layout of a model version.

    Attributes:
      line_break: text after a role marker and between parts: a line end in GLM-4.5, empty since.
      keeps_reasoning: whether the reasoning of earlier turns can stay (`clear_thinking=False`).
      unwraps_tools: whether a tool is shown as its inner `function`, without `strict` and `defer_loading`, and
        deferred tools are left out.
      empty_thinking: turns without reasoning that have an empty `<think></think>`: "never", those after the last user
        message ("last"), or "always"; the others have only `</think>`.
      strips_reasoning: whether blanks around reasoning are stripped.
      has_effort_line: whether a line after the prefix states the reasoning effort.
      no_thinking_prompt: end of the prompt for a reply without thinking.
      adds_nothink: whether user messages then end in `/nothink`.
    """

    line_break: str = ""
    keeps_reasoning: bool = True
    unwraps_tools: bool = False
    empty_thinking: str = "never"
    strips_reasoning: bool = True
    has_effort_line: bool = False
    no_thinking_prompt: str = "</think>"
    adds_nothink: bool = False

    @property
    def after_tools(self) -> str:
        """The text after the list of tools: how to call them."""
        return _CALLS + self.line_break.join(_CALL)

    def prompt(self, enable_thinking: bool) -> str:
        """Returns the text after `<|assistant|>` that the model continues.

        It is empty for GLM-4.5 with thinking, because that model opens its thinking itself.
        """
        if not enable_thinking:
            return self.no_thinking_prompt
        return "" if self.adds_nothink else "<think>"


VARIANTS = {
    "glm5": ChatLayout(),
    "glm4.5": ChatLayout(
        line_break="\n",
        keeps_reasoning=False,
        empty_thinking="always",
        no_thinking_prompt="\n<think></think>",
        adds_nothink=True,
    ),
    "glm5.1": ChatLayout(unwraps_tools=True, empty_thinking="last"),
    "glm5.2": ChatLayout(
        unwraps_tools=True,
        empty_thinking="always",
        strips_reasoning=False,
        has_effort_line=True,
        no_thinking_prompt="<think></think>",
    ),
}


def layout_of(variant: str) -> ChatLayout:
    """Returns the layout of that name. Raises ValueError if there is none."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; use one of {', '.join(VARIANTS)}")
    return VARIANTS[variant]


def template(variant: str = "glm5") -> str:
    """Returns the layout as a Jinja template, the chat_template.jinja of a checkpoint.

    transformers renders the same text with it. It checks nothing, and the arguments of calls must be objects.
    """
    layout = layout_of(variant)
    values = dataclasses.asdict(layout) | {
        "thinking_prompt": layout.prompt(enable_thinking=True),
        "before_tools": BEFORE_TOOLS,
        "after_tools": layout.after_tools,
    }
    head = (f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items())
    return "".join(head) + _TEMPLATE.read_text("utf-8")
