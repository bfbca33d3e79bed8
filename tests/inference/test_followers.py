"""Tests an engine of several processes with runners of this process: commands, their connection, and their results."""

import contextlib
import dataclasses
import json
import socket
import threading
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.inference import commands
from glm5_jax.inference.array_messages import encode
from glm5_jax.inference.constraints import ReplyRules
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.followers.command_stream import CommandReceiver, CommandSender, ProcessLost
from glm5_jax.inference.followers.follower import Follower
from glm5_jax.inference.followers.server import FollowerServer
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.runner import Runner, WeightSource
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.shapes import resolve_shapes
from glm5_jax.inference.step_arrays import SamplingVariant, StepOutput
from glm5_jax.model import glm5
from glm5_jax.runtime.http_server import ListenConfig
from tests.inference.test_engine import light_model

OPTIONS = EngineConfig(page_size=4, num_pages=16, max_num_seqs=2, prefill_chunk=16, max_length=32)
SAMPLING = Sampling(max_tokens=6, seed=3, ignore_eos=True)


def round_trip(command, arrays=()):
    """Returns a command and its arrays as another process decodes them."""
    message = memoryview(encode(command, arrays))
    start = 0

    def read(count: int) -> bytes:
        nonlocal start
        start += count
        return bytes(message[start - count : start])

    decoded = commands.MESSAGES.read(read)
    assert start == len(message)
    return decoded


class Relay:
    """Follower in this process. outputs: those of its steps."""

    def __init__(self, open_weights=None):
        cfg = light_model().cfg
        execution = OPTIONS.execution()
        self._runner = Runner(
            light_model(), resolve_shapes(cfg, OPTIONS)[0], execution, open_weights
        )
        self.outputs: list[StepOutput] = []

    def send(self, command, arrays) -> None:
        result = self._runner.execute(*round_trip(command, arrays))
        if isinstance(result, StepOutput):
            self.outputs.append(result)


def make_engine(relay: Relay, **options) -> Engine:
    return Engine(light_model(), config=OPTIONS, send=relay.send, **options)


def complete(engine: Engine, *requests: Request):
    handles = [engine.submit(request) for request in requests]
    while engine.step():
        pass
    return [handle.completion for handle in handles]


