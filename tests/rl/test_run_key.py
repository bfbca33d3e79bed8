"""The key of a run: its file, the programs that require it, and leases that no orchestrator can have issued."""

import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import time

import pytest

from experiments import rl_agentic
from experiments.rl_reasoning import TaskWeight
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.program import ProgramConfig
from glm5_jax.rl.programs.run_key import KEY_FILE, ensure_key_file
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.http_server import ListenConfig
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import Engine, post_json

DAY_MS = 24 * 3600 * 1000


def program(role, workdir, monkeypatch, **fields):
    """Returns a program of the tiny run, at any free port."""
    monkeypatch.setattr(servers, "load_tokenizer", lambda config: Tokenizer.load("bytes"))
    default = ProgramConfig()
    listen = dataclasses.replace(default.listen, port=0, grace_s=1.0)
    options = dict(role=role, listen=listen, gateway="http://127.0.0.1:1") | fields
    program_config = dataclasses.replace(default, **options)
    tasks = (TaskWeight(TaskConfig(kind="products", size=20)),)
    run_options = dict(checkpoint="nowhere", program=program_config, length=4096, tasks=tasks)
    config = dataclasses.replace(rl_agentic.tiny(), **run_options)
    return servers.SERVERS[role](config, workdir)


def status_of(call, *arguments):
    with pytest.raises(ServerError) as raised:
        call(*arguments)
    return raised.value.status


def test_creates_one_key_readable_by_user_only(tmp_path):
    path, ready = tmp_path / "run" / KEY_FILE, threading.Barrier(8)
    keys = []

    def start():
        ready.wait()
        keys.append(read_key(ensure_key_file(path)))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8 and len(set(keys)) == 1 and len(keys[0]) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [KEY_FILE]
    other = tmp_path / "other" / KEY_FILE
    assert read_key(ensure_key_file(other)) != keys[0]


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_rejects_key_file_open_to_others(tmp_path, mode):
    path = ensure_key_file(tmp_path / KEY_FILE)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode {mode:o}, .* chmod 600"):
        ensure_key_file(path)


def test_all_programs_require_key_of_run(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        orchestrator = stack.enter_context(program("orchestrator", tmp_path, monkeypatch).running())
        key = read_key(tmp_path / KEY_FILE)
        engine = Engine(ListenConfig(port=0, api_key=key))
        engine_url = stack.enter_context(engine.running())
        server = program("gateway", tmp_path, monkeypatch, engines=engine_url)
        gateway = stack.enter_context(server.running())
        for url, path in (
            (orchestrator, "/trainer/begin"),
            (orchestrator, "/tasks"),
            (gateway, "/weights"),
        ):
            assert status_of(Client(url).open, path, b"{}") == 401
            assert status_of(Client(url, "wrong").open, path, b"{}") == 401
        assert status_of(Client(gateway).open, "/sessions") == 401
        Client(orchestrator).open("/health").close()  # launchers check it without a key
        # The trainer's client and the gateway's requests to engines send the key.
        client = OrchestratorClient(orchestrator, key, patience_s=0.0)
        assert client.status()["tasks"] == {}
        gateway_client = Client(gateway, key)
        name = json.load(gateway_client.open("/sessions", b"{}"))["id"]
        body = json.dumps({"messages": [{"role": "user", "content": "?"}], "max_tokens": 16})
        with gateway_client.open(
            f"/sessions/{name}/v1/chat/completions", body.encode()
        ) as response:
            assert json.load(response)["choices"]


def test_registers_service_with_key_of_run(tmp_path, monkeypatch):
    with program("orchestrator", tmp_path, monkeypatch).running() as orchestrator:
        service = program(
            "task", tmp_path, monkeypatch, orchestrator=orchestrator, url="http://127.0.0.1:0"
        )
        with service.running() as url:
            end = time.monotonic() + 10
            while not service.is_registered and time.monotonic() < end:
                time.sleep(0.01)
            tasks = OrchestratorClient(orchestrator, service.api_key).status()["tasks"]
            assert [task["url"] for task in tasks.values()] == [url]
            assert status_of(post_json, url, "/cancel", {"rollout_id": "x"}) == 401


def test_rejects_public_host_without_key():
    listen = ProgramConfig().listen
    assert dataclasses.replace(listen, host="0.0.0.0").api_key_file == KEY_FILE
    with pytest.raises(ValueError, match="there is no API key"):
        dataclasses.replace(listen, host="0.0.0.0", api_key_file=None)


@pytest.mark.parametrize("ahead_ms", [2 * DAY_MS, 10**18 - 10**13])
def test_rejects_lease_far_in_future(tmp_path, monkeypatch, ahead_ms):
    engine = Engine()
    now_ms = int(1e3 * time.time())
    with engine.running() as url:
        gateway = program("gateway", tmp_path, monkeypatch, engines=url)
        key = gateway.api_key
        with gateway.running() as gateway_url:

            def require_weights(lease, version):
                body = json.dumps({"lease": lease, "version": version}).encode()
                with Client(gateway_url, key).open("/weights", body) as response:
                    return json.load(response)

            assert status_of(require_weights, now_ms + ahead_ms, 3) == 400
            assert status_of(require_weights, now_ms, 2**31) == 400
            assert require_weights(now_ms, 0)["lease"] == now_ms
    # The lease in an earlier gateway's journal is ignored.
    journal = pathlib.Path(tmp_path, "gateway", "weights.json")
    journal.write_text(json.dumps({"lease": now_ms + ahead_ms, "version": 1, "checksum": None}))
    with engine.running() as url:
        with program("gateway", tmp_path, monkeypatch, engines=url).running() as gateway_url:
            with Client(gateway_url, key).open("/server_info") as response:
                assert json.load(response)["weights"] is None


@pytest.mark.parametrize("field", ["step", "version"])
def test_rejects_step_out_of_range(tmp_path, monkeypatch, field):
    with program("orchestrator", tmp_path, monkeypatch).running() as orchestrator:
        client = Client(orchestrator, read_key(tmp_path / KEY_FILE))
        body = {"step": 5, "version": 5} | {field: 10**15}
        assert status_of(client.open, "/trainer/begin", json.dumps(body).encode()) == 400
