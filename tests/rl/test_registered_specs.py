"""Specs of task services: one out of bounds raises one clear error, and its service is not registered."""

import pytest

from glm5_jax.rl.orchestrator.task_registry import TaskRegistry
from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.runtime.http_server import ApiError

SPEC = dict(schema=2, name="t", url="http://10.0.0.1:8", weight=1.0, size=9, held_out=0)
SPEC |= dict(max_inflight=8, rollout_timeout_s=5.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 1e12),
        ("weight", 1e-320),
        ("weight", 0),
        ("name", "mean"),
        ("name", "reward"),
        ("name", "a/b"),
        ("token", "x" * 201),
        ("token", "a b"),
        ("token", "a\r\nHost: b"),
        ("token", "ä"),
        ("token", 5),
        ("instance", "x" * 201),
        ("url", "ftp://10.0.0.1"),
        ("url", "http://"),
        ("url", "http://["),
    ],
)
def test_rejects_spec_that_is_out_of_bounds(field, value):
    registry = TaskRegistry(4)
    with pytest.raises(ApiError) as raised:
        registry.register(SPEC | {field: value}, 0.0)
    assert raised.value.param == field and field in str(raised.value)
    assert not registry.services


@pytest.mark.parametrize(("field", "value"), [("weight", 1e12), ("name", "mean"), ("weight", 1e-9)])
def test_service_config_rejects_the_same_values(field, value):
    with pytest.raises(ValueError, match=f"{field} is "):
        ServiceConfig(**{field: value})


def test_reports_no_token():
    registry = TaskRegistry(4)
    registry.register(SPEC | {"token": "secret-token"}, 0.0)
    assert registry.services["t"].spec.token == "secret-token"
    assert "secret-token" not in str(registry.status({}, 0.0))
