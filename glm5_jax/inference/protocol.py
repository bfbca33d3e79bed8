"""Parses and checks request bodies: OpenAI's API with GLM's thinking options, and SGLang's `/generate`.

1. A schema checks the JSON. What does not fit raises `ApiError` with status 400 and the field's name.
2. `Reader` renders and tokenizes texts and messages, so that a `ParsedRequest` holds token ids.
"""

import dataclasses
from collections.abc import Mapping

from glm5_jax.checkpoint.manifest import Manifest, Tensor
from glm5_jax.data.record import MAX_VERSION
from glm5_jax.inference.prompts import PromptReader, num_characters
from glm5_jax.inference.request import Request, TokenIds
from glm5_jax.inference.sampling import MAX_TOP_LOGPROBS, Sampling, seed_of_choice
from glm5_jax.runtime.http_server import ApiError, truncate_text
from glm5_jax.runtime.json_body import JsonLimits
from glm5_jax.runtime.json_schema import object_schema as _object, validate
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import layout_of
from glm5_jax.text.messages import read_tools
from glm5_jax.text.tokenizer import Tokenizer

MAX_CHOICES = 128
MAX_STOP_IDS = 1024
MAX_STOP_CHARACTERS = 1024  # of a stop text, which is searched for after each token
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
# Fields of OpenAI's API that change nothing in this server.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields that routers use to keep a session on one server; this server ignores them.
ROUTING = ("session_id", "routing_key")
# Fields that sglang-router adds to every body: the first group with the values that are supported, the second ignored.
_OFF, _ON = {"const": False}, {"const": True}
_ROUTER = dict(no_stop_trim=_OFF, skip_special_tokens=_ON, return_hidden_states=_OFF)
LOGGING = ("log_metrics", "no_logs")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Values of fields that a request leaves out.

    Attributes:
      temperature, top_p: as z.ai serves GLM-5. Only for chat; completions sample from the full distribution.
      completion_tokens: max_tokens of `/v1/completions`, as OpenAI's.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    completion_tokens: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """Parsed body of a request.

    Attributes:
      requests: one request for each choice; the choices of a prompt are adjacent.
      num_choices: choices of each prompt.
      stream: whether the reply is streamed.
      usage: whether a stream ends with its token counts.
      logprobs: whether log-probs are returned.
      token_ids: whether token ids are returned.
      echo: texts of the prompts, returned before the replies.
      tools: tools of a chat, to parse tool calls; None: the reply may call none.
      thinking: whether a chat's reply begins in thinking.
      rid: id of the request in `/generate`; None: the server chooses one.
      batch: whether a body of `/generate` has a list of prompts, even of one.
    """

    requests: tuple[Request, ...]
    num_choices: int = 1
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    echo: tuple[str, ...] = ()
    tools: tuple[Mapping, ...] | None = None
    thinking: bool = False
    rid: str | None = None
    batch: bool = False


_NUMBER, _TEXT, _FLAG = {"type": "number"}, {"type": "string"}, {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 1}
_RANK = {"type": "integer", "minimum": 0}  # as sglang-router --dp-aware adds it
# Items of long lists are checked by `PromptReader`, which is faster than a schema.
_PROMPT = {"type": ["string", "array"]}
# No `anyOf`: for a list that fits no choice, a validator would collect an error for each item.
_STOP_TEXT = {"type": "string", "maxLength": MAX_STOP_CHARACTERS}
_STOP = _STOP_TEXT | {"type": ["string", "array"], "items": _STOP_TEXT, "maxItems": 16}
_BIAS = {
    "type": "object",
    "maxProperties": 10_000,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


_SAMPLING = dict(
    temperature={"type": "number", "minimum": 0, "maximum": 100},
    top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    top_k={"type": "integer", "minimum": -1},
    min_p={"type": "number", "minimum": 0, "maximum": 1},
    stop=_STOP,
    stop_token_ids={"type": "array", "items": {"type": "integer"}, "maxItems": MAX_STOP_IDS},
    ignore_eos=_FLAG,
    seed={"type": "integer"},
    logit_bias=_BIAS,
)
_COMMON = dict(
    _SAMPLING,
    model=_TEXT,
    max_tokens=_COUNT,
    n={"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
    stream=_FLAG,
    stream_options=_object(include_usage=_FLAG, include_obfuscation=_FLAG),
    frequency_penalty={"const": 0},
    presence_penalty={"const": 0},
    return_token_ids=_FLAG,
    weight_version={"type": "integer"},
    data_parallel_rank=_RANK,
    **{name: {} for name in (*IGNORED, *ROUTING)},
    **_ROUTER,
)
CHAT = _object(
    ("messages",),
    messages={"type": "array"},
    tools={"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS},
    tool_choice={"enum": ["auto", "none"]},
    parallel_tool_calls=_FLAG,
    tool_stream=_FLAG,
    max_completion_tokens=_COUNT,
    logprobs=_FLAG,
    top_logprobs={"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    response_format=_object(type={"const": "text"}),
    do_sample=_FLAG,
    thinking=_object(type={"enum": ["enabled", "disabled"]}, clear_thinking=_FLAG),
    chat_template_kwargs=_object(enable_thinking=_FLAG, clear_thinking=_FLAG),
    reasoning_effort={"enum": list(EFFORTS)},
    separate_reasoning=_ON,
    stream_reasoning=_ON,
    continue_final_message=_OFF,
    **_COMMON,
)
COMPLETION = _object(
    ("prompt",),
    prompt=_PROMPT,
    echo=_FLAG,
    logprobs={"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    best_of={"const": 1},
    suffix={"const": ""},
    **_COMMON,
)
GENERATE = _object(
    text=_PROMPT,
    input_ids={"type": "array"},
    sampling_params=_object(
        max_new_tokens=_COUNT,
        n={"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        sampling_seed={"type": "integer"},
        skip_special_tokens=_FLAG,
        **_SAMPLING,
    ),
    return_logprob=_FLAG,
    top_logprobs_num={"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    logprob_start_len={"const": -1},
    stream=_FLAG,
    rid={"type": "string", "maxLength": MAX_RID_CHARACTERS},
    weight_version={"type": "integer"},
    data_parallel_rank=_RANK,
    model=_TEXT,
    return_text_in_logprobs=_OFF,
    return_hidden_states=_OFF,
    return_entropy=_OFF,
    return_bytes=_OFF,
    background=_OFF,
    **{name: {} for name in (*ROUTING, *LOGGING)},
)
# After an excessive version, all later pushes would be refused as older.
_VERSION = {"type": "integer", "minimum": 0, "maximum": MAX_VERSION}
_POLICY = {"enum": ["finish", "keep", "recompute"]}
UPDATE = _object(("path", "version"), path=_TEXT, version=_VERSION, policy=_POLICY, rewind=_FLAG)
# Pushes over the network (inference/weights.py). `read_manifest` checks the tensors, because there are many: 60,000 in
# GLM-5.
WEIGHT_LIMITS = JsonLimits(num_values=10**6)
_PUSH = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}
BEGIN = _object(
    ("push", "version", "tensors", "arithmetic"),
    push=_PUSH,
    version=_VERSION,
    tensors={"type": "object"},
    arithmetic={"type": "object"},
    base=_object(("version", "checksum"), version=_VERSION, checksum=_TEXT),
    keep=_FLAG,
    rewind=_FLAG,
)
COMMIT = _object(("push", "checksums"), push=_PUSH, checksums={"type": "array"}, policy=_POLICY)
ABORT = _object(("push",), push=_PUSH)


def read_manifest(body: Mapping) -> Manifest:
    """Returns the manifest of a push from {tensor: [dtype, shape]}. Raises ApiError."""
    tensors = {}
    for name, entry in body["tensors"].items():
        match entry:
            case [str(dtype), [*shape]] if all(type(n) is int and n > 0 for n in shape):
                tensors[name] = Tensor(dtype, tuple(shape))
            case _:
                raise ApiError(
                    f"the tensor {name[:100]!r} is {str(entry)[:100]}; use [dtype, shape]"
                )
    return Manifest(body["version"], body["arithmetic"], tensors)


class Reader:
    """Parser of request bodies for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        variant: str = "glm5",
        timeout_s: float | None = None,
        defaults: Defaults = Defaults(),
        max_length: int | None = None,
        max_requests: int | None = None,
    ):
        """Creates a parser.

        Args:
          model: name of the model for clients.
          variant: variant of the chat layout.
          timeout_s: time limit of a request, in seconds; None: no limit.
          defaults: values of fields that a request leaves out.
          max_length: maximum tokens of a prompt and its reply; None: no limit.
          max_requests: maximum choices of all prompts of a body; None: no limit.
        """
        self._tokenizer, self._model, self._variant = tokenizer, model, variant
        self._timeout_s, self._defaults = timeout_s, defaults
        self._prompts, self._max_requests = PromptReader(tokenizer, max_length), max_requests

    @property
    def limits(self) -> JsonLimits:
        """Limits of a body, checked while it is read."""
        return self._prompts.limits

    def chat(self, body: Mapping, version: int) -> ParsedRequest:
        """Parses a body of `/v1/chat/completions`; version: of the weights. Raises ApiError.

        In a reply that begins in thinking, texts of `stop` count only after `</think>`, because a model may mention
        them in its reasoning. Blanks before the content do not count either. Tokens of `stop_token_ids` count anywhere.
        """
        fields = self._validate(body, CHAT, version)
        thinking, clear = thinking_of(fields)
        tools = tools_of(fields)
        self._check_choices(1, fields)
        prompt = self._render(fields, tools, thinking, clear)
        if fields.get("top_logprobs") and not fields.get("logprobs"):
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
        defaults = self._defaults
        sampling = self._sampling(
            {"temperature": defaults.temperature, "top_p": defaults.top_p, **fields},
            max_tokens,
            fields.get("top_logprobs", 0),
        )
        if fields.get("do_sample") is False:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        if sampling.stop:
            end = self._tokenizer.special_ids["</think>"] if thinking else None
            sampling = dataclasses.replace(sampling, stop_after=end, stop_skips_blanks=True)
        return dataclasses.replace(
            self._parsed([prompt], fields, sampling),
            logprobs=fields.get("logprobs", False),
            tools=tools,
            thinking=thinking,
        )

    def completion(self, body: Mapping, version: int) -> ParsedRequest:
        """Parses a body of `/v1/completions`; version: of the weights. Raises ApiError."""
        fields = self._validate(body, COMPLETION, version)
        prompts = self._read_prompts("prompt", fields, fields)
        logprobs = fields.get("logprobs")
        if fields.get("echo") and logprobs is not None:
            raise ApiError(
                "echo returns no logprobs of the prompt; leave out one of them", param="echo"
            )
        max_tokens = fields.get("max_tokens", self._defaults.completion_tokens)
        sampling = self._sampling(fields, max_tokens, logprobs or 0)
        parsed = self._parsed(prompts, fields, sampling)
        echo = ()
        if fields.get("echo"):
            echo = tuple(self._tokenizer.decode(ids, errors="replace") for ids in prompts)
        return dataclasses.replace(parsed, logprobs=logprobs is not None, echo=echo)

    def generate(self, body: Mapping, version: int) -> ParsedRequest:
        """Parses a body of `/generate`; version: of the weights. Raises ApiError."""
        fields = self._validate(body, GENERATE, version)
        names = [name for name in ("text", "input_ids") if name in fields]
        if len(names) != 1:
            raise ApiError("give either text or input_ids", param="input_ids")
        [field] = names
        value, options = fields[field], dict(fields.get("sampling_params", {}))
        prompts = self._read_prompts(field, fields, options)
        if "sampling_seed" in options:
            options["seed"] = options["sampling_seed"]
        top = fields.get("top_logprobs_num", 0)
        sampling = self._sampling(options, options.get("max_new_tokens"), top, "sampling_params.")
        parsed = self._parsed(prompts, {**fields, "n": options.get("n", 1)}, sampling)
        batch = isinstance(value, list) and not isinstance(value[0], int | float)
        return dataclasses.replace(
            parsed, logprobs=fields.get("return_logprob", False), rid=fields.get("rid"), batch=batch
        )

    def _validate(self, body, schema: Mapping, version: int) -> dict:
        """Checks a body by its schema, model and weight version. Raises ApiError."""
        fields = validate(body, schema)
        if (name := fields.get("model", self._model)) != self._model:
            raise ApiError(
                f"the model {truncate_text(name, 100)!r} is not served; use {self._model!r}",
                404,
                "model_not_found",
                "model",
            )
        if (wanted := fields.get("weight_version", version)) != version:
            raise ApiError(
                f"weight_version is {wanted}, {version} is served",
                409,
                "weight_version_mismatch",
                "weight_version",
            )
        return fields

    def _render(self, fields: Mapping, tools, thinking: bool, clear: bool) -> TokenIds:
        """Renders and encodes the messages of a chat. Raises ApiError that names the wrong field."""
        options = dict(enable_thinking=thinking, clear_thinking=clear, variant=self._variant)
        if layout_of(self._variant).has_effort_line:
            options["reasoning_effort"] = EFFORTS[fields.get("reasoning_effort", "max")]
        messages = fields["messages"]
        param = "tools"
        try:
            read_tools(tools or ())
            param = "messages"
            if self._prompts.is_long(num_characters([messages, tools])):
                text = render_chat(messages, None, tools=tools, **options).text
                self._prompts.check_text(text, param)
            return TokenIds(render_chat(messages, self._tokenizer, tools=tools, **options).ids)
        except ValueError as error:
            raise ApiError(str(error), param=param) from None
        except RecursionError:
            raise ApiError("the messages are nested too deeply", param="messages") from None

    def _read_prompts(self, param: str, fields: Mapping, sampling: Mapping) -> list[TokenIds]:
        prompts = self._prompts.split(fields[param], param)
        self._check_choices(len(prompts), sampling)
        return [self._prompts.read(prompt, param) for prompt in prompts]

    def _check_choices(self, num_prompts: int, fields: Mapping) -> None:
        """Raises ApiError if a body has more choices than the server generates at once."""
        n, maximum = fields.get("n", 1), self._max_requests
        if maximum is not None and num_prompts * n > maximum:
            raise ApiError(
                f"n is {n}, which makes {num_prompts * n} replies of {num_prompts} prompts; at most {maximum} are "
                "generated at once",
                429,
                "overloaded",
                "n",
            )

    def _sampling(
        self, fields: Mapping, max_tokens: int | None, top: int, prefix: str = ""
    ) -> Sampling:
        """Returns sampling parameters. prefix: of the fields' names in errors. Raises ApiError."""
        stop = fields.get("stop", ())
        names = ("temperature", "top_p", "min_p", "ignore_eos")
        try:
            return Sampling(
                max_tokens=max_tokens,
                top_k=max(0, fields.get("top_k", 0)),  # -1 means all in SGLang
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_ids=tuple(fields.get("stop_token_ids", ())),
                seed=fields["seed"] % 2**63 if "seed" in fields else None,
                logit_bias={int(i): value for i, value in fields.get("logit_bias", {}).items()},
                top_logprobs=top,
                **{name: fields[name] for name in names if name in fields},
            )
        except ValueError as error:
            # The message begins with the field's name.
            raise ApiError(f"{prefix}{error}", param=prefix + str(error).split()[0]) from None

    def _parsed(self, prompts, fields: Mapping, sampling: Sampling) -> ParsedRequest:
        """Returns a request for each choice of each prompt. Raises ApiError."""
        n, seed, dp_rank = fields.get("n", 1), sampling.seed, fields.get("data_parallel_rank")
        choices = [sampling] * n
        if seed is not None:
            # With the same seed, all choices would be the same text.
            seeds = (seed_of_choice(seed, choice) for choice in range(n))
            choices = [dataclasses.replace(sampling, seed=one) for one in seeds]
        try:
            requests = [
                Request(ids, choice, timeout_s=self._timeout_s, dp_rank=dp_rank)
                for ids in prompts
                for choice in choices
            ]
        except ValueError as error:
            raise ApiError(str(error)) from None
        return ParsedRequest(
            requests=tuple(requests),
            num_choices=n,
            stream=fields.get("stream", False),
            usage=fields.get("stream_options", {}).get("include_usage", False),
            token_ids=fields.get("return_token_ids", False),
        )


