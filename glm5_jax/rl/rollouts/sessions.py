"""Sessions: chats as trees of turns whose tokens are kept as they were sampled, and the training samples of them.

Agents exchange messages, the learner trains on token ids. Only the new messages of a request are encoded; the ids read and
sampled before are reused as they are (GLM-5 4.1.2). A request takes three steps, so that one that fails changes nothing:

1. `Session.plan` returns the prompt of a request.
2. `Session.make_turn` checks the engine's reply.
3. `Session.add` changes the session.

This module does no I/O; `gateway` does.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.prompts import PromptReader, num_characters
from glm5_jax.rl.types import Message
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.chat import render_chat
from glm5_jax.text.messages import ChatError, read_message, read_messages
from glm5_jax.text.tokenizer import STOP_TOKENS, Tokenizer

CLEAN, REALIGN, FORK = "clean", "realign", "fork"
ROOT = -1
_MAX_UNCOUNTED = 2**14  # characters of new messages that need no check of their length


class SessionError(Exception):
    """Raised for a request that a session cannot take.

    Attributes:
      status: HTTP status: 400 for an invalid request, 409 if the turn before it has no end, 429 after too many replies,
        500 if tokens do not fit together.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Options of a session. Raises ValueError for values out of range.

    Attributes:
      variant: chat layout.
      max_turns: maximum number of replies of a session, in all its branches.
      max_realigned_tokens: a request may repeat a reply with changes. A reply with fewer tokens than this is then replaced
        by the repeated message, which is not trained on. Otherwise the session forks before the reply, and keeps both.
      max_length: maximum length of a prompt, in tokens. Engines may have a smaller limit.
    """

    variant: str = "glm5"
    max_turns: int = 256  # not disclosed
    max_realigned_tokens: int = 1024  # THUDM/slime, agent adapters
    max_length: int = 202_752  # GLM-5 2.3: the positions that it is trained on

    def __post_init__(self):
        for name in ("max_turns", "max_realigned_tokens", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionStart:
    """Seed, temperature and top_p of the samples of a session."""

    seed: int
    temperature: float
    top_p: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """Reply of a session, with the new messages before it.

    Attributes:
      parent: index of the turn that it follows; ROOT: none.
      kind: CLEAN: it follows the end of its parent. REALIGN: it replaces the parent's reply. FORK: another turn follows
        the same parent already.
      tools: tools of the request, as JSON; the same for all turns of a branch.
      messages: new messages, as of `normalize_message`. Those of a REALIGN begin with the repeated reply.
      num_dropped: number of tokens at the end of the parent's that are not part of this branch.
      context: ids of the new messages, which are not trained on.
      output, logprobs, versions: sampled ids of the reply, with the log-prob and the weight version of each.
      finish_reason: "stop" or "length".
      reply: message that was sent to the agent, as of `normalize_message`.
      sample_index: index of the reply among those to the same prompt; each is sampled with another seed.
    """

    parent: int
    kind: str
    tools: str
    messages: tuple[Message, ...]
    num_dropped: int
    context: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    reply: Message
    sample_index: int = 0

    def __post_init__(self):
        if not 0 < len(self.output) == len(self.logprobs) == len(self.versions):
            counts = len(self.output), len(self.logprobs), len(self.versions)
            raise ValueError(
                f"a reply has {counts} ids, log-probs and versions; give one of each for every token"
            )


class TurnPlan(NamedTuple):
    """Prompt of a request.

    Attributes:
      ids: all ids of the prompt.
      parent, kind, tools, messages, num_dropped, context, sample_index: fields of the `Turn` that its reply makes.
    """

    parent: int
    kind: str
    tools: str
    messages: tuple[Message, ...]
    num_dropped: int
    context: tuple[int, ...]
    sample_index: int
    ids: tuple[int, ...]


class _Span(NamedTuple):
    """Consecutive tokens of a branch. turn: index of the turn whose reply they are; None for tokens of a prompt."""

    turn: int | None
    ids: tuple[int, ...]


class _Position(NamedTuple):
    """Position in a session from which a request continues.

    Attributes:
      parent: turn that the request follows; ROOT: none.
      kind: CLEAN or REALIGN.
      num_known: number of the request's messages that the session has read already.
    """

    parent: int
    kind: str
    num_known: int


class Session:
    """Tree of the turns of one rollout. Sub-agents, retries and compacted contexts make branches.

    Attributes:
      turns: turns in the order of their replies.
      seed: seed of all replies.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: SessionConfig = SessionConfig(), seed: int = 0
    ):
        self._tokenizer, self._config, self.seed = tokenizer, config, seed
        self._stop_ids = {
            tokenizer.special_ids[name] for name in STOP_TOKENS if name in tokenizer.special_ids
        }
        self._assistant_id = tokenizer.special_ids["<|assistant|>"]
        self.turns: list[Turn] = []
        self._num_messages: list[
            int
        ] = []  # of each turn, from the start of its branch to its reply

    def plan(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        *,
        enable_thinking: bool = True,
        pending: Collection[TurnPlan] = (),
    ) -> TurnPlan:
        """Returns the prompt of a request, and changes nothing. Raises SessionError.

        pending: plans of the requests that engines are answering.
        """
        if len(self.turns) + len(pending) >= self._config.max_turns:
            raise SessionError(
                f"the session has its {self._config.max_turns} replies, of which {len(pending)} are being written; end "
                "it, or raise max_turns",
                429,
            )
        try:
            # Find the turn that the request follows.
            messages = read_messages(messages)
            request = tuple(normalize_message(message) for message in messages)
            if request[-1]["role"] == "assistant":
                raise ChatError(
                    "the last message is an assistant's; add one after it to be answered"
                )
            tools_json = json.dumps(tools or [], sort_keys=True)
            position = self._find_position(request, tools_json)
            parent, kind = position.parent, position.kind
            prefix, num_dropped = self._prefix(position)

            # Encode the new messages only.
            render = functools.partial(
                render_chat,
                messages,
                tools=tools or None,
                enable_thinking=enable_thinking,
                clear_thinking=False,
                variant=self._config.variant,
                first=position.num_known,
            )
            new_messages = request[position.num_known :]
            if num_characters([new_messages, tools]) > _MAX_UNCOUNTED:
                self._check_length(render().text)
            context = tuple(render(self._tokenizer).ids or ())
        except ValueError as error:
            # A `ChatError`, or half of a surrogate pair, which no tokenizer encodes.
            raise SessionError(str(error), 400) from None
        except RecursionError:
            raise SessionError("the messages or tools are nested too deeply", 400) from None

        # Join both parts.
        if parent != ROOT and kind == CLEAN and prefix[-1] in self._stop_ids:
            # The stop token of a reply opens the message that the model expects; another message has its own opening.
            if prefix[-1] == context[0]:
                context = context[1:]
            else:
                num_dropped = 1
        ids = (*prefix[: len(prefix) - num_dropped], *context)

        # The smallest free index. A count could repeat an index: of two concurrent requests the first may fail.
        used = {
            turn.sample_index
            for turn in (*self.turns, *pending)
            if turn.parent == parent and turn.context == context
        }
        sample_index = next(i for i in itertools.count() if i not in used)
        return TurnPlan(
            parent=parent,
            kind=kind,
            tools=tools_json,
            messages=new_messages,
            num_dropped=num_dropped,
            context=context,
            sample_index=sample_index,
            ids=ids,
        )

    def _find_position(self, request: tuple[Message, ...], tools: str) -> _Position:
        """Returns the position from which a request continues."""
        parent, num_known = self._longest_matching_turn(request, tools)
        if parent == ROOT or is_same_message(request[num_known - 1], self.turns[parent].reply):
            return _Position(parent, CLEAN, num_known)
        if len(self.turns[parent].output) < self._config.max_realigned_tokens:
            return _Position(parent, REALIGN, num_known - 1)  # the changed reply is a new message
        parent = self.turns[parent].parent
        return _Position(parent, CLEAN, self._num_messages[parent] if parent != ROOT else 0)

    def _prefix(self, position: _Position) -> tuple[list[int], int]:
        """Returns the ids up to the end of a position's turn, and how many of them its branch drops.

        Raises SessionError if the turn has no end.
        """
        parent = position.parent
        if parent == ROOT:
            return [], 0
        if position.kind == REALIGN:
            return self._ids(parent), self._num_reply_tokens(parent)
        if self.turns[parent].finish_reason == "length":
            raise SessionError(
                f"reply {parent} was cut off at its length, and nothing can follow an incomplete reply; raise "
                "max_tokens and request it again",
                409,
            )
        return self._ids(parent), 0

    def _check_length(self, text: str) -> None:
        """Raises SessionError if a text has too many tokens, before it is encoded: 15 MB take 20 s and 2 GB."""
        try:
            _prompt_reader(self._tokenizer, self._config.max_length).check_text(text, "messages")
        except ApiError as error:
            raise SessionError(
                f"{error}; shorten it, or raise max_length of sessions", 400
            ) from None

    def reply_seed(self, plan: TurnPlan) -> int:
        """Returns the seed of the reply to a plan.

        A request that is repeated after a failure has the same seed; a second reply to the same prompt has another one.
        """
        return derive_seed(self.seed, plan.sample_index, *plan.ids)

    def make_turn(
        self,
        plan: TurnPlan,
        output: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: str,
        reply: Mapping,
    ) -> Turn:
        """Returns the turn of a reply, for `add`, and changes nothing.

        Raises ValueError unless each token has a log-prob and a version, SessionError if its parent does not exist.
        """
        kind = plan.kind
        if kind == CLEAN and any(turn.parent == plan.parent for turn in self.turns):
            kind = FORK
        turn = Turn(
            parent=plan.parent,
            kind=kind,
            tools=plan.tools,
            messages=plan.messages,
            num_dropped=plan.num_dropped,
            context=plan.context,
            output=tuple(output),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish_reason=finish_reason,
            reply=normalize_message(reply),
            sample_index=plan.sample_index,
        )
        self._check_parent(turn)
        return turn

    def add(self, turn: Turn) -> None:
        """Appends a turn. Raises SessionError if its parent does not exist."""
        self._check_parent(turn)
        self.turns.append(turn)
        self._num_messages.append(self._first_message(turn) + len(turn.messages) + 1)

    def _check_parent(self, turn: Turn) -> None:
        if not ROOT <= turn.parent < len(self.turns):
            raise SessionError(
                f"turn {len(self.turns)} follows turn {turn.parent}, which does not exist", 500
            )

    def records(self, **fields: Any) -> list[TokenRecord]:
        """Returns a record for each branch, in the order of their last turns.

        Every reply is trained on once, in the first branch that contains it. fields: other fields of all records.
        """
        parents = {turn.parent for turn in self.turns}
        in_earlier_branch: set[int] = set()
        records = []
        for leaf in range(len(self.turns)):
            if leaf in parents:
                continue
            spans = self._spans(leaf)
            ids = np.concatenate([span.ids for span in spans])
            logprobs = np.full(len(ids), np.nan, np.float32)
            versions = np.full(len(ids), -1, np.int32)
            start = 0
            for span in spans:
                count = len(span.ids)
                if span.turn is not None and span.turn not in in_earlier_branch:
                    turn, positions = self.turns[span.turn], slice(start, start + count)
                    logprobs[positions] = turn.logprobs[:count]
                    versions[positions] = turn.versions[:count]
                    in_earlier_branch.add(span.turn)
                start += count
            is_truncated = self.turns[leaf].finish_reason == "length"
            values: dict[str, Any] = {
                "status": "truncated" if is_truncated else "completed",
                **fields,
            }
            record = TokenRecord(
                token_ids=ids,
                loss_mask=~np.isnan(logprobs),
                rollout_logp=logprobs,
                weight_version=versions,
                **values,
            )
            records.append(record)
        return records

    def _longest_matching_turn(self, request: tuple[Message, ...], tools: str) -> tuple[int, int]:
        """Returns the turn whose chat is the longest beginning of a request, and its messages up to its reply.

        The reply itself may have been changed. Returns (ROOT, 0) if there is no such turn.
        """
        best, match = (0, False), (ROOT, 0)
        # For each turn, whether the request contains its chat up to its reply, and whether the reply is unchanged.
        reaches_reply: list[bool] = []
        has_same_reply: list[bool] = []
        for index, turn in enumerate(self.turns):
            # A REALIGN follows a reply that may differ, any other turn follows an unchanged one.
            matches_parent = reaches_reply if turn.kind == REALIGN else has_same_reply
            start, count = self._first_message(turn), self._num_messages[index]
            reaches_reply.append(
                turn.tools == tools
                and (turn.parent == ROOT or matches_parent[turn.parent])
                and len(request) >= count
                and request[count - 1]["role"] == "assistant"
                and all(map(is_same_message, request[start : count - 1], turn.messages))
            )
            has_same_reply.append(
                reaches_reply[-1] and is_same_message(request[count - 1], turn.reply)
            )
            # An unchanged reply wins over a changed one. Of two equal turns the later one wins, because an agent that
            # repeats a request has lost the earlier reply.
            if reaches_reply[-1] and (count, has_same_reply[-1]) >= best:
                best, match = (count, has_same_reply[-1]), (index, count)
        return match

    def _first_message(self, turn: Turn) -> int:
        """Returns the index of the first new message of a turn in its branch."""
        if turn.parent == ROOT:
            return 0
        return self._num_messages[turn.parent] - (turn.kind == REALIGN)

    def _num_reply_tokens(self, index: int) -> int:
        """Returns the number of tokens of a turn from the opening of its reply to its end."""
        turn = self.turns[index]
        opening = list(reversed(turn.context)).index(self._assistant_id) + 1
        return opening + len(turn.output)

    def _ids(self, index: int) -> list[int]:
        """Returns all ids of a branch up to the end of a turn."""
        return [i for span in self._spans(index) for i in span.ids]

    def _spans(self, index: int) -> list[_Span]:
        """Returns the spans of a branch up to the end of a turn."""
        path = []
        while index != ROOT:
            path.append(index)
            index = self.turns[index].parent
        spans: list[_Span] = []
        for index in reversed(path):
            turn = self.turns[index]
            num_dropped = turn.num_dropped
            while num_dropped:
                last = spans.pop()
                if len(last.ids) > num_dropped:
                    spans.append(last._replace(ids=last.ids[:-num_dropped]))
                num_dropped = max(num_dropped - len(last.ids), 0)
            spans += [_Span(None, turn.context), _Span(index, turn.output)]
        return spans


