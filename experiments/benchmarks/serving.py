"""Measures an engine's work in addition to the model's, and the savings of its cache.

    python -m experiments.benchmarks.serving [PART ...] [--checkpoint=DIR]

    cache    bytes a token in the pages of GLM-5's latents and index keys, in bf16 and 8 bits, and of GLM-4.5's grouped keys
             and values, and the number of conversations of 32K tokens that fit one memory (any machine, no time)
    eight_bits   effect of 8-bit pages on held-out text, with trained weights and with outliers in norms
    host     the host's own time for a decode step with 78 unstacked layers' weights as arguments
    turns    multi-turn conversations: prompt tokens found in the prefix cache, against an infinite cache
    load     requests with random arrivals (Poisson) and shared prefixes: time to the first and to each further token
    drafts   decoding with the MTP layer's drafts against plain decoding, where the trunk dominates, and every part's cost
    lengths  first token and tokens a second of dense and of sparse attention, by length and batch (19.4M random weights)
    timeline when the host prepares a step and the device computes it: workdir/benchmarks/timeline.html

eight_bits, turns, load and drafts use the trained model of --checkpoint (default: workdir/life/sft, of
experiments/lifecycle.py:tiny); eight_bits needs a workdir.
Expected figures: docs/results/serving.md. About half an hour for all on two cores, most of it compilation.
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
from experiments.benchmarks.quantised import (
    QuantisationMetrics,
    load as load_params,
    texts,
    with_outliers,
)

from glm5_jax import presets  # isort: skip
from jaxtyping import PyTree

from glm5_jax.checkpoint import models
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Handle, Request
from glm5_jax.inference.runner import Runner
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Limits, Scheduler, Sequence
from glm5_jax.inference.stats import EngineStats
from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_cache, init_pages
from glm5_jax.runtime.terminal import print_error
from pallas_kernels.quantized_vectors import FORMATS

PAGE = 16
RESULTS = pathlib.Path("workdir/benchmarks")
MEMORY, CONVERSATION = 141e9, 32_768  # one H200; tokens
PLAIN = Sampling(max_tokens=60, ignore_eos=True, temperature=0)
GLM_4_5 = dict(  # fields that determine its keys and values, from its config.json
    num_hidden_layers=92,
    num_attention_heads=96,
    num_key_value_heads=8,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


def main(arguments: list[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
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
        print_error(error)
        return 2
    return 0


def cache(options: argparse.Namespace) -> None:
    """Prints bytes a token, and conversations in one memory."""
    del options
    title = f"conversations of {CONVERSATION:,} tokens in {MEMORY / 1e9:.0f} GB"
    table = Table("cache", "bytes a token", "change", "conversations", "times", title=title)
    sizes = [token_bytes(cfg, **kinds) for _, cfg, kinds in caches()]
    counts = [num_admitted(size) for size in sizes]
    for (name, *_), size, count in zip(caches(), sizes, counts):
        change, times = f"{100 * (size / sizes[0] - 1):+.1f}%", f"{count / counts[0]:.1f}"
        table.add_row(name, f"{size:,}", change, str(count), times)
    Console().print(table)


def caches() -> list[tuple[str, ModelConfig, dict]]:
    """Returns (name, model, kinds of its pages) of every row; int8 and fp8 have the same bytes."""
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
    """Returns the bytes of one token in all pages, scales included, as the engine allocates them; a TPU pads its rows."""

    def pages():
        # Only MLA, which the engine serves, has pages in 8 bits.
        make = init_pages if cfg.projections == "mla" else lambda *args: init_cache(*args).layers
        return make(cfg, 1, PAGE, "bfloat16", **kinds)

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(pages))) // PAGE


def num_admitted(size: int) -> int:
    """Returns the number of conversations that the scheduler admits to pages of `size` bytes a token filling the memory."""
    pages = int(MEMORY // (PAGE * size))
    max_tokens = pages * PAGE
    scheduler = Scheduler(
        pages,
        PAGE,
        Limits(max_num_seqs=max_tokens, prefill_chunk=max_tokens, max_batched_tokens=max_tokens),
    )
    ids = [0] * (CONVERSATION - 1)  # one more token is sampled
    while not scheduler.num_waiting:
        handle = Handle(Request(tuple(ids), Sampling(max_tokens=1)))
        scheduler.add(
            Sequence(
                handle=handle, ids=list(ids), limit=CONVERSATION, seed=0, prefix_namespace=None
            )
        )
        scheduler.schedule()
    return len(scheduler.running)


def eight_bits(options: argparse.Namespace) -> None:
    """Prints perplexity, divergence and likeliest tokens with 8-bit pages, against pages in the model's own dtype."""
    cfg, params, tokenizer = load_params(pathlib.Path(options.checkpoint))
    batches, _ = texts(tokenizer)
    table = Table("weights", "index keys", "latents", "perplexity", "divergence", "same token")
    for weights, kinds in (("trained", ()), ("outliers in norms", ("norms",))):
        planted = with_outliers(params, cfg, kinds)
        before = [np.asarray(log_probs_over_pages(planted, batch, cfg=cfg)) for batch in batches]
        for index, latent in itertools.product((None, *FORMATS), repeat=2):
            if not (index or latent):
                continue
            over_pages = functools.partial(
                log_probs_over_pages, planted, cfg=cfg, index_cache=index, latent_cache=latent
            )
            row = [weights, index or cfg.dtype, latent or cfg.dtype]
            table.add_row(*row, *QuantisationMetrics.of(over_pages, batches, before).row())
    Console().print(table)


