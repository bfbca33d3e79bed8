"""The key of a run: its file, the programs that require it, and leases that no orchestrator can have given."""

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
from glm5_jax.runtime.http_server import ListenConfig, read_key
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import Engine, told

DAY_MS = 24 * 3600 * 1000


def program(role, workdir, monkeypatch, **fields):
    """A program of the tiny run, at any free port."""
    monkeypatch.setattr(servers, "load_tokenizer", lambda config: Tokenizer.load("bytes"))
    base = ProgramConfig()
    listen = dataclasses.replace(base.listen, port=0, grace_s=1.0)
    options = dict(role=role, listen=listen, gateway="http://127.0.0.1:1") | fields
    program_config = dataclasses.replace(base, **options)
    tasks = (TaskWeight(TaskConfig(kind="products", size=20)),)
    more = dict(checkpoint="nowhere", program=program_config, length=4096, tasks=tasks)
    config = dataclasses.replace(rl_agentic.tiny(), **more)
    return servers.SERVERS[role](config, workdir)


def status_of(call, *arguments):
    with pytest.raises(ServerError) as raised:
        call(*arguments)
    return raised.value.status


def test_creates_one_key_that_only_its_user_reads(tmp_path):
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
def test_rejects_key_file_that_others_may_use(tmp_path, mode):
    path = ensure_key_file(tmp_path / KEY_FILE)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode {mode:o}, .* chmod 600"):
        ensure_key_file(path)


def test_requires_key_of_run_from_everyone(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        orchestrator = stack.enter_context(program("orchestrator", tmp_path, monkeypatch).running())
        key = read_key(tmp_path / KEY_FILE)
        engine = Engine(ListenConfig(port=0, api_key=key))
        engine_url = stack.enter_context(engine.running())
        made = program("gateway", tmp_path, monkeypatch, engines=engine_url)
        gateway = stack.enter_context(made.running())
        for url, path in (
            (orchestrator, "/trainer/begin"),
            (orchestrator, "/tasks"),
            (gateway, "/weights"),
        ):
            assert status_of(Client(url).open, path, b"{}") == 401
            assert status_of(Client(url, "guessed").open, path, b"{}") == 401
        assert status_of(Client(gateway).open, "/sessions") == 401
        Client(orchestrator).open("/health").close()  # launchers look at it without a key
        # The trainer's client and the gateway's requests to engines carry it.
        client = OrchestratorClient(orchestrator, key, patience_s=0.0)
        assert client.status()["tasks"] == {}
        own = Client(gateway, key)
        name = json.load(own.open("/sessions", b"{}"))["id"]
        body = json.dumps({"messages": [{"role": "user", "content": "?"}], "max_tokens": 16})
        with own.open(f"/sessions/{name}/v1/chat/completions", body.encode()) as answer:
            assert json.load(answer)["choices"]


def test_registers_service_by_key_of_run(tmp_path, monkeypatch):
    with program("orchestrator", tmp_path, monkeypatch).running() as orchestrator:
        service = program(
            "task", tmp_path, monkeypatch, orchestrator=orchestrator, url="http://127.0.0.1:0"
        )
        with service.running() as url:
            end = time.monotonic() + 10
            while not service.is_registered and time.monotonic() < end:
                time.sleep(0.01)
            tasks = OrchestratorClient(orchestrator, service.api_key).status()["tasks"]
            assert [own["url"] for own in tasks.values()] == [url]
            assert status_of(told, url, "/cancel", {"rollout_id": "x"}) == 401


def test_rejects_listening_everywhere_without_key():
    listen = ProgramConfig().listen
    assert dataclasses.replace(listen, host="0.0.0.0").api_key_file == KEY_FILE
    with pytest.raises(ValueError, match="there is no API key"):
        dataclasses.replace(listen, host="0.0.0.0", api_key_file=None)


@pytest.mark.parametrize("ahead_ms", [2 * DAY_MS, 10**18 - 10**13])
def test_rejects_lease_that_no_orchestrator_gave(tmp_path, monkeypatch, ahead_ms):
    engine = Engine()
    now_ms = int(1e3 * time.time())
    with engine.running() as url:
        gateway = program("gateway", tmp_path, monkeypatch, engines=url)
        key = gateway.api_key
        with gateway.running() as served:

            def want(lease, version):
                body = json.dumps({"lease": lease, "version": version}).encode()
                with Client(served, key).open("/weights", body) as answer:
                    return json.load(answer)

            assert status_of(want, now_ms + ahead_ms, 3) == 400
            assert status_of(want, now_ms, 2**31) == 400
            assert want(now_ms, 0)["lease"] == now_ms
    # One that a gateway before this one took is not served under.
    journal = pathlib.Path(tmp_path, "gateway", "weights.json")
    journal.write_text(json.dumps({"lease": now_ms + ahead_ms, "version": 1, "checksum": None}))
    with engine.running() as url:
        with program("gateway", tmp_path, monkeypatch, engines=url).running() as served:
            with Client(served, key).open("/server_info") as answer:
                assert json.load(answer)["weights"] is None


@pytest.mark.parametrize("field", ["step", "version"])
def test_rejects_step_that_no_trainer_reaches(tmp_path, monkeypatch, field):
    with program("orchestrator", tmp_path, monkeypatch).running() as orchestrator:
        own = Client(orchestrator, read_key(tmp_path / KEY_FILE))
        body = {"step": 5, "version": 5} | {field: 10**15}
        assert status_of(own.open, "/trainer/begin", json.dumps(body).encode()) == 400
