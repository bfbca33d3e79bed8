"""Implements byte-level BPE with GLM's special tokens, lossless for every text.

Text and special tokens are separate: a document that spells out `<|user|>` becomes ordinary bytes, so that no data can
forge a role. Only `encode(text, parse_special=True)`, meant for rendered chats, converts the names to single ids.
"""

import codecs
import hashlib
import json
import pathlib
import re
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from glm5_jax.runtime.files import read_text, replace_text
from glm5_jax.text import layouts

# In the order of their ids, the last ids of the vocabulary (154820... in the released models).
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
END_OF_DOCUMENT = "<|endoftext|>"
STOP_TOKENS = (END_OF_DOCUMENT, "<|user|>", "<|observation|>")

# Contents of the released tokenizer_config.json; there is no bos token.
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_DOCUMENT,
    "pad_token": END_OF_DOCUMENT,
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
    "do_lower_case": False,
    "model_max_length": 202752,
}

# Contractions, words with one leading mark, numbers of up to three digits, runs of marks, line
# ends, blanks: the split of the cl100k vocabulary, which the GLM tokenizers follow.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_BYTES = 256
# Characters above which a text is encoded as a batch, because only that method of `tokenizers` releases the interpreter's
# lock.
LONG_TEXT = 2**14
BYTES = "bytes"
# Maximum characters of an encoded text. Such a text takes 8 GB, and `tokenizers` aborts the process if memory runs out.
MAX_TEXT = 2**26
MAX_VOCAB_SIZE = 2**24  # tables by id have a row for each
_LOSSLESS = "only a lossless one can be used: remove the normalizer and add_prefix_space from its definition"
# Texts that change if blanks are added before words or removed.
_PROBES = ("A.\u00e9e\u0301\ufb01\u200b  \t\x01\r\n1", " a ")
# Files in which transformers stores the chat template, and further templates by name. Both have priority over the entry of
# tokenizer_config.json, the older form.
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEFAULT = "default"
DEFAULT_PATH = pathlib.Path(__file__).parents[1] / "data" / "assets" / "tokenizer.json"