@functools.partial(jax.jit, static_argnames=("cfg", "index_cache", "latent_cache"))
def log_probs_over_pages(
    params: PyTree,
    batch: dict,
    *,
    cfg: ModelConfig,
    index_cache: str | None = None,
    latent_cache: str | None = None,
) -> jax.Array:
    """Returns float32[b t v] of the next token, with all latents and keys read from pages, a token's own too."""

    def of(row):
        count = -(-row.size // PAGE)
        layers = init_pages(cfg, count, PAGE, index_cache=index_cache, latent_cache=latent_cache)
        tables = jnp.arange(count, dtype=jnp.int32)[None]
        cache = PagedCache(layers, tables, jnp.zeros(1, jnp.int32))
        return jax.nn.log_softmax(glm5.forward(params, row[None], cfg, cache=cache).logits[0])

    return jax.lax.map(of, batch["token_ids"])


def host(options: argparse.Namespace) -> None:
    """Prints the host's share of a decode step at GLM-5's number of arguments."""
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
    engine = Engine(
        glm5.Glm5(cfg, rngs=nnx.Rngs(0)),
        config=EngineConfig(page_size=PAGE, max_num_seqs=32, max_length=64),
    )
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    calls, steps = [], []

    def timed(function, times):
        def run(*args, **named):
            began = time.thread_time()
            out = function(*args, **named)
            times.append(1e3 * (time.thread_time() - began))
            return out

        return run

    # On a CPU the caller starts each of the program's operations, which elsewhere is the device's part. So
    # the same arrays are passed to a program without operations too.
    hand_over = jax.jit(lambda w, state, x: (state, x), donate_argnums=1, keep_unused=True)
    with mock.patch.object(Runner, "_run_step", timed(Runner._run_step, calls)):
        for batch in (1, 32):
            for _ in range(2):  # the first compiles
                engine.stats = EngineStats(accepted=[0])
                for _ in range(batch):
                    engine.submit(Request((5, 6, 7), sampling))
                while engine.num_waiting:
                    engine.step()
                calls.clear(), steps.clear()
                step = timed(engine.step, steps)
                while step():
                    pass
            counts, host_ms = engine.stats, np.median(steps) - np.median(calls)
            print(
                f"host: {host_ms:.2f} ms of its own time a step of {batch}; the call takes {np.median(calls):.2f} ms, "
                f"with the operations' start on a CPU; {100 * counts.num_overlapped / counts.num_steps:.0f}% of "
                "the steps were sent off while the device computed the one before"
            )
    runner, handed = engine._runner, []
    state, call = runner._device, timed(hand_over, handed)
    for _ in range(30):
        state, _ = jax.block_until_ready(
            call(runner.weights.params, state, np.zeros((1, 8), np.int32))
        )
    count = len(jax.tree.leaves((runner.weights.params, state)))
    print(
        f"host: {np.median(handed):.2f} ms to hand {count} arrays to a program; target 1 ms for both parts together"
    )


def turns(options: argparse.Namespace) -> None:
    """Measures conversations of eight concurrent turns, whose prompts hold all earlier turns."""
    engine, vocab = _engine(options, max_num_seqs=8, num_pages=512)
    rng, count = np.random.default_rng(0), 24
    system = rng.integers(0, vocab, 64).tolist()
    histories = [[*system, *rng.integers(0, vocab, 20).tolist()] for _ in range(count)]
    possible = prompts = 0
    known = set()
    for _ in range(8):
        for ids in histories:
            prompts += len(ids)
            # An infinite cache holds all full pages of earlier prompts and replies.
            num_cached = 0
            while num_cached + PAGE < len(ids) and tuple(ids[: num_cached + PAGE]) in known:
                num_cached += PAGE
            possible += num_cached
            known.update(tuple(ids[:end]) for end in range(PAGE, len(ids) + 1, PAGE))
        replies = engine.generate(
            histories, Sampling(max_tokens=12, ignore_eos=True, temperature=0)
        )
        for ids, reply in zip(histories, replies):
            ids += reply.ids
            known.update(tuple(ids[:end]) for end in range(PAGE, len(ids), PAGE))
            ids += rng.integers(0, vocab, 10).tolist()
    num_found = engine.stats.cached_tokens
    print(
        f"turns: {num_found:,} of {prompts:,} tokens of prompts found ({100 * num_found / prompts:.1f}%), of {possible:,} that a "
        f"cache without end has: {num_found / possible:.3f}; target 0.98: {'met' if num_found >= 0.98 * possible else 'missed'}"
    )


def load(options: argparse.Namespace) -> None:
    """Measures Poisson arrivals at a rate that the engine sustains; half of the prompts share one of four prefixes."""
    engine, vocab = _engine(options, max_num_seqs=16)
    engine.warm()
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, vocab, 128).tolist() for _ in range(4)]
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    for rate in (10, 30, 60):
        engine.stats = EngineStats(accepted=[0])
        at = np.cumsum(rng.exponential(1 / rate, 150))
        prompts = []
        for _ in at:
            prefix = prefixes[rng.integers(4)] if rng.random() < 0.5 else []
            prompts.append([*prefix, *rng.integers(0, vocab, rng.integers(10, 60)).tolist()])
        handles, began = [], time.monotonic()
        while len(handles) < len(at) or engine.num_running or engine.num_waiting:
            now = time.monotonic() - began
            while len(handles) < len(at) and at[len(handles)] <= now:
                handles.append(engine.submit(Request(prompts[len(handles)], sampling)))
            if not engine.step():
                time.sleep(0.0005)
        first = [1e3 * (handle.first_token_at - handle.submitted_at) for handle in handles]
        further = [
            1e3 * (handle.ended_at - handle.first_token_at) / (len(handle.tokens) - 1)
            for handle in handles
        ]
        spent = max(handle.ended_at for handle in handles) - began
        counts = engine.stats
        print(
            f"load: {rate} requests/s: {counts.new_tokens / spent:,.0f} tokens/s, "
            f"{100 * counts.cached_tokens / counts.prompt_tokens:.0f}% of prompts cached; "
            f"first token p50 {np.percentile(first, 50):.1f}, p99 {np.percentile(first, 99):.1f} ms; each further "
            f"p50 {np.percentile(further, 50):.2f}, p99 {np.percentile(further, 99):.2f} ms"
        )


