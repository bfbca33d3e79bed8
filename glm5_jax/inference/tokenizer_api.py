"""Serves the tokenizer over HTTP as vLLM does: `/tokenize`, `/detokenize` and `/tokenizer_info`.

Clients that score given tokens, such as lm-evaluation-harness, then need no files of the tokenizer.
"""

from typing import Any

from glm5_jax.inference.prompts import PromptReader
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.runtime.json_structs import JsonStruct, Numbers, decode
from glm5_jax.text.tokenizer import Tokenizer


class TokenizeRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/tokenize`. The tokenizer adds no special tokens, so `add_special_tokens` changes nothing."""

    ignored = frozenset(("model", "add_special_tokens"))
    fixed = {"return_token_strs": False}
    prompt: str


class DetokenizeRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/detokenize`."""

    ignored = frozenset(("model",))
    tokens: Numbers  # read by `PromptReader`


class TokenizerApi:
    """Handlers of the tokenizer's endpoints.

    Attributes:
      prompts: reader of texts and ids, with the limits of the server's prompts.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int):
        """max_length: maximum tokens of a prompt and its reply."""
        self._tokenizer, self._max_length = tokenizer, max_length
        self.prompts = PromptReader(tokenizer, max_length)

    def tokenize(self, body: Any) -> dict[str, Any]:
        """Returns the reply to a body of `/tokenize`; names of special tokens become their ids. Raises ApiError."""
        text = decode(body, TokenizeRequest, ignore_neutral=True).prompt
        self.prompts.check_text(text, "prompt")
        try:
            ids = self._tokenizer.encode(text, parse_special=True)
        except ValueError as error:
            raise ApiError(str(error), param="prompt") from None
        return {"tokens": ids, "count": len(ids), "max_model_len": self._max_length}

    def detokenize(self, body: Any) -> dict[str, Any]:
        """Returns the reply to a body of `/detokenize`. Raises ApiError."""
        tokens = decode(body, DetokenizeRequest, ignore_neutral=True).tokens
        if isinstance(tokens, str):
            raise ApiError("tokens is a text; give a list of token ids", param="tokens")
        ids = self.prompts.read(tokens, "tokens")
        return {"prompt": self._tokenizer.decode(ids, errors="replace")}

    def info(self) -> dict[str, Any]:
        """Returns the reply to `/tokenizer_info`: the special tokens and the chat template."""
        names = {index: name for name, index in self._tokenizer.special_ids.items()}
        eos_ids, pad_id = self._tokenizer.eos_ids, self._tokenizer.pad_id
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": names[eos_ids[0]] if eos_ids else None,
            "pad_token": None if pad_id is None else names[pad_id],
            "model_max_length": self._max_length,
            "vocab_size": self._tokenizer.vocab_size,
            "chat_template": self._tokenizer.chat_template,
        }
