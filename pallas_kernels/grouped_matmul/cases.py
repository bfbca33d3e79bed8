"""GLM-5's routed experts, 32 per device: 6144 wide, 2048 inside."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs
from pallas_kernels.grouped_matmul import cost, grouped_matmul, grouped_swiglu

UP = {"m": 16384, "filled": 16384, "k": 6144, "n": 2048, "e": 32}
DOWN = UP | {"k": 2048, "n": 6144}
DECODE = UP | {"m": 2048, "filled": 2048}
# The maximum that 16 devices can send to one of them, and what a balanced router sends.
BUFFER = UP | {"m": 131072, "filled": 8192}
SMALL = {"m": 192, "filled": 160, "k": 128, "n": 256, "e": 4}


def even(sizes):
    """Returns int32[e]: the filled rows, spread evenly."""
    shares = jnp.arange(sizes["e"] + 1) * sizes["filled"] // sizes["e"]
    return jnp.diff(shares).astype(jnp.int32)


def skewed(sizes):
    """Returns int32[e]: the filled rows; each expert has 3/4 of the previous one's, and the last have none."""
    shares = 1 - 0.75 ** jnp.arange(sizes["e"] + 1, dtype=jnp.float32)
    rows = (sizes["filled"] * shares / shares[-1]).astype(jnp.int32)
    return jnp.diff(rows.at[-1].set(sizes["filled"]))


def inputs(group_sizes):
    """Returns unit rows, weights that keep them so, and a gradient."""

    def make_inputs(sizes, key):
        m, k, n, e = (sizes[name] for name in "mkne")
        keys = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(keys[0], (m, k), jnp.bfloat16),
            "w": jax.random.normal(keys[1], (e, k, n), jnp.bfloat16) * k**-0.5,
            "dy": jax.random.normal(keys[2], (m, n), jnp.bfloat16),
            "group_sizes": group_sizes(sizes),
        }

    return make_inputs


def forward(inputs, sizes, implementation):
    """Returns [m n]."""
    return grouped_matmul(
        inputs["x"], inputs["w"], inputs["group_sizes"], implementation=implementation
    )


def backward(inputs, sizes, implementation):
    """Returns the gradients of the rows and of the weights."""

    def run(x, w):
        return forward(inputs | {"x": x, "w": w}, sizes, implementation)

    return jax.vjp(run, inputs["x"], inputs["w"])[1](inputs["dy"])


def swiglu_inputs(sizes, key):
    """Returns unit rows and an expert's three weights."""
    m, k, n, e = (sizes[name] for name in "mkne")
    keys = jax.random.split(key, 4)
    shapes = {"gate": (e, k, n), "up": (e, k, n), "down": (e, n, k)}
    weights = {
        name: jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5
        for key, (name, shape) in zip(keys[1:], shapes.items())
    }
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    return weights | {"x": x, "group_sizes": even(sizes)}


def swiglu(inputs, sizes, implementation):
    """Returns [m k]."""
    return grouped_swiglu(**inputs, expected_rows=sizes["filled"], implementation=implementation)


def swiglu_backward(inputs, sizes, implementation):
    """Returns the gradients of the rows and of the three weights."""

    def run(x, gate, up, down):
        arguments = inputs | {"x": x, "gate": gate, "up": up, "down": down}
        return swiglu(arguments, sizes, implementation)

    y, pull = jax.vjp(run, *(inputs[name] for name in ("x", "gate", "up", "down")))
    return pull(y)


def forward_cost(sizes):
    """Cost of the filled rows."""
    return cost.matmul(**sizes)


def backward_cost(sizes):
    """Cost of both gradients, without the forward."""
    filled, k, n, e = (sizes[name] for name in ("filled", "k", "n", "e"))
    rows = cost.matmul(filled, sizes["m"], n, k, e)
    return sum_costs(rows, cost.weight_gradient(filled, k, n, e))


def swiglu_cost(sizes):
    """Cost of three products; the arrays between them need not go through memory."""
    m, filled, k, n, e = (sizes[name] for name in ("m", "filled", "k", "n", "e"))
    products = cost.matmul(**sizes), cost.matmul(**sizes), cost.matmul(filled, m, n, k, e)
    moved = 2 * (3 * e * k * n + m * k + filled * (k + n))
    return sum_costs(*products, cost.row_by_row(filled, n, 2, 1), bytes=moved)


def swiglu_backward_cost(sizes):
    """Cost with the preceding forward; of each only inputs and outputs move."""
    filled, k, n, e = (sizes[name] for name in ("filled", "k", "n", "e"))
    forward = swiglu_cost(sizes)
    down = cost.matmul(filled, filled, k, n, e)
    up = [cost.matmul(filled, filled, n, k, e)] * 2
    weights = [cost.weight_gradient(filled, k, n, e)] * 3
    between = cost.row_by_row(filled, n, 3, 3)
    moved = forward.bytes + 2 * 3 * e * k * n
    return sum_costs(forward, down, *up, *weights, between, bytes=moved)


CASES = {
    "forward": Case(UP, inputs(even), forward, forward_cost, SMALL),
    "forward_down": Case(DOWN, inputs(even), forward, forward_cost, SMALL),
    "forward_skewed": Case(UP, inputs(skewed), forward, forward_cost, SMALL),
    "decode": Case(DECODE, inputs(even), forward, forward_cost, SMALL),
    "backward": Case(UP, inputs(even), backward, backward_cost, SMALL),
    "backward_down": Case(DOWN, inputs(even), backward, backward_cost, SMALL),
    "backward_skewed": Case(UP, inputs(skewed), backward, backward_cost, SMALL),
    "swiglu_buffer": Case(BUFFER, swiglu_inputs, swiglu, swiglu_cost, SMALL),
    "swiglu_backward": Case(UP, swiglu_inputs, swiglu_backward, swiglu_backward_cost, SMALL),
}
