"""Runs a small real server that returns its arguments, and fails as its options say.

    python small_role.py HOST PORT READY [OPTION...]

`runtime.http_server.ListenConfig` defines HOST, PORT and READY. Options:

- `say=TEXT` prints a text.
- `late=SECONDS` makes the server healthy only after that time.
- `sick=FILE` makes it unhealthy while the file exists.
- `child=FILE` starts a sleeping program and writes its pid.
- `deaf` ignores SIGTERM.

GET /arguments returns all arguments after READY.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time

from glm5_jax.runtime.http_server import ApiError, HttpServer, ListenConfig, json_response


class Small(HttpServer):
    """Server of GET /health and of GET /arguments, which returns its pid and its arguments."""

    def __init__(self, config: ListenConfig, options: dict[str, str], arguments: list[str]):
        super().__init__(config)
        self._arguments, self._sick = arguments, options.get("sick")
        self._healthy_at = time.monotonic() + float(options.get("late", 0))

    def routes(self):
        return {"GET": {"/health": self._health, "/arguments": self._get_arguments}}

    async def _health(self, request):
        if time.monotonic() < self._healthy_at or self._sick and os.path.exists(self._sick):
            raise ApiError("not well", 503)
        return json_response({})

    async def _get_arguments(self, request):
        return json_response({"pid": os.getpid(), "arguments": self._arguments})


def main() -> None:
    host, port, ready, *arguments = sys.argv[1:]
    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    print(options.get("say", "started"), flush=True)
    if "child" in options:
        child = subprocess.Popen(["sleep", "600"])
        with open(options["child"], "a") as file:
            file.write(f"{child.pid}\n")
    config = ListenConfig(
        host=host, port=int(port), ready_file=ready, grace_s=1, trusted_network=True
    )
    server = Small(config, options, arguments)
    asyncio.run(server.serve(lambda _: "deaf" in arguments and signal.pthread_sigmask(0, [15])))


if __name__ == "__main__":
    main()
