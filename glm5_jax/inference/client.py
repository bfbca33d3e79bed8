"""A client of the server: chats in pieces."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

INSTANCE = "X-Instance"  # the header of an answer of `/generate` that tells whose it is


class ServerError(Exception):
    """The server cannot be reached, or has answered with an error, which the message says.

    status: of HTTP, None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Client:
    """Of a server at `url`, such as "http://127.0.0.1:8000". timeout: seconds without anything from it. direct: whether it
    is in this cluster, where no proxy that the environment names leads."""

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = 600.0, *, direct: bool = False
    ):
        self._url, self._timeout = url.rstrip("/"), timeout
        proxies = [urllib.request.ProxyHandler({})] if direct else []
        self._opener = urllib.request.build_opener(*proxies)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """The name of what it serves. ServerError."""
        with self.open("/v1/models") as response:
            return json.load(response)["data"][0]["id"]

    def chat(self, messages: Sequence[Mapping], **fields) -> Iterator[dict]:
        """The chunks of a streamed reply; fields: others of the request. ServerError."""
        body = {"messages": messages, "stream": True, **fields}
        with self.open("/v1/chat/completions", json.dumps(body).encode()) as response:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield chunk

    def open(self, path: str, body: bytes | None = None, timeout: float | None = None):
        """An answer to read from, to close afterwards; with a body, of a POST. timeout: another one. ServerError."""
        request = urllib.request.Request(self._url + path, body, self._headers)
        try:
            return self._opener.open(request, timeout=timeout or self._timeout)
        except urllib.error.HTTPError as error:
            raise ServerError(_message(error), error.code) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"no server answers at {self._url}: {reason}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
