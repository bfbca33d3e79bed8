"""The layouts of the family, by name and as Jinja templates.

`VARIANTS`: "glm5" (and GLM-4.7), "glm4.5", "glm5.1", "glm5.2"; from the published templates of GLM-4.7 and
5.2 and the renderers of PrimeIntellect-ai/renderers.
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


@dataclasses.dataclass(frozen=True)
class Variant:
    """What the layouts of the family differ in.

    Attributes:
      line: what stands behind a role marker and between parts: a line end in GLM-4.5, nothing since.
      keeps: whether the reasoning of earlier turns can be kept (`clear_thinking=False`).
      unwraps: whether a tool is shown as its inner `function`, without `strict` and `defer_loading`, and
        deferred ones not at all.
      empty: where a turn without reasoning has an empty `<think></think>`: "never", behind the last
        user ("last"), or "always"; elsewhere it has a lone `</think>`.
      strips: whether reasoning is stripped.
      effort: whether a line behind the prefix says the reasoning effort.
      off: what the prompt for an answer without thinking ends in.
      nothink: whether user messages then end in `/nothink`.
    """

    line: str = ""
    keeps: bool = True
    unwraps: bool = False
    empty: str = "never"
    strips: bool = True
    effort: bool = False
    off: str = "</think>"
    nothink: bool = False

    @property
    def behind_tools(self) -> str:
        """What stands behind the list of tools: how to call them."""
        return _CALLS + self.line.join(_CALL)

    def prompt(self, enable_thinking: bool) -> str:
        """What the layout writes behind `<|assistant|>` for the model to go on from; of GLM-4.5 with
        thinking nothing, the model opens it itself."""
        if not enable_thinking:
            return self.off
        return "" if self.nothink else "<think>"


VARIANTS = {
    "glm5": Variant(),
    "glm4.5": Variant(
        line="\n", keeps=False, empty="always", off="\n<think></think>", nothink=True
    ),
    "glm5.1": Variant(unwraps=True, empty="last"),
    "glm5.2": Variant(
        unwraps=True, empty="always", strips=False, effort=True, off="<think></think>"
    ),
}


def layout_of(variant: str) -> Variant:
    """The layout of that name; ValueError if there is none."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; use one of {', '.join(VARIANTS)}")
    return VARIANTS[variant]


def template(variant: str = "glm5") -> str:
    """The layout as a Jinja template: chat_template.jinja of a checkpoint, with which transformers renders
    the same text. It checks nothing, and the arguments of calls must be objects."""
    layout = layout_of(variant)
    values = dataclasses.asdict(layout) | {
        "on": layout.prompt(enable_thinking=True),
        "before_tools": BEFORE_TOOLS,
        "behind_tools": layout.behind_tools,
    }
    head = (f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items())
    return "".join(head) + _TEMPLATE.read_text("utf-8")
