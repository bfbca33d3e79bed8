"""An engine of two processes, started by launch.local as a launcher starts it on two hosts."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openai
import pytest

from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.inference.client import Client
from glm5_jax.runtime.supervisor import read_events
from glm5_jax.text.tokenizer import Tokenizer
from tests.contracts.source_tree import ROOT
from tests.inference.test_engine import model
from tests.journeys.test_pod import UNCACHED

PROMPT = "Zwei Rechner, eine Maschine"
MESH = {"mesh.fsdp": 4, "mesh.expert": 2}


@contextlib.contextmanager
def launched(checkpoint: Path, workdir: Path, **fields):
    """Starts the server under launch.local. Yields (process of the launcher, function that returns its next URL)."""
    fields = {"checkpoint": checkpoint, "server.port": 0, "engine.max_num_seqs": 2, **fields}
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "launch.local", "--experiment=experiments/serve.py:tiny"]
    with subprocess.Popen(
        [*command, *flags, f"--workdir={workdir}"],
        cwd=ROOT,
        env=os.environ | UNCACHED,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, lambda: next(x for x in process.stdout if " ready http" in x).split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


def complete(url: str, prompt: str = PROMPT, **more):
    """Returns the reply to a prompt with its log-probs."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return client.completions.create(
            model="glm-5-tiny",
            prompt=prompt,
            max_tokens=12,
            temperature=1,
            seed=7,
            logprobs=1,
            **more,
        )


def received_tokens(url: str) -> float:
    """Returns the number of tokens whose pages came from another engine."""
    with Client(url).open("/metrics") as response:
        text = response.read().decode()
    return float(re.search(r"^glm5_received_tokens_total (.*)$", text, re.MULTILINE)[1])


def scores_of(reply) -> tuple[str, list[float]]:
    [choice] = reply.choices
    return choice.text, choice.logprobs.token_logprobs


def processes_of(checkpoint: Path) -> list[int]:
    """Returns the processes of the engine that serves a checkpoint, in the order of their numbers."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        number = [w.rpartition(",")[2] for w in words if w.startswith("--distributed=")]
        if number and f"--experiment.checkpoint={checkpoint}" in words and "launch.run" in words:
            pids[int(number[0])] = int(folder.name)
    return [pids[number] for number in sorted(pids)]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_of_two_processes_serves_and_restarts_whole(tmp_path):
    checkpoint, changed = tmp_path / "model", tmp_path / "changed"
    save_hf(model(), checkpoint, tokenizer=Tokenizer.default())
    save_hf(model(1), changed, tokenizer=Tokenizer.default())
    with launched(checkpoint, tmp_path / "one", devices=8, **MESH) as (_, next_url):
        want = scores_of(complete(next_url()))
    with launched(checkpoint, tmp_path / "two", hosts=2, devices=4, **MESH) as (local, next_url):
        url = next_url()
        got = scores_of(complete(url))
        assert got[0] == want[0]
        np.testing.assert_allclose(got[1], want[1], atol=1e-5)
        # A client that leaves: its request ends, and the next one is answered.
        complete(url, stream=True).close()
        assert scores_of(complete(url)) == got
        # New weights in both processes, and a folder that neither can read.
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            body = {"path": str(changed), "version": 2, "policy": "finish"}
            client.post("/update_weights", body=body, cast_to=object)
            with pytest.raises(openai.BadRequestError, match="no checkpoint"):
                body |= {"path": str(tmp_path / "missing"), "version": 3}
                client.post("/update_weights", body=body, cast_to=object)
        other = scores_of(complete(url))
        assert other[1] != got[1]
        # Each process is lost once. The others end with it, and all are restarted, with the weights of the checkpoint.
        for victim in (1, 0):
            pids = processes_of(checkpoint)
            assert len(pids) == 2
            os.kill(pids[victim], signal.SIGKILL)
            url = next_url()
            wait_until_gone(pids)
            assert scores_of(complete(url)) == got
        pids = processes_of(checkpoint)
    assert local.returncode == 130
    wait_until_gone(pids)
    events = [event.what for event in read_events(tmp_path / "two" / "roles")]
    assert events == ["started", "ready", "died"] * 2 + ["started", "ready", "stopped"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_that_prefills_may_span_hosts_and_be_lost(tmp_path):
    """The engine that decodes has one device, and the other one eight in two processes."""
    checkpoint, prompts = tmp_path / "model", [f"{number} {PROMPT}" for number in range(3)]
    save_hf(model(), checkpoint, tokenizer=Tokenizer.default())
    plain = {"devices": 1, "engine.page_size": 4}
    with launched(checkpoint, tmp_path / "one", **plain) as (_, next_url):
        url = next_url()
        want = [scores_of(complete(url, prompt)) for prompt in prompts]
        assert received_tokens(url) == 0
    split = {"replicas": 1, "hosts": 2, "devices": 4, **MESH}
    fields = plain | {f"prefill.{name}": value for name, value in split.items()}
    fields["server.prefill_min_tokens"] = 5
    with launched(checkpoint, tmp_path / "two", **fields) as (_, next_url):
        _, url = next_url(), next_url()
        counts = []
        for number, prompt in enumerate(prompts):
            if number == 1:
                pids = processes_of(checkpoint)
                os.kill(pids[0], signal.SIGKILL)
                wait_until_gone(pids)
            if number == 2:
                next_url()
                time.sleep(6)  # until the engine is asked again
            got = scores_of(complete(url, prompt))
            assert got[0] == want[number][0]
            np.testing.assert_allclose(got[1], want[number][1], atol=1e-5)
            counts.append(received_tokens(url))
        assert 0 < counts[0] == counts[1] < counts[2]
