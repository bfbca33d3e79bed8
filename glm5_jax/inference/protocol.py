"""Parses and checks request bodies: OpenAI's API with GLM's thinking options, and SGLang's `/generate`.

1. The types in request_bodies.py check the JSON. What does not fit raises `ApiError` with status 400 and the field's name.
2. `Reader` renders and tokenizes texts and messages, so that a `ParsedRequest` holds token ids.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from glm5_jax.inference.chat_options import (
    reply_grammar_of,
    thinking_budget_of,
    thinking_of,
    tools_of,
)
from glm5_jax.inference.constraints import ReplyRules
from glm5_jax.inference.grammars import GrammarError, compile_grammar
from glm5_jax.inference.prompts import PromptReader, num_characters
from glm5_jax.inference.request import Request, TokenIds
from glm5_jax.inference.request_bodies import (
    EFFORTS,
    ChatCompletionRequest,
    CompletionFields,
    CompletionRequest,
    GenerateRequest,
    SamplingFields,
)
from glm5_jax.inference.sampling import Sampling, seed_of_choice
from glm5_jax.runtime.http_server import ApiError, truncate_text
from glm5_jax.runtime.json_body import JsonLimits
from glm5_jax.runtime.json_structs import decode
from glm5_jax.text.chat import begins_in_thinking, render_chat
from glm5_jax.text.layouts import layout_of
from glm5_jax.text.messages import CALL_END
from glm5_jax.text.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 5_000_000  # of all prompts of a body; each takes about 100 bytes
# Of the most likely tokens of all replies of a body. One reply of 202,752 tokens may have 20 for each.
MAX_REPLY_LOGPROBS = 20_000_000
MAX_PROMPT_IDS = 5_000_000  # that a response to a body repeats


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
      continuous_usage: whether each chunk of a stream has the token counts so far.
      logprobs: whether log-probs are returned.
      token_ids: whether token ids are returned.
      echo: texts of the prompts, returned before the replies.
      tools: tools of a chat, to parse tool calls; None: the reply may call none.
      thinking: whether a chat's reply begins in thinking.
      rid: id of the request in `/generate`; None: the server chooses one.
      batch: whether a body of `/generate` has a list of prompts, even of one.
      repeated: fields of a body of `/v1/responses` that its response repeats.
    """

    requests: tuple[Request, ...]
    num_choices: int = 1
    stream: bool = False
    usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    echo: tuple[str, ...] = ()
    tools: tuple[Mapping, ...] | None = None
    thinking: bool = False
    rid: str | None = None
    batch: bool = False
    repeated: Mapping = dataclasses.field(default_factory=dict)


def _check_prompt_logprobs(num_tokens: int, num_top: int) -> None:
    """Raises ApiError if the log-probs of all prompts of a body would take too much memory."""
    num_logprobs = num_tokens * (1 + num_top)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            f"echo with logprobs {num_top} gives {num_logprobs} log-probs of {num_tokens} tokens of prompts; at most "
            f"{MAX_PROMPT_LOGPROBS} are given at once: send fewer prompts, or a smaller logprobs or n",
            param="logprobs",
        )


