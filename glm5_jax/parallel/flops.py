"""Counts the matmul FLOPs of any program from its jaxpr, with the trip count of every loop.

The count is the work that a device does, recomputation included, for a function that can be traced. The FLOPs that a
model needs are computed from its config instead (training/flops.py).

XLA's `cost_analysis` counts the body of a loop once, so it cannot tell linear from quadratic work. Of a kernel it
knows only the kernel's cost estimate.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

REST = "rest"
# Primitives of Pallas kernels: a plain pallas_call, and one for Mosaic GPU.
KERNELS = ("pallas_call", "mpmd_map")


class Work(NamedTuple):
    """Work of a program.

    Attributes:
      flops: FLOPs of matrix products.
      kernel_bytes: bytes of device memory that kernels move, by their cost estimates.
    """

    flops: int = 0
    kernel_bytes: int = 0


def count_flops(
    function: Callable, *args, scope: str | None = None, while_trips: int | None = None
) -> int:
    """Counts the FLOPs of the matrix products in function(*args), two per multiply-add, without running it.

    - args: arrays or `jax.ShapeDtypeStruct`s.
    - scope: count only work under the `jax.named_scope` of that name; None: all work.
    - while_trips: assumed trip count of loops whose end is known at run time only.

    Raises ValueError if such a loop holds counted FLOPs and while_trips is None. All other rules are those of
    `work_by_scope`.
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    if scope is None:
        return work_by_scope(jaxpr, (), while_trips)[REST].flops
    work = _count(jaxpr, _ScopeContext((scope,), rest=False), while_trips)
    return work.get(scope, Work()).flops


def work_by_scope(jaxpr: Any, scopes: Sequence[str] = (), while_trips: int | None = None) -> dict:
    """Returns {scope: Work, REST: Work} of a closed jaxpr, from `jax.make_jaxpr` or a traced `jax.jit`.

    - Work under several of the scopes (`jax.named_scope`) counts for the first of them, work under none for REST.
    - A branch counts as its most expensive arm.
    - Work that no result depends on counts as nothing, because XLA removes it: the last product of the forward in a
      recomputation, for example.
    - Inside `jax.shard_map` shapes and FLOPs are those of one device; outside, those of the full array.
    - A Pallas kernel counts by its `cost_estimate`, which holds the work that its algorithm needs: the keys that
      causality or a selection leaves, the expected number of rows.

    Raises ValueError for a kernel without a cost estimate. Mosaic GPU kernels have none in jax 0.10.2, because
    `plgpu.kernel` takes none. Trace for a TPU then, on an abstract mesh whose `abstract_device` is one: the algorithms
    have the same FLOPs.
    """
    work = _count(jaxpr, _ScopeContext(tuple(scopes)), while_trips)
    return {scope: work.get(scope, Work()) for scope in (*scopes, REST)}


class _ScopeContext(NamedTuple):
    """Scope of an equation.

    Attributes:
      scopes: names of the scopes that are counted.
      scope: the one that the equation is in.
      rest: whether equations outside of all scopes count.
    """

    scopes: tuple[str, ...]
    scope: str = REST
    rest: bool = True

    def at(self, eqn) -> "_ScopeContext":
        # The names of an inner jaxpr start at its loop or call, so the outer scope is added.
        names = {self.scope, *re.findall(r"\w+", str(eqn.source_info.name_stack))}
        return self._replace(scope=next((s for s in self.scopes if s in names), REST))

    def assign(self, work: Work) -> dict[str, Work]:
        return {self.scope: work} if self.rest or self.scope != REST else {}


def _count(jaxpr, context: _ScopeContext, trips) -> dict[str, Work]:
    return _walk(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), context, trips)[0]


def _walk(jaxpr, used_outs, context: _ScopeContext, trips) -> tuple[dict[str, Work], list[bool]]:
    """Returns (work by scope, which inputs are used) of a jaxpr; used_outs marks the results that are used."""
    used = {v for v, is_used in zip(jaxpr.outvars, used_outs) if is_used and _is_variable(v)}
    total: dict[str, Work] = {}
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in used for v in eqn.outvars]
        if any(wanted) or _acts(eqn):
            work, needed = _of_equation(eqn, wanted, context.at(eqn), trips)
            total = _sum(total, work)
            used |= {v for v, is_used in zip(eqn.invars, needed) if is_used and _is_variable(v)}
    return total, [v in used for v in jaxpr.invars]


