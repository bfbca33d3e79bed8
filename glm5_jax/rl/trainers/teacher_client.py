"""Scores sampled tokens by a teacher that a server has, with the log-probs of given tokens of OpenAI's completions API.

The request has the token ids of a record as its prompt, with `echo` and `logprobs`, and samples nothing. serve.py
answers it, as do vLLM and SGLang. The log-probs are those of temperature 1.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.client import Client, ServerError
from glm5_jax.parallel import multihost
from glm5_jax.runtime.api_keys import read_key

NUM_CONNECTIONS = 64
_MAX_LOGPROB = 1e-3  # 0, with the rounding errors of a server
TIMEOUT_S = 1800.0  # of one record: a server may have others before it


class TeacherClient:
    """Teacher at the server `url`. Raises ValueError for an invalid URL or key file.

    key_file: file with the server's API key; None: it needs none.
    """

    def __init__(self, url: str, key_file: str | None = None):
        key = None if key_file is None else read_key(key_file, "key_file")
        self._url, self._client = url, Client(url, key, TIMEOUT_S)

    def score(self, records: Sequence[TokenRecord]) -> list[Float[np.ndarray, " t"]]:
        """Returns the log-prob of each token of each record, given the tokens before it; NaN for the first.

        In a pod the first process sends the requests. Raises ValueError in all processes if the server fails.
        """

        def request_all() -> bytes:
            with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
                scores = list(threads.map(self._score, records))
            return np.concatenate(scores).astype(np.float32).tobytes()

        if not records:
            return []
        scores = np.frombuffer(multihost.broadcast_bytes_from_first(request_all), np.float32)
        return np.split(scores, np.cumsum([len(record) for record in records])[:-1])

    def _score(self, record: TokenRecord) -> Float[np.ndarray, " t"]:
        body = {
            "prompt": [int(token) for token in record.token_ids],
            "echo": True,
            "logprobs": 0,
            "max_tokens": 0,
        }
        try:
            choice = self._client.post("/v1/completions", body)["choices"][0]
            logprobs = choice["logprobs"]["token_logprobs"]
            scores = np.array(
                [np.nan if value is None else value for value in logprobs], np.float32
            )
        except ServerError as error:
            raise ValueError(f"the teacher at {self._url}: {error}") from None
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"the teacher at {self._url} has sent no log-probs of the prompt ({error!r}); give a server with "
                "OpenAI's completions API, echo and logprobs"
            ) from None
        if scores.shape != (len(record),):
            raise ValueError(
                f"the teacher at {self._url} has sent {len(scores)} log-probs of {len(record)} tokens; give a server of "
                "a model with the same tokenizer"
            )
        if (scores[1:] > _MAX_LOGPROB).any():
            raise ValueError(
                f"the teacher at {self._url} has sent {scores[1:].max():g} as a log-prob, which is above 0; give a server "
                "that sends natural logarithms of probabilities"
            )
        return scores