_Body = TypeVar("_Body", CompletionRequest, ChatCompletionRequest, GenerateRequest)


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
        self._max_length = max_length

    @property
    def limits(self) -> JsonLimits:
        """Limits of a body, checked while it is read."""
        return self._prompts.limits

    def chat(self, body: Any, version: int) -> ParsedRequest:
        """Parses a body of `/v1/chat/completions`; version: of the weights. Raises ApiError.

        In a reply that begins in thinking, texts of `stop` count only after `</think>`, because a model may mention
        them in its reasoning. Blanks before the content do not count either. Tokens of `stop_token_ids` count anywhere.
        A grammar of the content or of calls also begins after `</think>`.
        """
        chat = self._decode(body, ChatCompletionRequest, version)
        tools = tools_of(chat)
        self._check_choices(1, chat.n)
        prompt, thinking = self._render(chat, tools.shown)
        end = self._tokenizer.special_ids["</think>"] if thinking else None
        rules = self._rules(chat, reply_grammar_of(chat, tools), end)
        if chat.top_logprobs and not chat.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        defaults = self._defaults
        options = chat.replace(
            temperature=defaults.temperature if chat.temperature is None else chat.temperature,
            top_p=defaults.top_p if chat.top_p is None else chat.top_p,
        )
        max_tokens = chat.max_completion_tokens or chat.max_tokens
        sampling = self._sampling(options, max_tokens, chat.top_logprobs)
        if not chat.do_sample:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        if tools.is_single and tools.shown:
            ends = (self._tokenizer.special_ids[CALL_END],)
            sampling = dataclasses.replace(sampling, stop_after=end, late_stop_ids=ends)
        if sampling.stop:
            sampling = dataclasses.replace(sampling, stop_after=end, stop_skips_blanks=True)
        return dataclasses.replace(
            self._parsed([prompt], chat, chat.n, sampling, rules),
            logprobs=chat.logprobs,
            tools=tools.shown,
            thinking=thinking,
        )

    def _rules(
        self, chat: ChatCompletionRequest, grammar: str | None, thinking_end: int | None
    ) -> ReplyRules | None:
        """Returns the rules of a chat's reply; None: there are none. Raises ApiError."""
        budget = None if thinking_end is None else thinking_budget_of(chat)
        if grammar is None and budget is None:
            return None
        if grammar is not None and chat.ignore_eos:
            raise ApiError(
                "ignore_eos is true, and a reply of a grammar ends with it; leave ignore_eos out",
                param="ignore_eos",
            )
        try:
            compiled = None if grammar is None else compile_grammar(grammar, self._tokenizer)
        except GrammarError as error:
            param = "tools" if chat.response_format.type == "text" else "response_format"
            raise ApiError(
                f"{param}: the schema cannot be enforced ({error}); simplify it", param=param
            ) from None
        return ReplyRules(grammar=compiled, thinking_budget=budget, thinking_end=thinking_end)

    def completion(self, body: Any, version: int) -> ParsedRequest:
        """Parses a body of `/v1/completions`; version: of the weights. Raises ApiError."""
        fields = self._decode(body, CompletionRequest, version)
        prompts = self._read_prompts("prompt", fields.prompt, fields.n)
        scores_prompt = fields.echo and fields.logprobs is not None
        if scores_prompt and fields.stream:
            raise ApiError(
                "echo with logprobs cannot be streamed; leave stream out", param="stream"
            )
        if scores_prompt:
            _check_prompt_logprobs(sum(map(len, prompts)) * fields.n, fields.logprobs or 0)
        default = self._defaults.completion_tokens
        max_tokens = default if fields.max_tokens is None else fields.max_tokens
        sampling = dataclasses.replace(
            self._sampling(fields, max_tokens, fields.logprobs or 0), prompt_logprobs=scores_prompt
        )
        parsed = self._parsed(prompts, fields, fields.n, sampling)
        echo = ()
        if fields.echo:
            echo = tuple(self._tokenizer.decode(ids, errors="replace") for ids in prompts)
        return dataclasses.replace(parsed, logprobs=fields.logprobs is not None, echo=echo)

    def generate(self, body: Any, version: int) -> ParsedRequest:
        """Parses a body of `/generate`; version: of the weights. Raises ApiError."""
        fields = self._decode(body, GenerateRequest, version)
        prompt = {"text": fields.text, "input_ids": fields.input_ids}
        prompt = {name: value for name, value in prompt.items() if value is not None}
        if len(prompt) != 1:
            raise ApiError("give either text or input_ids", param="input_ids")
        if isinstance(fields.input_ids, str):
            raise ApiError("input_ids is a text; give it as text", param="input_ids")
        [(name, value)] = prompt.items()
        options = fields.sampling_params
        prompts = self._read_prompts(name, value, options.n)
        if options.sampling_seed is not None:
            options = options.replace(seed=options.sampling_seed)
        sampling = self._sampling(
            options, options.max_new_tokens, fields.top_logprobs_num, "sampling_params."
        )
        return dataclasses.replace(
            self._parsed(prompts, fields, options.n, sampling),
            logprobs=fields.return_logprob,
            rid=fields.rid,
            batch=isinstance(value, list) and not isinstance(value[0], int | float),
        )

    def _decode(self, body: Any, kind: type[_Body], version: int) -> _Body:
        """Returns the message of a body. Raises ApiError, also for another model or another weight version."""
        fields = decode(body, kind, ignore_neutral=True)
        if fields.model is not None and fields.model != self._model:
            raise ApiError(
                f"the model {truncate_text(fields.model, 100)!r} is not served; use {self._model!r}",
                404,
                "model_not_found",
                "model",
            )
        if fields.weight_version not in (None, version):
            raise ApiError(
                f"weight_version is {fields.weight_version}, {version} is served",
                409,
                "weight_version_mismatch",
                "weight_version",
            )
        return fields

    def _render(self, chat: ChatCompletionRequest, tools) -> tuple[TokenIds, bool]:
        """Returns the ids of a chat, and whether its reply begins in thinking. Raises ApiError with the wrong field."""
        thinking, clear = thinking_of(chat)
        is_continued = chat.continue_final_message
        if chat.add_generation_prompt is is_continued:
            raise ApiError(
                f"continue_final_message is {is_continued} and add_generation_prompt is not {not is_continued}; leave "
                "add_generation_prompt out",
                param="add_generation_prompt",
            )
        options: dict[str, Any] = dict(
            enable_thinking=thinking,
            clear_thinking=clear,
            continue_final=is_continued,
            variant=self._variant,
        )
        if layout_of(self._variant).has_effort_line:
            options["reasoning_effort"] = EFFORTS[chat.reasoning_effort or "max"]
        messages = chat.messages
        try:
            if self._prompts.is_long(num_characters([messages, tools])):
                text = render_chat(messages, None, tools=tools, **options).text
                self._prompts.check_text(text, "messages")
            ids = TokenIds(render_chat(messages, self._tokenizer, tools=tools, **options).ids)
            return ids, begins_in_thinking(messages[-1], thinking) if is_continued else thinking
        except ValueError as error:
            raise ApiError(str(error), param="messages") from None
        except RecursionError:
            raise ApiError("the messages are nested too deeply", param="messages") from None

    def _read_prompts(self, param: str, value: Any, num_choices: int) -> list[TokenIds]:
        prompts = self._prompts.split(value, param)
        self._check_choices(len(prompts), num_choices)
        return [self._prompts.read(prompt, param) for prompt in prompts]

    def _check_choices(self, num_prompts: int, n: int) -> None:
        """Raises ApiError if a body has more choices than the server generates at once."""
        maximum = self._max_requests
        if maximum is not None and num_prompts * n > maximum:
            raise ApiError(
                f"n is {n}, which makes {num_prompts * n} replies of {num_prompts} prompts; at most {maximum} are "
                "generated at once",
                429,
                "overloaded",
                "n",
            )

    def _sampling(
        self, fields: SamplingFields, max_tokens: int | None, top: int, prefix: str = ""
    ) -> Sampling:
        """Returns sampling parameters. prefix: of the fields' names in errors. Raises ApiError."""
        names = ("temperature", "top_p", "min_p")
        values = {name: getattr(fields, name) for name in names}
        try:
            return Sampling(
                max_tokens=max_tokens,
                top_k=max(0, fields.top_k or 0),  # -1 means all in SGLang
                stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
                stop_ids=fields.stop_token_ids,
                ignore_eos=fields.ignore_eos,
                seed=None if fields.seed is None else fields.seed % 2**63,
                logit_bias={int(i): value for i, value in (fields.logit_bias or {}).items()},
                top_logprobs=top,
                **{name: value for name, value in values.items() if value is not None},
            )
        except ValueError as error:
            # The message begins with the field's name.
            raise ApiError(f"{prefix}{error}", param=prefix + str(error).split()[0]) from None

    def _check_reply_logprobs(
        self, prompts: Sequence[TokenIds], n: int, sampling: Sampling
    ) -> None:
        """Raises ApiError if the most likely tokens of all replies of a body could take too much memory."""
        if not sampling.top_logprobs or self._max_length is None:
            return
        max_tokens = self._max_length if sampling.max_tokens is None else sampling.max_tokens
        num_tokens = n * sum(min(max_tokens, self._max_length - len(ids)) for ids in prompts)
        if num_tokens * sampling.top_logprobs > MAX_REPLY_LOGPROBS:
            raise ApiError(
                f"top_logprobs {sampling.top_logprobs} of up to {num_tokens} tokens of replies are more than "
                f"{MAX_REPLY_LOGPROBS}; give a smaller max_tokens, top_logprobs or n",
                param="max_tokens",
            )

    def _parsed(
        self,
        prompts: Sequence[TokenIds],
        body: CompletionFields | GenerateRequest,
        n: int,
        sampling: Sampling,
        rules: ReplyRules | None = None,
    ) -> ParsedRequest:
        """Returns n requests for each prompt. Raises ApiError."""
        self._check_reply_logprobs(prompts, n, sampling)
        seed, dp_rank = sampling.seed, body.data_parallel_rank
        choices = [sampling] * n
        if seed is not None:
            # With the same seed, all choices would be the same text.
            seeds = (seed_of_choice(seed, choice) for choice in range(n))
            choices = [dataclasses.replace(sampling, seed=one) for one in seeds]
        try:
            requests = [
                Request(ids, choice, timeout_s=self._timeout_s, dp_rank=dp_rank, rules=rules)
                for ids in prompts
                for choice in choices
            ]
        except ValueError as error:
            raise ApiError(str(error)) from None
        parsed = ParsedRequest(requests=tuple(requests), num_choices=n, stream=body.stream)
        if isinstance(body, GenerateRequest):
            return parsed
        num_ids = sum(map(len, prompts)) * n
        if body.return_token_ids and num_ids > MAX_PROMPT_IDS:
            raise ApiError(
                f"return_token_ids returns the prompt of each choice, {num_ids} ids; at most {MAX_PROMPT_IDS} are returned "
                "at once: send fewer prompts, or a smaller n",
                param="return_token_ids",
            )
        return dataclasses.replace(
            parsed,
            usage=body.stream_options.include_usage,
            continuous_usage=body.stream_options.continuous_usage_stats,
            token_ids=body.return_token_ids,
        )
