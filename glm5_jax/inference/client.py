"""Client of the server, with streamed chats."""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from glm5_jax.runtime.addresses import check_url

MAX_BYTES = 2**22  # of a response, or a line of one
MAX_JSON_BYTES = 2**28  # of the response to a `post`: log-probs of 200,000 tokens are about 20 MB
INSTANCE = "X-Instance"  # header of `/generate` with the server's instance id


class ServerError(Exception):
    """Raised if the server cannot be reached or responds with an error.

    Attributes:
      status: HTTP status; None if there was no response.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Client:
    """Client of one server. Raises ValueError for an invalid URL.

    url: address such as "http://127.0.0.1:8000". timeout_s: maximum time without data, in seconds. direct: whether to
    ignore the proxies of the environment, for a server in the same cluster.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        *,
        direct: bool = False,
    ):
        check_url("url", url)
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        proxies = [urllib.request.ProxyHandler({})] if direct else []
        self._opener = urllib.request.build_opener(_NoRedirects, *proxies)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Returns the name of the served model. Raises ServerError."""
        with self.open("/v1/models") as response, self._reading():
            return str(json.loads(response.read(MAX_BYTES))["data"][0]["id"])

    def post(self, path: str, body: Mapping) -> Any:
        """Returns the JSON of the response to a POST. Raises ServerError."""
        with self.open(path, json.dumps(body).encode()) as response, self._reading():
            return json.loads(response.read(MAX_JSON_BYTES))

    def chat(self, messages: Sequence[Mapping], **fields) -> Generator[dict, None, None]:
        """Yields the choices of a streamed reply, each with a `delta`. Raises ServerError.

        fields: further fields of the request.
        """
        body = {"messages": messages, "stream": True, **fields}
        with self.open("/v1/chat/completions", json.dumps(body).encode()) as response:
            while True:
                with self._reading():
                    line = response.readline(MAX_BYTES)
                    choice = _choice(line)
                if not line:
                    return
                if choice is not None:
                    yield choice

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises ServerError for a response that breaks off or has another format."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the response of {self._url} broke off: {error}") from None
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ServerError(
                f"the response of {self._url} is not of this API: {error!r}"
            ) from None

    def open(
        self, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> http.client.HTTPResponse:
        """Returns a response to read and close; with a body, of a POST. Raises ServerError.

        timeout_s: replaces that of the client.
        """
        request = urllib.request.Request(self._url + path, body, self._headers)
        try:
            return self._opener.open(request, timeout=timeout_s or self._timeout_s)
        except urllib.error.HTTPError as error:
            raise ServerError(_message(error, self._url), error.code) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"no server answers at {self._url}: {reason}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because the server could send the API key elsewhere."""

    def redirect_request(self, *_) -> None:
        return None


def _choice(line: bytes) -> dict | None:
    """Returns the choice in a line of a stream, or None. Raises ServerError for an error, others for a wrong format."""
    data = line.strip().removeprefix(b"data:").strip()
    if (
        not data or data == b"[DONE]" or data.startswith(b":")
    ):  # a comment, which keeps a connection open
        return None
    chunk = json.loads(data)
    if "error" in chunk:
        raise ServerError(str(chunk["error"]["message"]))
    if not chunk["choices"]:  # a chunk with only token counts
        return None
    choice = chunk["choices"][0]
    if not isinstance(choice["delta"], dict):
        raise TypeError("a delta is no object")
    return choice


def _message(error: urllib.error.HTTPError, url: str) -> str:
    """Returns the message of an error response, or for a server of another API its address and its status."""
    try:
        return str(json.loads(error.read(MAX_BYTES))["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return f"the server at {url} responds with {error.code} {error.reason}, not in the form of this API"
