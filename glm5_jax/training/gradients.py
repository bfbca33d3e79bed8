"""Loss, gradients and scores of a train step, as functions of (params, batch).

Each function binds a model, a mesh and a `StepConfig`. `gradient_function` splits the batch into microbatches and
balances its rows. `training.step` compiles them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region, check_batch
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.training.accumulation import accumulate_gradients, check_vocab_block
from glm5_jax.training.loss import (
    LossWeights,
    Shifted,
    TokenLoss,
    Totals,
    local_logp,
    local_objective,
    shift,
    totals_of,
)
from glm5_jax.training.row_balancing import balance_rows

if TYPE_CHECKING:  # step imports this module
    from glm5_jax.training.step import StepConfig

BATCH_KEYS = ("token_ids", "segment_ids", "positions", "loss_mask", "ce_weight")


class Rates(NamedTuple):
    """Scheduled values of one step.

    Attributes:
      mtp_weight: weight of the MTP loss.
      bias_rate: step size of the router biases.
    """

    mtp_weight: Float[Array, ""]
    bias_rate: Float[Array, ""]


def loss_function(
    cfg: ModelConfig,
    config: "StepConfig",
    mesh: Mesh | AbstractMesh | None = None,
    token_loss: TokenLoss | None = None,
) -> Callable:
    """Returns f(params, batch, rates) -> (objective, LossParts) over a batch of arrays [b t].

    token_loss: loss on sampled tokens; None: no tokens are sampled.

    Raises ValueError if the options do not fit the model or the mesh.
    """
    mtp_steps = config.mtp_runs(cfg)
    check_vocab_block(cfg, config.vocab_block, config.accumulate, mesh)
    if config.index_weight and cfg.index_topk is None:
        raise ValueError(
            f"index_weight is {config.index_weight}, but the model has no indexer (index_topk is None); "
            "use 0, or give the model an indexer"
        )

    local = _local(cfg, config, mesh, token_loss)

    def loss(params, batch, rates, totals: Totals | None = None):
        shifted = shift(batch, mtp_steps, _streams(token_loss, batch))
        batch = {k: batch[k] for k in BATCH_KEYS}
        totals = totals_of(batch, shifted) if totals is None else totals
        args = (params, batch, shifted, totals, _loss_weights(config, rates))
        run = functools.partial(
            local, num_rows=batch["token_ids"].shape[0], execution=config.execution()
        )
        if mesh is None:
            return run(*args)
        params_spec = jax.tree.map(lambda s: s.spec, glm5.param_shardings(cfg, mesh))
        rows, stacked = P(BATCH_AXES, SEQUENCE_AXES), P(None, BATCH_AXES, SEQUENCE_AXES)
        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(params_spec, rows, Shifted(stacked, stacked, rows), P(), P()),
            out_specs=P(),
            check_vma=False,
        )(*args)

    return loss


def _local(cfg, config: "StepConfig", mesh, token_loss: TokenLoss | None):
    """Binds `local_objective` to a model, a mesh and a step's options; rows and execution are left open."""
    return functools.partial(
        local_objective,
        cfg=cfg,
        chunk=config.loss_chunk,
        region=Region() if mesh is None else Region.of(mesh),
        index_factor=config.index_weight,
        index_target=config.index_target,
        token_loss=token_loss,
    )


def _loss_weights(config: "StepConfig", rates: Rates) -> LossWeights:
    return LossWeights(rates.mtp_weight, config.balance_weight, config.z_weight)


def _streams(token_loss: TokenLoss | None, batch) -> tuple[str, ...]:
    """Returns the streams of a batch that a token_loss reads.

    "old_logp" is among them in a batch that is trained on in several steps.
    """
    return () if token_loss is None else (*token_loss.streams, *({"old_logp"} & set(batch)))


