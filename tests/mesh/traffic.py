"""Counts the bytes that a traced program sends between devices, including the trips of loops."""

import collections
import math

import jax

from glm5_jax.parallel.flops import jaxprs_of

COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "all_to_all", "ragged_all_to_all")


def traffic(function, *args) -> collections.Counter:
    """Returns {(collective, mesh axes): bytes of its results on one device}.

    A cond counts as its largest branch, a while loop as one trip.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr) -> collections.Counter:
    total = collections.Counter()
    for eqn in jaxpr.eqns:
        parts = [_count(inner) for inner in jaxprs_of(eqn.params)]
        if eqn.primitive.name in COLLECTIVES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = axes if isinstance(axes, tuple) else (axes,)
            sizes = (math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in eqn.outvars)
            total[eqn.primitive.name, axes] += sum(sizes)
        elif eqn.primitive.name == "cond":
            for part in parts:
                total |= part
        else:
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for part in parts:
                total.update({key: trips * size for key, size in part.items()})
    return total
