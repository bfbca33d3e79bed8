"""A model asked in chats: its replies, taken apart, and what they cost.

Plain decoding, many requests in step: for experiments that compare modes of thinking.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.evals.batches import batches
from glm5_jax.model.generate import generate
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import Reply, parse_reply


@dataclasses.dataclass(frozen=True)
class Request:
    """What a model is asked: `render_chat` says what the fields mean."""

    messages: tuple[Mapping, ...]
    tools: tuple[Mapping, ...] | None = None
    enable_thinking: bool = True
    clear_thinking: bool = True

    def prompt(self, tokenizer: Tokenizer, variant: str = "glm5") -> list[int]:
        """Ids up to where the reply begins."""
        rendered = render_chat(
            self.messages,
            tokenizer,
            tools=self.tools,
            enable_thinking=self.enable_thinking,
            clear_thinking=self.clear_thinking,
            variant=variant,
        )
        return rendered.ids


class Answer(NamedTuple):
    """The prompt, the ids that the model wrote, the marker by which it stopped included, how many of them are
    reasoning (the marker that ends it included), and the reply they are. seconds: its batch's share."""

    prompt: list[int]
    ids: list[int]
    num_reasoning: int
    reply: Reply
    seconds: float


def ask(
    params,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    num_new: int,
    *,
    batch_size: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    variant: str = "glm5",
) -> list[Answer]:
    """The answers of a model, of at most num_new tokens each, in the order of the requests; variant: of the
    layout that it has learnt.

    ValueError if there is no request, or a prompt and num_new exceed the model's positions.
    """
    prompts = [request.prompt(tokenizer, variant) for request in requests]
    longest, pad = max(map(len, prompts), default=0), tokenizer.pad_id
    if longest + num_new > cfg.max_position_embeddings:
        raise ValueError(
            f"a prompt of {longest} tokens and {num_new} new ones exceed the model's "
            f"{cfg.max_position_embeddings} positions; shorten one of them"
        )
    rows = np.array([[pad] * (longest - len(p)) + p for p in prompts], np.int32)
    lengths = np.array([len(p) for p in prompts])
    written, seconds = [], []
    for batch, count in batches(np.arange(len(rows)), min(batch_size, len(rows))):
        began = time.perf_counter()
        out = generate(
            params,
            rows[batch],
            cfg,
            num_new,
            mask=np.arange(longest) >= longest - lengths[batch][:, None],
            temperature=temperature,
            key=jax.random.fold_in(jax.random.key(seed), len(written)),
        )
        written += out[:count, longest:].tolist()
        seconds += [(time.perf_counter() - began) / count] * count
    stops, close = {*tokenizer.eos_ids}, tokenizer.special_ids["</think>"]
    answers = []
    for request, prompt, ids, spent in zip(requests, prompts, written, seconds):
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        ids, thinks = ids[:end], request.enable_thinking
        reply = parse_reply(ids, request.tools, tokenizer=tokenizer, thinking=thinks)
        num = ids.index(close) + 1 if close in ids else len(ids) if thinks else 0
        answers.append(Answer(prompt, ids, num, reply, spent))
    return answers
