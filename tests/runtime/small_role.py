"""A role that is small and real: a server that tells what it was given, and fails in the way it is asked to.

    python small_role.py HOST PORT READY [OPTION...]

fixed as it is by `runtime.http_server.ListenConfig`. Options: `say=TEXT` prints, `late=SECONDS` is healthy only then, `sick=FILE` is not while
the file is there, `child=FILE` starts a sleeping program and writes its pid, `deaf` does not end at SIGTERM, and all others are
what GET /given answers with.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time

from glm5_jax.runtime.http_server import ApiError, HttpServer, ListenConfig, json_response


class Small(HttpServer):
    """GET /health, and /given: its pid and its arguments."""

    def __init__(self, config: ListenConfig, options: dict[str, str], given: list[str]):
        super().__init__(config)
        self._given, self._sick = given, options.get("sick")
        self._healthy_at = time.monotonic() + float(options.get("late", 0))

    def routes(self):
        return {"GET": {"/health": self._health, "/given": self._tell}}

    async def _health(self, request):
        if time.monotonic() < self._healthy_at or self._sick and os.path.exists(self._sick):
            raise ApiError("not well", 503)
        return json_response({})

    async def _tell(self, request):
        return json_response({"pid": os.getpid(), "given": self._given})


def main() -> None:
    host, port, ready, *given = sys.argv[1:]
    options = dict(word.split("=", 1) for word in given if "=" in word)
    print(options.get("say", "started"), flush=True)
    if "child" in options:
        child = subprocess.Popen(["sleep", "600"])
        with open(options["child"], "a") as file:
            file.write(f"{child.pid}\n")
    config = ListenConfig(
        host=host, port=int(port), ready_file=ready, grace_s=1, trusted_network=True
    )
    server = Small(config, options, given)
    asyncio.run(server.serve(lambda _: "deaf" in given and signal.pthread_sigmask(0, [15])))


if __name__ == "__main__":
    main()
