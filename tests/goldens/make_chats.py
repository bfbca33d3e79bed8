"""Writes chats.json: conversations as the package `renderers` (PrimeIntellect-ai, Apache-2.0) lays them out.

    python -m venv /tmp/renderers
    /tmp/renderers/bin/pip install renderers==0.1.12 transformers==5.23.0 httpx openai numpy
    PYTHONPATH=. /tmp/renderers/bin/python tests/goldens/make_chats.py

Each case has the messages, tools and options, the ids by the shipped tokenizer and, where all reasoning is
kept, which of them the model samples.

Cases of GLM-4.5 have only the text, and at most one call per message:
- Its renderer encodes each part separately, where a tokenizer encodes the rendered text.
- It omits the line end before a second call, which the published template has.
- Its mask of sampled ids contradicts its prompt. That ends in `<|assistant|>` with thinking and in `<think></think>`
  without, but the line end after the former is unsampled and after the latter sampled.

The package has no renderer of GLM-5.2. That of GLM-5.3 gives the same text with thinking on, reasoning in a separate
field and calls without ids, so it is used for these cases. There are no cases without thinking.
"""

import json
import pathlib
import random

from renderers.configs import (
    GLM5RendererConfig,
    GLM45RendererConfig,
    GLM51RendererConfig,
    GLM53RendererConfig,
)
from renderers.glm5 import GLM5Renderer, GLM51Renderer, GLM53Renderer
from renderers.glm45 import GLM45Renderer
from transformers import PreTrainedTokenizerFast

FOLDER = pathlib.Path(__file__).parent
TOKENIZER = FOLDER.parents[1] / "glm5_jax" / "data" / "assets" / "tokenizer.json"
VARIANTS = {
    "glm5": (GLM5Renderer, GLM5RendererConfig),
    "glm5.1": (GLM51Renderer, GLM51RendererConfig),
    "glm4.5": (GLM45Renderer, GLM45RendererConfig),
    "glm5.2": (GLM53Renderer, GLM53RendererConfig),
}
WORDS = [
    "hello",
    "a b",
    "\n",
    "  ",
    "naïve 日本",
    "{}",
    "x<y",
    "'q'",
    '"z"',
    "1",
    "&amp;",
    "\t",
    "🙂",
]
CASES = 24


def text(r, max_words=4) -> str:
    return "".join(r.choices(WORDS, k=r.randrange(max_words + 1)))


def call(r, i) -> dict:
    values = [text(r), 7, True, None, 1.5, [1, "a"], {"k": [text(r)]}]
    arguments = {f"a{j}": r.choice(values) for j in range(r.randrange(3))}
    return {"type": "function", "function": {"name": f"f{i}", "arguments": arguments}}


def messages(r, max_calls, inline=True) -> list[dict]:
    conversation = [{"role": "system", "content": text(r)}] * (r.random() < 0.5)
    for _ in range(r.randrange(1, 4)):
        conversation.append({"role": "user", "content": text(r, 6)})
        while r.random() < 0.6:
            message = {"role": "assistant", "content": text(r)}
            if r.random() < 0.5:
                message["reasoning_content"] = text(r)
            elif inline and r.random() < 0.3:
                message["content"] = f"<think>{text(r)}</think>{text(r)}"
            if count := r.randrange(max_calls + 1):
                message["tool_calls"] = [call(r, i) for i in range(count)]
            results = [{"role": "tool", "content": text(r)} for _ in range(r.randrange(count + 1))]
            conversation += [message, *results]
    return conversation


def case(r, variant, tokenizer) -> dict:
    renderer, config = VARIANTS[variant]
    tool = {"name": "f0", "description": text(r), "strict": True, "parameters": {"type": "object"}}
    record = {
        "variant": variant,
        "messages": messages(r, 1 if variant == "glm4.5" else 2, variant != "glm5.2"),
        "tools": r.choice([None, [{"type": "function", "function": tool}]]),
        "enable_thinking": variant == "glm5.2" or r.random() < 0.6,
        "clear_thinking": variant == "glm4.5" or r.random() < 0.5,
        "add_generation_prompt": r.random() < 0.5,
    }
    options = {}
    if variant == "glm5.2":
        record["reasoning_effort"] = options["reasoning_effort"] = r.choice(["high", "max"])
    else:
        options["enable_thinking"] = record["enable_thinking"]
    if variant != "glm4.5":
        options["clear_thinking"] = record["clear_thinking"]
    rendered = renderer(tokenizer, config(**options)).render(
        record["messages"],
        tools=record["tools"],
        add_generation_prompt=record["add_generation_prompt"],
    )
    if variant == "glm4.5":
        return record | {"text": tokenizer.decode(rendered.token_ids)}
    record["ids"] = [int(i) for i in rendered.token_ids]
    if not record["clear_thinking"]:
        record["sampled"] = [int(x) for x in rendered.sampled_mask]
    return record


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), clean_up_tokenization_spaces=False
    )
    r = random.Random(0)
    cases = [case(r, variant, tokenizer) for variant in VARIANTS for _ in range(CASES)]
    lines = ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases)
    (FOLDER / "chats.json").write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
