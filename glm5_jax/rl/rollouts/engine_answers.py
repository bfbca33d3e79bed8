"""Reads what engines answer to `/generate`, so that nonsense is the engine's failure and not that of an agent."""

from typing import Any

from glm5_jax.data.record import MAX_VERSION

REFUSED = (400, 413, 422)  # statuses of HTTP: what the agent has sent is at fault


def check_generated(answer: Any) -> bool:
    """Returns whether an engine's answer is a reply, and not one that was aborted. Raises ValueError if it is neither."""
    try:
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return False
        ids, versions = answer["output_ids"], meta["weight_versions"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        reason, cached = meta["finish_reason"]["type"], meta["cached_tokens"]
        is_reply = (
            isinstance(reason, str)
            and all(type(number) is int and number >= 0 for number in (cached, *ids))
            and all(type(number) is int and number <= MAX_VERSION for number in versions)
            and all(type(number) in (int, float) for number in logprobs)
            and 0 < len(ids) == len(versions) == len(logprobs)
        )
    except (LookupError, TypeError) as error:
        raise ValueError(f"the answer is no reply: {type(error).__name__} {error}") from None
    if not is_reply:
        raise ValueError("the answer is no reply: its tokens, log-probs and versions do not fit")
    return True


def error_message(answer: Any) -> str:
    """Returns what an engine's error says."""
    try:
        return str(answer["error"]["message"])
    except (LookupError, TypeError):
        return "no reason"
