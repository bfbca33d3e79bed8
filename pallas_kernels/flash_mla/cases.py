"""GLM-5's dense attention: packed rows of pre-training, long sequences, a shard of a sequence, and decoding.

64 heads of 192 + 64 and of 256 in the expanded form. In the absorbed form they share the latent of 512 + 64,
which is both key and value.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs
from pallas_kernels.flash_mla import cost, flash_mla

ROWS = {"b": 2, "t": 4096, "s": 4096, "start": 0, "n": 64, "m": 64, "x": 256, "y": 256}
LONG = ROWS | {"b": 1, "t": 32768, "s": 32768}
SHARE = LONG | {"t": 4096, "start": 28672}
DECODE = {"b": 8, "t": 1, "s": 8192, "start": 8191, "n": 64, "m": 1, "x": 576, "y": 576}
DRAFTS = DECODE | {"t": 8, "start": 8184}
SMALL = {"b": 2, "t": 256, "s": 256, "start": 0, "n": 2, "m": 2, "x": 128, "y": 128}
SMALL_SHARE = SMALL | {"t": 64, "start": 192}
SMALL_DECODE = {"b": 2, "t": 2, "s": 256, "start": 254, "n": 8, "m": 1, "x": 192, "y": 192}
DOCUMENTS = 6  # per packed row
SCALE = 0.0625  # 1 / sqrt(192 + 64), also where the latent is the key


def inputs(packed: bool = False, start: bool = False):
    """Returns unit queries, keys, values and gradient.

    packed: documents of random lengths, the last one padding. start: start is an array, known only at run time.
    """

    def make_inputs(sizes, key):
        b, t, s, n, m, x, y = (sizes[name] for name in "btsnmxy")
        keys = jax.random.split(key, 5)
        arrays = {
            "q": jax.random.normal(keys[0], (b, t, n, x), jnp.bfloat16),
            "k": jax.random.normal(keys[1], (b, s, m, x), jnp.bfloat16),
            "dout": jax.random.normal(keys[2], (b, t, n, y), jnp.bfloat16),
        }
        if m > 1:
            arrays["v"] = jax.random.normal(keys[3], (b, s, m, y), jnp.bfloat16)
        if packed:
            ends = jnp.sort(jax.random.randint(keys[4], (b, DOCUMENTS), 0, s), axis=1)
            number = jnp.sum(jnp.arange(s) >= ends[..., None], axis=1, dtype=jnp.int32)
            arrays["segments"] = jnp.where(number == DOCUMENTS, 0, number + 1)
        if start:
            arrays["start"] = jnp.full((), sizes["start"], jnp.int32)
        return arrays

    return make_inputs


def forward(inputs, sizes, implementation):
    """Returns (out, lse, largest logit)."""
    segments = inputs.get("segments")
    q_segments = None if segments is None else segments[:, -sizes["t"] :]
    return flash_mla(
        inputs["q"],
        inputs["k"],
        inputs.get("v", inputs["k"]),
        scale=SCALE,
        start=inputs.get("start", sizes["start"]),
        q_segments=q_segments,
        k_segments=segments,
        implementation=implementation,
    )


def backward(inputs, sizes, implementation):
    """Returns the gradients of queries, keys and values."""

    def out(q, k, v):
        return forward(inputs | {"q": q, "k": k, "v": v}, sizes, implementation)[0]

    return jax.vjp(out, inputs["q"], inputs["k"], inputs["v"])[1](inputs["dout"])


def forward_cost(sizes):
    """Cost for queries whose position is known; one head of keys also serves as values."""
    sizes_of_cost = {name: sizes[name] for name in ("b", "t", "s", "n", "m", "x", "y", "start")}
    return cost.forward(**sizes_of_cost, shared=sizes["m"] == 1)


def backward_cost(sizes):
    """Cost with the preceding forward."""
    sizes_of_cost = {name: sizes[name] for name in ("b", "t", "s", "n", "m", "x", "y", "start")}
    return sum_costs(forward_cost(sizes), cost.backward(**sizes_of_cost))


CASES = {
    "forward": Case(ROWS, inputs(packed=True), forward, forward_cost, SMALL),
    "backward": Case(ROWS, inputs(packed=True), backward, backward_cost, SMALL),
    "long_forward": Case(LONG, inputs(), forward, forward_cost, SMALL),
    "long_backward": Case(LONG, inputs(), backward, backward_cost, SMALL),
    "share_forward": Case(SHARE, inputs(start=True), forward, forward_cost, SMALL_SHARE),
    "share_backward": Case(SHARE, inputs(start=True), backward, backward_cost, SMALL_SHARE),
    "decode": Case(DECODE, inputs(start=True), forward, forward_cost, SMALL_DECODE),
    "drafts": Case(DRAFTS, inputs(start=True), forward, forward_cost, SMALL_DECODE),
}
