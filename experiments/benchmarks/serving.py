"""What an engine does beside the model's own work, and what its cache saves.

    python -m experiments.benchmarks.serving [PART ...] [--checkpoint=DIR]

    cache    bytes a token in the pages of GLM-5's latents and index keys, in bf16 and 8 bits, and of GLM-4.5's grouped keys
             and values, and how many conversations of 32K tokens are admitted to one memory (any machine, at once)
    eight_bits   what pages in 8 bits change on held-out text, of weights as trained and with outliers in norms
    host     the host's own time for a decode step with 78 unstacked layers' weights as arguments
    turns    multi-turn conversations: tokens of prompts that the prefix cache finds, against a cache without end
    load     requests that come at random (Poisson) and share beginnings: first token and each further one
    drafts   decoding with the MTP layer's drafts against plain decoding, where the trunk dominates, and every part's cost
    lengths  first token and tokens a second of dense and of sparse attention, by length and batch (19.4M random weights)
    timeline when the host prepares a step and the device computes it: workdir/benchmarks/timeline.html

eight_bits, turns, load and drafts take the trained model of --checkpoint (default: workdir/life/sft, of
experiments/lifecycle.py:tiny); eight_bits wants a workdir.
Expected figures: experiments/LOG.md. About half an hour for all on two cores, most of it compilation.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from experiments.benchmarks import drafting, timeline as picture
from experiments.benchmarks.glm5_arm import BASELINE
from experiments.benchmarks.measure import pin
from experiments.benchmarks.quantised import Measured, load as load_params, plant, texts

from glm5_jax import presets  # isort: skip
from glm5_jax.checkpoint import models
from glm5_jax.config import ModelConfig
from glm5_jax.inference.counts import Counts
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import Handle, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Limits, Scheduler, Sequence
from glm5_jax.inference.steps import Steps
from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_cache, init_pages
from pallas_kernels.eight_bits import FORMATS

PAGE = 16
RESULTS = pathlib.Path("workdir/benchmarks")
MEMORY, CONVERSATION = 141e9, 32_768  # one H200; tokens
PLAIN = Sampling(max_tokens=60, ignore_eos=True, temperature=0)
GLM_4_5 = dict(  # what its keys and values depend on, from its config.json
    num_hidden_layers=92,
    num_attention_heads=96,
    num_key_value_heads=8,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


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
    title = f"conversations of {CONVERSATION:,} tokens in {MEMORY / 1e9:.0f} GB"
    table = Table("cache", "bytes a token", "change", "conversations", "times", title=title)
    sizes = [token_bytes(cfg, **kinds) for _, cfg, kinds in caches()]
    counts = [admitted(size) for size in sizes]
    for (name, *_), size, count in zip(caches(), sizes, counts):
        change, times = f"{100 * (size / sizes[0] - 1):+.1f}%", f"{count / counts[0]:.1f}"
        table.add_row(name, f"{size:,}", change, str(count), times)
    Console().print(table)


def caches() -> list[tuple[str, ModelConfig, dict]]:
    """(name, model, kinds of its pages) of every row; int8 and fp8 have the same bytes."""
    glm5, both = presets.glm5(), {"index_cache": "fp8", "latent_cache": "fp8"}
    grouped = dataclasses.replace(presets.ablation("gqa", glm5), **GLM_4_5)
    return [
        ("GLM-4.5: grouped keys and values, bf16", grouped, {}),
        ("GLM-5 without DSA: latents, bf16", presets.ablation("mla", glm5), {}),
        ("the same in 8 bits", presets.ablation("mla", glm5), {"latent_cache": "fp8"}),
        ("GLM-5: latents and index keys, bf16", glm5, {}),
        ("index keys in 8 bits", glm5, {"index_cache": "fp8"}),
        ("both in 8 bits", glm5, both),
        ("GLM-5.2 (21 indexers), both in 8 bits", presets.glm5_2(), both),
    ]


def token_bytes(cfg: ModelConfig, **kinds) -> int:
    """Of one token in all pages, scales included, as the engine allocates them; a TPU makes its rows longer."""

    def pages():
        # Only the engine's own kind of attention has pages in 8 bits.
        make = init_pages if cfg.projections == "mla" else lambda *args: init_cache(*args).layers
        return make(cfg, 1, PAGE, "bfloat16", **kinds)

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(pages))) // PAGE


def admitted(size: int) -> int:
    """Conversations that the engine's scheduler admits to pages of so many bytes a token that fill the memory."""
    pages = int(MEMORY // (PAGE * size))
    most = pages * PAGE
    scheduler = Scheduler(pages, PAGE, Limits(most, chunk=most, step_tokens=most))
    ids = [0] * (CONVERSATION - 1)  # and the token that is drawn
    while not scheduler.num_waiting:
        handle = Handle(Request(ids, Sampling(max_tokens=1)))
        scheduler.add(Sequence(handle, list(ids), CONVERSATION, seed=0, space=None))
        scheduler.schedule()
    return len(scheduler.running)


def eight_bits(options) -> None:
    """Perplexity, divergence and likeliest tokens over pages in 8 bits, against pages in the model's own dtype."""
    cfg, params, tokenizer = load_params(pathlib.Path(options.checkpoint))
    batches, _ = texts(tokenizer)
    table = Table("weights", "index keys", "latents", "perplexity", "divergence", "same token")
    for weights, kinds in (("trained", ()), ("outliers in norms", ("norms",))):
        planted = plant(params, cfg, kinds)
        before = [np.asarray(log_probs_over_pages(planted, batch, cfg=cfg)) for batch in batches]
        for index, latent in itertools.product((None, *FORMATS), repeat=2):
            if not (index or latent):
                continue
            over_pages = functools.partial(
                log_probs_over_pages, planted, cfg=cfg, index_cache=index, latent_cache=latent
            )
            row = [weights, index or cfg.dtype, latent or cfg.dtype]
            table.add_row(*row, *Measured.of(over_pages, batches, before).row())
    Console().print(table)


@functools.partial(jax.jit, static_argnames=("cfg", "index_cache", "latent_cache"))
def log_probs_over_pages(params, batch, *, cfg, index_cache=None, latent_cache=None):
    """float32[b t v] of the next token, where all that a token attends to is read from pages, its own too."""

    def of(row):
        count = -(-row.size // PAGE)
        layers = init_pages(cfg, count, PAGE, index_cache=index_cache, latent_cache=latent_cache)
        tables = jnp.arange(count, dtype=jnp.int32)[None]
        cache = PagedCache(layers, tables, jnp.zeros(1, jnp.int32))
        return jax.nn.log_softmax(glm5.forward(params, row[None], cfg, cache=cache).logits[0])

    return jax.lax.map(of, batch["token_ids"])


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


def timeline(options) -> None:
    """What host and device do when."""
    del options
    picture.timeline(RESULTS)


def _engine(options, **more) -> tuple[Engine, int]:
    """The checkpoint's engine, and ids that a prompt may have."""
    model = models.load_model(options.checkpoint)
    tokenizer = models.load_tokenizer(options.checkpoint)
    vocab = model.cfg.vocab_size - len(tokenizer.special_ids)
    return Engine(model, tokenizer, page_size=PAGE, max_length=512, chunk=256, **more), vocab


PARTS = {
    part.__name__: part
    for part in (cache, eight_bits, host, turns, load, drafts, lengths, timeline)
}

if __name__ == "__main__":
    pin()
    sys.exit(main(sys.argv[1:]))
