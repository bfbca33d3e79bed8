"""Tests that an engine of a run returns a long reply before the attempt ends, so that the attempt can be judged."""

from experiments import rl_agentic
from glm5_jax.rl.programs import servers
from tests.rl.test_run_key import program


def test_engine_ends_reply_before_attempt_ends(tmp_path, monkeypatch):
    def describe(checkpoint, mesh, engine, server, **options):
        return engine, server

    monkeypatch.setattr(servers, "make_checkpoint_server", describe)
    engine, server = program("engine", tmp_path, monkeypatch)
    limit = rl_agentic.tiny().agent_timeout_s
    assert 0.5 * limit < server.timeout_s < limit
    assert not engine.warms_prompt_logprobs
