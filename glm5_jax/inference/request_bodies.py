"""Bodies of requests that the server accepts: OpenAI's API with GLM's options, `/generate` and weight updates.

The types bound every list and every number, so that no later code meets an excessive value. Fields without a default
must be given; None: the field was left out.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from glm5_jax.data.record import MAX_VERSION
from glm5_jax.inference.sampling import MAX_TOP_LOGPROBS
from glm5_jax.runtime.json_body import MAX_VALUES, JsonLimits
from glm5_jax.runtime.json_structs import (
    MAX_INTEGER,
    Count,
    Integer,
    JsonStruct,
    Numbers,
    PositiveInteger,
)

MAX_CHOICES = 128
MAX_STOP_IDS = 1024
MAX_STOP_CHARACTERS = 1024  # of a stop text, which is searched for after each token
MAX_STOP_TEXTS = 16
MAX_TOOLS = 1024
MAX_RID_CHARACTERS = 1024  # of a request id, which each piece of a stream repeats
# z.ai's mapping for GLM-5.2 of the values that OpenAI's clients send: two levels of thinking, or none. Layouts without
# an effort line only have thinking on or off.
EFFORTS = {
    "none": None,
    "minimal": None,
    "low": "high",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Fields of OpenAI's API that change nothing in this server.
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
# Fields that routers use to keep a session on one server; this server ignores them.
_ROUTING = frozenset(("session_id", "routing_key"))
# Values of OpenAI's fields that this server does not vary, and of fields that sglang-router adds to every body.
_FIXED = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "min_tokens": 0,
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NumTopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
# `read_messages` and `PromptReader` check the items of these lists.
Items = Annotated[list[Any], Meta(max_length=MAX_VALUES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
_StopText = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]


class SamplingFields(JsonStruct, kw_only=True, frozen=True):
    """Sampling parameters of a body, as in `Sampling`."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=MAX_STOP_TEXTS)] | None = None
    stop_token_ids: Annotated[tuple[Integer, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    ignore_eos: bool = False
    seed: Integer | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Meta(pattern=r"^(?:0|[1-9][0-9]{0,8})\Z")],
                Annotated[float, Meta(ge=-100, le=100)],
            ],
            Meta(max_length=10_000),
        ]
        | None
    ) = None


class StreamOptions(JsonStruct, kw_only=True, frozen=True):
    """Options of a stream; obfuscation is never added."""

    ignored = frozenset(("include_obfuscation",))
    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionFields(SamplingFields, kw_only=True, frozen=True):
    """Fields of OpenAI's chats and completions alike."""

    ignored: ClassVar[frozenset[str]] = _IGNORED | _ROUTING
    fixed = _FIXED
    model: str | None = None
    n: NumChoices = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    weight_version: Integer | None = None
    data_parallel_rank: Count | None = None  # as sglang-router --dp-aware adds it


class JsonSchemaFormat(JsonStruct, kw_only=True, frozen=True):
    """JSON schema of a reply's content."""

    ignored = frozenset(("name", "description", "strict"))
    schema: dict[str, Any] | None = None


class ResponseFormat(JsonStruct, kw_only=True, frozen=True):
    """Format of a reply's content."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None


class ThinkingFields(JsonStruct, kw_only=True, frozen=True):
    """Thinking of a chat, as z.ai's API has it."""

    type: Literal["enabled", "disabled"] | None = None
    clear_thinking: bool | None = None
    budget_tokens: Count | None = None


