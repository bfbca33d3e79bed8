"""Decides from which hosts an engine pulls weights: it sends them the key of the run, and they may be anywhere in a network."""

import ipaddress
from collections.abc import Sequence

from glm5_jax.inference.request_bodies import PullRequest
from glm5_jax.runtime.addresses import check_url, host_of, is_address, is_loopback, netloc_of

# Networks in which launchers place the processes of a run.
PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")


def check_pull_hosts(hosts: Sequence[str]) -> None:
    """Raises ValueError unless each is a host's name, an address or a network."""
    for host in hosts:
        is_network = "/" in host and _network(host) is not None
        if not host or "://" in host or ("/" in host and not is_network):
            raise ValueError(
                f"pull_hosts has {host!r}; give the name of a host, an address, or a network such as 10.0.0.0/8"
            )


def check_sources(request: PullRequest, client: str | None, hosts: Sequence[str]) -> None:
    """Raises ValueError if a request names a host to pull from that is neither the client's nor one of `hosts`.

    client: address that the request came from; None: unknown.
    """
    named = [(f"sources[{i}]", url) for i, url in enumerate(request.sources)]
    for i, urls in enumerate(request.peers):
        named += [(f"peers[{i}][{j}]", url) for j, url in enumerate(urls)]
    for name, url in named:
        check_url(name, url)
        host = _plain(host_of(netloc_of(url) or "") or "")
        if not _is_known(host, _plain(client or ""), hosts):
            raise ValueError(
                f"{name} is {url!r:.200}, and this engine pulls no weights from {host!r:.100}; add it, or its network, to "
                "pull_hosts of the server"
            )


def _is_known(host: str, client: str, hosts: Sequence[str]) -> bool:
    if host == client or (is_loopback(host) and is_loopback(client)):
        return True
    if not is_address(host):
        return host.lower() in (known.lower() for known in hosts)
    address = ipaddress.ip_address(host)
    networks = [_network(known) for known in hosts]
    return any(
        network is not None and network.version == address.version and address in network
        for network in networks
    )


def _plain(host: str) -> str:
    """Returns an address without the IPv6 form of IPv4, so that equal addresses are equal texts."""
    if not is_address(host):
        return host
    address = ipaddress.ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _network(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(host, strict=False)
    except ValueError:
        return None