def _of_equation(eqn, wanted, context: _ScopeContext, trips) -> tuple[dict[str, Work], list[bool]]:
    """Returns the result of `_walk` for one equation; wanted marks its results that are used."""
    name, all_inputs = eqn.primitive.name, [True] * len(eqn.invars)
    if name in _OF_PRIMITIVES:
        return context.assign(Work(_OF_PRIMITIVES[name](eqn))), all_inputs
    if name in KERNELS:
        return context.assign(_of_kernel(eqn)), all_inputs
    inner = jaxprs_of(eqn.params)
    if name == "scan":
        return _of_scan(eqn, inner[0], wanted, context, trips)
    if name == "cond":
        arms = [_walk(arm, wanted, context, trips) for arm in inner]
        needed = [any(column) for column in zip(*(needed for _, needed in arms))]
        return max((work for work, _ in arms), key=_flops), [True, *needed]
    if name == "while":
        work = _sum(*(_walk(part, [True] * len(part.outvars), context, trips)[0] for part in inner))
        if not any(map(any, work.values())):
            return {}, all_inputs
        if trips is None:
            raise ValueError(
                "a while loop with matrix products ends at run time; pass while_trips="
            )
        return _sum(*[work] * trips), all_inputs
    if len(inner) == 1 and len(inner[0].outvars) == len(wanted):
        work, needed = _walk(inner[0], wanted, context, trips)
        return work, needed if len(needed) == len(all_inputs) else all_inputs
    parts = (_walk(part, [True] * len(part.outvars), context, trips)[0] for part in inner)
    return _sum(*parts), all_inputs


def _of_scan(
    eqn, body, wanted, context: _ScopeContext, trips
) -> tuple[dict[str, Work], list[bool]]:
    consts, carry = scan_counts(eqn)
    while True:
        work, needed = _walk(body, wanted, context, trips)
        # An iteration has to compute the carried values that the next one reads.
        carried = [a or b for a, b in zip(wanted[:carry], needed[consts : consts + carry])]
        if carried == wanted[:carry]:
            times = eqn.params["length"]
            work = {k: Work(times * w.flops, times * w.kernel_bytes) for k, w in work.items()}
            return work, needed
        wanted = carried + wanted[carry:]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns (number of constants, number of carried values) of a scan."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.11
    return len(list(consts)), len(list(carry))


def _of_kernel(eqn) -> Work:
    estimate = eqn.params["cost_estimate"]
    if estimate is None:
        kernel = eqn.params.get("name") or eqn.primitive.name
        raise ValueError(
            f"kernel {kernel!r} has no cost estimate; pass a cost_estimate to it, or trace for a TPU"
        )
    return Work(estimate.flops, estimate.bytes_accessed)


def _dot_flops(eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return 2 * depth * math.prod(eqn.outvars[0].aval.shape)


def _ragged_dot_flops(eqn) -> int:
    """Returns the FLOPs of all rows, because the rows per group are known at run time only."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    num_values = math.prod(eqn.outvars[0].aval.shape)
    if set(numbers.lhs_ragged_dimensions) & set(contracted):
        num_values //= eqn.invars[2].aval.shape[-1]  # a result for each group, of its own rows
    return 2 * depth * num_values


_OF_PRIMITIVES = {"dot_general": _dot_flops, "ragged_dot_general": _ragged_dot_flops}


def _sum(*parts: dict[str, Work]) -> dict[str, Work]:
    total: dict[str, Work] = {}
    for part in parts:
        for scope, work in part.items():
            total[scope] = Work(*map(sum, zip(total.get(scope, Work()), work)))
    return total


def _flops(by_scope: dict[str, Work]) -> int:
    return sum(work.flops for work in by_scope.values())


def _acts(eqn) -> bool:
    """Returns True if an equation has side effects; the axis name of a collective is not one."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _is_variable(v) -> bool:
    return not hasattr(v, "val")  # a literal has one


def jaxprs_of(params: Mapping[str, Any]) -> list:
    """Returns the jaxprs among an equation's parameters: bodies of loops, calls and branches."""
    leaves = jax.tree.leaves(tuple(params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns")]
