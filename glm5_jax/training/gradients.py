"""Loss, gradients and scores of a train step, as functions of (params, batch).

`loss_function`, `gradient_function` and `score_function` bind a model, a mesh and a `StepConfig`. Gradients are
computed over microbatches whose rows are balanced by cost. `training.step` compiles the functions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region, check_batch
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.training.accumulation import accumulate_gradients, check_vocab_block
from glm5_jax.training.loss import (
    LossParts,
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
from glm5_jax.training.step_config import StepConfig

FlatParams = dict[str, Array]  # weights by path

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
    config: StepConfig,
    mesh: Mesh | AbstractMesh | None = None,
    token_loss: TokenLoss | None = None,
) -> Callable:
    """Returns f(params, batch, rates) -> (objective, LossParts) over a batch of arrays [b t].

    token_loss: loss on sampled tokens; None: no tokens are sampled.

    Raises ValueError if the options do not fit the model or the mesh.
    """
    return _Objective(cfg, config, mesh, token_loss).loss


def gradient_function(
    cfg: ModelConfig,
    config: StepConfig,
    mesh: Mesh | AbstractMesh | None = None,
    frozen: Sequence[str] = (),
    token_loss: TokenLoss | None = None,
) -> Callable:
    """Returns f(params, batch, rates) -> (objective, LossParts, gradients), summed over microbatches.

    frozen: paths of parameters without a gradient; theirs are zeros.

    Raises ValueError if the options do not fit the model or the mesh.
    """
    return functools.partial(_Objective(cfg, config, mesh, token_loss).gradients, frozen=frozen)


class _Objective:
    """Training objective of a model on a mesh, and its gradients; see `loss_function` and `gradient_function`."""

    def __init__(
        self,
        cfg: ModelConfig,
        config: StepConfig,
        mesh: Mesh | AbstractMesh | None,
        token_loss: TokenLoss | None,
    ):
        check_vocab_block(cfg, config.vocab_block, config.accumulate, mesh)
        if config.index_weight and cfg.index_topk is None:
            raise ValueError(
                f"index_weight is {config.index_weight}, but the model has no indexer (index_topk is None); "
                "use 0, or give the model an indexer"
            )
        self._cfg, self._config, self._mesh, self._token_loss = cfg, config, mesh, token_loss
        self._region = Region() if mesh is None else Region.of(mesh)

    def loss(
        self,
        params: PyTree,
        batch: dict[str, Array],
        rates: Rates,
        totals: Totals | None = None,
    ) -> tuple[Float[Array, ""], LossParts]:
        """Returns (objective, LossParts). totals: divisors of the sums; None: those of this batch."""
        shifted = self._shift(batch)
        inputs = {k: batch[k] for k in BATCH_KEYS}
        totals = totals_of(inputs, shifted) if totals is None else totals
        args = params, inputs, shifted, totals, self._loss_weights(rates)
        run = functools.partial(
            self._local, num_rows=len(inputs["token_ids"]), execution=self._config.execution()
        )
        if self._mesh is None:
            return run(*args)
        param_specs = _param_specs(self._cfg, self._mesh)
        in_specs = param_specs, _row_specs(inputs), _row_specs(shifted), P(), P()
        return jax.shard_map(
            run, mesh=self._mesh, in_specs=in_specs, out_specs=P(), check_vma=False
        )(*args)

    def gradients(
        self, params: PyTree, batch: dict[str, Array], rates: Rates, frozen: Sequence[str] = ()
    ) -> tuple[Float[Array, ""], LossParts, PyTree]:
        """Returns (objective, LossParts, gradients)."""
        trainable = flatten(params)
        frozen_params = {path: trainable.pop(path) for path in frozen}
        rows, length = batch["token_ids"].shape
        check_batch(rows, length, self._region)
        num_microbatches = self._config.microbatches(rows, self._region.size(BATCH_AXES))
        if self._config.balance_rows:
            batch = balance_rows(
                batch,
                self._cfg,
                self._mesh,
                num_microbatches,
                mtp_steps=self._config.mtp_runs(self._cfg),
                trains_trunk=any("indexer/" not in path for path in trainable),
                trains_indexers=self._config.index_weight > 0,
            )
        totals = totals_of(batch, self._shift(batch))
        if num_microbatches == 1 and self._config.accumulate == "sharded":
            objective, parts, gradients = self._plain_gradients(
                trainable, frozen_params, batch, rates, totals
            )
        else:
            objective, parts, gradients = self._accumulated_gradients(
                trainable, frozen_params, batch, rates, totals, num_microbatches
            )
        zeros = jax.tree.map(jnp.zeros_like, frozen_params)
        return objective, parts, unflatten(gradients | zeros)

    def _plain_gradients(
        self, trainable: FlatParams, frozen_params: FlatParams, batch, rates: Rates, totals: Totals
    ) -> tuple[Float[Array, ""], LossParts, FlatParams]:
        """Returns (objective, LossParts, gradients) of a batch in one forward and backward."""

        def loss(trainable):
            return self.loss(unflatten(trainable | frozen_params), batch, rates, totals)

        (objective, parts), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        return objective, parts, gradients

    def _accumulated_gradients(
        self,
        trainable: FlatParams,
        frozen_params: FlatParams,
        batch,
        rates: Rates,
        totals: Totals,
        num_microbatches: int,
    ) -> tuple[Float[Array, ""], LossParts, FlatParams]:
        """Returns (objective, LossParts, gradients), summed over microbatches in one manual region."""
        # Row r goes to microbatch r % n, so that no row changes its device.
        split = jax.tree.map(
            lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch
        )
        shifted = jax.vmap(self._shift)(split)
        microbatches = {k: split[k] for k in BATCH_KEYS}, shifted
        args = trainable, frozen_params, microbatches, totals, self._loss_weights(rates)
        run = functools.partial(self._accumulate, num_rows=len(batch["token_ids"]))
        if self._mesh is None:
            return run(*args)
        specs = flatten(_param_specs(self._cfg, self._mesh))
        trainable_specs, frozen_specs = (
            {path: specs[path] for path in part} for part in (trainable, frozen_params)
        )
        in_specs = trainable_specs, frozen_specs, _row_specs(microbatches), P(), P()
        return jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=(P(), P(), trainable_specs),
            check_vma=False,
        )(*args)

    def _accumulate(
        self,
        trainable: FlatParams,
        frozen_params: FlatParams,
        microbatches: tuple[dict[str, Array], Shifted],
        totals: Totals,
        loss_weights: LossWeights,
        *,
        num_rows: int,
    ):
        """Runs `accumulate_gradients` on one device's shards."""

        def objective(params, microbatch, execution):
            inputs, shifted = microbatch
            return self._local(
                params,
                inputs,
                shifted,
                totals,
                loss_weights,
                num_rows=num_rows,
                execution=execution,
            )

        return accumulate_gradients(
            objective,
            trainable,
            frozen_params,
            microbatches,
            cfg=self._cfg,
            execution=self._config.execution(),
            region=self._region,
            mode=self._config.accumulate,
        )

    def _local(
        self,
        params: PyTree,
        batch: dict[str, Array],
        shifted: Shifted,
        totals: Totals,
        loss_weights: LossWeights,
        *,
        num_rows: int,
        execution: ExecutionConfig,
    ) -> tuple[Float[Array, ""], LossParts]:
        """Returns (objective, LossParts) over all devices, from one device's shard of the batch."""
        return local_objective(
            params,
            batch,
            shifted,
            totals,
            loss_weights,
            cfg=self._cfg,
            execution=execution,
            chunk=self._config.loss_chunk,
            region=self._region,
            num_rows=num_rows,
            index_factor=self._config.index_weight,
            index_target=self._config.index_target,
            token_loss=self._token_loss,
        )

    def _shift(self, batch: dict[str, Array]) -> Shifted:
        """Returns the targets of a batch, and the streams that the token_loss reads."""
        streams = ()
        if self._token_loss is not None:
            # "old_logp" is among them in a batch that is trained on in several steps.
            streams = *self._token_loss.streams, *({"old_logp"} & set(batch))
        return shift(batch, self._config.mtp_runs(self._cfg), streams)

    def _loss_weights(self, rates: Rates) -> LossWeights:
        return LossWeights(rates.mtp_weight, self._config.balance_weight, self._config.z_weight)


def _param_specs(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> PyTree:
    return jax.tree.map(lambda s: s.spec, glm5.param_shardings(cfg, mesh))


def _row_specs(arrays: PyTree) -> PyTree:
    """Returns the specs of arrays [... b t]: rows and positions are sharded, leading dimensions are not."""
    return jax.tree.map(lambda x: P(*[None] * (x.ndim - 2), BATCH_AXES, SEQUENCE_AXES), arrays)


def score_function(
    cfg: ModelConfig,
    config: StepConfig,
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
            rows = P(BATCH_AXES, SEQUENCE_AXES)
            in_specs = _param_specs(cfg, mesh), rows, rows
            run = jax.shard_map(
                local, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False
            )
        logp = jnp.roll(run(params, inputs, targets), 1, axis=1)
        return jnp.where(inputs["positions"] > 0, logp, 0)

    return score
