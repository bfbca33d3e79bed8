"""A saved model, served by the command of README, with a client, its page, and a signal to end."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

import openai
import pytest

from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.text.tokenizer import Tokenizer
from tests.contracts.source_tree import ROOT
from tests.inference.conftest import serving
from tests.inference.test_engine import model

HI = [{"role": "user", "content": "hi"}]
CHROMIUM = shutil.which("chromium")


@contextlib.contextmanager
def serve_folder(folder, env):
    """Yields (process, URL) of the server of a HuggingFace folder."""
    options = (
        "server.port=0",
        "engine.prefill_chunk=32",
        "engine.max_num_seqs=2",
        f"checkpoint={folder}",
    )
    flags = [f"--experiment.{option}" for option in options]
    command = [sys.executable, "-m", "launch.run", "--experiment=experiments/serve.py:tiny", *flags]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout if "answers at" in line)
            yield process, line.split()[3]
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_serves_and_ends_after_running_requests(tmp_path):
    save_hf(model(), tmp_path, tokenizer=Tokenizer.default())
    with (
        serve_folder(tmp_path, dict(os.environ)) as (process, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        complete = client.chat.completions.create(
            model="glm-5-tiny", messages=HI, max_tokens=20, temperature=0
        )
        stream = client.chat.completions.create(
            model="glm-5-tiny", messages=HI, max_tokens=20, temperature=0, stream=True
        )
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == complete.choices[0].finish_reason == "length"
        text = "".join(
            getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks
        )
        assert text == complete.choices[0].message.reasoning_content
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian's package is called so)")
@pytest.mark.timeout(300)
def test_page_chats():
    from playwright.sync_api import sync_playwright

    with serving(api_key="secret") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(error))
        page.goto(server.url)
        assert page.locator("#model").inner_text() and page.title() == "Chat"

        page.fill("#text", "hi")
        page.press("#text", "Enter")
        page.wait_for_selector("article.error")
        assert "API key" in page.inner_text("article.error")

        page.fill("#key", "secret")
        page.dispatch_event("#key", "change")
        page.wait_for_function("document.querySelector('#model').textContent === 'tiny'")
        page.fill("#tokens", "6")
        page.fill("#temperature", "0")
        page.fill("#text", "hi")
        page.click("#send")
        page.wait_for_selector("article.cost")
        assert page.locator("article.thinking").count() == 1  # the model is cut off while it thinks
        assert "6 tokens" in page.inner_text("article.cost")

        page.uncheck("#think")
        page.fill("#text", "again")
        page.click("#send")
        page.wait_for_function("document.querySelectorAll('article.cost').length === 2")
        assert page.locator("article.assistant").count() == 1

        page.fill("#tokens", "40")
        page.fill("#text", "stop")
        server.engine.pause()
        page.click("#send")
        page.wait_for_function("document.querySelector('#send').textContent === 'Stop'")
        page.click("#send")
        page.wait_for_function("document.querySelector('#send').textContent === 'Send'")
        server.engine.resume()
        for _ in range(100):
            if not server.engine.num_waiting + server.engine.num_running:
                break
            threading.Event().wait(0.1)
        assert server.engine.num_waiting + server.engine.num_running == 0

        page.click("#new")
        assert page.locator("article").count() == 0 and not problems
        browser.close()
