"""What an engine does beside the model's own work, and what its cache saves.

    python -m experiments.benchmarks.serving [PART ...] [--checkpoint=DIR]

    cache    bytes a token in the pages of GLM-5's latents and index keys and of GLM-4.5's grouped keys and values, and how
             many conversations of 32K tokens one memory holds (any machine, at once)
    host     the host's own time for a decode step with 78 unstacked layers' weights as arguments
    turns    multi-turn conversations: tokens of prompts that the prefix cache finds, against a cache without end
    load     requests that come at random (Poisson) and share beginnings: first token and each further one
    drafts   decoding with the MTP layer's drafts against plain decoding, where the trunk dominates, and every part's cost
    lengths  first token and tokens a second of dense and of sparse attention, by length and batch (19.4M random weights)

turns, load and drafts serve the trained model of --checkpoint (default: workdir/life/sft, of experiments/lifecycle.py:tiny).
Expected figures: experiments/LOG.md. About three minutes for all on two cores.
"""

import argparse
import dataclasses
import sys
import time
from unittest import mock

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from experiments.benchmarks import drafting
from experiments.benchmarks.glm5_arm import BASELINE
from experiments.benchmarks.measure import pin

from glm5_jax import presets  # isort: skip
from glm5_jax.checkpoint import models
from glm5_jax.inference.counts import Counts
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.steps import Steps
from glm5_jax.model import glm5
from glm5_jax.model.cache import init_cache

PAGE = 16
MEMORY, CONVERSATION = 141e9, 32_768  # one H200; tokens
PLAIN = Sampling(max_tokens=60, ignore_eos=True, temperature=0)
GLM_4_5 = dict(layers=92, heads=8, width=128)  # grouped-query attention, from its config.json


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.serving")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--checkpoint", default="workdir/life/sft")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        print(f"error: no part {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        for name in options.parts or PARTS:
            PARTS[name](options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def cache(options) -> None:
    """Bytes a token, and conversations in one memory."""
    del options
    grouped = 2 * 2 * GLM_4_5["layers"] * GLM_4_5["heads"] * GLM_4_5["width"]
    rows = [("GLM-4.5: grouped keys and values, bf16", grouped)]
    for name, index, dtype in (
        ("GLM-5 without DSA: latents, bf16", False, "bfloat16"),
        ("GLM-5: latents and index keys, bf16", True, "bfloat16"),
        ("GLM-5: the same in 8 bits, without scales", True, "int8"),
    ):
        rows.append((name, token_bytes(presets.glm5(), index, dtype)))
    table = Table(
        "cache", "bytes a token", "against GLM-4.5", f"of {CONVERSATION:,} tokens in 141 GB"
    )
    for name, size in rows:
        count = int(MEMORY / (size * CONVERSATION))
        table.add_row(name, f"{size:,}", f"{100 * (size / grouped - 1):+.1f}%", str(count))
    Console().print(table)


def token_bytes(cfg, index: bool, dtype: str) -> int:
    """Of one token in all pages, as the engine allocates them."""
    pages = jax.eval_shape(lambda: init_cache(cfg, 1, PAGE, dtype)).layers
    kept = [(layer.latent, layer.idx_k if index else None) for layer in pages]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)) // PAGE


def host(options) -> None:
    """The host's part of a decode step at GLM-5's number of arguments."""
    del options
    cfg = dataclasses.replace(
        presets.tiny(),
        num_hidden_layers=78,
        first_k_dense_replace=3,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_attention_heads=2,
    )
    engine = Engine(glm5.Glm5(cfg, rngs=nnx.Rngs(0)), page_size=PAGE, max_batch=32, max_length=64)
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    calls, steps = [], []

    def timed(function, times):
        def run(*args, **named):
            began = time.thread_time()
            out = function(*args, **named)
            times.append(1e3 * (time.thread_time() - began))
            return out

        return run

    # On a CPU the caller starts each of the program's operations, which elsewhere is the device's part: so
    # the same arrays are handed to a program without operations too.
    hand_over = jax.jit(lambda w, own, x: (own, x), donate_argnums=1, keep_unused=True)
    with mock.patch.object(Steps, "_run", timed(Steps._run, calls)):
        for batch in (1, 32):
            for _ in range(2):  # the first compiles
                engine.counts = Counts(accepted=[0])
                for _ in range(batch):
                    engine.submit(Request([5, 6, 7], sampling))
                while engine.num_waiting:
                    engine.step()
                calls.clear(), steps.clear()
                step = timed(engine.step, steps)
                while step():
                    pass
            counts, own = engine.counts, np.median(steps) - np.median(calls)
            print(
                f"host: {own:.2f} ms of its own time a step of {batch}; the call takes {np.median(calls):.2f} ms, "
                f"with the operations' start on a CPU; {100 * counts.num_overlapped / counts.num_steps:.0f}% of "
                "the steps were sent off while the device computed the one before"
            )
    runner, handed = engine._runner, []
    state, call = runner._device, timed(hand_over, handed)
    for _ in range(30):
        state, _ = jax.block_until_ready(call(runner._params, state, np.zeros((1, 8), np.int32)))
    count = len(jax.tree.leaves((runner._params, state)))
    print(
        f"host: {np.median(handed):.2f} ms to hand {count} arrays to a program; target 1 ms for both parts together"
    )


