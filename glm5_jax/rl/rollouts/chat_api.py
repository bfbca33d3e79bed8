"""Maps OpenAI's chat API to the engines' API and back, for the sessions of the gateway."""

import time
from typing import Any

from glm5_jax.inference.request_bodies import ChatCompletionRequest
from glm5_jax.rl.rollouts.engine_answers import EngineReply
from glm5_jax.rl.rollouts.sessions import SessionStart, TurnPlan
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tool_calls import Reply

# Fields of OpenAI's chat API that a session accepts; `sampling_of` checks their values.
_FIELDS = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "model", "stream", "n"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "user", "metadata"),
    *("thinking", "chat_template_kwargs"),
)


def sampling_of(
    chat: ChatCompletionRequest, start: SessionStart, max_tokens: int
) -> dict[str, Any]:
    """Returns the sampling parameters for `/generate`.

    Raises ApiError for a field or a value with which the samples could not be trained on as they were sampled.

    - start: has the temperature and the top_p of all samples of the session.
    - max_tokens: maximum length of the reply, in tokens, if the request does not give one.
    """
    fields = chat.non_default_fields()
    if unknown := [field for field in fields if field not in _FIELDS]:
        raise ApiError(f"sessions take no {unknown[0]}; leave it out", param=unknown[0])
    shared = {"temperature": start.temperature, "top_p": start.top_p}
    fixed = shared | {"n": 1, "stream": False}
    for field, value in fixed.items():
        if fields.get(field, value) != value:
            raise ApiError(
                f"{field} is {fields[field]}; all samples of this session have {value}, which the trainer relies on: "
                "leave it out",
                param=field,
            )
    max_new_tokens = chat.max_completion_tokens or chat.max_tokens or max_tokens
    return shared | {"max_new_tokens": max_new_tokens}


def chat_response(
    session_id: str, num_turns: int, plan: TurnPlan, reply: EngineReply, parsed: Reply, model: str
) -> dict[str, Any]:
    """Returns a reply as a response of OpenAI's API.

    - num_turns: number of turns of the session, with that of the reply.
    - parsed: the reply as a message.
    - model: name of the served model.
    """
    meta, num_output = reply.meta_info, len(reply.output_ids)
    calls = [
        {"id": f"call_{num_turns}_{i}", "type": "function", "function": call.function}
        for i, call in enumerate(parsed.tool_calls)
    ]
    reason = meta.finish_reason.type
    if calls and reason == "stop" and not parsed.problem:
        reason = "tool_calls"
    return {
        "id": f"{session_id}-{num_turns - 1}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": parsed.message | ({"tool_calls": calls} if calls else {}),
                "finish_reason": reason,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(plan.ids),
            "completion_tokens": num_output,
            "total_tokens": len(plan.ids) + num_output,
            "prompt_tokens_details": {"cached_tokens": meta.cached_tokens},
        },
    }