def gradient_function(
    cfg: ModelConfig,
    config: "StepConfig",
    mesh: Mesh | AbstractMesh | None = None,
    frozen: Sequence[str] = (),
    token_loss: TokenLoss | None = None,
) -> Callable:
    """Returns f(params, batch, rates) -> (objective, LossParts, gradients), summed over microbatches.

    frozen: paths of parameters without a gradient; theirs are zeros.
    """
    loss, local = (make(cfg, config, mesh, token_loss) for make in (loss_function, _local))
    mtp_steps = config.mtp_runs(cfg)

    def gradients(params, batch, rates):
        flat = flatten(params)
        frozen_params = {path: flat.pop(path) for path in frozen}
        objective, parts, grads = trainable_gradients(flat, frozen_params, batch, rates)
        return objective, parts, unflatten(grads | jax.tree.map(jnp.zeros_like, frozen_params))

    def trainable_gradients(trainable, frozen_params, batch, rates):
        rows, length = batch["token_ids"].shape
        region = local.keywords["region"]
        check_batch(rows, length, region)
        count = config.microbatches(rows, region.size(BATCH_AXES))
        if config.balance_rows:
            batch = balance_rows(
                batch,
                cfg,
                mesh,
                count,
                mtp_steps=mtp_steps,
                trains_trunk=any("indexer/" not in path for path in trainable),
                trains_indexers=config.index_weight > 0,
            )
        streams = _streams(token_loss, batch)
        totals = totals_of(batch, shift(batch, mtp_steps, streams))
        # One batch: the plain gradient.
        if count == 1 and config.accumulate == "sharded":
            value_and_grad = jax.value_and_grad(
                lambda p: loss(unflatten(p | frozen_params), batch, rates, totals), has_aux=True
            )
            (objective, parts), grads = value_and_grad(trainable)
            return objective, parts, grads
        # Microbatches: row r goes to microbatch r % n, so that no row changes its device.
        split = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
        shifted = jax.vmap(lambda part: shift(part, mtp_steps, streams))(split)
        split = {k: split[k] for k in BATCH_KEYS}

        def run(trainable, frozen_params, split, totals, loss_weights):
            def objective(params, part, execution):
                return local(
                    params, *part, totals, loss_weights, num_rows=rows, execution=execution
                )

            return accumulate_gradients(
                objective,
                trainable,
                frozen_params,
                split,
                cfg=cfg,
                execution=config.execution(),
                region=region,
                mode=config.accumulate,
            )

        args = (
            trainable,
            frozen_params,
            (split, shifted),
            totals,
            _loss_weights(config, rates),
        )
        if mesh is None:
            return run(*args)
        specs = {path: s.spec for path, s in flatten(glm5.param_shardings(cfg, mesh)).items()}
        trainable_specs, frozen_specs = (
            {path: specs[path] for path in part} for part in (trainable, frozen_params)
        )
        parts = P(None, BATCH_AXES, SEQUENCE_AXES)
        stacked = P(None, *parts)
        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(
                trainable_specs,
                frozen_specs,
                (parts, Shifted(stacked, stacked, parts)),
                P(),
                P(),
            ),
            out_specs=(P(), P(), trainable_specs),
            check_vma=False,
        )(*args)

    return gradients


def score_function(
    cfg: ModelConfig,
    config: "StepConfig",
    mesh: Mesh | AbstractMesh | None = None,
    temperature: float = 1.0,
) -> Callable:
    """Returns `Step.score`, f(params, batch) -> float32[b t], by the learner's forward.

    temperature: divisor of the logits.
    """
    region = Region() if mesh is None else Region.of(mesh)

    def local(params, batch, targets):
        return local_logp(
            params,
            batch,
            targets,
            temperature,
            cfg=cfg,
            execution=config.execution(),
            chunk=config.loss_chunk,
            region=region,
        )

    def score(params, batch):
        inputs = {k: batch[k] for k in ("token_ids", "segment_ids", "positions")}
        targets = jnp.roll(inputs["token_ids"], -1, axis=1)
        run = local
        if mesh is not None:
            params_spec = jax.tree.map(lambda s: s.spec, glm5.param_shardings(cfg, mesh))
            rows = P(BATCH_AXES, SEQUENCE_AXES)
            run = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(params_spec, rows, rows),
                out_specs=rows,
                check_vma=False,
            )
        logp = jnp.roll(run(params, inputs, targets), 1, axis=1)
        return jnp.where(inputs["positions"] > 0, logp, 0)

    return score
