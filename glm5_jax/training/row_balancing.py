"""Row balancing: assigns the rows of a batch to ranks and microbatches by cost, so that ranks wait less.

Rows have equally many tokens, but tokens of a long document attend to more keys than those of short ones. In
every layer all devices wait for the slowest, so a step takes, for each microbatch, as long as the costliest
rank. (GLM-5 2.4.1: "workload-aware sequence reordering". Not implemented: spreading one document's attention
over ranks, and context-parallel groups of several sizes.)

Balancing runs on the devices:

- The cost of a row follows from its positions, so all ranks compute the same order.
- One exchange moves each row to its rank. No process needs to know the rows of another one.
- The data source is not involved, and neither is the position that a run resumes at.
- The batch contains the same rows, so loss and gradients change only by the order of sums.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Int

from glm5_jax.config import ModelConfig
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region
from glm5_jax.parallel.ragged_all_to_all import Peers, ragged_all_to_all, route_of
from glm5_jax.training import flops


def balance_rows(
    batch: dict[str, Array],
    cfg: ModelConfig,
    mesh: Mesh | AbstractMesh | None,
    microbatches: int,
    **flops_options,
) -> dict[str, Array]:
    """Reorders the rows of a batch of arrays [b t] as `assign_rows` says; on one rank returns it unchanged.

    The step splits b into contiguous parts, one per rank; row r of a rank belongs to microbatch
    r % microbatches. flops_options: options of `flops.train_flops`.

    Raises ValueError if ranks and microbatches do not divide b.
    """
    region = Region() if mesh is None else Region.of(mesh)
    ranks = Peers(region.nontrivial_axes(BATCH_AXES), region.size(BATCH_AXES))
    if ranks.size == 1:
        return batch
    rows, multiple = batch["positions"].shape[0], ranks.size * microbatches
    if rows % multiple:
        raise ValueError(
            f"{rows} rows cannot be assigned to {ranks.size} ranks in {microbatches} microbatches; use a "
            f"multiple of {multiple}"
        )

    def local(batch):
        costs = flops.token_train_flops(cfg, batch["positions"], **flops_options).sum(1)
        costs = region.all_gather(region.psum(costs, SEQUENCE_AXES), BATCH_AXES, 0)
        return exchange_rows(batch, assign_rows(costs, ranks.size, microbatches), ranks)

    spec = P(BATCH_AXES, SEQUENCE_AXES)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(batch)


def assign_rows(costs: Float[Array, " b"], ranks: int, microbatches: int) -> Int[Array, " b"]:
    """Returns the row that goes to each position of a batch, by the costs of rows.

    Tries three assignments and returns the cheapest, by the sum over microbatches of the costliest rank. Ties go
    to the first:

    1. unchanged,
    2. costliest rows first, each round to the least loaded ranks of all microbatches,
    3. rows of similar cost in one microbatch, assigned to its ranks in the same way.
    """
    rounds = costs.shape[0] // (ranks * microbatches)
    unchanged = jnp.arange(costs.shape[0], dtype=jnp.int32)
    by_cost = jnp.argsort(-costs, stable=True).astype(jnp.int32)
    mixed = _assign_to_least_loaded(by_cost.reshape(rounds, microbatches * ranks), costs)
    similar = jax.vmap(_assign_to_least_loaded, (0, None))(
        by_cost.reshape(microbatches, rounds, ranks), costs
    )
    orders = jnp.stack(
        [
            unchanged,
            # [rounds microbatches ranks], and [microbatches rounds ranks]
            mixed.reshape(rounds, microbatches, ranks).transpose(2, 0, 1).reshape(-1),
            similar.transpose(2, 1, 0).reshape(-1),
        ]
    )
    step_costs = jax.vmap(lambda order: step_cost(costs[order], ranks, microbatches))(orders)
    return orders[jnp.argmin(step_costs)]


def step_cost(costs: Float[Array, " b"], ranks: int, microbatches: int) -> Float[Array, ""]:
    """Returns the sum over microbatches of the costliest rank, for rows in the order of the batch."""
    return costs.reshape(ranks, -1, microbatches).sum(1).max(0).sum()


def _assign_to_least_loaded(by_cost, costs):
    """Assigns each round of rows [rounds slots] to the slots in the order of their load so far."""

    def assign_round(load, rows):
        assigned = jnp.zeros_like(rows).at[jnp.argsort(load, stable=True)].set(rows)
        return load + costs[assigned], assigned

    return lax.scan(assign_round, jnp.zeros(by_cost.shape[1], costs.dtype), by_cost)[1]


def exchange_rows(
    batch: dict[str, Array], order: Int[Array, " b"], ranks: Peers
) -> dict[str, Array]:
    """Returns this device's rows [q t] of the batch in this order."""
    q, me = order.shape[0] // ranks.size, ranks.index()
    destinations = (
        jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    )
    leaving = lax.dynamic_slice_in_dim(
        destinations, me * q, q
    )  # positions that this device's rows go to
    sizes = jnp.zeros((ranks.size, ranks.size), jnp.int32)
    route = route_of(sizes.at[order // q, jnp.arange(order.shape[0]) // q].add(1), ranks)
    # Rows arrive in the order of their senders; those of one sender in the order of their positions.
    arriving = lax.dynamic_slice_in_dim(order, me * q, q) // q
    at = jnp.argsort(jnp.argsort(arriving, stable=True), stable=True)

    def send(x):
        return jnp.take(ragged_all_to_all(x[jnp.argsort(leaving)], q, route, ranks), at, axis=0)

    return jax.tree.map(send, batch)
