"""Builds responses in the formats of OpenAI's API and SGLang's `/generate`, complete or streamed.

A tool call that is cut off or cannot be parsed has its text as arguments, which is not JSON. `finish_reason` is
"tool_calls" only if all calls are complete. Reasoning is returned as `reasoning_content`.
"""

import dataclasses
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence

from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.request import DEADLINE, LENGTH, STOP, Handle, Token
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Detokenizer, Tokenizer
from glm5_jax.text.tool_calls import Delta, ReplyParser, ToolCall

_MIN_GROWTH = 1 / 32  # of a reply, between two pieces of a cumulative stream


@dataclasses.dataclass(frozen=True)
class Origin:
    """Metadata of a response.

    Attributes:
      model: name of the model.
      version: version of the weights at submission.
      id: unique id.
      created: time of creation, in seconds since 1970.
    """

    model: str
    version: int
    _: dataclasses.KW_ONLY
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class StopFilter:
    """Filter of streamed text that holds back possible starts of a stop text and cuts at a stop text."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._max_start = max(map(len, stops), default=1) - 1
        self._text = ""

    def feed(self, text: str) -> str:
        """Appends text and returns what cannot be part of a stop text."""
        self._text += text
        matches = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        ready = self._text[: min([max(0, len(self._text) - self._max_start), *matches])]
        self._text = self._text[len(ready) :]
        return ready

    def close(self, stopped: bool, stopped_by: str | None = None) -> str:
        """Returns the rest, up to the first stop text if `stopped`.

        stopped_by: stop text that ended a text whose last blanks were stripped. Its start may end the rest.
        """
        rest, self._text = self._text, ""
        matches = [at for stop in self._stops if (at := rest.find(stop)) >= 0] if stopped else []
        if matches:
            return rest[: min(matches)]
        return rest.removesuffix((stopped_by or "").rstrip())


class Chat:
    """Incremental parser of one choice of a chat."""

    def __init__(self, parsed: ParsedRequest, handle: Handle, tokenizer: Tokenizer):
        self._handle = handle
        self._parser = ReplyParser(parsed.tools, tokenizer=tokenizer, thinking=parsed.thinking)
        self._close = tokenizer.special_ids.get("</think>")
        sampling = handle.request.sampling
        in_reasoning = () if sampling.stop_after is not None else sampling.stop
        self._filters = {
            "reasoning": StopFilter(in_reasoning),
            "content": StopFilter(sampling.stop),
        }
        self._thinking, self._num_read = bool(parsed.thinking), 0
        self.num_reasoning, self.ended = 0, False
        self.text = {"reasoning": "", "content": ""}
        self.calls: list[dict] = []
        self._has_problem = False  # of a call

    def take(self) -> tuple[list[dict], list[Token]]:
        """Returns (OpenAI's deltas, tokens) since the last call; the last ones include the end."""
        tokens, reason = self._handle.tokens_after(self._num_read)
        self.ended = reason is not None
        self._num_read += len(tokens)
        for token in tokens:
            self.num_reasoning += self._thinking
            self._thinking = self._thinking and token.id != self._close
        deltas = [
            d for delta in self._parser.feed(t.id for t in tokens) for d in self._convert(delta)
        ]
        if self.ended:
            deltas += [d for delta in self._parser.finish() for d in self._convert(delta)]
            stopped = isinstance(self._handle.stopped_by, str)
            for part in self._filters:
                # A stop within a call is not at the end of the content before it.
                is_last = stopped and not self.calls and (part == "reasoning") == self._thinking
                stop = self._handle.stopped_by
                stopped_by = stop if is_last and isinstance(stop, str) else None
                deltas += self._append(part, self._filters[part].close(stopped, stopped_by))
        return list(_merge_deltas(deltas)), tokens

    def _convert(self, delta: Delta) -> Iterator[dict]:
        """Yields the OpenAI deltas of a parsed delta."""
        if delta.call is not None:
            yield from self._append_call(delta.call)
        else:
            yield from self._append(delta.part, self._filters[delta.part].feed(delta.text))

    def _append(self, part: str, text: str) -> Iterator[dict]:
        if text:
            self.text[part] += text
            yield {"reasoning_content" if part == "reasoning" else "content": text}

    def _append_call(self, call: ToolCall) -> Iterator[dict]:
        index = len(self.calls)
        self._has_problem |= call.problem is not None
        entry = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": call.function,
        }
        self.calls.append(entry)
        yield {"tool_calls": [{"index": index, **entry}]}

    @property
    def finish_reason(self) -> str:
        """Finish reason in OpenAI's terms."""
        has_calls = self.calls and not self._has_problem
        return (
            "tool_calls"
            if has_calls and self._handle.finish_reason == STOP
            else _reason(self._handle)
        )

    @property
    def message(self) -> dict:
        """Message of the complete reply."""
        content = self.text["content"]
        message = {"role": "assistant", "content": content if content or not self.calls else None}
        if self.text["reasoning"]:
            message["reasoning_content"] = self.text["reasoning"]
        return message | ({"tool_calls": self.calls} if self.calls else {})