def test_encodes_commands_and_arrays():
    variant = SamplingVariant(truncate=True, num_top=20)
    step = commands.RunStep(program="decode", variant=variant, width=3, has_rules=True)
    arrays = [
        np.arange(6, dtype=np.int32).reshape(1, 2, 3),
        np.zeros((2, 0), np.int32),
        np.asarray(jnp.arange(3, dtype=jnp.bfloat16)),
    ]
    command, decoded = round_trip(step, arrays)
    assert command == step and command.variant.truncate is True
    for got, want in zip(decoded, arrays, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    opened = commands.OpenWeights(source={"path": "\u00e9", "version": 2})
    assert round_trip(opened) == (opened, [])


def test_follower_computes_same_tokens_and_weights():
    """Both have the same pages, slots and weights, because a wrong one would change the tokens."""

    def open_weights(source):
        if source["factor"] == 0:
            raise ValueError("the factor is 0")
        return jax.tree.map(lambda x: x * source["factor"], glm5.params_of(light_model()))

    relay = Relay(open_weights)
    engine = make_engine(relay, open_weights=open_weights)
    request = Request(range(1, 13), SAMPLING, rules=ReplyRules(thinking_budget=2, thinking_end=7))
    replies = []
    for factor in (1.5, 0.5):
        relay.outputs.clear()
        [reply] = complete(engine, request)
        drawn = [(o.sampled, int(o.count[0])) for o in relay.outputs if o.count[0]]
        assert [int(sampled.tokens[0, 0]) for sampled, _ in drawn][-6:] == reply.ids
        assert [float(sampled.logprobs[0, 0]) for sampled, _ in drawn][-6:] == reply.logprobs
        replies.append(reply)
        engine.update_weights(WeightSource(fields={"factor": factor}), engine.version + 1)
    assert replies[0].logprobs != replies[1].logprobs and 7 in replies[0].ids
    with pytest.raises(ValueError, match="takes weights as a WeightSource"):
        engine.update_weights(glm5.params_of(light_model()), 3)
    with pytest.raises(ValueError, match="the factor is 0"):
        engine.update_weights(WeightSource(fields={"factor": 0}), 3)
    assert engine.version == 2


def test_moves_pages_between_engines_with_followers():
    relays = Relay(), Relay()
    sender, receiver = map(make_engine, relays)
    ids = list(range(1, 12))
    [want] = complete(make_engine(Relay()), Request(ids, SAMPLING))
    complete(sender, Request(ids, dataclasses.replace(SAMPLING, max_tokens=0)))
    part = sender.read_prefix(ids, 0)
    assert part is not None and receiver.write_prefix(ids, part, 0) == part.count
    [reply] = complete(receiver, Request(ids, SAMPLING))
    assert reply.cached_tokens == part.count * sender.page_size
    assert reply.ids == want.ids
    np.testing.assert_allclose(reply.logprobs, want.logprobs, atol=1e-5)
    drawn = [int(o.sampled.tokens[0, 0]) for o in relays[1].outputs if o.count[0]]
    assert drawn[: len(want.ids)] == want.ids


@pytest.fixture
def connection():
    """Yields a sender, a receiver that is connected to it, and the numbers of lost processes."""
    lost, is_lost = [], threading.Event()

    def on_lost(number):
        lost.append(number)
        is_lost.set()

    sender = CommandSender("localhost", 2, on_lost)
    receivers = []
    thread = threading.Thread(
        target=lambda: receivers.append(CommandReceiver(sender.rendezvous, 1)), daemon=True
    )
    thread.start()
    sender.accept(30)
    thread.join()
    yield sender, receivers[0], lost, is_lost
    sender.close()
    receivers[0].close()


def test_connection_delivers_commands_in_order_and_stops(connection):
    sender, receiver, lost, _ = connection
    stopping = threading.Event()
    sender.on_stop_requested = stopping.set
    assert sender.urls is None
    receiver.reply(commands.Listening(port=81))
    receiver.reply(commands.StopRequested())
    assert stopping.wait(30) and sender.urls == ["http://127.0.0.1:81"]
    read = commands.ReadPages()
    sender.send(read, [np.arange(3)])
    sender.stop()
    command, [pages] = receiver.receive()
    assert command == read and pages.tolist() == [0, 1, 2]
    assert receiver.receive() == (commands.Stop(), [])
    receiver.close()
    assert not lost


def test_connection_reports_lost_processes(connection):
    sender, receiver, lost, is_lost = connection
    receiver.close()
    assert is_lost.wait(30) and lost == [1]
    with pytest.raises(ProcessLost, match="process 1 of the engine has ended"):
        for _ in range(100):
            sender.send(commands.LoadWeights())


def test_follower_ends_with_first_process(connection):
    sender, receiver, *_ = connection
    follower = Follower(light_model(), OPTIONS, receiver)
    sender.close()
    with pytest.raises(ProcessLost, match="the first process of the engine has ended"):
        follower.run()


def test_follower_server_reports_health(connection):
    sender, receiver, *_ = connection
    server = FollowerServer(Follower(light_model(), OPTIONS, receiver), ListenConfig(port=0))
    with server.running() as url:
        with urllib.request.urlopen(f"{url}/health") as reply:
            assert json.load(reply) == {"status": "ok"}
        assert server.num_active == 1 and not server.failed
        sender.close()
        while server.num_active:
            threading.Event().wait(0.01)
        assert isinstance(server.failure, ProcessLost)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health")


def test_rejects_connection_without_key():
    sender = CommandSender("localhost", 2, lambda number: None)
    with socket.create_connection(sender.rendezvous[:2]) as other:
        other.sendall(b"0" * 32 + (1).to_bytes(4))
        with pytest.raises(TimeoutError, match=r"processes \[1\] did not connect within 0.2 s"):
            sender.accept(0.2)
        assert other.recv(1) == b""


def test_strangers_do_not_hold_up_processes():
    """Connections that send nothing, or one byte of a wrong key, are closed once all processes are there."""
    sender = CommandSender("localhost", 3, lambda number: None)
    strangers = [socket.create_connection(sender.rendezvous[:2]) for _ in range(20)]
    for stranger in strangers[::2]:
        stranger.sendall(b"0")
    receivers: list[CommandReceiver] = []

    def connect() -> None:
        receivers.extend(CommandReceiver(sender.rendezvous, number) for number in (1, 2))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    sender.accept(5)
    thread.join()

    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):  # closed with a byte that nobody read
            assert stranger.recv(1) == b""
        stranger.close()
    sender.close()
    for receiver in receivers:
        receiver.close()


@pytest.mark.parametrize("number", [0, 2, 2**32 - 1])
def test_rejects_number_of_no_process(number):
    sender = CommandSender("localhost", 2, lambda number: None)
    other = CommandReceiver(sender.rendezvous, number)
    with pytest.raises(TimeoutError, match=r"processes \[1\] did not connect"):
        sender.accept(0.2)
    other.close()


def test_follower_pulls_from_hosts_of_its_run_only(connection):
    sender, receiver, *_ = connection
    server = FollowerServer(Follower(light_model(), OPTIONS, receiver), ListenConfig(port=0))
    body = {"push": "a", "sources": ["http://169.254.169.254"], "peers": [[]]}
    with server.running() as url:
        request = urllib.request.Request(
            f"{url}/weights/pull",
            json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            urllib.request.urlopen(request)
        assert "pull_hosts" in json.load(caught.value)["error"]["message"]
        sender.stop()
