"""Writes chats.json: conversations as the package `renderers` (PrimeIntellect-ai, Apache-2.0) lays them out.

    python -m venv /tmp/renderers
    /tmp/renderers/bin/pip install renderers==0.1.12 transformers==5.23.0 httpx openai numpy
    PYTHONPATH=. /tmp/renderers/bin/python tests/goldens/make_chats.py

Each case has the messages, tools and options, the ids by the shipped tokenizer and, where all reasoning is
kept, which of them the model samples.

Of GLM-4.5 only the text is taken: its renderer encodes each part by itself, where a tokenizer that reads the
rendered text does not; and a single call per message, as it leaves out the line end before a second one, which
the published template has. Which ids are sampled is not: there it is at odds with its own prompt, which ends
in `<|assistant|>` with thinking and in `<think></think>` without, and has the line end behind the former unsampled
and the latter sampled.

Of GLM-5.2 the package has no renderer. That of GLM-5.3 lays out the same with thinking on, reasoning in its
own field and calls without ids, and stands for it; without thinking there is none.
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

HERE = pathlib.Path(__file__).parent
TOKENIZER = HERE.parents[1] / "glm5_jax" / "data" / "assets" / "tokenizer.json"
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


def text(r, most=4) -> str:
    return "".join(r.choices(WORDS, k=r.randrange(most + 1)))


def call(r, i) -> dict:
    values = [text(r), 7, True, None, 1.5, [1, "a"], {"k": [text(r)]}]
    arguments = {f"a{j}": r.choice(values) for j in range(r.randrange(3))}
    return {"type": "function", "function": {"name": f"f{i}", "arguments": arguments}}


def messages(r, most_calls, inline=True) -> list[dict]:
    found = [{"role": "system", "content": text(r)}] * (r.random() < 0.5)
    for _ in range(r.randrange(1, 4)):
        found.append({"role": "user", "content": text(r, 6)})
        while r.random() < 0.6:
            message = {"role": "assistant", "content": text(r)}
            if r.random() < 0.5:
                message["reasoning_content"] = text(r)
            elif inline and r.random() < 0.3:
                message["content"] = f"<think>{text(r)}</think>{text(r)}"
            if count := r.randrange(most_calls + 1):
                message["tool_calls"] = [call(r, i) for i in range(count)]
            results = [{"role": "tool", "content": text(r)} for _ in range(r.randrange(count + 1))]
            found += [message, *results]
    return found


def case(r, variant, tokenizer) -> dict:
    renderer, config = VARIANTS[variant]
    tool = {"name": "f0", "description": text(r), "strict": True, "parameters": {"type": "object"}}
    made = {
        "variant": variant,
        "messages": messages(r, 1 if variant == "glm4.5" else 2, variant != "glm5.2"),
        "tools": r.choice([None, [{"type": "function", "function": tool}]]),
        "enable_thinking": variant == "glm5.2" or r.random() < 0.6,
        "clear_thinking": variant == "glm4.5" or r.random() < 0.5,
        "add_generation_prompt": r.random() < 0.5,
    }
    options = {}
    if variant == "glm5.2":
        made["reasoning_effort"] = options["reasoning_effort"] = r.choice(["high", "max"])
    else:
        options["enable_thinking"] = made["enable_thinking"]
    if variant != "glm4.5":
        options["clear_thinking"] = made["clear_thinking"]
    found = renderer(tokenizer, config(**options)).render(
        made["messages"], tools=made["tools"], add_generation_prompt=made["add_generation_prompt"]
    )
    if variant == "glm4.5":
        return made | {"text": tokenizer.decode(found.token_ids)}
    made["ids"] = [int(i) for i in found.token_ids]
    if not made["clear_thinking"]:
        made["sampled"] = [int(x) for x in found.sampled_mask]
    return made


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), clean_up_tokenization_spaces=False
    )
    r = random.Random(0)
    cases = [case(r, variant, tokenizer) for variant in VARIANTS for _ in range(CASES)]
    lines = ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases)
    (HERE / "chats.json").write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
