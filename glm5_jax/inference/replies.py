"""What a server answers: replies as OpenAI's API and SGLang's `/generate` have them, whole or in pieces.

A tool call that is cut off or cannot be parsed has its text as arguments, which is no JSON, and `finish_reason` is
"tool_calls" only if all calls are whole. Reasoning is `reasoning_content`.
"""

import dataclasses
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence

from glm5_jax.inference.protocol import Asked
from glm5_jax.inference.request import DEADLINE, LENGTH, STOP, Handle, Token
from glm5_jax.text.tokenizer import Detokenizer, Tokenizer
from glm5_jax.text.tool_calls import Delta, ReplyParser, ToolCall


@dataclasses.dataclass(frozen=True)
class Origin:
    """Of an answer: the model's name, the weights' version when it was asked, and its id and time."""

    model: str
    version: int
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class Held:
    """Text as it comes, without what a text to stop at may still begin in, and up to that text at the end."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._room = max(map(len, stops), default=1) - 1
        self._text = ""

    def feed(self, text: str) -> str:
        """What can be told."""
        self._text += text
        whole = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        told = self._text[: min([max(0, len(self._text) - self._room), *whole])]
        self._text = self._text[len(told) :]
        return told

    def close(self, stopped: bool) -> str:
        """The rest; stopped: up to the first stop in it."""
        rest, self._text = self._text, ""
        found = [at for stop in self._stops if (at := rest.find(stop)) >= 0] if stopped else []
        return rest[: min(found)] if found else rest


class Chat:
    """One choice of a chat, taken apart as its tokens come."""

    def __init__(self, asked: Asked, handle: Handle, tokenizer: Tokenizer):
        self._handle = handle
        self._parser = ReplyParser(asked.tools, tokenizer=tokenizer, thinking=asked.thinking)
        self._close = tokenizer.special_ids.get("</think>")
        sampling = handle.request.sampling
        in_reasoning = () if sampling.stop_after is not None else sampling.stop
        self._held = {"reasoning": Held(in_reasoning), "content": Held(sampling.stop)}
        self._thinking, self._seen = asked.thinking, 0
        self.num_reasoning, self.ended = 0, False
        self.text = {"reasoning": "", "content": ""}
        self.calls: list[dict] = []
        self._has_problem = False  # of a call

    def take(self) -> tuple[list[dict], list[Token]]:
        """(deltas of OpenAI's form, tokens) that have come since it was last asked, the last ones with the end."""
        tokens, reason = self._handle.since(self._seen)
        self.ended = reason is not None
        self._seen += len(tokens)
        for token in tokens:
            self.num_reasoning += self._thinking
            self._thinking &= token.id != self._close
        found = [d for delta in self._parser.feed(t.id for t in tokens) for d in self._told(delta)]
        if self.ended:
            found += [d for delta in self._parser.finish() for d in self._told(delta)]
            stopped = isinstance(self._handle.stopped_by, str)
            for part in self._held:
                found += self._piece(part, self._held[part].close(stopped))
        return list(_joined(found)), tokens

    def _told(self, delta: Delta) -> Iterator[dict]:
        if delta.part == "call":
            yield from self._called(delta.call)
        else:
            yield from self._piece(delta.part, self._held[delta.part].feed(delta.text))

    def _piece(self, part: str, text: str) -> Iterator[dict]:
        if text:
            self.text[part] += text
            yield {"reasoning_content" if part == "reasoning" else "content": text}

    def _called(self, call: ToolCall) -> Iterator[dict]:
        index = len(self.calls)
        self._has_problem |= call.problem is not None
        own = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call.function}
        self.calls.append(own)
        yield {"tool_calls": [{"index": index, **own}]}

    @property
    def finish_reason(self) -> str:
        """Why the reply ended, as OpenAI's API has it."""
        has_calls = self.calls and not self._has_problem
        return (
            "tool_calls"
            if has_calls and self._handle.finish_reason == STOP
            else _reason(self._handle)
        )

    @property
    def message(self) -> dict:
        """Of the whole reply."""
        content = self.text["content"]
        message = {"role": "assistant", "content": content if content or not self.calls else None}
        if self.text["reasoning"]:
            message["reasoning_content"] = self.text["reasoning"]
        return message | ({"tool_calls": self.calls} if self.calls else {})


