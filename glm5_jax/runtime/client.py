"""Health checks of servers."""

import http.client
import urllib.request

# The servers are in this cluster, but a proxy named by the environment is for hosts outside of it.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_healthy(url: str, timeout_s: float) -> bool:
    """Returns True if GET url replies with a 2xx status and no read blocks longer than `timeout_s` seconds."""
    try:
        with _direct.open(url, timeout=timeout_s):
            return True
    except (OSError, http.client.HTTPException):  # HTTP's errors are OSErrors too
        return False
