"""GLM-5's sparse attention: 8192 queries at the end of 65,536 keys, and 64 sequences that decode."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import together
from pallas_kernels.sparse_flash_attention import (
    Layout,
    WordRows,
    cost,
    paged_sparse_attention,
    sparse_flash_attention,
)
from pallas_kernels.sparse_flash_attention.rows import GROUP, LANES

SIZES = {"b": 1, "t": 8192, "s": 65536, "n": 64, "x": 576, "y": 512, "k": 2048}
SMALL = {"b": 1, "t": 20, "s": 500, "n": 16, "x": 288, "y": 256, "k": 64}
DECODE = {"b": 64, "t": 1, "s": 32768, "z": 64, "n": 64, "x": 576, "y": 512, "k": 2048}
SMALL_DECODE = {"b": 3, "t": 2, "s": 512, "z": 32, "n": 16, "x": 288, "y": 256, "k": 64}
TURNS = 5  # queries after which a pick of `local` has moved by one


def local(sizes, key):
    """int32[b t k]: half of a query's rows are its own and those before it, the others spread over all
    earlier ones; of these a fifth move on by one from query to query, so that neighbours share 90%."""
    b, t, s, k = (sizes[name] for name in "btsk")
    near, far = k - k // 2, k // 2
    query = jnp.arange(t, dtype=jnp.int32)[:, None]
    window = s - t + query - near + 1 + jnp.arange(near, dtype=jnp.int32)
    stride = (s - t - near + 1) // far
    pick = jnp.arange(far, dtype=jnp.int32)
    phase = jax.random.randint(key, (b, 1, far), 0, TURNS * stride)
    spread = pick * stride + (query + phase) // TURNS % stride
    return jnp.concatenate([spread, jnp.broadcast_to(window, (b, t, near))], axis=-1)


def uniform(sizes, key):
    """int32[b t k]: a row from each of k equal parts of the earlier ones, drawn for every query alone."""
    b, t, s, k = (sizes[name] for name in "btsk")
    stride = (s - t) // k
    within = jax.random.randint(key, (b, t, k), 0, stride)
    return jnp.arange(k, dtype=jnp.int32) * stride + within


def inputs(chosen):
    """Queries and latents of unit variance, and rows that are `chosen`."""

    def of(sizes, key):
        b, t, s, n, x = (sizes[name] for name in "btsnx")
        keys = jax.random.split(key, 3)
        return {
            "q": jax.random.normal(keys[0], (b, t, n, x), jnp.bfloat16),
            "latents": jax.random.normal(keys[1], (b, s, x), jnp.bfloat16),
            "topk": chosen(sizes, keys[2]),
        }

    return of


def pages(form):
    """A cache whose pages lie anywhere, in that form."""

    def of(sizes, key):
        b, t, s, z, n, x = (sizes[name] for name in "btsznx")
        keys = jax.random.split(key, 4)
        count = b * s // z
        return {
            "q": jax.random.normal(keys[0], (b, t, n, x), jnp.bfloat16),
            "pages": form(jax.random.normal(keys[1], (count, z, x), jnp.bfloat16)),
            "page_table": jax.random.permutation(keys[2], count).reshape(b, s // z),
            "topk": local(sizes, keys[3]),
        }

    return of


def in_words(latents):
    """The form of latents [... x] that a TPU copies."""
    return WordRows.of(latents, Layout.exact(latents.shape[-1], latents.dtype))


def in_eight_bits(dtype: str, multiple: int = 1):
    """The form of latents [... x] of which all but the last ninth are values of that dtype."""

    def of(latents):
        rest = latents.shape[-1] // 9
        layout = Layout(dtype, latents.shape[-1] - rest, rest, "bfloat16", multiple)
        return WordRows.of(latents, layout)

    return of


def _named(sizes):
    return {"scale": sizes["x"] ** -0.5, "value_dim": sizes["y"]}


def forward(inputs, sizes, implementation):
    """(out, lse)."""
    return sparse_flash_attention(**inputs, **_named(sizes), implementation=implementation)[:2]


def backward(inputs, sizes, implementation):
    """Gradients of q and latents."""

    def loss(q, latents):
        out = forward(inputs | {"q": q, "latents": latents}, sizes, implementation)[0]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return jax.grad(loss, (0, 1))(inputs["q"], inputs["latents"])


def decode(inputs, sizes, implementation):
    """(out, lse)."""
    return paged_sparse_attention(**inputs, **_named(sizes), implementation=implementation)


def forward_cost(sizes):
    """Of rows as they are computed with."""
    return cost.forward(*(sizes[name] for name in "btnkxy"))


def eight_bits_cost(sizes):
    """Of rows whose first y columns are values in 8 bits, with a scale for each GROUP of them."""
    x, y = sizes["x"], sizes["y"]
    row = y + 2 * (x - y) + 4 * (y // GROUP)
    return cost.forward(*(sizes[name] for name in "btnkxy"), row=row)


def backward_cost(sizes):
    """With the forward before it."""
    return together(forward_cost(sizes), cost.backward(*(sizes[name] for name in "btnkxy")))


def decode8(dtype: str, multiple: int = 1):
    """Decoding over a cache in 8 bits; multiple: of words that a row has."""
    form = pages(in_eight_bits(dtype, multiple))
    return Case(DECODE, form, decode, eight_bits_cost, SMALL_DECODE)


CASES = {
    "forward_local": Case(SIZES, inputs(local), forward, forward_cost, SMALL),
    "forward_uniform": Case(SIZES, inputs(uniform), forward, forward_cost, SMALL),
    "backward_local": Case(SIZES, inputs(local), backward, backward_cost, SMALL),
    "backward_uniform": Case(SIZES, inputs(uniform), backward, backward_cost, SMALL),
    "decode": Case(DECODE, pages(lambda x: x), decode, forward_cost, SMALL_DECODE),
    "decode_packed": Case(DECODE, pages(in_words), decode, forward_cost, SMALL_DECODE),
    "decode_int8": decode8("int8"),
    "decode_float8": decode8("float8_e4m3fn"),
    "decode_float8_lanes": decode8("float8_e4m3fn", LANES),
}