@functools.lru_cache(maxsize=4)
def _prompt_reader(tokenizer: Tokenizer, max_length: int) -> PromptReader:
    return PromptReader(tokenizer, max_length)


def normalize_message(message: Mapping) -> dict:
    """Returns a message with the four fields that have a meaning, in the form of `read_message`. Raises ChatError.

    They are role, content, reasoning_content (None: the message has none) and tool_calls.
    """
    return {"reasoning_content": None, "tool_calls": [], **read_message(message)}


def is_same_message(message: Message, known: Message) -> bool:
    """Returns whether a message of a request equals a known one. An agent may leave out the reasoning."""
    if any(message[name] != known[name] for name in ("role", "tool_calls")):
        return False
    has_same_content = message["content"] == known["content"]
    if has_same_content and message["reasoning_content"] in (
        None,
        known["reasoning_content"] or "",
    ):
        return True
    if known["role"] != "assistant" or "</think>" not in known["content"]:
        return False
    # The content of a reply may contain "</think>". Without a reasoning field it is then read as reasoning and content.
    reparsed = normalize_message({"role": "assistant", "content": known["content"]})
    return all(message[name] == reparsed[name] for name in ("content", "reasoning_content"))


def derive_seed(*numbers: int) -> int:
    """Returns a seed for these numbers, the same in every process and different for other numbers."""
    text = json.dumps(numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
