"""Tests the definition of roles and the order in which they start."""

import dataclasses

import pytest

from glm5_jax.runtime.placement import (
    Health,
    Restarts,
    Role,
    escape_words,
    http_url,
    substitute_words,
    topological_order,
)


def server(name, *words, **more) -> Role:
    return Role(name=name, argv=["serve", "--port={port}", "--ready={ready}", *words], **more)


def test_reads_dependencies_from_command():
    role = server(
        "orchestrator", "--gateway={gateway.url}", "--engines={engine.urls}", after=["judge"]
    )
    assert role.needs == ("gateway", "engine", "judge")
    assert role.serves and Role(name="sglang", argv=["router"], port=30000).serves
    assert not Role(name="train", argv=["python", "{index}"]).serves


def test_orders_roles_after_their_dependencies():
    roles = [
        server("orchestrator", "{gateway.url}"),
        server("gateway", "{engine.urls}"),
        server("judge"),
        server("engine", count=2),
    ]
    assert [r.name for r in topological_order(roles)] == [
        "judge",
        "engine",
        "gateway",
        "orchestrator",
    ]


def test_substitutes_only_words_in_braces():
    argv = ["{python}", "--x={'kind': 'a'}", "--port={port}", "{engine.urls}", "${HOME} {}"]
    values = {"python": "py", "port": "0", "engine.urls": "http://a,http://b"}
    expected = ["py", "--x={'kind': 'a'}", "--port=0", "http://a,http://b", "${HOME} {}"]
    assert substitute_words(argv, values) == expected


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{answer}",
        "{host}",
        "{{port}}",
        "{{{x}",
        "{engine.urls}{",
        "{a}{b-c}",
        "{}",
        "{A}",
        "{{",
    ],
)
def test_keeps_escaped_words_of_users(text):
    role = Role(name="train", argv=["{python}", f"--x={escape_words(text)}"])
    assert role.words == ("python",) and role.needs == ()
    assert substitute_words(role.argv, {"python": "py"}) == ["py", f"--x={text}"]


def test_formats_addresses_as_urls():
    assert http_url("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert http_url("::1", 80) == "http://[::1]:80"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Engine"}, "role name 'Engine'; use up to 32 lower-case letters"),
        ({"name": "a" * 33}, "use up to 32 lower-case letters"),
        ({"argv": "python"}, "argv is 'python'; give the words of a command"),
        ({"argv": ()}, "give the words of a command"),
        ({"argv": ["{prot}"]}, "argv has {prot}; there are {python}, {index}, {host}, {port}"),
        ({"count": 0}, "role one: count is 0; it must be positive"),
        ({"hosts": 0}, "role one: hosts is 0; it must be positive"),
        ({"slices": 0}, "role one: slices is 0; it must be positive"),
        ({"hosts": 4, "slices": 3}, "3 slices cannot have equal parts of 4 hosts"),
        ({"grace_s": 0.0}, "role one: grace_s is 0.0; it must be positive"),
        ({"start_timeout_s": -1.0}, "role one: start_timeout_s is -1.0; it must be positive"),
        ({"settle_s": 0.0}, "role one: settle_s is 0.0; it must be positive"),
        ({"cpus": -1}, "role one: cpus is -1; it must be 0 or more"),
        ({"devices": -1}, "role one: devices is -1; it must be 0 or more"),
        ({"memory_gib": -1}, "role one: memory_gib is -1; it must be 0 or more"),
        ({"port": 65535, "count": 2}, "port is 65535; 2 replicas need ports up to 65535"),
        ({"port": -1}, "role one: port is -1"),
    ],
)
def test_rejects_role_out_of_range(changes, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(Role(name="one", argv=["true"]), **changes)
    assert message in str(error.value)
    Role(name="one", argv=["true"], port=65534, count=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Health(path="health"), "health.path is 'health'; it must begin with /"),
        (lambda: Health(interval_s=0), "health.interval_s is 0; it must be positive"),
        (lambda: Health(timeout_s=0), "health.timeout_s is 0"),
        (lambda: Health(max_silence_s=-1), "health.max_silence_s is -1"),
        (lambda: Restarts(max_restarts=-1), "restarts.max_restarts is -1; it must be 0 or more"),
        (lambda: Restarts(window_s=0), "restarts.window_s is 0; it must be positive"),
        (lambda: Restarts(initial_delay_s=0), "restarts.initial_delay_s is 0"),
        (lambda: Restarts(max_delay_s=0), "restarts.max_delay_s is 0"),
    ],
)
def test_rejects_limits_out_of_range(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([server("a"), server("a")], "role names are ['a', 'a']; they must differ"),
        ([server("a", "{b.url}")], "role a needs b; there are a"),
        ([server("a", after=["b"])], "role a needs b; there are a"),
        ([server("a", "{b.url}"), server("b", "{a.url}")], "roles a, b need each other"),
        ([server("a", "{a.url}")], "roles a need each other"),
        ([server("a", "{b.port}"), server("b")], "{b.port}; a role has url and urls"),
        ([server("a", "{b.url}"), server("b", count=2)], "b has 2 replicas; use {b.urls}"),
        (
            [server("a", "{b.urls}"), Role(name="b", argv=["true"])],
            "role a needs the address of b, which has neither {ready} nor a port",
        ),
    ],
)
def test_rejects_inconsistent_roles(roles, message):
    with pytest.raises(ValueError) as error:
        topological_order(roles)
    assert message in str(error.value)
