"""GLM-5's sparse attention: 8192 queries at the end of 65,536 keys, and 64 decoding sequences."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs
from pallas_kernels.sparse_flash_attention import (
    RowLayout,
    WordRows,
    cost,
    paged_sparse_attention,
    sparse_flash_attention,
)
from pallas_kernels.sparse_flash_attention.word_rows import GROUP, LANES

SIZES = {"b": 1, "t": 8192, "s": 65536, "n": 64, "x": 576, "y": 512, "k": 2048}
SMALL = {"b": 1, "t": 20, "s": 500, "n": 16, "x": 288, "y": 256, "k": 64}
DECODE = {"b": 64, "t": 1, "s": 32768, "z": 64, "n": 64, "x": 576, "y": 512, "k": 2048}
SMALL_DECODE = {"b": 3, "t": 2, "s": 512, "z": 32, "n": 16, "x": 288, "y": 256, "k": 64}
TURNS = 5  # number of queries after which a pick of `local` has moved by one


def local(sizes, key):
    """Returns topk int32[b t k], half of it the query's own and preceding rows, half spread over earlier ones.

    A fifth of the latter move by one from query to query, so that neighbours share 90% of their rows.
    """
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
    """Returns int32[b t k]: one row from each of k equal parts of the earlier ones, drawn independently per query."""
    b, t, s, k = (sizes[name] for name in "btsk")
    stride = (s - t) // k
    within = jax.random.randint(key, (b, t, k), 0, stride)
    return jnp.arange(k, dtype=jnp.int32) * stride + within


def inputs(select):
    """Returns queries and latents of unit variance, and the rows that `select` draws."""

    def make_inputs(sizes, key):
        b, t, s, n, x = (sizes[name] for name in "btsnx")
        keys = jax.random.split(key, 3)
        return {
            "q": jax.random.normal(keys[0], (b, t, n, x), jnp.bfloat16),
            "latents": jax.random.normal(keys[1], (b, s, x), jnp.bfloat16),
            "topk": select(sizes, keys[2]),
        }

    return make_inputs


def pages(convert):
    """Returns a cache with pages in random order, in the form of `convert`."""

    def make_inputs(sizes, key):
        b, t, s, z, n, x = (sizes[name] for name in "btsznx")
        keys = jax.random.split(key, 4)
        count = b * s // z
        return {
            "q": jax.random.normal(keys[0], (b, t, n, x), jnp.bfloat16),
            "pages": convert(jax.random.normal(keys[1], (count, z, x), jnp.bfloat16)),
            "page_table": jax.random.permutation(keys[2], count).reshape(b, s // z),
            "topk": local(sizes, keys[3]),
        }

    return make_inputs


def as_word_rows(latents):
    """Converts latents [... x] to the form that a TPU can copy by row."""
    return WordRows.encode(latents, RowLayout.exact(latents.shape[-1], latents.dtype))


def as_quantized_rows(dtype: str, multiple: int = 1):
    """Returns a conversion of latents [... x] whose first eight ninths become 8-bit values of that dtype."""

    def convert(latents):
        rest = latents.shape[-1] // 9
        layout = RowLayout(dtype, latents.shape[-1] - rest, rest, "bfloat16", multiple)
        return WordRows.encode(latents, layout)

    return convert


def _options(sizes):
    return {"scale": sizes["x"] ** -0.5, "value_dim": sizes["y"]}


def forward(inputs, sizes, implementation):
    """Returns (out, lse)."""
    return sparse_flash_attention(**inputs, **_options(sizes), implementation=implementation)[:2]


def backward(inputs, sizes, implementation):
    """Returns the gradients of q and latents."""

    def loss(q, latents):
        out = forward(inputs | {"q": q, "latents": latents}, sizes, implementation)[0]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return jax.grad(loss, (0, 1))(inputs["q"], inputs["latents"])


def decode(inputs, sizes, implementation):
    """Returns (out, lse)."""
    return paged_sparse_attention(**inputs, **_options(sizes), implementation=implementation)


def forward_cost(sizes):
    """Cost with rows in the compute dtype."""
    return cost.forward(*(sizes[name] for name in "btnkxy"))


def quantized_cost(sizes):
    """Cost with rows whose first y columns are 8-bit values, with one scale per GROUP of them."""
    x, y = sizes["x"], sizes["y"]
    row = y + 2 * (x - y) + 4 * (y // GROUP)
    return cost.forward(*(sizes[name] for name in "btnkxy"), row=row)


def backward_cost(sizes):
    """Cost with the preceding forward."""
    return sum_costs(forward_cost(sizes), cost.backward(*(sizes[name] for name in "btnkxy")))


def quantized_decode_case(dtype: str, multiple: int = 1):
    """Returns a case of decoding over an 8-bit cache. multiple: the words of a row are padded to it."""
    form = pages(as_quantized_rows(dtype, multiple))
    return Case(DECODE, form, decode, quantized_cost, SMALL_DECODE)


CASES = {
    "forward_local": Case(SIZES, inputs(local), forward, forward_cost, SMALL),
    "forward_uniform": Case(SIZES, inputs(uniform), forward, forward_cost, SMALL),
    "backward_local": Case(SIZES, inputs(local), backward, backward_cost, SMALL),
    "backward_uniform": Case(SIZES, inputs(uniform), backward, backward_cost, SMALL),
    "decode": Case(DECODE, pages(lambda x: x), decode, forward_cost, SMALL_DECODE),
    "decode_packed": Case(DECODE, pages(as_word_rows), decode, forward_cost, SMALL_DECODE),
    "decode_int8": quantized_decode_case("int8"),
    "decode_float8": quantized_decode_case("float8_e4m3fn"),
    "decode_float8_lanes": quantized_decode_case("float8_e4m3fn", LANES),
}
