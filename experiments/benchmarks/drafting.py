"""Measures the gain of drafts where the trunk dominates: a trained model made deeper, decoded with and without them.

The deepened model computes the same function, so the share of right drafts is unchanged: the added layers do all the
work of a layer, but their outputs are zero. There is still one MTP layer.
"""

import dataclasses
import functools
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.stats import EngineStats
from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_pages
from glm5_jax.model.generate import unstack_for_decoding
from glm5_jax.parallel.tree import map_with_path

LAYERS = 20  # of the deepened trunk
PAGE, LENGTH = 16, 512
OUTPUTS = ("attn/o", "mlp/down")


def deepen(model: glm5.Glm5, num_layers: int) -> glm5.Glm5:
    """Returns the same function with num_layers layers: dense ones in front, whose outputs are zero."""
    cfg, params = model.cfg, glm5.params_of(model)
    more = num_layers - cfg.num_hidden_layers
    deep = dataclasses.replace(
        cfg, num_hidden_layers=num_layers, first_k_dense_replace=cfg.first_k_dense_replace + more
    )
    deep_params = glm5.init_params(deep, jax.random.key(0), cfg.dtype)
    zero_layers = map_with_path(
        lambda path, w: jnp.zeros_like(w) if path.endswith(OUTPUTS) else w,
        deep_params["dense_layers"],
    )
    stack = jax.tree.map(
        lambda added, trained: jnp.concatenate([added[:more], trained]),
        zero_layers,
        params["dense_layers"],
    )
    return glm5.Glm5(deep, params={**params, "dense_layers": stack})


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="layers")
def _verify(params, layers, tables, lengths, tokens, cfg):
    out = glm5.forward(params, tokens, cfg, cache=PagedCache(layers, tables, lengths))
    assert out.cache is not None, "a forward with a cache returns one"
    return out.cache.layers, jnp.argmax(out.logits, axis=-1)


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="layers")
def _draft(params, layers, tables, lengths, hidden, tokens, cfg):
    cache = PagedCache(layers, tables, lengths)
    out = glm5.forward_mtp(params, hidden, tokens, cfg, cache=cache)
    assert out.cache is not None, "a forward with a cache returns one"
    return out.cache.layers, jnp.argmax(out.logits, axis=-1)


def component_times(model: glm5.Glm5, counts: Iterable[int]) -> tuple[float, dict[int, float]]:
    """Returns the seconds of one draft, and {number of new tokens: seconds of a forward}.

    One sequence of LENGTH / 2 tokens precedes them.
    """
    cfg = model.cfg
    params = unstack_for_decoding(glm5.params_of(model), cfg)
    tables = jnp.arange(LENGTH // PAGE, dtype=jnp.int32)[None]
    lengths = jnp.array([LENGTH // 2], jnp.int32)

    def seconds(step, layers, *args):
        times = []
        for _ in range(6):  # the first compiles
            began = time.perf_counter()
            for _ in range(20):
                layers, out = step(params, layers, tables, lengths, *args, cfg)
            jax.block_until_ready(out)
            times.append((time.perf_counter() - began) / 20)
        return min(times)

    def pages(**options):
        return init_pages(cfg, LENGTH // PAGE, PAGE, **options)

    hidden = jnp.zeros((1, 1, cfg.hidden_size), cfg.dtype)
    one = jnp.ones((1, 1), jnp.int32)
    forwards = {n: seconds(_verify, pages(), jnp.ones((1, n), jnp.int32)) for n in counts}
    return seconds(_draft, pages(num_layers=1), hidden, one), forwards


def compare(
    model: glm5.Glm5, prompts: list[list[int]], num_new: int, drafts: tuple[int, ...] = (1, 2, 4)
) -> None:
    """Prints every term of the comparison for some numbers of drafts."""
    draft, forwards = component_times(model, (1, *(n + 1 for n in drafts)))
    cfg, sampling = model.cfg, Sampling(max_tokens=num_new, ignore_eos=True, temperature=0)
    print(
        f"drafts: {cfg.num_hidden_layers} layers; T1, a forward over one token: {1e3 * forwards[1]:.2f} ms; "
        f"Tdraft: {1e3 * draft:.2f} ms"
    )
    plain, expected_replies = None, None  # seconds a token and replies without drafts
    for count in (0, *drafts):
        engine = Engine(
            model,
            config=EngineConfig(
                page_size=PAGE, max_length=LENGTH, max_num_seqs=1, num_speculative_tokens=count
            ),
        )
        engine.generate([prompts[0]], sampling)  # compiles
        times, replies = [], []
        engine.stats = EngineStats(accepted=[0] * (count + 1))
        for prompt in prompts:
            handle = engine.submit(Request(tuple(prompt), sampling))
            while engine.step():
                pass
            assert handle.ended_at is not None and handle.first_token_at is not None, "it ended"
            times.append((handle.ended_at - handle.first_token_at) / (num_new - 1))
            replies.append(handle.completion.ids)
        token_s, expected_replies = float(np.median(times)), expected_replies or replies
        if replies != expected_replies:
            raise ValueError("greedy decoding with drafts is not what it is without")
        if not count:
            plain = token_s
            print(f"drafts: none: {1e3 * token_s:.2f} ms a token")
            continue
        assert plain is not None, "the first run has no drafts"
        accepted_counts = np.array(engine.stats.accepted)
        accepted = float(accepted_counts @ np.arange(1, count + 2) / accepted_counts.sum())
        possible = accepted * forwards[1] / (forwards[count + 1] + count * draft)
        gain = plain / token_s
        print(
            f"drafts: {count}: {accepted:.2f} tokens kept a step; Tverify {1e3 * forwards[count + 1]:.2f} ms; possible "
            f"{possible:.2f} times as fast, really {gain:.2f}: {gain / possible:.2f} of it (target 0.9) and "
            f"{gain / accepted:.2f} of the tokens kept (target 0.6)"
        )