class Text:
    """One choice of a completion."""

    def __init__(self, handle: Handle, tokenizer: Tokenizer):
        self._handle, self._seen = handle, 0
        self._bytes = Detokenizer(tokenizer, errors="replace")
        self._held = Held(handle.request.sampling.stop)
        self.text, self.ended = "", False

    def take(self) -> tuple[str, list[Token]]:
        """(text, tokens) that have come since it was last asked. A token that ends the reply is no text."""
        handle = self._handle
        tokens, reason = handle.since(self._seen)
        self.ended = reason is not None
        self._seen += len(tokens)
        ids = [token.id for token in tokens]
        if self.ended and isinstance(handle.stopped_by, int):
            ids = ids[:-1]
        text = self._held.feed(self._bytes.feed(ids))
        if self.ended:
            text += self._held.feed(self._bytes.close())
            text += self._held.close(isinstance(handle.stopped_by, str))
        self.text += text
        return text, tokens


class Chats:
    """Answers of `/v1/chat/completions`."""

    def __init__(
        self, asked: Asked, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        self._asked, self._handles = asked, handles
        self._origin, self._tokenizer = origin, tokenizer
        self._chats = [Chat(asked, handle, tokenizer) for handle in handles]

    def whole(self) -> dict:
        """The answer, when all have ended."""
        choices = []
        for index, (chat, handle) in enumerate(zip(self._chats, self._handles)):
            _, tokens = chat.take()
            choice = {"index": index, "message": chat.message, "finish_reason": chat.finish_reason}
            choice |= self._extras(handle, tokens) | _prompt(self._asked, handle)
            choices.append(choice)
        return _answer(self._origin, "chat.completion", choices) | {"usage": self._usage()}

    def first(self) -> list[dict]:
        """What a stream begins with."""
        role = {"role": "assistant", "content": ""}
        chunks = [self._chunk(index, role) for index in range(len(self._chats))]
        for chunk, handle in zip(chunks, self._handles):
            chunk["choices"][0] |= _prompt(self._asked, handle)
        return chunks

    def piece(self, index: int) -> list[dict]:
        """What a stream has of a choice since it was last asked."""
        handle, chat = self._handles[index], self._chats[index]
        deltas, tokens = chat.take()
        if not deltas and tokens and (self._asked.logprobs or self._asked.token_ids):
            deltas = [{}]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            chunks[0]["choices"][0] |= self._extras(handle, tokens)
        if chat.ended:
            chunks.append(self._chunk(index, {}, chat.finish_reason))
        return chunks

    def last(self) -> list[dict]:
        """What a stream ends with."""
        if not self._asked.usage:
            return []
        return [_answer(self._origin, "chat.completion.chunk", []) | {"usage": self._usage()}]

    def _chunk(self, index: int, delta: dict, reason: str | None = None) -> dict:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        return _answer(self._origin, "chat.completion.chunk", [choice])

    def _usage(self) -> dict:
        return _usage(self._asked, self._handles, sum(chat.num_reasoning for chat in self._chats))

    def _extras(self, handle: Handle, tokens: Sequence[Token]) -> dict:
        found = {"logprobs": None}
        if self._asked.logprobs:
            found["logprobs"] = {
                "content": [
                    _told(token.id, token.logprob, self._tokenizer)
                    | {"top_logprobs": [_told(*top, self._tokenizer) for top in token.top]}
                    for token in tokens
                ]
            }
        return found | _ids(self._asked, tokens)


class Completions:
    """Answers of `/v1/completions`; methods as of `Chats`."""

    def __init__(
        self, asked: Asked, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        self._asked, self._handles = asked, handles
        self._origin, self._tokenizer = origin, tokenizer
        self._texts = [Text(handle, tokenizer) for handle in handles]

    def whole(self) -> dict:
        choices = [self._choice(index) for index in range(len(self._texts))]
        for index, choice in enumerate(choices):
            choice["text"] = self._echo(index) + choice["text"]
            choice |= _prompt(self._asked, self._handles[index])
        return _answer(self._origin, "text_completion", choices) | {"usage": self._usage()}

    def first(self) -> list[dict]:
        if not self._asked.echo:
            return []
        none = {"logprobs": None, "finish_reason": None}
        choices = [{"index": i, "text": self._echo(i)} | none for i in range(len(self._texts))]
        return [_answer(self._origin, "text_completion", [choice]) for choice in choices]

    def piece(self, index: int) -> list[dict]:
        return [_answer(self._origin, "text_completion", [self._choice(index)])]

    def last(self) -> list[dict]:
        if not self._asked.usage:
            return []
        return [_answer(self._origin, "text_completion", []) | {"usage": self._usage()}]

    def _echo(self, index: int) -> str:
        return self._asked.echo[index // self._asked.num_choices] if self._asked.echo else ""

    def _usage(self) -> dict:
        return _usage(self._asked, self._handles, 0)

    def _choice(self, index: int) -> dict:
        handle = self._handles[index]
        text, tokens = self._texts[index].take()
        reason = _reason(handle) if self._texts[index].ended else None
        found = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if self._asked.logprobs:
            names = [_name(token.id, self._tokenizer) for token in tokens]
            found["logprobs"] = {
                "tokens": names,
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [
                    {_name(i, self._tokenizer): value for i, value in token.top} for token in tokens
                ],
                "text_offset": list(itertools.accumulate(map(len, names[:-1]), initial=0)),
            }
        return found | _ids(self._asked, tokens)


class Generated:
    """Answers of `/generate`; methods as of `Chats`. A piece tells all of its reply so far."""

    def __init__(
        self, asked: Asked, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        self._asked, self._handles, self._origin = asked, handles, origin
        self._texts = [Text(handle, tokenizer) for handle in handles]
        self._tokens: list[list[Token]] = [[] for _ in handles]

    def whole(self) -> dict | list[dict]:
        found = [self._reply(index) for index in range(len(self._texts))]
        return found if len(found) > 1 or self._asked.batch else found[0]

    def first(self) -> list[dict]:
        return []

    def piece(self, index: int) -> list[dict]:
        several = len(self._texts) > 1 or self._asked.batch
        return [self._reply(index) | ({"index": index} if several else {})]

    def last(self) -> list[dict]:
        return []

    def _reply(self, index: int) -> dict:
        handle, text, tokens = self._handles[index], self._texts[index], self._tokens[index]
        tokens += text.take()[1]
        ended = {
            STOP: {"type": "stop", "matched": handle.stopped_by},
            LENGTH: {"type": "length", "length": len(tokens)},
        }
        abort = {"type": "abort", "message": handle.finish_reason}
        rid = self._asked.rid or self._origin.id
        meta = {
            "id": rid if len(self._texts) == 1 else f"{rid}-{index}",
            "finish_reason": ended.get(handle.finish_reason, abort) if text.ended else None,
            "prompt_tokens": len(handle.request.ids),
            "completion_tokens": len(tokens),
            "cached_tokens": handle.cached_tokens or 0,
            "weight_version": str(tokens[-1].version if tokens else self._origin.version),
            "weight_versions": [token.version for token in tokens],
        }
        if self._asked.logprobs:
            meta["output_token_logprobs"] = [[token.logprob, token.id, None] for token in tokens]
            if handle.request.sampling.top_logprobs:
                meta["output_top_logprobs"] = [
                    [[value, i, None] for i, value in token.top] for token in tokens
                ]
        return {"text": text.text, "output_ids": [t.id for t in tokens], "meta_info": meta}


def _usage(asked: Asked, handles: Sequence[Handle], num_reasoning: int) -> dict:
    """What an answer cost, in tokens. The choices of a prompt count it once."""
    first = handles[:: asked.num_choices]
    prompt = sum(len(handle.request.ids) for handle in first)
    completion = sum(len(handle.tokens) for handle in handles)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(h.cached_tokens or 0 for h in first)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def _prompt(asked: Asked, handle: Handle) -> dict:
    return {"prompt_token_ids": list(handle.request.ids)} if asked.token_ids else {}


def _ids(asked: Asked, tokens: Sequence[Token]) -> dict:
    if not asked.token_ids:
        return {}
    return {
        "token_ids": [token.id for token in tokens],
        "weight_versions": [token.version for token in tokens],
    }


def _joined(deltas: Iterable[dict]) -> Iterator[dict]:
    """Neighbours that append to the same text as one."""
    for names, group in itertools.groupby(deltas, key=tuple):
        if names == ("tool_calls",):
            yield from group
        else:
            yield {name: "".join(delta[name] for delta in group) for name in names}


def _answer(origin: Origin, kind: str, choices: list[dict]) -> dict:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{origin.id}",
        "object": kind,
        "created": origin.created,
        "model": origin.model,
        "choices": choices,
        "weight_version": origin.version,
    }


def _told(token: int, logprob: float, tokenizer: Tokenizer) -> dict:
    own = tokenizer.bytes_of(token, errors="replace")
    return {"token": own.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(own)}


def _name(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.bytes_of(token, errors="replace").decode("utf-8", "replace")


def _reason(handle: Handle) -> str:
    """A request that ran out of time was cut off, as one that ran out of tokens."""
    if handle.finish_reason in (LENGTH, DEADLINE):
        return "length"
    return "stop" if handle.finish_reason == STOP else "abort"