class Text:
    """Incremental decoder of one choice of a completion."""

    def __init__(self, handle: Handle, tokenizer: Tokenizer):
        self._handle, self._num_read = handle, 0
        self._bytes = Detokenizer(tokenizer, errors="replace")
        self._filters = StopFilter(handle.request.sampling.stop)
        self.text, self.ended = "", False

    def take(self) -> tuple[str, list[Token]]:
        """Returns (text, tokens) since the last call. The text excludes a token that ends the reply."""
        handle = self._handle
        tokens, reason = handle.tokens_after(self._num_read)
        self.ended = reason is not None
        self._num_read += len(tokens)
        ids = [token.id for token in tokens]
        if self.ended and isinstance(handle.stopped_by, int):
            ids = ids[:-1]
        text = self._filters.feed(self._bytes.feed(ids))
        if self.ended:
            text += self._filters.feed(self._bytes.close())
            text += self._filters.close(isinstance(handle.stopped_by, str))
        self.text += text
        return text, tokens


class ReplyForm:
    """Form of the responses of an endpoint: one object, or the events of a stream.

    Attributes:
      is_cumulative: whether each piece of a stream repeats the pieces before it.
      has_named_events: whether events have the name in their `type`, and no `[DONE]` follows them.
    """

    is_cumulative = False
    has_named_events = False

    def complete(self) -> dict | list[dict]:
        """Returns the complete response, after all replies have ended."""
        raise NotImplementedError

    def first(self) -> list[dict]:
        """Returns the first events of a stream."""
        return []

    def piece(self, index: int) -> list[dict]:
        """Returns the events of a choice since the last call."""
        raise NotImplementedError

    def last(self) -> list[dict]:
        """Returns the last events of a stream."""
        return []

    def failed(self, error: ApiError) -> list[dict]:
        """Returns the last events of a stream after an error."""
        return [error.body]


