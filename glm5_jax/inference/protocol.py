"""What clients ask a server, read and checked: bodies of OpenAI's API with GLM's thinking switches, and SGLang's
`/generate`.

A body is JSON that a schema describes; what does not fit is an `ApiError` of status 400 that names the field.
Text is laid out and encoded here, so that what goes on is token ids.
"""

import dataclasses
from collections.abc import Mapping

from glm5_jax.checkpoint.manifest import Manifest, Tensor
from glm5_jax.core.json_body import Limits
from glm5_jax.core.schema import checked, of_fields as _object
from glm5_jax.core.server import ApiError, shortened
from glm5_jax.inference.prompts import PromptReader, num_characters
from glm5_jax.inference.request import Request, TokenIds
from glm5_jax.inference.sampling import MOST_TOP_LOGPROBS, Sampling, seed_of_choice
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import layout_of
from glm5_jax.text.messages import read_tools
from glm5_jax.text.tokenizer import Tokenizer

MOST_CHOICES = 128
MAX_STOP_IDS = 1024
# What z.ai makes of the values that OpenAI's clients send to GLM-5.2: it thinks at two levels or not at all. Models
# whose layout has no such line think or do not.
EFFORTS = {
    "none": None,
    "minimal": None,
    "low": "high",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
# OpenAI's API has them; they change nothing here.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Where a router sends the requests of a session; the server itself needs none of it.
ROUTING = ("session_id", "routing_key")
# Added to every body by sglang-router: the first has values that are served, the second change nothing.
_OFF, _ON = {"const": False}, {"const": True}
_ROUTER = dict(no_stop_trim=_OFF, skip_special_tokens=_ON, return_hidden_states=_OFF)
LOGGING = ("log_metrics", "no_logs")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Of requests that say nothing. temperature and top_p: as z.ai serves GLM-5 (chat alone; completions draw from
    the whole distribution); completion_tokens: max_tokens of `/v1/completions`, as OpenAI's."""

    temperature: float = 1.0
    top_p: float = 0.95
    completion_tokens: int = 16


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body, read. requests: one for each choice, those of a prompt behind each other.

    num_choices: of each prompt. stream, usage: whether the answer comes in pieces, and whether what it cost comes
    at the end of them. logprobs: whether they are told. token_ids: whether ids are told. echo: texts of the
    prompts, told before the replies. tools, thinking: of a chat, to read the reply by.
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
    batch: bool = False  # of `/generate`: whether a list was asked, even of one


_NUMBER, _TEXT, _FLAG = {"type": "number"}, {"type": "string"}, {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 1}
_RANK = {"type": "integer", "minimum": 0}  # as sglang-router --dp-aware adds it
# Long lists of ids are read faster than a schema is: `PromptReader` looks at what is in them.
_PROMPT = {"type": ["string", "array"]}
_TEXTS = {"type": "array", "items": _TEXT, "maxItems": 16}
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
    stop={"anyOf": [_TEXT, _TEXTS]},
    stop_token_ids={"type": "array", "items": {"type": "integer"}, "maxItems": MAX_STOP_IDS},
    ignore_eos=_FLAG,
    seed={"type": "integer"},
    logit_bias=_BIAS,
)
_COMMON = dict(
    _SAMPLING,
    model=_TEXT,
    max_tokens=_COUNT,
    n={"type": "integer", "minimum": 1, "maximum": MOST_CHOICES},
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
    tools={"type": "array", "items": {"type": "object"}},
    tool_choice={"enum": ["auto", "none"]},
    parallel_tool_calls=_FLAG,
    tool_stream=_FLAG,
    max_completion_tokens=_COUNT,
    logprobs=_FLAG,
    top_logprobs={"type": "integer", "minimum": 0, "maximum": MOST_TOP_LOGPROBS},
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
    logprobs={"type": "integer", "minimum": 0, "maximum": MOST_TOP_LOGPROBS},
    best_of={"const": 1},
    suffix={"const": ""},
    **_COMMON,
)
GENERATE = _object(
    text=_PROMPT,
    input_ids={"type": "array"},
    sampling_params=_object(
        max_new_tokens=_COUNT,
        n={"type": "integer", "minimum": 1, "maximum": MOST_CHOICES},
        sampling_seed={"type": "integer"},
        skip_special_tokens=_FLAG,
        **_SAMPLING,
    ),
    return_logprob=_FLAG,
    top_logprobs_num={"type": "integer", "minimum": 0, "maximum": MOST_TOP_LOGPROBS},
    logprob_start_len={"const": -1},
    stream=_FLAG,
    rid=_TEXT,
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
_VERSION = {"type": "integer", "minimum": 0}
_POLICY = {"enum": ["finish", "keep", "recompute"]}
UPDATE = _object(("path", "version"), path=_TEXT, version=_VERSION, policy=_POLICY, rewind=_FLAG)
# Pushes over the network (inference/weights.py). Of tensors there are many: `manifest` looks at what is in them.
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


def manifest(said: Mapping) -> Manifest:
    """Of the body of a push, which tells {tensor: [dtype, shape]}. ApiError."""
    tensors = {}
    for name, own in said["tensors"].items():
        match own:
            case [str(dtype), [*shape]] if all(type(n) is int and n > 0 for n in shape):
                tensors[name] = Tensor(dtype, tuple(shape))
            case _:
                raise ApiError(
                    f"the tensor {name[:100]!r} is {str(own)[:100]}; tell [dtype, shape]"
                )
    return Manifest(said["version"], said["arithmetic"], tensors)


class Reader:
    """Reads bodies for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        variant: str = "glm5",
        deadline: float | None = None,
        defaults: Defaults = Defaults(),
        max_length: int | None = None,
        max_requests: int | None = None,
    ):
        """model: its name for clients. variant: of the chat's layout. deadline: seconds a request may take.

        max_length: tokens of a prompt and its reply. max_requests: choices of all prompts of a body. None: no limit.
        """
        self._tokenizer, self._model, self._variant = tokenizer, model, variant
        self._deadline, self._defaults = deadline, defaults
        self._prompts, self._max_requests = PromptReader(tokenizer, max_length), max_requests

    @property
    def limits(self) -> Limits:
        """Bounds of a body, by which it is refused while it is read."""
        return self._prompts.limits

    def chat(self, body: Mapping, version: int) -> Asked:
        """Reads a body of `/v1/chat/completions`; version: of the weights. Raises ApiError.

        A text of `stop` ends a reply that begins in thinking only behind `</think>`, where its content is: a model may
        think of that text. Tokens of `stop_token_ids` end it anywhere.
        """
        said = self._checked(body, CHAT, version)
        thinking, clear = thinking_of(said)
        tools = tools_of(said)
        self._check_choices(1, said)
        prompt = self._rendered(said, tools, thinking, clear)
        if said.get("top_logprobs") and not said.get("logprobs"):
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        most = said.get("max_completion_tokens", said.get("max_tokens"))
        defaults = self._defaults
        sampling = self._sampling(
            {"temperature": defaults.temperature, "top_p": defaults.top_p, **said},
            most,
            said.get("top_logprobs", 0),
        )
        if said.get("do_sample") is False:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        if thinking and sampling.stop:
            end = self._tokenizer.special_ids["</think>"]
            sampling = dataclasses.replace(sampling, stop_after=end)
        return dataclasses.replace(
            self._asked([prompt], said, sampling),
            logprobs=said.get("logprobs", False),
            tools=tools,
            thinking=thinking,
        )

    def completion(self, body: Mapping, version: int) -> Asked:
        """Of `/v1/completions`. ApiError."""
        said = self._checked(body, COMPLETION, version)
        prompts = self._read_prompts("prompt", said, said)
        logprobs = said.get("logprobs")
        if said.get("echo") and logprobs is not None:
            raise ApiError("echo tells no logprobs of the prompt; drop one of them", param="echo")
        most = said.get("max_tokens", self._defaults.completion_tokens)
        asked = self._asked(prompts, said, self._sampling(said, most, logprobs or 0))
        echo = ()
        if said.get("echo"):
            echo = tuple(self._tokenizer.decode(ids, errors="replace") for ids in prompts)
        return dataclasses.replace(asked, logprobs=logprobs is not None, echo=echo)

    def generate(self, body: Mapping, version: int) -> Asked:
        """Of `/generate`. ApiError."""
        said = self._checked(body, GENERATE, version)
        given = [name for name in ("text", "input_ids") if name in said]
        if len(given) != 1:
            raise ApiError("give either text or input_ids", param="input_ids")
        value, own = said[given[0]], dict(said.get("sampling_params", {}))
        prompts = self._read_prompts(given[0], said, own)
        if "sampling_seed" in own:
            own["seed"] = own["sampling_seed"]
        top = said.get("top_logprobs_num", 0)
        sampling = self._sampling(own, own.get("max_new_tokens"), top, "sampling_params.")
        asked = self._asked(prompts, {**said, "n": own.get("n", 1)}, sampling)
        batch = isinstance(value, list) and not isinstance(value[0], int | float)
        return dataclasses.replace(
            asked, logprobs=said.get("return_logprob", False), rid=said.get("rid"), batch=batch
        )

    def _checked(self, body, schema: Mapping, version: int) -> dict:
        """What a body says."""
        said = checked(body, schema)
        if (name := said.get("model", self._model)) != self._model:
            raise ApiError(
                f"the model {shortened(name, 100)!r} is not served; use {self._model!r}",
                404,
                "model_not_found",
                "model",
            )
        if (wanted := said.get("weight_version", version)) != version:
            raise ApiError(
                f"weight_version {wanted} was asked for, {version} is served",
                409,
                "weight_version_mismatch",
                "weight_version",
            )
        return said

    def _rendered(self, said: Mapping, tools, thinking: bool, clear: bool) -> TokenIds:
        """Lays out the messages of a chat. Raises ApiError that names the field which is wrong."""
        options = dict(enable_thinking=thinking, clear_thinking=clear, variant=self._variant)
        if layout_of(self._variant).effort:
            options["reasoning_effort"] = EFFORTS[said.get("reasoning_effort", "max")]
        messages = said["messages"]
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

    def _read_prompts(self, param: str, said: Mapping, sampling: Mapping) -> list[TokenIds]:
        prompts = self._prompts.split(said[param], param)
        self._check_choices(len(prompts), sampling)
        return [self._prompts.read(prompt, param) for prompt in prompts]

    def _check_choices(self, num_prompts: int, said: Mapping) -> None:
        """Raises ApiError if there are more replies to give than the server gives at once."""
        n, most = said.get("n", 1), self._max_requests
        if most is not None and num_prompts * n > most:
            raise ApiError(
                f"n is {n}, which makes {num_prompts * n} replies of {num_prompts} prompts; at most {most} are given at once",
                429,
                "overloaded",
                "n",
            )

    def _sampling(self, said: Mapping, most: int | None, top: int, prefix: str = "") -> Sampling:
        """Returns how tokens are drawn. prefix: of the fields' names in errors. Raises ApiError."""
        stop = said.get("stop", ())
        names = ("temperature", "top_p", "min_p", "ignore_eos")
        try:
            return Sampling(
                max_tokens=most,
                top_k=max(0, said.get("top_k", 0)),  # SGLang says -1 for all
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_ids=tuple(said.get("stop_token_ids", ())),
                seed=said["seed"] % 2**63 if "seed" in said else None,
                logit_bias={int(i): value for i, value in said.get("logit_bias", {}).items()},
                top_logprobs=top,
                **{name: said[name] for name in names if name in said},
            )
        except ValueError as error:
            # It begins with the field's name.
            raise ApiError(f"{prefix}{error}", param=prefix + str(error).split()[0]) from None

    def _asked(self, prompts, said: Mapping, sampling: Sampling) -> Asked:
        n, seed, group = said.get("n", 1), sampling.seed, said.get("data_parallel_rank")
        choices = [sampling] * n
        if seed is not None:
            # Choices of one seed would be the same text.
            seeds = (seed_of_choice(seed, choice) for choice in range(n))
            choices = [dataclasses.replace(sampling, seed=own) for own in seeds]
        try:
            requests = [
                Request(ids, own, self._deadline, group) for ids in prompts for own in choices
            ]
        except ValueError as error:
            raise ApiError(str(error)) from None
        return Asked(
            tuple(requests),
            n,
            stream=said.get("stream", False),
            usage=said.get("stream_options", {}).get("include_usage", False),
            token_ids=said.get("return_token_ids", False),
        )


def thinking_of(said: Mapping) -> tuple[bool, bool]:
    """Returns (enable_thinking, clear_thinking) of any spelling. Raises ApiError if they contradict each other."""
    own, template = (dict(said.get(n, {})) for n in ("thinking", "chat_template_kwargs"))
    if "type" in own:
        own["enable_thinking"] = own.pop("type") == "enabled"
    for name in own.keys() & template.keys():
        if own[name] != template[name]:
            raise ApiError(
                f"thinking and chat_template_kwargs say different things of {name}",
                param="thinking",
            )
    both = {**own, **template}
    effort = said.get("reasoning_effort")
    if effort is not None and EFFORTS[effort] is None:
        if both.setdefault("enable_thinking", False):
            raise ApiError(
                f"reasoning_effort is {effort!r}, which means no thinking, and thinking is enabled; leave one of them out",
                param="reasoning_effort",
            )
    return both.get("enable_thinking", True), both.get("clear_thinking", True)


def tools_of(said: Mapping) -> tuple[Mapping, ...] | None:
    """Returns the tools that a reply may call; None if it may call none. Raises ApiError."""
    tools = tuple(said.get("tools") or ())
    if not tools or said.get("tool_choice") == "none":
        return None
    if said.get("parallel_tool_calls") is False:
        raise ApiError(
            "parallel_tool_calls is false, and a reply of this model may call several tools; leave it out",
            param="parallel_tool_calls",
        )
    return tools
