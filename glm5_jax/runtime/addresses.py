"""Parses and classifies the hosts that servers listen at and that requests name."""

import ipaddress
import re
import socket
from urllib.parse import urlsplit


def netloc_of(url: str) -> str | None:
    """Returns the host and port of a URL; None if it is not a URL."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def check_url(name: str, url: str) -> None:
    """Raises ValueError unless it is the URL of a server."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if the port is not a number
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_url = is_url and not re.search(r"[\s\x00-\x1f\x7f]", url)  # urlsplit drops some of these
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"{name} is {url!r}, which is no URL; give one such as http://HOST:PORT")


def host_of(host: str) -> str | None:
    """Returns the name or address in a Host header, without the port; None if it is malformed."""
    try:
        return None if "@" in host else urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def machine_names() -> frozenset[str]:
    """Returns the host name of this machine and all prefixes of its full name that end at a label."""
    labels = socket.getfqdn().lower().split(".")
    full = (".".join(labels[:count]) for count in range(1, len(labels) + 1))
    return frozenset({socket.gethostname().lower(), *full})


def address_towards(url: str) -> str:
    """Returns the address of this machine from which it reaches the host of a URL. Raises OSError if there is none."""
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ValueError(f"{url!r} is no URL; give one such as http://HOST:PORT")
    target = parts.hostname, parts.port or 80
    family, *_, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def resolve_host(url: str) -> str:
    """Returns a URL with an address in place of the name of its host. Raises OSError if the name has none.

    A loopback name stays, because a server may listen at one of its addresses only.
    """
    parts = urlsplit(url)
    if not parts.hostname or is_address(parts.hostname) or is_loopback(parts.hostname):
        return url
    [first, *_] = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    address = str(first[4][0])
    host = f"[{address}]" if ":" in address else address
    return parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}").geturl()


def is_address(name: str) -> bool:
    """Returns True if a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches a host."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def can_be_host(host: str) -> bool:
    """Returns whether a text can be the name or address of a machine, or empty, which is every network."""
    try:
        return not re.search(r"[\s\x00-\x1f\x7f/]", host) and bool(host.encode("idna") or not host)
    except UnicodeError:
        return False


def is_wildcard(host: str) -> bool:
    """Returns True if a host means every network of the machine, in any spelling, such as 0 or ::ffff:0.0.0.0."""
    if not host:
        return True
    try:
        # This queries no name server. The C library accepts more spellings than `ipaddress`.
        [first, *_] = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # a text that is no host at all
        return False
    return is_unspecified(str(first[4][0]))


def is_unspecified(address: str) -> bool:
    """Returns True if the address of a socket is that of every network."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_unspecified
