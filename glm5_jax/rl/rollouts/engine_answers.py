"""Checks engines' responses to `/generate`: an invalid one is a failure of the engine, not of the agent."""

from typing import Any

from glm5_jax.data.record import MAX_VERSION

REQUEST_ERRORS = (400, 413, 422)  # HTTP statuses: the agent's request is at fault


def is_reply(response: Any) -> bool:
    """Returns whether an engine's response is a reply: False if it was aborted. Raises ValueError if it is neither."""
    try:
        meta = response["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return False
        ids, versions = response["output_ids"], meta["weight_versions"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        reason, cached_tokens = meta["finish_reason"]["type"], meta["cached_tokens"]
        is_valid = (
            isinstance(reason, str)
            and all(type(number) is int and number >= 0 for number in (cached_tokens, *ids))
            and all(type(number) is int and number <= MAX_VERSION for number in versions)
            and all(type(number) in (int, float) for number in logprobs)
            and 0 < len(ids) == len(versions) == len(logprobs)
        )
    except (LookupError, TypeError) as error:
        raise ValueError(f"the answer is no reply: {type(error).__name__} {error}") from None
    if not is_valid:
        raise ValueError("the answer is no reply: its tokens, log-probs and versions do not fit")
    return True


def error_message(response: Any) -> str:
    """Returns the message of an engine's error."""
    try:
        return str(response["error"]["message"])
    except (LookupError, TypeError):
        return "no reason"