class Tokenizer:
    """Tokenizer, created by `Tokenizer.default()`, `Tokenizer.load(path)` or `Tokenizer.train(texts, vocab_size)`.

    Attributes:
      vocab_size: largest id + 1.
      special_ids: ids of the special (added) tokens by name.
      eos_ids: ids that end a generation (GLM: end of text and the openers of the next turn).
      pad_id: id of padding; None: the tokenizer has none.
      chat_template: Jinja template from its files; None: they have none.
      more_templates: templates for other uses, by name.
    """

    def __init__(
        self,
        definition: str,
        config: dict | None = None,
        chat_template: str | None = None,
        more_templates: Mapping[str, str] | None = None,
    ):
        """Reads a tokenizer from the contents of its files.

        - definition: text of tokenizer.json.
        - config: content of tokenizer_config.json; None: there is none.
        - chat_template: text of chat_template.jinja; None: there is none.
        - more_templates: texts of other templates by name. Without any template, those of the config are used.

        Raises ValueError if the definition is not a byte-level BPE in the format of `tokenizers`, changes texts
        (normalizer, add_prefix_space), or numbers its special tokens in a way that `tokenizers` would change.
        """
        # The definition, with and without special tokens.
        self._definition = definition
        content, self._with_special = _read_definition(definition)
        # The library always parses added tokens in a text, so plain text is encoded by a copy without added tokens.
        # `encode_special_tokens` would not cover added tokens that are marked as not special.
        added = content.get("added_tokens") or []
        plain = json.dumps({**content, "added_tokens": [], "post_processor": None})
        self._plain = tokenizers.Tokenizer.from_str(plain)
        for inner in (self._plain, self._with_special):
            inner.no_truncation()
            inner.no_padding()

        self.special_ids = {token["content"]: token["id"] for token in added}
        for name, index in self.special_ids.items():
            # `tokenizers` silently replaces an id that follows neither from the vocabulary nor from the running count.
            if (read := self._with_special.token_to_id(name)) != index:
                raise ValueError(
                    f"special token {name!r} has id {index} in the tokenizer's definition but would "
                    f"be read as {read}; give the added tokens ids that follow the vocabulary"
                )
        # The config and the templates.
        if config is None:
            config = CONFIG if END_OF_DOCUMENT in self.special_ids else {}
        if not isinstance(config, dict):
            raise ValueError(f"tokenizer_config.json holds {config!r}; it must be an object")
        self._config = {name: value for name, value in config.items() if name != "chat_template"}
        templates = dict(more_templates or {})
        if chat_template is not None:
            templates[_DEFAULT] = chat_template
        templates = templates or _templates(config.get("chat_template"))
        self.chat_template = templates.pop(_DEFAULT, None)
        self.more_templates = templates
        vocabulary = self._with_special.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"the tokenizer has the id {self.vocab_size - 1}; ids can be at most {MAX_VOCAB_SIZE - 1}"
            )
        # The bytes of each token.
        self._bytes = _bytes_by_id(vocabulary, self.special_ids, self.vocab_size)
        for probe in _PROBES:
            ids = self._plain.encode(probe, add_special_tokens=False).ids
            if (read := self.decode(ids)) != probe:
                raise ValueError(f"the tokenizer reads {probe!a} as {read!a}; {_LOSSLESS}")

        eos, pad = (_token_name(self._config, kind) for kind in ("eos_token", "pad_token"))
        stops = STOP_TOKENS if END_OF_DOCUMENT in self.special_ids else (eos,)
        self.eos_ids = tuple(self.special_ids[t] for t in stops if t in self.special_ids)
        self.pad_id = self.special_ids.get(pad)

    @property
    def eos_id(self) -> int:
        """The id that ends a document. Raises ValueError if the tokenizer has none."""
        if not self.eos_ids:
            raise ValueError(
                "the tokenizer has no end-of-document token; put a tokenizer_config.json with "
                "its eos_token next to the tokenizer.json"
            )
        return self.eos_ids[0]

    @property
    def fingerprint(self) -> str:
        """The hash of everything that determines a document's ids: the definition and the ids that end a text."""
        content = f"{self.eos_ids}{self._definition}".encode()
        return hashlib.blake2b(content, digest_size=8).hexdigest()

    @classmethod
    def default(cls) -> "Tokenizer":
        """Loads the shipped tokenizer of 2048 ids (trained by experiments/train_tokenizer.py)."""
        return cls.load(DEFAULT_PATH)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Loads a tokenizer from a tokenizer.json, or a folder with one, and the files next to it.

        These are tokenizer_config.json, chat_template.jinja and additional_chat_templates/. "bytes" is the tokenizer
        without merges: each byte is a token. Raises ValueError with the path if a file is missing or cannot be read.
        """
        if path == BYTES:
            return cls.train((), NUM_BYTES + len(SPECIAL_TOKENS))
        path = pathlib.Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise ValueError(
                f"no tokenizer at {path}: give a tokenizer.json or the folder that holds one"
            )
        config_file, template = file.with_name("tokenizer_config.json"), file.with_name(_TEMPLATE)
        try:
            config = json.loads(read_text(config_file)) if config_file.exists() else None
            chat_template = read_text(template) if template.exists() else None
            more = file.with_name(_MORE_TEMPLATES).glob("*.jinja")
            more_templates = {path.stem: read_text(path) for path in sorted(more)}
            return cls(read_text(file), config, chat_template, more_templates)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"cannot read the tokenizer at {path}: {error}") from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Trains byte-level BPE; the same texts give the same tokenizer.

        vocab_size: number of all tokens: 256 bytes, merges, and the 36 special tokens at the end. Raises ValueError if
        it is too small for these, or if the texts are too short to fill it.
        """
        num_ordinary = vocab_size - len(SPECIAL_TOKENS)
        if num_ordinary < NUM_BYTES:
            raise ValueError(
                f"vocab_size is {vocab_size}; it must be at least "
                f"{NUM_BYTES + len(SPECIAL_TOKENS)} ({NUM_BYTES} bytes and the special tokens)"
            )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=num_ordinary, initial_alphabet=_byte_letters(), show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        if inner.get_vocab_size() < num_ordinary:
            raise ValueError(
                f"the texts give only {inner.get_vocab_size() + len(SPECIAL_TOKENS)} tokens, "
                f"vocab_size is {vocab_size}; give more text or a smaller vocab_size"
            )
        inner.add_special_tokens(
            [tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
        )
        return cls(inner.to_str())

    def with_chat_template(self, template: str) -> "Tokenizer":
        """Returns a copy for saving, with another chat template and no further templates."""
        return Tokenizer(self._definition, self._config, template)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for `load` and transformers.

        The template is that of the tokenizer's files, or that of GLM-5 if the tokenizer has GLM's markers and no
        template. It is written to chat_template.jinja only. Templates that the folder had before are removed.
        """
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "tokenizer.json", self._definition)
        config = json.dumps(self._config, indent=2, ensure_ascii=False) + "\n"
        replace_text(folder / "tokenizer_config.json", config)
        template = self.chat_template
        if template is None and set(SPECIAL_TOKENS) <= set(self.special_ids):
            template = layouts.template()
        if template is None:
            (folder / _TEMPLATE).unlink(missing_ok=True)
        else:
            replace_text(folder / _TEMPLATE, template)
        for path in (folder / _MORE_TEMPLATES).glob("*.jinja"):
            path.unlink()
        for name, text in self.more_templates.items():
            (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
            (folder / _MORE_TEMPLATES / f"{name}.jinja").write_text(text, "utf-8")

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Returns the ids of a text; `decode` is the inverse.

        parse_special: convert the names of special tokens to their ids; otherwise they are text. Raises ValueError for
        text that UTF-8 cannot encode (a lone surrogate), and for more than `MAX_TEXT` characters.
        """
        if len(text) > MAX_TEXT:
            raise ValueError(
                f"the text has {len(text):,} characters, and at most {MAX_TEXT:,} can be encoded; split it"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate at character {error.start}; "
                "decode its bytes as UTF-8 first"
            ) from error
        inner = self._with_special if parse_special else self._plain
        if len(text) > LONG_TEXT:
            return inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return inner.encode(text, add_special_tokens=False).ids

    def decode(
        self, ids: Sequence[int], *, skip_special: bool = False, errors: str = "strict"
    ) -> str:
        """Returns the text of ids; bytes that are not UTF-8 (an incomplete character) become U+FFFD.

        skip_special: leave out special tokens. An id without a token, such as the padding of a model's vocabulary,
        raises ValueError; with errors="replace" it becomes U+FFFD.
        """
        special = set(self.special_ids.values()) if skip_special else ()
        pieces = [self.bytes_of(i, errors=errors) for i in map(int, ids) if i not in special]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int, *, errors: str = "strict") -> bytes:
        """Returns the bytes of a token; for a special token, its name. An id without a token is as in `decode`."""
        token = self._bytes[token_id] if 0 <= token_id < self.vocab_size else None
        if token is None:
            if errors == "replace":
                return "\ufffd".encode()
            raise ValueError(f"id {token_id} is not a token; the ids are 0..{self.vocab_size - 1}")
        return token

    def token_bytes(self) -> np.ndarray:
        """Returns the number of bytes of text of each id, int32[v]; 0 for special tokens."""
        sizes = np.array([len(token or b"") for token in self._bytes], np.int32)
        sizes[list(self.special_ids.values())] = 0
        return sizes