def thinking_of(fields: Mapping) -> tuple[bool, bool]:
    """Returns (enable_thinking, clear_thinking) from all fields that set them. Raises ApiError if these contradict."""
    thinking, template = (dict(fields.get(n, {})) for n in ("thinking", "chat_template_kwargs"))
    if "type" in thinking:
        thinking["enable_thinking"] = thinking.pop("type") == "enabled"
    for name in thinking.keys() & template.keys():
        if thinking[name] != template[name]:
            raise ApiError(
                f"thinking and chat_template_kwargs have different values of {name}",
                param="thinking",
            )
    both = {**thinking, **template}
    effort = fields.get("reasoning_effort")
    if effort is not None and EFFORTS[effort] is None:
        if both.setdefault("enable_thinking", False):
            raise ApiError(
                f"reasoning_effort is {effort!r}, which means no thinking, and thinking is enabled; leave one of them "
                "out",
                param="reasoning_effort",
            )
    return both.get("enable_thinking", True), both.get("clear_thinking", True)


def tools_of(fields: Mapping) -> tuple[Mapping, ...] | None:
    """Returns the tools that a reply may call; None if it may call none. Raises ApiError."""
    tools = tuple(fields.get("tools") or ())
    if not tools or fields.get("tool_choice") == "none":
        return None
    if fields.get("parallel_tool_calls") is False:
        raise ApiError(
            "parallel_tool_calls is false, and a reply of this model may call several tools; leave it out",
            param="parallel_tool_calls",
        )
    return tools
