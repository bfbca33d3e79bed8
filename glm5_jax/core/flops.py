"""Matmul FLOPs of a program, counted from its jaxpr with every loop multiplied out.

XLA's own `cost_analysis` counts the body of a loop once, so it cannot tell linear work from quadratic, and
nothing of a kernel but what that says itself.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

REST = "rest"
# Of a Pallas kernel that is called as such, and of one for Mosaic GPU.
KERNELS = ("pallas_call", "mpmd_map")


class Work(NamedTuple):
    """FLOPs of matrix products, and the bytes of device memory that kernels say they move."""

    flops: int = 0
    kernel_bytes: int = 0


def count_flops(
    function: Callable, *args, scope: str | None = None, while_trips: int | None = None
) -> int:
    """FLOPs of the matrix products in function(*args), two per multiply-add; nothing is computed.

    args are arrays or `jax.ShapeDtypeStruct`s. scope: count only what runs under `jax.named_scope` of
    that name. while_trips: how often a loop with a run-time end is taken to run; ValueError if such a loop
    holds counted FLOPs and it is None. The rest is as `work_by_scope` says.
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    if scope is None:
        return work_by_scope(jaxpr, (), while_trips)[REST].flops
    found = _count(jaxpr, _Place((scope,), rest=False), while_trips)
    return found.get(scope, Work()).flops


def work_by_scope(jaxpr, scopes: Sequence[str] = (), while_trips: int | None = None) -> dict:
    """{scope: Work, REST: Work} of a closed jaxpr, of `jax.make_jaxpr` or of a traced `jax.jit`.

    What runs under several of the scopes (`jax.named_scope`) counts to the first of them, what runs under none
    to REST. A branch counts as its most expensive arm, and what no result depends on, as the forward's last
    product in a recomputation, as nothing: XLA leaves it out.

    A Pallas kernel counts as its `cost_estimate` says, by what its algorithm needs: the keys that causality or a
    selection leaves, the rows that are expected. ValueError names one that has none. Kernels of Mosaic GPU
    have none in jax 0.10.2 (`plgpu.kernel` takes none): trace for a TPU, on an abstract mesh whose
    `abstract_device` is one. The FLOPs of the algorithms are the same.

    Inside `jax.shard_map` shapes and FLOPs are those of one device, outside of the whole array.
    """
    found = _count(jaxpr, _Place(tuple(scopes)), while_trips)
    return {scope: found.get(scope, Work()) for scope in (*scopes, REST)}


class _Place(NamedTuple):
    """Where an equation stands: the scopes that are looked for, and which of them holds it; rest: whether what none
    of them holds counts."""

    scopes: tuple[str, ...]
    scope: str = REST
    rest: bool = True

    def at(self, eqn) -> "_Place":
        # The names of an inner jaxpr start at its own loop or call: what holds it holds them.
        names = {self.scope, *re.findall(r"\w+", str(eqn.source_info.name_stack))}
        return self._replace(scope=next((s for s in self.scopes if s in names), REST))

    def holding(self, work: Work) -> dict[str, Work]:
        return {self.scope: work} if self.rest or self.scope != REST else {}


def _count(jaxpr, place: _Place, trips) -> dict[str, Work]:
    return _walk(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), place, trips)[0]


def _walk(jaxpr, used_outs, place: _Place, trips) -> tuple[dict[str, Work], list[bool]]:
    """(work by scope, which inputs are used) of a jaxpr of whose results those are."""
    used = {v for v, is_used in zip(jaxpr.outvars, used_outs) if is_used and _is_variable(v)}
    total: dict[str, Work] = {}
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in used for v in eqn.outvars]
        if any(wanted) or _acts(eqn):
            found, needed = _of_equation(eqn, wanted, place.at(eqn), trips)
            total = _sum(total, found)
            used |= {v for v, is_used in zip(eqn.invars, needed) if is_used and _is_variable(v)}
    return total, [v in used for v in jaxpr.invars]


