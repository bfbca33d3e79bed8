"""Generates a model's replies to chats, parses them, and measures their time.

It decodes batches of requests in lockstep, without an engine, for experiments that compare modes of thinking.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.evals.batches import batches
from glm5_jax.model.generate import generate
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import Reply, parse_reply


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """Request of a reply; the fields are the arguments of `render_chat`."""

    messages: tuple[Mapping, ...]
    tools: tuple[Mapping, ...] | None = None
    enable_thinking: bool = True
    clear_thinking: bool = True

    def prompt(self, tokenizer: Tokenizer, variant: str = "glm5") -> list[int]:
        """Returns the ids of the prompt, up to the start of the reply."""
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
    """Reply of the model.

    Attributes:
      prompt: ids of the prompt.
      ids: generated ids, including the stop marker.
      num_reasoning: number of generated ids that are reasoning, including its end marker.
      reply: parsed reply.
      seconds: share of its batch's time.
    """

    prompt: list[int]
    ids: list[int]
    num_reasoning: int
    reply: Reply
    seconds: float


def generate_answers(
    params: PyTree,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    requests: Sequence[ChatPrompt],
    num_new: int,
    *,
    batch_size: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    variant: str = "glm5",
) -> list[Answer]:
    """Generates the model's answers, of at most num_new tokens each, in the order of the requests.

    variant: chat layout that the model was trained on. Raises ValueError if there is no request, or if a prompt and
    num_new exceed the model's positions.
    """
    prompts = [request.prompt(tokenizer, variant) for request in requests]
    longest, pad = max(map(len, prompts), default=0), tokenizer.pad_id
    if longest + num_new > cfg.max_position_embeddings:
        raise ValueError(
            f"a prompt of {longest} tokens and {num_new} new ones exceed the model's "
            f"{cfg.max_position_embeddings} positions; shorten one of them"
        )
    # Generate in batches, with prompts padded on the left.
    rows = np.array([[pad] * (longest - len(p)) + p for p in prompts], np.int32)
    lengths = np.array([len(p) for p in prompts])
    generated, seconds = [], []
    for batch, count in batches(np.arange(len(rows)), min(batch_size, len(rows))):
        start = time.perf_counter()
        out = generate(
            params,
            rows[batch],
            cfg,
            num_new,
            mask=np.arange(longest) >= longest - lengths[batch][:, None],
            temperature=temperature,
            key=jax.random.fold_in(jax.random.key(seed), len(generated)),
        )
        generated += out[:count, longest:].tolist()
        seconds += [(time.perf_counter() - start) / count] * count
    # Parse the replies, up to their stop marker.
    stops, close = {*tokenizer.eos_ids}, tokenizer.special_ids["</think>"]
    answers = []
    for request, prompt, ids, elapsed in zip(requests, prompts, generated, seconds):
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        ids, thinks = ids[:end], request.enable_thinking
        reply = parse_reply(ids, request.tools, tokenizer=tokenizer, thinking=thinks)
        num = ids.index(close) + 1 if close in ids else len(ids) if thinks else 0
        answers.append(
            Answer(prompt=prompt, ids=ids, num_reasoning=num, reply=reply, seconds=elapsed)
        )
    return answers