def drafts(options: argparse.Namespace) -> None:
    """Compares decoding with and without the MTP layer's drafts, with a model made deeper."""
    model = models.load_model(options.checkpoint)
    rng = np.random.default_rng(0)
    vocab = model.cfg.vocab_size - len(models.load_tokenizer(options.checkpoint).special_ids)
    prompts = [rng.integers(0, vocab, 40).tolist() for _ in range(5)]
    drafting.compare(drafting.deepen(model, drafting.LAYERS), prompts, 200)


def lengths(options: argparse.Namespace) -> None:
    """Compares dense with sparse attention of one model: time to the first token, and tokens a second."""
    del options
    table = Table("prompt", "attention", "first token, s", "tokens/s of 1", "tokens/s of 4")
    for length in (1024, 4096, 16384):
        for attention in ("dense", "sparse"):
            model = glm5.Glm5(dataclasses.replace(BASELINE, attention=attention), rngs=nnx.Rngs(0))
            engine = Engine(
                model,
                config=EngineConfig(max_num_seqs=4, max_length=length + 64, prefill_chunk=1024),
            )
            first, rates = None, {}
            for batch in (1, 4):
                for seed in range(2):  # the first compiles
                    rng = np.random.default_rng([batch, seed])
                    prompts = rng.integers(2, BASELINE.vocab_size, (batch, length)).tolist()
                    handles = [engine.submit(Request(tuple(ids), PLAIN)) for ids in prompts]
                    while not all(handle.tokens for handle in handles):
                        engine.step()
                    began, num_tokens = (
                        time.monotonic(),
                        sum(len(handle.tokens) for handle in handles),
                    )
                    while engine.step():
                        pass
                    num_tokens = sum(len(handle.tokens) for handle in handles) - num_tokens
                    rates[batch] = num_tokens / (time.monotonic() - began)
                    if batch == 1:
                        assert handles[0].first_token_at is not None, "it has tokens"
                        first = handles[0].first_token_at - handles[0].submitted_at
            cells = (
                f"{length:,}",
                attention,
                f"{first:.2f}",
                *(f"{r:.0f}" for r in rates.values()),
            )
            table.add_row(*cells)
    Console().print(table)


def timeline(options: argparse.Namespace) -> None:
    """Draws a timeline of host and device."""
    del options
    picture.timeline(RESULTS)


def _engine(options, **engine_options) -> tuple[Engine, int]:
    """Returns the checkpoint's engine, and the number of ids that a prompt may have."""
    model = models.load_model(options.checkpoint)
    tokenizer = models.load_tokenizer(options.checkpoint)
    vocab = model.cfg.vocab_size - len(tokenizer.special_ids)
    return Engine(
        model,
        tokenizer,
        EngineConfig(page_size=PAGE, max_length=512, prefill_chunk=256, **engine_options),
    ), vocab


PARTS = {
    part.__name__: part
    for part in (cache, eight_bits, host, turns, load, drafts, lengths, timeline)
}

if __name__ == "__main__":
    pin()
    sys.exit(main(sys.argv[1:]))
