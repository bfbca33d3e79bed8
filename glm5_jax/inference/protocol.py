"""What clients ask a server, read and checked: bodies of OpenAI's API with GLM's thinking switches, and SGLang's
`/generate`.

A body is JSON that a schema describes; what does not fit is an `ApiError` of status 400 that names the field.
Text is laid out and encoded here, so that what goes on is token ids.
"""

import dataclasses
from collections.abc import Mapping

from glm5_jax.checkpoint.manifest import Manifest, Tensor
from glm5_jax.core.schema import checked, of_fields as _object
from glm5_jax.core.server import ApiError
from glm5_jax.inference.request import Request
from glm5_jax.inference.sampling import MOST_TOP_LOGPROBS, Sampling
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer

MOST_CHOICES = 128
MOST_PROMPTS = 2048
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
# Long lists of ids are read faster than a schema is: `_prompts` looks at what is in them.
_PROMPT = {"type": ["string", "array"]}
_TEXTS = {"type": "array", "items": _TEXT, "maxItems": 16}
_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


_SAMPLING = dict(
    temperature={"type": "number", "minimum": 0, "maximum": 100},
    top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    top_k={"type": "integer", "minimum": -1},
    min_p={"type": "number", "minimum": 0, "maximum": 1},
    stop={"anyOf": [_TEXT, _TEXTS]},
    stop_token_ids={"type": "array", "items": {"type": "integer"}},
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
    parallel_tool_calls={"const": True},
    tool_stream=_FLAG,
    max_completion_tokens=_COUNT,
    logprobs=_FLAG,
    top_logprobs={"type": "integer", "minimum": 0, "maximum": MOST_TOP_LOGPROBS},
    response_format=_object(type={"const": "text"}),
    do_sample=_FLAG,
    thinking=_object(type={"enum": ["enabled", "disabled"]}, clear_thinking=_FLAG),
    chat_template_kwargs=_object(enable_thinking=_FLAG, clear_thinking=_FLAG),
    reasoning_effort=_TEXT,
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
    ):
        """model: its name for clients. variant: of the chat's layout. deadline: seconds a request may take."""
        self._tokenizer, self._model, self._variant = tokenizer, model, variant
        self._deadline, self._defaults = deadline, defaults

    def chat(self, body: Mapping, version: int) -> Asked:
        """Of `/v1/chat/completions`; version: of the weights. ApiError."""
        said = self._checked(body, CHAT, version)
        thinking, clear = thinking_of(said)
        _check_parts(said["messages"])
        tools = tuple(said.get("tools") or ()) or None
        if said.get("tool_choice") == "none":
            tools = None
        try:
            prompt = render_chat(
                said["messages"],
                self._tokenizer,
                tools=tools,
                enable_thinking=thinking,
                clear_thinking=clear,
                variant=self._variant,
                reasoning_effort=said.get("reasoning_effort"),
            ).ids
        except ValueError as error:
            raise ApiError(str(error), param="messages") from None
        except RecursionError:
            raise ApiError("the messages are nested too deeply", param="messages") from None
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
        return dataclasses.replace(
            self._asked([prompt], said, sampling),
            logprobs=said.get("logprobs", False),
            tools=tools,
            thinking=thinking,
        )

    def completion(self, body: Mapping, version: int) -> Asked:
        """Of `/v1/completions`. ApiError."""
        said = self._checked(body, COMPLETION, version)
        prompts = self._prompts(said["prompt"], "prompt")
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
        value = said[given[0]]
        prompts = self._prompts(value, given[0])
        own = dict(said.get("sampling_params", {}))
        if "sampling_seed" in own:
            own["seed"] = own["sampling_seed"]
        top = said.get("top_logprobs_num", 0)
        sampling = self._sampling(own, own.get("max_new_tokens"), top)
        asked = self._asked(prompts, {**said, "n": own.get("n", 1)}, sampling)
        batch = isinstance(value, list) and not isinstance(value[0], int)
        return dataclasses.replace(
            asked, logprobs=said.get("return_logprob", False), rid=said.get("rid"), batch=batch
        )

    def _checked(self, body, schema: Mapping, version: int) -> dict:
        """What a body says."""
        said = checked(body, schema)
        if (name := said.get("model", self._model)) != self._model:
            raise ApiError(
                f"the model {name!r} is not served; use {self._model!r}",
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

    def _prompts(self, value, name: str) -> list[list[int]]:
        """The ids of a text, of texts, of ids or of lists of ids; ApiError."""
        if isinstance(value, str) or (value and isinstance(value[0], int)):
            value = [value]
        if not 0 < len(value) <= MOST_PROMPTS:
            raise ApiError(f"{name} has {len(value)} prompts; give 1 to {MOST_PROMPTS}", param=name)
        found = []
        for prompt in value:
            if isinstance(prompt, str):
                try:
                    prompt = self._tokenizer.encode(prompt)
                except ValueError as error:
                    raise ApiError(str(error), param=name) from None
            elif not (isinstance(prompt, list) and all(type(i) is int for i in prompt)):
                raise ApiError(f"{name} must be text or a list of token ids, or a list of either")
            found.append(prompt)
        return found

    def _sampling(self, said: Mapping, most: int | None, top: int) -> Sampling:
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
            raise ApiError(str(error)) from None

    def _asked(self, prompts, said: Mapping, sampling: Sampling) -> Asked:
        n, requests, rank = said.get("n", 1), [], said.get("data_parallel_rank")
        group = None if rank is None else int(rank)  # 1.0 is an integer of JSON
        try:
            for ids in prompts:
                for choice in range(n):
                    own = sampling
                    if choice and sampling.seed is not None:
                        # Choices of one seed would be the same text.
                        seed = (sampling.seed + choice) % 2**63
                        own = dataclasses.replace(sampling, seed=seed)
                    requests.append(Request(ids, own, self._deadline, group))
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
    """(enable_thinking, clear_thinking) of either spelling; ApiError if they contradict each other."""
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
    return both.get("enable_thinking", True), both.get("clear_thinking", True)


def _check_parts(messages: list) -> None:
    """ApiError for a part of a message that is no text: the layout would leave it out."""
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise ApiError(
                    f"message {i} has a part of type {part.get('type')!r}; this model reads text alone",
                    param="messages",
                )
