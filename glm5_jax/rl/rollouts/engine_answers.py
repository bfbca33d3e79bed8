"""Reads engines' responses to `/generate`: an invalid one is a failure of the engine, not of the agent."""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from glm5_jax.data.record import MAX_VERSION
from glm5_jax.runtime.json_structs import Count, JsonStruct

REQUEST_ERRORS = (400, 413, 422)  # HTTP statuses: the agent's request is at fault


class FinishReason(JsonStruct, kw_only=True, frozen=True):
    """Reason why a reply ended: "stop", "length" or "abort"."""

    type: str


class ReplyMeta(JsonStruct, kw_only=True, frozen=True):
    """Data of an engine about a reply.

    Attributes:
      finish_reason: why the reply ended.
      weight_versions: version of the weights that sampled each token.
      output_token_logprobs: log-prob, id and text of each token; the text is None.
      cached_tokens: tokens of the prompt that came from the cache.
    """

    finish_reason: FinishReason
    weight_versions: list[Annotated[int, Meta(ge=0, le=MAX_VERSION)]] = []
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    cached_tokens: Count


class EngineReply(JsonStruct, kw_only=True, frozen=True):
    """Reply of an engine, in SGLang's schema; fields that the gateway does not read are left out."""

    output_ids: list[Count]
    meta_info: ReplyMeta

    @property
    def logprobs(self) -> list[float]:
        """The log-prob of each token."""
        return [logprob for logprob, *_ in self.meta_info.output_token_logprobs]


def read_reply(response: Any) -> EngineReply | None:
    """Returns an engine's reply; None if it was aborted. Raises ValueError for a response that is neither."""
    try:
        reply = msgspec.convert(response, EngineReply)
    except msgspec.ValidationError as error:
        raise ValueError(f"the answer is no reply: {error}") from None
    meta = reply.meta_info
    if meta.finish_reason.type == "abort":
        return None
    if not 0 < len(reply.output_ids) == len(meta.weight_versions) == len(reply.logprobs):
        raise ValueError(
            f"the answer is no reply: it has {len(reply.output_ids)} tokens, {len(reply.logprobs)} log-probs and "
            f"{len(meta.weight_versions)} versions"
        )
    if not all(map(math.isfinite, reply.logprobs)):
        # The trainer would read NaN as a token that was not sampled.
        raise ValueError("the answer is no reply: a log-prob is not finite")
    return reply


def error_message(response: Any) -> str:
    """Returns the message of an engine's error."""
    try:
        return str(response["error"]["message"])
    except (LookupError, TypeError):
        return "no reason"
