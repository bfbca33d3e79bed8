"""Chats whose tokens are kept as they were sampled: a tree of turns, and the samples that are trained on.

An agent speaks in messages, a learner in token ids, and neither is the other encoded: of a request only the messages
that are new are, behind the ids that were read and sampled before (GLM-5 4.1.2). Nothing here waits or touches a
socket (`gateway`); a request is understood first (`Session.plan`), its answer is looked at (`Session.answer`), and
only then it changes the session (`Session.add`), so that what fails leaves no trace.
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
_MAX_UNCOUNTED = 2**14  # characters that are encoded without a look at how many tokens they are


class SessionError(Exception):
    """A request that a session cannot take. status: HTTP's, 400 what it says is wrong, 409 what it goes on from has no
    end, 429 there were too many, 500 its tokens do not fit together."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class SessionConfig:
    """How chats become tokens. Construction refuses values out of range (ValueError).

    Attributes:
      variant: the chat layout.
      max_turns: replies of a session, of all its branches.
      realigned: a reply that comes back altered is overwritten by what came back, which is not trained on, if that is
        shorter than so many tokens; else the session forks before it, and both are kept.
      max_length: largest prompt that is encoded, in tokens. Engines may have a smaller limit.
    """

    variant: str = "glm5"
    max_turns: int = 256  # not disclosed
    realigned: int = 1024  # THUDM/slime, agent adapters
    max_length: int = 202_752  # GLM-5 2.3: the positions that it is trained on

    def __post_init__(self):
        for name in ("max_turns", "realigned", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class Turn:
    """A reply and what was new before it.

    Attributes:
      parent: the number of the turn that it goes on from; ROOT: of none.
      kind: how it does: CLEAN behind the parent's end, REALIGN over its reply, FORK beside another turn.
      tools: that were offered, as JSON; those of all turns on a way are the same.
      messages: new ones, in the form of `plain`; of a REALIGN they begin with the reply as it came back.
      drop: tokens at the end of the parent's that it does without.
      context: ids of the messages, which are not trained on.
      output, logprobs, versions: the reply's ids as sampled, with each one's log-prob and weights.
      finish_reason: "stop" or "length".
      reply: the message that the reply was told as, in the form of `plain`.
      draw: which reply to its prompt it is; each is drawn with a seed of its own.
    """

    parent: int
    kind: str
    tools: str
    messages: tuple[Message, ...]
    drop: int
    context: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    reply: Message
    draw: int = 0

    def __post_init__(self):
        if not 0 < len(self.output) == len(self.logprobs) == len(self.versions):
            counts = len(self.output), len(self.logprobs), len(self.versions)
            raise ValueError(
                f"a reply has {counts} ids, log-probs and versions; give one of each for every token"
            )


class Plan(NamedTuple):
    """What a request comes to. ids: the prompt; other fields: as of the turn that will be."""

    parent: int
    kind: str
    tools: str
    messages: tuple[Message, ...]
    drop: int
    context: tuple[int, ...]
    draw: int
    ids: tuple[int, ...]


class _Piece(NamedTuple):
    """Tokens of a branch; turn: whose reply they are, None for what was only read."""

    turn: int | None
    ids: tuple[int, ...]


class Session:
    """The turns of one rollout, whose requests may branch: sub-agents, retries and compacted contexts fork.

    Attributes:
      turns: in the order of their answers.
      seed: of all of them.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: SessionConfig = SessionConfig(), seed: int = 0
    ):
        """seed: of all replies."""
        self._tokenizer, self._config, self.seed = tokenizer, config, seed
        self._stops = {tokenizer.special_ids[n] for n in STOP_TOKENS if n in tokenizer.special_ids}
        self._opens = tokenizer.special_ids["<|assistant|>"]
        self.turns: list[Turn] = []
        self._counts: list[int] = []  # of each turn, messages up to its reply

    def plan(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        *,
        enable_thinking: bool = True,
        asked: Collection[Plan] = (),
    ) -> Plan:
        """What to read for a request; nothing is changed. asked: those that are being answered. SessionError."""
        if len(self.turns) + len(asked) >= self._config.max_turns:
            raise SessionError(
                f"the session has its {self._config.max_turns} replies, of which {len(asked)} are being written; end it, "
                "or raise max_turns",
                429,
            )
        try:
            messages = read_messages(messages)
            said = tuple(plain(message) for message in messages)
            if said[-1]["role"] == "assistant":
                raise ChatError(
                    "the last message is an assistant's; put one behind it to be answered"
                )
            offered = json.dumps(tools or [], sort_keys=True)
            parent, known = self._deepest(said, offered)
            kind = CLEAN
            if parent != ROOT and not alike(said[known - 1], self.turns[parent].reply):
                if len(self.turns[parent].output) < self._config.realigned:
                    kind = REALIGN
                    known -= 1  # the reply is read as it came back
                else:
                    parent = self.turns[parent].parent
                    known = self._counts[parent] if parent != ROOT else 0
            before, drop = [], 0
            if parent != ROOT:
                before = self._ids(parent)
                if kind == REALIGN:
                    drop = self._replaced(parent)
                elif self.turns[parent].finish_reason == "length":
                    raise SessionError(
                        f"reply {parent} was cut off at its length, and nothing can follow what has no end; raise "
                        "max_tokens and ask for it again",
                        409,
                    )
            render = functools.partial(
                render_chat,
                messages,
                tools=tools or None,
                enable_thinking=enable_thinking,
                clear_thinking=False,
                variant=self._config.variant,
                first=known,
            )
            if num_characters([said[known:], tools]) > _MAX_UNCOUNTED:
                self._check_length(render().text)
            context = render(self._tokenizer).ids
        except (
            ValueError
        ) as error:  # a `ChatError`, or half of a character, which no tokenizer encodes
            raise SessionError(str(error), 400) from None
        except RecursionError:
            raise SessionError("the messages or tools are nested too deeply", 400) from None
        if parent != ROOT and kind == CLEAN and before[-1] in self._stops:
            # What a reply stops with opens the message that it expects; another one opens itself.
            if before[-1] == context[0]:
                context = context[1:]
            else:
                drop = 1
        ids, context = (*before[: len(before) - drop], *context), tuple(context)
        # A count would give a draw twice: of two that were asked for at once, the first may fail.
        drawn = {
            one.draw
            for one in (*self.turns, *asked)
            if one.parent == parent and one.context == context
        }
        draw = next(i for i in itertools.count() if i not in drawn)
        return Plan(parent, kind, offered, said[known:], drop, context, draw, ids)

    def _check_length(self, text: str) -> None:
        """Raises SessionError if a text has too many tokens, before it is encoded: 15 MB take 20 s and 2 GB."""
        try:
            _prompt_reader(self._tokenizer, self._config.max_length).check_text(text, "messages")
        except ApiError as error:
            raise SessionError(
                f"{error}; shorten it, or raise max_length of sessions", 400
            ) from None

    def seed_of(self, plan: Plan) -> int:
        """Of the reply to a plan: the same for who asks the same again after a failure, another for a second reply."""
        return seed_of(self.seed, plan.draw, *plan.ids)

    def answer(
        self,
        plan: Plan,
        output: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: str,
        reply: Mapping,
    ) -> Turn:
        """The answer to a planned request, for `add`; nothing is changed. ValueError unless each token has its log-prob
        and version, SessionError if what it goes on from is not there."""
        kind = plan.kind
        if kind == CLEAN and any(turn.parent == plan.parent for turn in self.turns):
            kind = FORK
        more = plan.tools, plan.messages, plan.drop, plan.context
        sampled = tuple(output), tuple(logprobs), tuple(versions)
        turn = Turn(plan.parent, kind, *more, *sampled, finish_reason, plain(reply), plan.draw)
        self._check(turn)
        return turn

    def add(self, turn: Turn) -> None:
        """Goes on by a turn. SessionError if what it goes on from is not there."""
        self._check(turn)
        self.turns.append(turn)
        self._counts.append(self._start(turn) + len(turn.messages) + 1)

    def _check(self, turn: Turn) -> None:
        if not ROOT <= turn.parent < len(self.turns):
            raise SessionError(
                f"turn {len(self.turns)} goes on from {turn.parent}, which is not there", 500
            )

    def records(self, **more: Any) -> list[TokenRecord]:
        """A record for each branch, in the order of their ends: every reply is trained on once, in the first branch
        that it is in. more: other fields of the records."""
        parents = {turn.parent for turn in self.turns}
        trained: set[int] = set()
        found = []
        for leaf in range(len(self.turns)):
            if leaf in parents:
                continue
            pieces = self._pieces(leaf)
            ids = np.concatenate([piece.ids for piece in pieces])
            logp = np.full(len(ids), np.nan, np.float32)
            version = np.full(len(ids), -1, np.int32)
            first = 0
            for piece in pieces:
                count = len(piece.ids)
                if piece.turn is not None and piece.turn not in trained:
                    turn, here = self.turns[piece.turn], slice(first, first + count)
                    logp[here], version[here] = turn.logprobs[:count], turn.versions[:count]
                    trained.add(piece.turn)
                first += count
            cut = self.turns[leaf].finish_reason == "length"
            fields = {"status": "truncated" if cut else "completed", **more}
            streams = {"rollout_logp": logp, "weight_version": version}
            found.append(TokenRecord(token_ids=ids, loss_mask=~np.isnan(logp), **streams, **fields))
        return found

    def _deepest(self, said: tuple[Message, ...], tools: str) -> tuple[int, int]:
        """(turn, messages up to its reply) of the turn that most of a request goes on from: its chat is the request's
        beginning, but for a reply that may have come back altered. ROOT, 0 if there is none."""
        best, found = (0, False), (ROOT, 0)
        reached, told = (
            [],
            [],
        )  # whether the request goes as far as a turn's reply, and whether it tells it as it was
        for number, turn in enumerate(self.turns):
            behind = reached if turn.kind == REALIGN else told
            start, count = self._start(turn), self._counts[number]
            reached.append(
                turn.tools == tools
                and (turn.parent == ROOT or behind[turn.parent])
                and len(said) >= count
                and said[count - 1]["role"] == "assistant"
                and all(map(alike, said[start : count - 1], turn.messages))
            )
            told.append(reached[-1] and alike(said[count - 1], turn.reply))
            # A reply as it was told goes before one that was altered, the later of two that say the same: who asks
            # again has lost the earlier.
            if reached[-1] and (count, told[-1]) >= best:
                best, found = (count, told[-1]), (number, count)
        return found

    def _start(self, turn: Turn) -> int:
        """Messages before those that are new with a turn."""
        if turn.parent == ROOT:
            return 0
        return self._counts[turn.parent] - (turn.kind == REALIGN)

    def _replaced(self, number: int) -> int:
        """Tokens of a turn from what opens its reply to its end."""
        turn = self.turns[number]
        opening = list(reversed(turn.context)).index(self._opens) + 1
        return opening + len(turn.output)

    def _ids(self, number: int) -> list[int]:
        """All tokens up to the end of a turn."""
        return [i for piece in self._pieces(number) for i in piece.ids]

    def _pieces(self, number: int) -> list[_Piece]:
        way = []
        while number != ROOT:
            way.append(number)
            number = self.turns[number].parent
        pieces: list[_Piece] = []
        for number in reversed(way):
            turn = self.turns[number]
            drop = turn.drop
            while drop:
                last = pieces.pop()
                if len(last.ids) > drop:
                    pieces.append(last._replace(ids=last.ids[:-drop]))
                drop = max(drop - len(last.ids), 0)
            pieces += [_Piece(None, turn.context), _Piece(number, turn.output)]
        return pieces


@functools.lru_cache(maxsize=4)
def _prompt_reader(tokenizer: Tokenizer, max_length: int) -> PromptReader:
    return PromptReader(tokenizer, max_length)


def plain(message: Mapping) -> dict:
    """Returns a message with all fields that say something, in the form of `read_message`.

    They are role, content, reasoning_content (None: it is not given) and tool_calls. Raises ChatError.
    """
    return {"reasoning_content": None, "tool_calls": [], **read_message(message)}


def alike(said: Message, known: Message) -> bool:
    """Whether a message that came back is one that is known: in all but reasoning that it does not tell."""
    if any(said[name] != known[name] for name in ("role", "tool_calls")):
        return False
    same = said["content"] == known["content"]
    if same and said["reasoning_content"] in (None, known["reasoning_content"] or ""):
        return True
    if known["role"] != "assistant" or "</think>" not in known["content"]:
        return False
    # Of who does not tell it, the content seems to hold some.
    seeming = plain({"role": "assistant", "content": known["content"]})
    return all(said[name] == seeming[name] for name in ("content", "reasoning_content"))


def seed_of(*numbers: int) -> int:
    """A seed of its own for these numbers, the same in every process."""
    text = json.dumps(numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