class Detokenizer:
    """Incremental decoder that returns complete characters only; in total the text of `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, errors: str = "strict"):
        self._tokenizer, self._errors = tokenizer, errors
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the characters that these ids complete. An id without a token is as in `Tokenizer.decode`."""
        parts = (self._tokenizer.bytes_of(token, errors=self._errors) for token in ids)
        return "".join(map(self._decoder.decode, parts))

    def close(self) -> str:
        """Returns the rest, U+FFFD for an incomplete character, and resets the decoder."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _read_definition(definition: str) -> tuple[dict, tokenizers.Tokenizer]:
    """Returns the content of a tokenizer.json, and its tokenizer. Raises ValueError for any but a byte-level BPE."""
    try:
        content = json.loads(definition)
        _check_affixes(content["model"])
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ValueError(f"not a tokenizer definition (tokenizer.json): {error}") from error
    if '"ByteLevel"' not in json.dumps(content.get("decoder")):
        raise ValueError(
            f"the tokenizer's decoder is {content.get('decoder')}; only byte-level BPE "
            "(decoder ByteLevel) can be read"
        )
    if _changes_texts(content.get("normalizer")):
        # Probes cannot find this: a normalizer may replace a rare letter only, even by a huge text.
        raise ValueError(
            f"the tokenizer has a normalizer of type {content['normalizer'].get('type')!r}; {_LOSSLESS}"
        )
    return content, tokenizer


def _check_affixes(model: dict) -> None:
    """Raises ValueError for a model whose tokens have a prefix or a suffix, as those of byte-level BPE never have.

    `tokenizers` cuts the bytes of a prefix off each merge, and ends the process if that cuts a letter in two.
    """
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"model.{name} is {model[name]!r:.60}; byte-level BPE has none")


def _bytes_by_id(
    vocabulary: Mapping[str, int], special: Container[str], size: int
) -> list[bytes | None]:
    """Returns the bytes of the token of each id below `size`, for special tokens their names; None: no token."""
    byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokens: list[bytes | None] = [None] * size
    for token, token_id in vocabulary.items():
        if token in special or not byte_of.keys() >= set(token):
            tokens[token_id] = token.encode()
        else:
            tokens[token_id] = bytes(byte_of[letter] for letter in token)
    return tokens


def _changes_texts(normalizer) -> bool:
    """Returns True if a normalizer may change a text: any except none, or a sequence of none."""
    if normalizer is None:
        return False
    inner = normalizer.get("normalizers")
    return normalizer.get("type") != "Sequence" or any(map(_changes_texts, inner))


def _templates(entry) -> dict[str, str]:
    """Reads the chat_template of a tokenizer_config.json: a text, or a list of names and texts. Raises ValueError."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {_DEFAULT: entry}
    templates = {}
    for one in entry if isinstance(entry, list) else [entry]:
        match one:
            case {"name": str(name), "template": str(text)} if _TEMPLATE_NAME.fullmatch(name):
                templates[name] = text
            case _:
                raise ValueError(
                    f"chat_template of tokenizer_config.json has {str(one)[:100]!r}; it must be a text, or a list of "
                    "objects with a name of letters, digits, - and _, and a template"
                )
    return templates


def _token_name(config: dict, kind: str) -> str | None:
    """Returns the token name in a config entry, which transformers writes as a string or a dict."""
    entry = config.get(kind)
    name = entry.get("content", entry) if isinstance(entry, dict) else entry
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{kind} of tokenizer_config.json is {entry!r}; it must be a token")
    return name


def _byte_letters() -> list[str]:
    """Returns the printable letter that byte-level BPE uses for each of the 256 bytes.

    A visible Latin-1 character is its own letter. The other bytes use the letters from 256 on.
    """
    letters = []
    for byte in range(NUM_BYTES):
        visible = 33 <= byte <= 126 or (161 <= byte and byte != 173)
        letters.append(byte if visible else None)
    unused = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(next(unused) if letter is None else letter) for letter in letters]