def turns(options) -> None:
    """Conversations of eight turns, all at once, whose prompts hold all that was said before."""
    made, vocab = _engine(options, max_batch=8, num_pages=512)
    rng, count = np.random.default_rng(0), 24
    system = rng.integers(0, vocab, 64).tolist()
    said = [[*system, *rng.integers(0, vocab, 20).tolist()] for _ in range(count)]
    possible = prompts = 0
    known = set()
    for _ in range(8):
        for ids in said:
            prompts += len(ids)
            # Without end, all whole pages of what was read or written before are found again.
            whole = 0
            while whole + PAGE < len(ids) and tuple(ids[: whole + PAGE]) in known:
                whole += PAGE
            possible += whole
            known.update(tuple(ids[:end]) for end in range(PAGE, len(ids) + 1, PAGE))
        replies = made.generate(said, Sampling(max_tokens=12, ignore_eos=True, temperature=0))
        for ids, reply in zip(said, replies):
            ids += reply.ids
            known.update(tuple(ids[:end]) for end in range(PAGE, len(ids), PAGE))
            ids += rng.integers(0, vocab, 10).tolist()
    found = made.counts.cached_tokens
    print(
        f"turns: {found:,} of {prompts:,} tokens of prompts found ({100 * found / prompts:.1f}%), of {possible:,} that a "
        f"cache without end has: {found / possible:.3f}; target 0.98: {'met' if found >= 0.98 * possible else 'missed'}"
    )


def load(options) -> None:
    """Poisson arrivals at a rate the engine can bear, half of the prompts behind one of four beginnings."""
    made, vocab = _engine(options, max_batch=16)
    made.warm()
    rng = np.random.default_rng(0)
    stems = [rng.integers(0, vocab, 128).tolist() for _ in range(4)]
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    for rate in (10, 30, 60):
        made.counts = Counts(accepted=[0])
        at = np.cumsum(rng.exponential(1 / rate, 150))
        asked = []
        for _ in at:
            stem = stems[rng.integers(4)] if rng.random() < 0.5 else []
            asked.append([*stem, *rng.integers(0, vocab, rng.integers(10, 60)).tolist()])
        handles, began = [], time.monotonic()
        while len(handles) < len(at) or made.num_running or made.num_waiting:
            now = time.monotonic() - began
            while len(handles) < len(at) and at[len(handles)] <= now:
                handles.append(made.submit(Request(asked[len(handles)], sampling)))
            if not made.step():
                time.sleep(0.0005)
        first = [1e3 * (own.first - own.submitted) for own in handles]
        each = [1e3 * (own.ended - own.first) / (len(own.tokens) - 1) for own in handles]
        spent = max(own.ended for own in handles) - began
        counts = made.counts
        print(
            f"load: {rate} requests/s: {counts.new_tokens / spent:,.0f} tokens/s, "
            f"{100 * counts.cached_tokens / counts.prompt_tokens:.0f}% of prompts cached; "
            f"first token p50 {np.percentile(first, 50):.1f}, p99 {np.percentile(first, 99):.1f} ms; each further "
            f"p50 {np.percentile(each, 50):.2f}, p99 {np.percentile(each, 99):.2f} ms"
        )


def drafts(options) -> None:
    """The same decoding with and without the MTP layer's drafts, by a model made deeper."""
    model = models.load_model(options.checkpoint)
    rng = np.random.default_rng(0)
    vocab = model.cfg.vocab_size - len(models.load_tokenizer(options.checkpoint).special_ids)
    prompts = [rng.integers(0, vocab, 40).tolist() for _ in range(5)]
    drafting.compare(drafting.deepened(model, drafting.LAYERS), prompts, 200)


def lengths(options) -> None:
    """The same model with dense and with sparse attention: first token, and tokens a second at once."""
    del options
    table = Table("prompt", "attention", "first token, s", "tokens/s of 1", "tokens/s of 4")
    for length in (1024, 4096, 16384):
        for attention in ("dense", "sparse"):
            model = glm5.Glm5(dataclasses.replace(BASELINE, attention=attention), rngs=nnx.Rngs(0))
            made = Engine(model, max_batch=4, max_length=length + 64, chunk=1024)
            first, rates = None, {}
            for batch in (1, 4):
                for seed in range(2):  # the first compiles
                    rng = np.random.default_rng([batch, seed])
                    asked = rng.integers(2, BASELINE.vocab_size, (batch, length)).tolist()
                    handles = [made.submit(Request(ids, PLAIN)) for ids in asked]
                    while not all(handle.tokens for handle in handles):
                        made.step()
                    began, had = time.monotonic(), sum(len(handle.tokens) for handle in handles)
                    while made.step():
                        pass
                    had = sum(len(handle.tokens) for handle in handles) - had
                    rates[batch] = had / (time.monotonic() - began)
                    first = first if batch > 1 else handles[0].first - handles[0].submitted
            cells = (
                f"{length:,}",
                attention,
                f"{first:.2f}",
                *(f"{r:.0f}" for r in rates.values()),
            )
            table.add_row(*cells)
    Console().print(table)


def _engine(options, **more) -> tuple[Engine, int]:
    """The checkpoint's engine, and ids that a prompt may have."""
    model = models.load_model(options.checkpoint)
    tokenizer = models.load_tokenizer(options.checkpoint)
    vocab = model.cfg.vocab_size - len(tokenizer.special_ids)
    return Engine(model, tokenizer, page_size=PAGE, max_length=512, chunk=256, **more), vocab


PARTS = {
    "cache": cache,
    "host": host,
    "turns": turns,
    "load": load,
    "drafts": drafts,
    "lengths": lengths,
}

if __name__ == "__main__":
    pin()
    sys.exit(main(sys.argv[1:]))