class TemplateOptions(JsonStruct, kw_only=True, frozen=True):
    """Thinking of a chat, as vLLM's and SGLang's APIs have it. `thinking` is the name in other models' layouts."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    clear_thinking: bool | None = None


class ChatCompletionRequest(CompletionFields, kw_only=True, frozen=True):
    """Body of `/v1/chat/completions`."""

    fixed = _FIXED | {
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
        "think": True,
        "modalities": ["text"],
        "verbosity": "medium",
    }
    ignored = CompletionFields.ignored | {"tool_stream"}
    messages: Items
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] = "auto"  # read by `chat_options.tools_of`
    parallel_tool_calls: bool = True
    max_tokens: PositiveInteger | None = None
    max_completion_tokens: PositiveInteger | None = None
    logprobs: bool = False
    top_logprobs: NumTopLogprobs = 0
    response_format: ResponseFormat = ResponseFormat()
    do_sample: bool = True
    thinking: ThinkingFields = ThinkingFields()
    enable_thinking: bool | None = None
    thinking_token_budget: Count | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    reasoning_effort: Effort | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None


class CompletionRequest(CompletionFields, kw_only=True, frozen=True):
    """Body of `/v1/completions`."""

    fixed = _FIXED | {"best_of": 1, "suffix": ""}
    prompt: Numbers  # read by `PromptReader`
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: NumTopLogprobs | None = None


class GenerateSampling(SamplingFields, kw_only=True, frozen=True):
    """Sampling parameters of `/generate`."""

    ignored = frozenset(("skip_special_tokens",))
    max_new_tokens: Count | None = None
    n: NumChoices = 1
    sampling_seed: Integer | None = None


class GenerateRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/generate`, in SGLang's schema."""

    ignored = _ROUTING | {"log_metrics", "no_logs"}
    fixed = {
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "return_hidden_states": False,
        "return_entropy": False,
        "return_bytes": False,
        "background": False,
    }
    text: Numbers = None  # read by `PromptReader`, like input_ids
    input_ids: Numbers = None
    sampling_params: GenerateSampling = GenerateSampling()
    return_logprob: bool = False
    top_logprobs_num: NumTopLogprobs = 0
    stream: bool = False
    rid: Annotated[str, Meta(max_length=MAX_RID_CHARACTERS)] | None = None
    weight_version: Integer | None = None
    data_parallel_rank: Count | None = None
    model: str | None = None


# Updates of weights (inference/weights.py).
WEIGHT_LIMITS = JsonLimits(num_values=10**6)
# After an excessive version, all later pushes would be refused as older.
Version = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
UpdatePolicy = Literal["finish", "keep", "recompute"]
_PushName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
_MAX_PROCESSES = 65_536


class UpdateRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/update_weights`."""

    path: str
    version: Version
    policy: UpdatePolicy = "finish"
    rewind: bool = False


class PullRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/weights/pull`, which makes a process of an engine pull the weights that its devices need.

    Attributes:
      push: name of the push.
      sources: URLs of the trainer's processes, by their number.
      peers: URLs of the processes of each engine that pulls these weights, by the engine's number.
      engine, process: numbers of the receiver's engine and of its process in `peers`.
      keep: whether the process keeps a copy in host memory, as the base of later pushes.
      rewind: whether an older version than that of the engine is accepted.
      max_connections: maximum concurrent requests.
      max_part_bytes: maximum size of a reply, in bytes.
      max_tries: attempts to get a part from the trainer.
      timeout_s: time limit of a reply, in seconds.
    """

    push: _PushName
    sources: Annotated[tuple[str, ...], Meta(min_length=1, max_length=_MAX_PROCESSES)]
    peers: Annotated[
        tuple[Annotated[tuple[str, ...], Meta(max_length=_MAX_PROCESSES)], ...],
        Meta(min_length=1, max_length=_MAX_PROCESSES),
    ]
    engine: Count = 0
    process: Count = 0
    keep: bool = False
    rewind: bool = False
    max_connections: Annotated[int, Meta(ge=1, le=256)] = 16
    max_part_bytes: PositiveInteger = 64 * 2**20
    max_tries: Annotated[int, Meta(ge=1, le=100)] = 2
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0


class CommitPush(JsonStruct, kw_only=True, frozen=True):
    """Body of `/weights/commit`."""

    push: _PushName
    policy: UpdatePolicy = "finish"


class AbortPush(JsonStruct, kw_only=True, frozen=True):
    """Body of `/weights/abort`."""

    push: _PushName
