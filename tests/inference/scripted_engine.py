"""Simulates a model with scripted replies in the place of an engine, so that the real server tokenizes and parses them."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping

from flax import nnx

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Handle, Request, Token
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.inference.stop_checker import StopChecker
from glm5_jax.model import glm5
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from tests.model.small import one_layer

MAX_LENGTH = 262_144  # tokens; the shipped tokenizer makes more of a coding agent's prompt than that of a large model
Script = Callable[[str], Mapping]


class ScriptedEngine(Engine):
    """Engine whose replies are the messages that a script returns for the text of a prompt.

    Attributes:
      prompts: texts of all prompts.
    """

    def __init__(self, script: Script):
        model = glm5.Glm5(one_layer(max_position_embeddings=MAX_LENGTH), rngs=nnx.Rngs(0))
        self._script, self._texts = script, Tokenizer.default()
        super().__init__(model, self._texts, EngineConfig(page_size=128, max_num_seqs=1))
        self._submitted: collections.deque[tuple[Handle, int]] = collections.deque()
        self.prompts: list[str] = []

    def submit(
        self,
        request: Request,
        listener: Callable[[Handle], None] | None = None,
        submitted_at: float | None = None,
    ) -> Handle:
        limit = self.check(request)
        handle = Handle(request, listener, submitted_at)
        self._submitted.append((handle, limit - len(request.ids)))
        return handle

    def step(self) -> bool:
        while self._submitted:
            handle, max_tokens = self._submitted.popleft()
            self.prompts.append(self._texts.decode(handle.request.ids, errors="replace"))
            self._reply(handle, max_tokens)
        return False

    def _reply(self, handle: Handle, max_tokens: int) -> None:
        """Appends the tokens of the script's message, up to the end that the request's sampling sets."""
        handle.cached_tokens = 0
        ids = reply_ids(self._script(self.prompts[-1]), handle.request.ids, self._texts)
        stops = StopChecker(handle.request.sampling, max_tokens, self._texts.eos_ids, self._texts)
        for token in ids:
            end = stops.feed(token)
            handle.append_output([Token(token, -0.1, self.version)], *(end or (None,)))
            if end:
                return
        raise AssertionError("a reply ends with an end token")


def reply_ids(message: Mapping, prompt: tuple[int, ...], tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that a model samples to reply with a message, its end included."""
    is_thinking = prompt[-1] == tokenizer.special_ids["<think>"]
    reply = {"role": "assistant", "content": "", **message}
    if is_thinking:
        reply = {"reasoning_content": "I think.", **reply}
    rendered = render_chat(
        [{"role": "user", "content": "x"}, reply],
        tokenizer,
        enable_thinking=is_thinking,
        clear_thinking=False,
        close=True,
    )
    return [token for token, mask in zip(rendered.ids, rendered.loss_mask) if mask]


def calling(name: str, **arguments) -> dict:
    """Returns a message that calls a tool."""
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


@contextlib.contextmanager
def serving_script(script: Script) -> Iterator[Server]:
    """Runs a server of a scripted model named `scripted`; its engine is the attribute `engine`, its address `url`."""
    engine = ScriptedEngine(script)
    server = Server(engine, Tokenizer.default(), ServerConfig(port=0, model="scripted"))
    server.engine = engine
    with server.running() as server.url:
        yield server
