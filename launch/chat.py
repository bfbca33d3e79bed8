"""A chat in the terminal; thinking is shown dimmed, and no control character of a model or a server reaches it.

    python -m launch.chat --checkpoint=DIR        # serves it (experiments/serve.py:tiny) and chats with it
    python -m launch.chat --url=http://HOST:PORT  # chats with a server that runs

DIR is a run's workdir, one of its checkpoints/STEP or a HuggingFace folder. In the chat, /new forgets what was
said, /think turns thinking off and on, /quit or Ctrl-D ends it, and Ctrl-C ends a reply. An error of the
user is one line and exit code 2.
"""

import contextlib
import dataclasses
import sys
import unicodedata
from collections.abc import Callable, Iterator

from absl import flags
from rich.console import Console
from rich.text import Text

from glm5_jax.core.server import read_key
from glm5_jax.inference.client import Client, ServerError

# Characters that reorder the text around them, so that it reads as what it is not.
_BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
HELP = "/new forgets what was said, /think turns thinking off and on, /quit ends"


def main(argv: list[str], read: Callable[[str], str] = input) -> int:
    """Exit code of the program with these arguments; read: asks for a line."""
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    values = define()
    try:
        rest = values(argv)
        if len(rest) > 1:
            raise ValueError(f"unexpected argument {rest[1]!r}; every flag is --NAME=VALUE")
        if (values.url is None) == (values.checkpoint is None):
            raise ValueError("give either --checkpoint=DIR or --url=http://HOST:PORT")
        with _server(values) as url:
            file = values.api_key_file
            client = Client(url, None if file is None else read_key(file))
            Chat(client, client.model(), values, read).run()
    except (ValueError, OSError, flags.Error, ServerError) as error:
        fix = (
            "; give its file as --api_key_file=FILE"
            if getattr(error, "status", None) == 401
            else ""
        )
        print("error:", make_printable(" ".join(str(error).split())) + fix, file=sys.stderr)
        return 2
    return 0


def make_printable(text: str) -> str:
    """Returns a text that has no effect on a terminal: its control characters but line end and tab become U+FFFD.

    Sequences that begin with ESC or its 8-bit forms set the clipboard, the title or what the keyboard sends.
    """
    return "".join("\ufffd" if _is_control(c) else c for c in text.replace("\r", ""))


def _is_control(character: str) -> bool:
    if character in _BIDI_CONTROLS:
        return True
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs")


def define() -> flags.FlagValues:
    """The program's flags."""
    values = flags.FlagValues()
    options = dict(flag_values=values)
    flags.DEFINE_string("checkpoint", None, "what to serve and chat with", **options)
    flags.DEFINE_string("url", None, "of a server that runs", **options)
    flags.DEFINE_string("api_key_file", None, "of the key that the server wants", **options)
    flags.DEFINE_string("system", None, "a message before all others", **options)
    flags.DEFINE_bool("think", True, "whether replies begin with thinking", **options)
    flags.DEFINE_bool("keep", False, "whether thinking is kept over turns", **options)
    flags.DEFINE_float("temperature", 1.0, "0: always the likeliest token", **options)
    flags.DEFINE_integer("max_tokens", None, "of a reply; as many as fit if not given", **options)
    return values


@contextlib.contextmanager
def _server(values) -> Iterator[str]:
    if values.url is not None:
        yield values.url
        return
    from experiments import serve

    config = serve.get_config("tiny")
    server = dataclasses.replace(config.server, port=0, api_key_file=values.api_key_file)
    config = dataclasses.replace(config, checkpoint=values.checkpoint, server=server, warm=False)
    with serve.make_server(config).running() as url:
        yield url


class Chat:
    """Asks, and shows the replies as they come."""

    def __init__(self, client: Client, model: str, values, read: Callable[[str], str]):
        self._client, self._values, self._read = client, values, read
        self._console = Console(highlight=False)
        self._model, self._think = model, values.think
        self._messages: list[dict] = []

    def run(self) -> None:
        """Until the user ends it. ServerError."""
        self._say(f"{self._model}: {HELP}", "dim")
        self._forget()
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/quit":
                return
            if line == "/new":
                self._forget()
            elif line == "/think":
                self._think = not self._think
                self._say(f"thinking is {'on' if self._think else 'off'}", "dim")
            elif line.startswith("/"):
                self._say(HELP, "dim")
            elif line:
                self._ask(line)

    def _forget(self) -> None:
        system = self._values.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _ask(self, line: str) -> None:
        """A question; one that the server refuses, or whose reply is broken off, is as if not asked."""
        asked = [*self._messages, {"role": "user", "content": line}]
        reply = {"role": "assistant", "content": "", "reasoning_content": ""}
        chunks = self._client.chat(
            asked,
            temperature=self._values.temperature,
            max_tokens=self._values.max_tokens,
            thinking={
                "type": "enabled" if self._think else "disabled",
                "clear_thinking": not self._values.keep,
            },
        )
        try:
            for chunk in chunks:
                self._show(chunk["choices"][0], reply)
        except ServerError as error:
            self._say(f"error: {error} (/new forgets what was said)", "red")
            return
        except KeyboardInterrupt:
            chunks.close()
            self._say("\n(broken off)", "dim")
            return
        self._console.print()
        self._messages = [*asked, reply]

    def _show(self, choice: dict, reply: dict) -> None:
        delta = choice["delta"]
        if text := delta.get("reasoning"):  # as vLLM and OpenRouter call it
            delta = {**delta, "reasoning_content": delta.get("reasoning_content") or text}
        for name, style in (("reasoning_content", "dim"), ("content", "")):
            if text := delta.get(name):
                if name == "content" and not reply["content"] and reply["reasoning_content"]:
                    self._console.print()
                reply[name] += text
                self._console.print(Text(make_printable(text), style), end="", soft_wrap=True)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            self._say(f"{function['name']}({function['arguments']})", "cyan")
        if choice["finish_reason"] == "length":
            self._console.print(Text(" (cut off)", "dim"), end="")

    def _say(self, text: str, style: str) -> None:
        self._console.print(Text(make_printable(text), style), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