def _of_equation(eqn, wanted, place: _Place, trips) -> tuple[dict[str, Work], list[bool]]:
    """As `_walk` of one equation, of whose results those are wanted."""
    name, everything = eqn.primitive.name, [True] * len(eqn.invars)
    if name in _OF_PRIMITIVES:
        return place.holding(Work(_OF_PRIMITIVES[name](eqn))), everything
    if name in KERNELS:
        return place.holding(_of_kernel(eqn)), everything
    inner = jaxprs_of(eqn.params)
    if name == "scan":
        return _of_scan(eqn, inner[0], wanted, place, trips)
    if name == "cond":
        arms = [_walk(arm, wanted, place, trips) for arm in inner]
        needed = [any(column) for column in zip(*(needed for _, needed in arms))]
        return max((found for found, _ in arms), key=_flops), [True, *needed]
    if name == "while":
        found = _sum(*(_walk(part, [True] * len(part.outvars), place, trips)[0] for part in inner))
        if not any(map(any, found.values())):
            return {}, everything
        if trips is None:
            raise ValueError(
                "a while loop with matrix products ends at run time; pass while_trips="
            )
        return _sum(*[found] * trips), everything
    if len(inner) == 1 and len(inner[0].outvars) == len(wanted):
        found, needed = _walk(inner[0], wanted, place, trips)
        return found, needed if len(needed) == len(everything) else everything
    parts = (_walk(part, [True] * len(part.outvars), place, trips)[0] for part in inner)
    return _sum(*parts), everything


def _of_scan(eqn, body, wanted, place: _Place, trips) -> tuple[dict[str, Work], list[bool]]:
    consts, carry = scan_counts(eqn)
    while True:
        found, needed = _walk(body, wanted, place, trips)
        # What the next turn reads, this one has to make.
        carried = [a or b for a, b in zip(wanted[:carry], needed[consts : consts + carry])]
        if carried == wanted[:carry]:
            times = eqn.params["length"]
            work = {k: Work(times * w.flops, times * w.kernel_bytes) for k, w in found.items()}
            return work, needed
        wanted = carried + wanted[carry:]


def scan_counts(eqn) -> tuple[int, int]:
    """Returns how many constants a scan has, and how many values it carries from step to step."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.11
    return len(list(consts)), len(list(carry))


def _of_kernel(eqn) -> Work:
    estimate = eqn.params["cost_estimate"]
    if estimate is None:
        kernel = eqn.params.get("name") or eqn.primitive.name
        raise ValueError(
            f"kernel {kernel!r} does not say what it costs; give it a cost_estimate, or trace for a TPU"
        )
    return Work(estimate.flops, estimate.bytes_accessed)


def _dot_flops(eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return 2 * depth * math.prod(eqn.outvars[0].aval.shape)


def _ragged_dot_flops(eqn) -> int:
    """Of all rows: how many of them belong to a group is known at run time."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    made = math.prod(eqn.outvars[0].aval.shape)
    if set(numbers.lhs_ragged_dimensions) & set(contracted):
        made //= eqn.invars[2].aval.shape[-1]  # a result for each group, of its own rows
    return 2 * depth * made


_OF_PRIMITIVES = {"dot_general": _dot_flops, "ragged_dot_general": _ragged_dot_flops}


def _sum(*parts: dict[str, Work]) -> dict[str, Work]:
    total: dict[str, Work] = {}
    for part in parts:
        for scope, work in part.items():
            total[scope] = Work(*map(sum, zip(total.get(scope, Work()), work)))
    return total


def _flops(found: dict[str, Work]) -> int:
    return sum(work.flops for work in found.values())


def _acts(eqn) -> bool:
    """Whether it does more than give results; that a collective names its axis is no such thing."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _is_variable(v) -> bool:
    return not hasattr(v, "val")  # a literal has one


def jaxprs_of(params) -> list:
    """The jaxprs among an equation's parameters: bodies of loops, calls and branches."""
    leaves = jax.tree.leaves(tuple(params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns")]
