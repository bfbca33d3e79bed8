"""Engines pull weights from hosts of their run only, because the key of the run is sent there."""

import pytest

from glm5_jax.inference.request_bodies import PullRequest
from glm5_jax.inference.server import ServerConfig
from glm5_jax.inference.shards.hosts import PRIVATE_NETWORKS, check_sources


def request(*sources: str, peers: tuple[tuple[str, ...], ...] = ((),)) -> PullRequest:
    return PullRequest(push="a", sources=sources, peers=peers)


@pytest.mark.parametrize(
    ("url", "client", "hosts"),
    [
        ("http://127.0.0.1:9", "127.0.0.1", ()),
        ("http://localhost:9", "::1", ()),
        ("http://10.1.2.3:9", "10.1.2.3", ()),
        ("http://10.1.2.3:9", "::ffff:10.1.2.3", ()),
        ("http://10.1.2.3:9", "10.9.9.9", ("10.1.0.0/16",)),
        ("http://10.1.2.3:9", "10.9.9.9", ("10.1.2.3",)),
        ("http://Trainer-0.run:9", "10.9.9.9", ("trainer-0.run",)),
        ("http://[fd00::7]:9", "fd00::1", PRIVATE_NETWORKS),
    ],
)
def test_accepts_hosts_of_run(url, client, hosts):
    check_sources(request(url, peers=((url,),)), client, hosts)


@pytest.mark.parametrize(
    ("url", "client", "hosts"),
    [
        ("http://169.254.169.254/latest", "10.1.2.3", PRIVATE_NETWORKS),
        ("http://127.0.0.1:9", "10.1.2.3", PRIVATE_NETWORKS),
        ("http://localhost:9", "10.1.2.3", PRIVATE_NETWORKS),
        ("http://example.org", "127.0.0.1", PRIVATE_NETWORKS),
        ("http://10.1.2.3:9", "127.0.0.1", ()),
        ("http://[::ffff:169.254.169.254]", "10.1.2.3", PRIVATE_NETWORKS),
        ("http://2130706433", "10.1.2.3", PRIVATE_NETWORKS),
    ],
)
def test_refuses_other_hosts(url, client, hosts):
    with pytest.raises(ValueError, match=r"sources\[1\] is .*pulls no weights from .*pull_hosts"):
        check_sources(
            request(f"http://{'[::1]' if ':' in client else client}:1", url), client, hosts
        )
    with pytest.raises(ValueError, match=r"peers\[0\]\[0\] is .*pull_hosts"):
        check_sources(request(f"http://{client}:1", peers=((url,),)), client, hosts)


def test_refuses_what_is_no_url():
    with pytest.raises(ValueError, match=r"sources\[0\] is 'file:///etc/passwd', which is no URL"):
        check_sources(request("file:///etc/passwd"), "127.0.0.1", ())


@pytest.mark.parametrize("host", ["", "http://a", "10.0.0.0/99", "a/b"])
def test_refuses_malformed_host_in_config(host):
    with pytest.raises(ValueError, match="pull_hosts has .*such as 10.0.0.0/8"):
        ServerConfig(pull_hosts=(host,))