class Chats(ReplyForm):
    """Responses of `/v1/chat/completions`."""

    def __init__(
        self, parsed: ParsedRequest, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        self._parsed, self._handles = parsed, handles
        self._origin, self._tokenizer = origin, tokenizer
        self._chats = [Chat(parsed, handle, tokenizer) for handle in handles]

    def complete(self) -> dict:
        choices = []
        for index, (chat, handle) in enumerate(zip(self._chats, self._handles)):
            _, tokens = chat.take()
            choice = {"index": index, "message": chat.message, "finish_reason": chat.finish_reason}
            choice |= self._extras(handle, tokens) | _prompt(self._parsed, handle)
            choices.append(choice)
        return _answer(self._origin, "chat.completion", choices) | {"usage": self._usage()}

    def first(self) -> list[dict]:
        role = {"role": "assistant", "content": ""}
        chunks = [self._chunk(index, role) for index in range(len(self._chats))]
        for chunk, handle in zip(chunks, self._handles):
            chunk["choices"][0] |= _prompt(self._parsed, handle)
        return [chunk | self._current_usage() for chunk in chunks]

    def piece(self, index: int) -> list[dict]:
        handle, chat = self._handles[index], self._chats[index]
        if chat.ended:  # it ended while its last piece was built
            return []
        deltas, tokens = chat.take()
        if not deltas and tokens and (self._parsed.logprobs or self._parsed.token_ids):
            deltas = [{}]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            chunks[0]["choices"][0] |= self._extras(handle, tokens)
        if chat.ended:
            chunks.append(self._chunk(index, {}, chat.finish_reason))
        return [chunk | self._current_usage() for chunk in chunks]

    def last(self) -> list[dict]:
        if not self._parsed.usage:
            return []
        return [_answer(self._origin, "chat.completion.chunk", []) | {"usage": self._usage()}]

    def _current_usage(self) -> dict:
        return {"usage": self._usage()} if self._parsed.continuous_usage else {}

    def _chunk(self, index: int, delta: dict, reason: str | None = None) -> dict:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        return _answer(self._origin, "chat.completion.chunk", [choice])

    def _usage(self) -> dict:
        return usage_of(
            self._parsed, self._handles, sum(chat.num_reasoning for chat in self._chats)
        )

    def _extras(self, handle: Handle, tokens: Sequence[Token]) -> dict:
        extras: dict = {"logprobs": None}
        if self._parsed.logprobs:
            extras["logprobs"] = {
                "content": [
                    _logprob_entry(token.id, token.logprob, self._tokenizer)
                    | {"top_logprobs": [_logprob_entry(*top, self._tokenizer) for top in token.top]}
                    for token in tokens
                ]
            }
        return extras | _token_ids_of(self._parsed, tokens)


class Completions(ReplyForm):
    """Responses of `/v1/completions`."""

    def __init__(
        self, parsed: ParsedRequest, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        self._parsed, self._handles = parsed, handles
        self._origin, self._tokenizer = origin, tokenizer
        self._texts = [Text(handle, tokenizer) for handle in handles]

    def complete(self) -> dict:
        choices = [self._choice(index) for index in range(len(self._texts))]
        for index, choice in enumerate(choices):
            choice["text"] = self._echo(index) + choice["text"]
            if self._parsed.echo and self._parsed.logprobs:
                choice["logprobs"] = self._logprobs(index, self._handles[index].tokens)
            choice |= _prompt(self._parsed, self._handles[index])
        return _answer(self._origin, "text_completion", choices) | {"usage": self._usage()}

    def first(self) -> list[dict]:
        if not self._parsed.echo:
            return []
        none = {"logprobs": None, "finish_reason": None}
        choices = [{"index": i, "text": self._echo(i)} | none for i in range(len(self._texts))]
        return [self._chunk(choice) for choice in choices]

    def piece(self, index: int) -> list[dict]:
        if self._texts[index].ended:
            return []
        return [self._chunk(self._choice(index))]

    def last(self) -> list[dict]:
        if not self._parsed.usage:
            return []
        return [_answer(self._origin, "text_completion", []) | {"usage": self._usage()}]

    def _chunk(self, choice: dict) -> dict:
        usage = {"usage": self._usage()} if self._parsed.continuous_usage else {}
        return _answer(self._origin, "text_completion", [choice]) | usage

    def _echo(self, index: int) -> str:
        return self._parsed.echo[index // self._parsed.num_choices] if self._parsed.echo else ""

    def _usage(self) -> dict:
        return usage_of(self._parsed, self._handles, 0)

    def _choice(self, index: int) -> dict:
        handle = self._handles[index]
        text, tokens = self._texts[index].take()
        reason = _reason(handle) if self._texts[index].ended else None
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if self._parsed.logprobs and not self._parsed.echo:
            choice["logprobs"] = self._logprobs(index, tokens)
        return choice | _token_ids_of(self._parsed, tokens)

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict:
        """Returns the log-probs of tokens, after those of the prompt if it is echoed. The first has none."""
        handle, ids, entries = self._handles[index], [token.id for token in tokens], list(tokens)
        if self._parsed.echo:
            ids = [*handle.request.ids, *ids]
            entries = [None, *handle.prompt_tokens, *tokens]
        names = [_token_text(i, self._tokenizer) for i in ids]
        offsets = itertools.accumulate(map(len, names), initial=0)
        return {
            "tokens": names,
            "token_logprobs": [one and one.logprob for one in entries],
            "top_logprobs": [
                one and {_token_text(i, self._tokenizer): value for i, value in one.top}
                for one in entries
            ],
            "text_offset": list(offsets)[: len(names)],
        }


class Generated(ReplyForm):
    """Responses of `/generate`.

    Each piece of a stream repeats the reply so far, as in SGLang. A piece is sent only after the reply has grown by
    1/32, because with one per token the size of the stream would grow with the square of the tokens.
    """

    is_cumulative = True

    def __init__(
        self, parsed: ParsedRequest, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        self._parsed, self._handles, self._origin = parsed, handles, origin
        self._texts = [Text(handle, tokenizer) for handle in handles]
        self._tokens: list[list[Token]] = [[] for _ in handles]
        self._num_sent = [0] * len(handles)  # tokens of the last piece of each

    def complete(self) -> dict | list[dict]:
        replies = [self._reply(index) for index in range(len(self._texts))]
        return replies if len(replies) > 1 or self._parsed.batch else replies[0]

    def piece(self, index: int) -> list[dict]:
        is_batch = len(self._texts) > 1 or self._parsed.batch
        num_sent = self._num_sent[index]
        tokens, reason = self._handles[index].tokens_after(num_sent)
        if self._texts[index].ended or (reason is None and len(tokens) < num_sent * _MIN_GROWTH):
            return []
        reply = self._reply(index)
        self._num_sent[index] = len(reply["output_ids"])
        return [reply | ({"index": index} if is_batch else {})]

    def _reply(self, index: int) -> dict:
        handle, text, tokens = self._handles[index], self._texts[index], self._tokens[index]
        tokens += text.take()[1]
        ended: dict[str | None, dict] = {
            STOP: {"type": "stop", "matched": handle.stopped_by},
            LENGTH: {"type": "length", "length": len(tokens)},
        }
        abort = {"type": "abort", "message": handle.finish_reason}
        rid = self._parsed.rid or self._origin.id
        meta = {
            "id": rid if len(self._texts) == 1 else f"{rid}-{index}",
            "finish_reason": ended.get(handle.finish_reason, abort) if text.ended else None,
            "prompt_tokens": len(handle.request.ids),
            "completion_tokens": len(tokens),
            "cached_tokens": handle.cached_tokens or 0,
            "weight_version": str(tokens[-1].version if tokens else self._origin.version),
            "weight_versions": [token.version for token in tokens],
        }
        if self._parsed.logprobs:
            meta["output_token_logprobs"] = [[token.logprob, token.id, None] for token in tokens]
            if handle.request.sampling.top_logprobs:
                meta["output_top_logprobs"] = [
                    [[value, i, None] for i, value in token.top] for token in tokens
                ]
        return {"text": text.text, "output_ids": [t.id for t in tokens], "meta_info": meta}


def usage_of(parsed: ParsedRequest, handles: Sequence[Handle], num_reasoning: int) -> dict:
    """Returns the token counts of a response. All choices of a prompt count its tokens once."""
    first = handles[:: parsed.num_choices]
    prompt = sum(len(handle.request.ids) for handle in first)
    completion = sum(handle.num_tokens for handle in handles)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(h.cached_tokens or 0 for h in first)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def _prompt(parsed: ParsedRequest, handle: Handle) -> dict:
    return {"prompt_token_ids": list(handle.request.ids)} if parsed.token_ids else {}


def _token_ids_of(parsed: ParsedRequest, tokens: Sequence[Token]) -> dict:
    if not parsed.token_ids:
        return {}
    return {
        "token_ids": [token.id for token in tokens],
        "weight_versions": [token.version for token in tokens],
    }


def _merge_deltas(deltas: Iterable[dict]) -> Iterator[dict]:
    """Merges adjacent deltas that append to the same text."""
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


def _logprob_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict:
    data = tokenizer.bytes_of(token, errors="replace")
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _token_text(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.bytes_of(token, errors="replace").decode("utf-8", "replace")


def _reason(handle: Handle) -> str:
    """Returns the finish reason in OpenAI's terms; a timeout counts as "length"."""
    if handle.finish_reason in (LENGTH, DEADLINE):
        return "length"
    return "stop" if handle.finish_reason == STOP else "abort"
