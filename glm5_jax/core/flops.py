"""Matmul FLOPs of a function, counted from its jaxpr with every loop multiplied out.

XLA's own `cost_analysis` counts the body of a loop once, so it cannot tell linear work from quadratic.
"""

import math
import re
from collections.abc import Callable

import jax


def count_flops(
    function: Callable, *args, scope: str | None = None, while_trips: int | None = None
) -> int:
    """FLOPs of the matrix products in function(*args), two per multiply-add; nothing is computed.

    args are arrays or `jax.ShapeDtypeStruct`s. scope: count only what runs under `jax.named_scope` of
    that name. A branch counts as its most expensive arm. while_trips: how often a loop with a run-time
    end is taken to run; ValueError if such a loop holds counted FLOPs and it is None.
    """
    closed = jax.make_jaxpr(function)(*args)
    return _count(closed.jaxpr, scope, scope is None, while_trips)


def _count(jaxpr, scope: str | None, inside: bool, trips: int | None) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        # The names of an inner jaxpr start at its own loop or call: what holds it holds them.
        here = inside or scope in re.findall(r"\w+", str(eqn.source_info.name_stack))
        if eqn.primitive.name == "dot_general":
            total += _dot_flops(eqn) if here else 0
            continue
        parts = [_count(inner, scope, here, trips) for inner in _jaxprs(eqn.params)]
        if eqn.primitive.name == "scan":
            total += eqn.params["length"] * sum(parts)
        elif eqn.primitive.name == "cond":
            total += max(parts)
        elif eqn.primitive.name == "while" and any(parts):
            if trips is None:
                raise ValueError(
                    "a while loop with matrix products ends at run time; pass while_trips="
                )
            total += trips * sum(parts)
        else:
            total += sum(parts)
    return total


def _dot_flops(eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return 2 * depth * math.prod(eqn.outvars[0].aval.shape)


def _jaxprs(params) -> list:
    """The jaxprs among an equation's parameters: bodies of loops, calls and branches."""
    leaves = jax.tree.leaves(tuple(params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns")]
