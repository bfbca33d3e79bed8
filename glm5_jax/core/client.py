"""Whether a server answers."""

import http.client
import urllib.request

# What is asked is in this cluster; a proxy that the environment names is for what is not.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, seconds: float) -> bool:
    """Whether GET url is answered with 200 or another 2xx, no part of the answer taking longer than so many seconds."""
    try:
        with _direct.open(url, timeout=seconds):
            return True
    except (OSError, http.client.HTTPException):  # HTTP's errors are OSErrors too
        return False
