"""Checks requests against the limits of an engine."""

from glm5_jax.config import ModelConfig
from glm5_jax.inference.request import Request, TooLong
from glm5_jax.inference.shapes import EngineShapes


def check_request(
    request: Request,
    *,
    cfg: ModelConfig,
    shape: EngineShapes,
    max_length: int,
    dp_size: int,
    has_tokenizer: bool,
) -> int:
    """Checks a request and returns its maximum tokens, including its prompt.

    Raises ValueError if the request can never be served, TooLong if that is because of its length.
    """
    # Ids, logit biases, rank and stop texts.
    sampling, v = request.sampling, cfg.vocab_size
    for ids, name in ((request.id_range, "the prompt"), (sampling.logit_bias, "logit_bias")):
        if wrong := [i for i in ids if not 0 <= i < v]:
            raise ValueError(f"{name} has the token id {wrong[0]}; ids are from 0 to {v - 1}")
    if (max_bias := shape.max_bias) < len(sampling.logit_bias):
        raise ValueError(
            f"logit_bias has {len(sampling.logit_bias)} tokens; at most {max_bias} are possible"
        )
    if request.dp_rank is not None and request.dp_rank >= dp_size:
        raise ValueError(
            f"dp_rank is {request.dp_rank}; there are {dp_size} data-parallel ranks, numbered from 0"
        )
    if sampling.stop and not has_tokenizer:
        raise ValueError("stop texts need a tokenizer; give the engine one, or use stop_ids")
    # Lengths.
    num = len(request.ids)
    if num >= max_length:
        raise TooLong(
            f"the prompt has {num} tokens; with a reply at most {max_length} are possible"
        )
    if sampling.max_tokens is None:
        room = shape.num_pages * shape.page_size
        limit = max(num + 1, min(max_length, room))
    else:
        limit = num + max(1, sampling.max_tokens)  # a prefill always draws a token
        if limit > max_length:
            raise TooLong(
                f"a prompt of {num} tokens and max_tokens {sampling.max_tokens} exceed the "
                f"{max_length} that are possible; shorten one of them"
            )
    return limit
