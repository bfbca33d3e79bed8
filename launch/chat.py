"""Chats with a model in the terminal; thinking is dimmed, and control characters of models and servers are removed.

    glm5 chat DIR                  # serves a checkpoint (experiments/serve.py:tiny) and chats with it
    glm5 chat http://HOST:PORT     # chats with a server that runs
    glm5 chat                      # the same at http://127.0.0.1:8000

The long form is `python -m launch.chat --checkpoint=DIR` or `--url=http://HOST:PORT`. DIR is a run's workdir, one of its checkpoints/STEP, or a HuggingFace folder. In the chat, /new starts a new chat, /think
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
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.terminal import clean_logging, make_printable, print_error
from launch.imports import paused_collector

SERVER = "http://127.0.0.1:8000"  # where experiments/serve.py listens
HELP = "/new starts a new chat, /think turns thinking off and on, /quit ends"


def main(argv: list[str], read: Callable[[str], str] = input) -> int:
    """Runs the chat and returns the exit code; read: function from a prompt to the user's line."""
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    clean_logging()
    values = define()
    try:
        values(expand(argv))
        if values.url is not None and values.checkpoint is not None:
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


def expand(argv: list[str]) -> list[str]:
    """Returns the arguments with a first word without dashes as --url or --checkpoint. Raises ValueError for another one."""
    program, *words = argv
    if words and not words[0].startswith("-"):
        is_url = words[0].startswith(("http://", "https://"))
        words[0] = f"--{'url' if is_url else 'checkpoint'}={words[0]}"
    if extra := [word for word in words if not word.startswith("-")]:
        raise ValueError(f"unexpected argument {extra[0]!r}; every flag is --NAME=VALUE")
    return [program, *words]


def define() -> flags.FlagValues:
    """Returns the program's flags."""
    values = flags.FlagValues()
    flags.DEFINE_string("checkpoint", None, "checkpoint to serve and chat with", flag_values=values)
    flags.DEFINE_string("url", None, "URL of a running server", flag_values=values)
    flags.DEFINE_string("api_key_file", None, "file with the server's API key", flag_values=values)
    flags.DEFINE_string("system", None, "system message", flag_values=values)
    flags.DEFINE_bool("think", True, "whether replies begin with thinking", flag_values=values)
    flags.DEFINE_bool("keep", False, "whether thinking stays in the context", flag_values=values)
    flags.DEFINE_float("temperature", 1.0, "0: always the likeliest token", flag_values=values)
    flags.DEFINE_integer("max_tokens", None, "maximum tokens of a reply", flag_values=values)
    return values


@contextlib.contextmanager
def _server(values) -> Iterator[str]:
    if values.checkpoint is None:
        yield values.url or SERVER
        return
    with paused_collector():
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
