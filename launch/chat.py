"""Chats with a model in the terminal; thinking is dimmed, and control characters of models and servers are removed.

    python -m launch.chat --checkpoint=DIR        # serves it (experiments/serve.py:tiny) and chats with it
    python -m launch.chat --url=http://HOST:PORT  # chats with a server that runs

DIR is a run's workdir, one of its checkpoints/STEP, or a HuggingFace folder. In the chat, /new starts a new chat, /think
turns thinking off and on, /quit or Ctrl-D ends the program, and Ctrl-C ends a reply. A user's error is one line and exit
code 2.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator

from absl import flags
from rich.console import Console
from rich.text import Text

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.runtime.http_server import read_key
from glm5_jax.runtime.terminal import clean_logging, make_printable, print_error

HELP = "/new starts a new chat, /think turns thinking off and on, /quit ends"


def main(argv: list[str], read: Callable[[str], str] = input) -> int:
    """Runs the chat and returns the exit code; read: function from a prompt to the user's line."""
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    clean_logging()
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
            TerminalChat(client, client.model(), values, read).run()
    except (ValueError, OSError, flags.Error, ServerError) as error:
        fix = (
            "; give its file as --api_key_file=FILE"
            if getattr(error, "status", None) == 401
            else ""
        )
        print_error(f"{error}{fix}")
        return 2
    return 0


def define() -> flags.FlagValues:
    """Returns the program's flags."""
    values = flags.FlagValues()
    options = dict(flag_values=values)
    flags.DEFINE_string("checkpoint", None, "checkpoint to serve and chat with", **options)
    flags.DEFINE_string("url", None, "URL of a running server", **options)
    flags.DEFINE_string("api_key_file", None, "file with the server's API key", **options)
    flags.DEFINE_string("system", None, "system message", **options)
    flags.DEFINE_bool("think", True, "whether replies begin with thinking", **options)
    flags.DEFINE_bool("keep", False, "whether thinking stays in the context", **options)
    flags.DEFINE_float("temperature", 1.0, "0: always the likeliest token", **options)
    flags.DEFINE_integer("max_tokens", None, "maximum tokens of a reply", **options)
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


class TerminalChat:
    """Chat that sends the user's lines to a server and streams the replies to the terminal."""

    def __init__(self, client: Client, model: str, values, read: Callable[[str], str]):
        self._client, self._values, self._read = client, values, read
        self._console = Console(highlight=False)
        self._model, self._think = model, values.think
        self._messages: list[dict] = []

    def run(self) -> None:
        """Runs the chat until the user ends it. Raises ServerError."""
        self._say(f"{self._model}: {HELP}", "dim")
        self._start_new_chat()
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/quit":
                return
            if line == "/new":
                self._start_new_chat()
            elif line == "/think":
                self._think = not self._think
                self._say(f"thinking is {'on' if self._think else 'off'}", "dim")
            elif line.startswith("/"):
                self._say(HELP, "dim")
            elif line:
                self._ask(line)

    def _start_new_chat(self) -> None:
        system = self._values.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _ask(self, text: str) -> None:
        """Sends a message and shows the reply. A message without a complete reply is left out of the chat."""
        messages = [*self._messages, {"role": "user", "content": text}]
        reply = {"role": "assistant", "content": "", "reasoning_content": ""}
        choices = self._client.chat(
            messages,
            temperature=self._values.temperature,
            max_tokens=self._values.max_tokens,
            thinking={
                "type": "enabled" if self._think else "disabled",
                "clear_thinking": not self._values.keep,
            },
        )
        try:
            for choice in choices:
                self._show(choice, reply)
        except ServerError as error:
            self._say(f"error: {error} (/new starts a new chat)", "red")
            return
        except KeyboardInterrupt:
            choices.close()
            self._say("\n(broken off)", "dim")
            return
        self._console.print()
        self._messages = [*messages, reply]

    def _show(self, choice: dict, reply: dict) -> None:
        delta = choice["delta"]
        if text := delta.get("reasoning"):  # the name in vLLM and OpenRouter
            delta = {**delta, "reasoning_content": delta.get("reasoning_content") or text}
        for name, style in (("reasoning_content", "dim"), ("content", "")):
            if isinstance(text := delta.get(name), str) and text:
                if name == "content" and not reply["content"] and reply["reasoning_content"]:
                    self._console.print()
                reply[name] += text
                self._console.print(Text(make_printable(text), style), end="", soft_wrap=True)
        for call in delta.get("tool_calls") or ():
            self._say(_format_call(call), "cyan")
        if choice.get("finish_reason") == "length":
            self._console.print(Text(" (cut off)", "dim"), end="")

    def _say(self, text: str, style: str) -> None:
        self._console.print(Text(make_printable(text), style), soft_wrap=True)


def _format_call(call) -> str:
    """Returns a tool call as text. Some servers stream a call in pieces, of which only the first has a name."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return str(call)
    return f"{function.get('name') or ''}({function.get('arguments') or ''})"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
