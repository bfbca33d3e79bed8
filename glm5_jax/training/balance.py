"""Rows of a batch dealt to devices and microbatches by what they cost, so that nobody waits long for the slowest.

Rows have equally many tokens, but a long document's attend to more keys than those of short ones, and in every layer
all devices wait for the one that has most to do: a step takes, for each microbatch, as long as the costliest rank. (GLM-5
2.4.1: "workload-aware sequence reordering"; that document's attention spread over ranks, and context-parallel groups
of several sizes, are not built.)

It happens on the devices: what a row costs follows from its positions, all ranks come to the same order, and one
exchange brings each row to its place. No process needs to know another's rows, and where batches come from, and with
it the position that a run resumes at, has no part in it. The rows of a batch are the same, so its loss and
gradients are, but for the order of sums.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from glm5_jax.core.exchange import Peers, exchange, route_of
from glm5_jax.core.mesh import BATCH_AXES, SEQUENCE_AXES, Region
from glm5_jax.training import flops


def balanced(batch, cfg, mesh, microbatches: int, **learnt):
    """The batch of arrays [b t] with its rows in an order that `deal` gives; on one rank, as it is. ValueError if ranks and
    microbatches do not divide b.

    learnt: as of `flops.train_flops`. How the step cuts b: contiguous parts are ranks', row r of one belongs to
    microbatch r % microbatches.
    """
    region = Region() if mesh is None else Region.of(mesh)
    ranks = Peers(region.live(BATCH_AXES), region.size(BATCH_AXES))
    if ranks.size == 1:
        return batch
    rows, multiple = batch["positions"].shape[0], ranks.size * microbatches
    if rows % multiple:
        raise ValueError(
            f"{rows} rows cannot be dealt to {ranks.size} ranks in {microbatches} microbatches; use a multiple of "
            f"{multiple}"
        )

    def local(batch):
        costs = flops.token_train_flops(cfg, batch["positions"], **learnt).sum(1)
        costs = region.all_gather(region.psum(costs, SEQUENCE_AXES), BATCH_AXES, 0)
        return _sent(batch, deal(costs, ranks.size, microbatches), ranks)

    spec = P(BATCH_AXES, SEQUENCE_AXES)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(batch)


def deal(costs, ranks: int, microbatches: int):
    """int32[b]: which row goes to each place of a batch, by what rows cost, [b].

    Of three orders the one whose microbatches' costliest ranks cost least together; the first of equals:
    as they are; the costliest rows first, each round of them to the least filled ranks of all microbatches; and rows
    of similar cost in one microbatch, dealt so to its ranks.
    """
    rounds = costs.shape[0] // (ranks * microbatches)
    given = jnp.arange(costs.shape[0], dtype=jnp.int32)
    falling = jnp.argsort(-costs, stable=True).astype(jnp.int32)
    mixed = _filled(falling.reshape(rounds, microbatches * ranks), costs)
    alike = jax.vmap(_filled, (0, None))(falling.reshape(microbatches, rounds, ranks), costs)
    orders = jnp.stack(
        [
            given,
            # [rounds microbatches ranks], and [microbatches rounds ranks]
            mixed.reshape(rounds, microbatches, ranks).transpose(2, 0, 1).reshape(-1),
            alike.transpose(2, 1, 0).reshape(-1),
        ]
    )
    waits = jax.vmap(lambda order: step_cost(costs[order], ranks, microbatches))(orders)
    return orders[jnp.argmin(waits)]


def step_cost(costs, ranks: int, microbatches: int):
    """What a step waits for if rows cost this, [b] in the order of the batch: the costliest rank of each microbatch."""
    return costs.reshape(ranks, -1, microbatches).sum(1).max(0).sum()


def _filled(falling, costs):
    """The rows falling [rounds slots], each round's in the order of slots that have least so far."""

    def fill(load, rows):
        own = jnp.zeros_like(rows).at[jnp.argsort(load, stable=True)].set(rows)
        return load + costs[own], own

    return lax.scan(fill, jnp.zeros(falling.shape[1], costs.dtype), falling)[1]


def _sent(batch, order, ranks: Peers):
    """This device's rows [q t] of a batch in the order int32[b]."""
    q, me = order.shape[0] // ranks.size, ranks.index()
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    leaving = lax.dynamic_slice_in_dim(places, me * q, q)  # where this device's rows go
    sizes = jnp.zeros((ranks.size, ranks.size), jnp.int32)
    route = route_of(sizes.at[order // q, jnp.arange(order.shape[0]) // q].add(1), ranks)
    # Rows come in the order of their senders, each one's in the order of places.
    arriving = lax.dynamic_slice_in_dim(order, me * q, q) // q
    at = jnp.argsort(jnp.argsort(arriving, stable=True), stable=True)

    def send(x):
        return jnp.take(exchange(x[jnp.argsort(leaving)], q, route, ranks), at, axis=0)

    return jax.tree.map(send, batch)
