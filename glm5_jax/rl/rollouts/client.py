"""Client that fetches the token records of finished rollouts from the gateway, for the trainer."""

import http.client
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.rollouts.record_codec import digest_of

NUM_CONNECTIONS = 8
RESPONSE_TIMEOUT_S = 60.0  # without data
RETRY_DELAY_S = 0.5


class RecordClient:
    """Blocking client of the gateway at `url`."""

    def __init__(self, url: str, api_key: str | None = None):
        self._client = Client(url, api_key, timeout_s=RESPONSE_TIMEOUT_S, direct=True)

    def fetch(self, digests: Mapping[str, str], timeout_s: float = 0.0) -> dict[str, bytes]:
        """Returns the encoded records of rollouts, by rollout, without those that the gateway has lost.

        Raises ServerError if the gateway does not answer, or refuses the key.

        - digests: for each rollout, the digest that its records must have; others count as lost.
        - timeout_s: time for which requests are repeated that a gateway does not answer, because it restarts, in seconds.
        """
        end = time.monotonic() + timeout_s
        with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
            contents = threads.map(lambda name: self._fetch(name, end), digests)
            return {
                name: content
                for (name, digest), content in zip(digests.items(), contents, strict=True)
                if content is not None and digest_of(content) == digest
            }

    def _fetch(self, rollout_id: str, end: float) -> bytes | None:
        """Returns the encoded records of a rollout; None if the gateway does not have them."""
        while True:
            try:
                with self._client.open(f"/sessions/{rollout_id}/records") as response:
                    return response.read()
            except ServerError as error:
                if error.status == 404:
                    return None
                if is_refused(error) or time.monotonic() > end:
                    raise
            except (OSError, http.client.HTTPException) as error:
                # The gateway was killed while it sent the response.
                if time.monotonic() > end:
                    raise ServerError(
                        f"the records of rollout {rollout_id} are incomplete: {error}"
                    ) from None
            time.sleep(RETRY_DELAY_S)


def is_refused(error: ServerError) -> bool:
    """Returns whether a server refused a request, so that it is useless to repeat it."""
    return error.status is not None and error.status < 500
