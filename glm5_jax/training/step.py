"""Train step: one pure function of (state, batch), compiled once per batch shape.

A step computes the loss and its gradients over microbatches (training/gradients.py), updates the weights by the
optimiser and the router biases by their load, discards both if a number is not finite, and returns metrics.
`StepConfig` holds its options.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.model.router import balance_bias
from glm5_jax.parallel.tree import flatten, matches_any, unflatten
from glm5_jax.training.gradients import Rates, gradient_function, loss_function, score_function
from glm5_jax.training.loss import LossParts, TokenLoss, shift
from glm5_jax.training.optimizer import (
    OptimizerConfig,
    gradient_norms,
    groups_of,
    make_optimizer,
    state_shardings,
)
from glm5_jax.training.schedule import value_at
from glm5_jax.training.step_config import StepConfig

ROUTER_BIASES = ("moe_layers/router/bias", "mtp/block/router/bias")


class Step(NamedTuple):
    """Compiled functions of one model's training.

    Attributes:
      initialise: initialise(key, params=None) -> state.
      abstract: state as `jax.ShapeDtypeStruct`s with shardings, into which a checkpoint is restored.
      train: train(state, batch) -> (state, metrics). Donates the state.
      update: update(state, batch, learning_rate) -> (state, metrics), compiled by the caller: one program
        serves all rates.
      evaluate: evaluate(params, batch) -> (summed nll, number of targets) of the main head.
      score: score(params, batch) -> float32[b t], the log-prob of each token given the earlier tokens of its
        segment; 0 for the first token of a segment.
      trains_trunk: whether anything except the indexers is trained.
    """

    initialise: Callable[..., dict]
    abstract: dict
    train: Callable[[dict, dict], tuple[dict, dict]]
    update: Callable[[dict, dict, jax.Array], tuple[dict, dict]]
    evaluate: Callable[[dict, dict], tuple[jax.Array, jax.Array]]
    score: Callable[[dict, dict], jax.Array]
    trains_trunk: bool


def make_step(
    cfg: ModelConfig,
    config: StepConfig,
    optimizer_config: OptimizerConfig,
    schedule: Callable,
    mesh: Mesh | AbstractMesh | None = None,
    token_loss: TokenLoss | None = None,
) -> Step:
    """Builds the train step of a model and jits its functions; see `TrainStep`."""
    return TrainStep(cfg, config, optimizer_config, schedule, mesh, token_loss).jit()


class TrainStep:
    """Train step of a model, as pure functions of the state and a batch.

    The state is {params, optimizer, step, tokens, rng}: float32 weights (with adapters, frozen ones in the
    compute dtype), the optax state, number of steps, tokens seen (float32, because only schedules read it) and key data. If the loss or a gradient is not finite,
    the step leaves params and optimizer unchanged and reports `skipped` 1. It counts as a step all the same.

    Args:
      schedule: step (from 0) -> learning rate.
      mesh: mesh of the run; None: one device.
      token_loss: loss on sampled tokens; None: no tokens are sampled.

    Raises ValueError if the options contradict each other, the model or the mesh.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        config: StepConfig,
        optimizer_config: OptimizerConfig,
        schedule: Callable,
        mesh: Mesh | AbstractMesh | None = None,
        token_loss: TokenLoss | None = None,
    ):
        self._cfg, self._config, self._mesh = cfg, config, mesh
        self._schedule, self._token_loss = schedule, token_loss
        letters = glm5.axis_letters(cfg)
        self._groups = groups_of(optimizer_config, letters)
        groups = flatten(self._groups)
        self._frozen = [path for path, group in groups.items() if group == "frozen"]
        if len(self._frozen) == len(groups):
            raise ValueError(
                f"frozen is {optimizer_config.frozen!r}, which freezes all weights; leave one out of it"
            )
        # No optimiser trains router biases. They stay unchanged if the user freezes them, and with adapters.
        self._router_biases = [
            path
            for path in ROUTER_BIASES
            if path in groups
            and not cfg.lora.rank
            and not matches_any(optimizer_config.frozen, path)
        ]
        self._optimizer = make_optimizer(optimizer_config, letters, mesh)
        self._gradients = gradient_function(cfg, config, mesh, self._frozen, token_loss)
        main_head = dataclasses.replace(config, mtp_steps=0, index_weight=0.0)
        self._evaluation_loss = loss_function(cfg, main_head, mesh)
        self._abstract = jax.eval_shape(
            lambda params, key: new_state(params, self._optimizer.init(params), key),
            glm5.abstract_params(cfg, "float32"),
            jax.random.key(0),
        )
        self._shardings = None
        if mesh is not None:
            self._shardings = _state_shardings(cfg, self._abstract, mesh)
            self._abstract = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                self._abstract,
                self._shardings,
            )

    def jit(self) -> Step:
        """Returns the jitted functions."""
        out = None
        if self._mesh is not None:
            out = self._shardings, NamedSharding(self._mesh, P())
        temperature = self._token_loss.temperature if self._token_loss else 1.0
        return Step(
            initialise=self.initialise,
            abstract=self._abstract,
            train=jax.jit(self.train, donate_argnums=0, out_shardings=out),
            update=self.update,
            evaluate=jax.jit(self.evaluate),
            score=jax.jit(score_function(self._cfg, self._config, self._mesh, temperature)),
            trains_trunk=bool(set(jax.tree.leaves(self._groups)) - {"indexer", "frozen"}),
        )

    def initialise(self, key: jax.Array, params: PyTree | None = None) -> dict:
        """Returns the state of a new run, with random weights if params is None."""
        init_key, run_key = jax.random.split(key)
        if params is None:
            params = glm5.init_params(self._cfg, init_key, "float32", self._mesh)
        shardings = self._shardings
        moments_shardings = None if shardings is None else shardings["optimizer"]
        moments = jax.jit(self._optimizer.init, out_shardings=moments_shardings)(params)
        if shardings is None:
            # All leaves are bound to the device of the initial weights, because the results of a step are. Else
            # the second step would be another program, and compile again.
            shardings = jax.tree.leaves(params)[0].sharding
        return jax.device_put(new_state(params, moments, run_key), shardings)

    def train(self, state: dict, batch: dict[str, Array]) -> tuple[dict, dict]:
        """Returns (state, metrics) after a step at the schedule's learning rate."""
        return self.update(state, batch, self._schedule(state["step"]))

    def update(
        self, state: dict, batch: dict[str, Array], learning_rate: Float[Array, ""]
    ) -> tuple[dict, dict]:
        """Returns (state, metrics) after a step at a learning rate."""
        rates = Rates(
            value_at(self._config.mtp_weight, state["tokens"]),
            value_at(self._config.bias_update_rate, state["tokens"]),
        )
        objective, parts, gradients = self._gradients(state["params"], batch, rates)
        norms = gradient_norms(gradients, self._groups)
        finite = all_finite(objective, norms)
        params, moments = self._apply_gradients(state, gradients, learning_rate)
        params = self._update_router_biases(params, parts.load, rates.bias_rate)
        state = next_state(state, batch, params, moments, finite)
        metrics = {
            "loss": self._losses(objective, parts),
            "grad_norm": norms,
            "learning_rate": learning_rate,
            "skipped": ~finite,
        }
        return state, metrics | self._model_metrics(parts)

    def evaluate(
        self, params: PyTree, batch: dict[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns (summed negative log-likelihood, number of targets) of the main head."""
        num_targets = shift(batch, 0).weights.sum()
        zero = jnp.zeros(())
        _, parts = self._evaluation_loss(params, batch, Rates(zero, zero))
        return parts.ce * num_targets, num_targets

    def _apply_gradients(self, state: dict, gradients: PyTree, learning_rate) -> tuple[PyTree, Any]:
        """Returns the params and the optimiser's state after an update."""
        params = state["params"]
        updates, moments = self._optimizer.update(gradients, state["optimizer"], params)
        updates = jax.tree.map(lambda u: learning_rate * u, updates)
        # Frozen weights are left out of the sum, because -0.0 + 0.0 would be 0.0.
        updated = flatten(params) | {
            path: value
            for path, value in flatten(optax.apply_updates(params, updates)).items()
            if path not in self._frozen
        }
        return unflatten(updated), moments

    def _update_router_biases(
        self, params: PyTree, load: Float[Array, "l e"] | None, rate
    ) -> PyTree:
        """Moves the router biases towards a balanced load, layer by layer, the MTP block last."""
        if load is None:
            return params
        flat = flatten(params)
        for path in self._router_biases:
            layer_load = load[-1] if path.startswith("mtp") else load[: flat[path].shape[0]]
            flat[path] = balance_bias(flat[path], layer_load, rate)
        return unflatten(flat)

    def _losses(self, objective: Float[Array, ""], parts: LossParts) -> dict[str, Array]:
        """Returns the objective and its parts by name, without the parts that the step does not train on."""
        losses = {"total": objective, "ce": parts.ce, "balance": parts.balance, **parts.parts}
        if self._config.mtp_runs(self._cfg):
            losses["mtp"] = parts.mtp
        if self._config.z_weight:
            losses["z"] = parts.z
        if parts.index_loss is not None:
            losses["indexer"] = jnp.sum(parts.index_loss)
        return losses

    def _model_metrics(self, parts: LossParts) -> dict[str, PyTree]:
        """Returns the metrics of each layer, and those of the sampled tokens."""
        metrics: dict[str, PyTree] = {"max_logit": parts.max_logit}
        if parts.index_loss is not None:
            metrics["index_loss"] = parts.index_loss
        if self._token_loss is not None:
            metrics["policy"] = parts.stats
        if parts.load is not None:
            mean = jnp.maximum(parts.load.mean(-1), 1e-9)
            metrics["router"] = {"load_imbalance": parts.load.max(-1) / mean}
        return metrics


def new_state(params: PyTree, moments: Any, key: jax.Array) -> dict:
    """Returns the state before the first step. moments: the optimiser's state."""
    return {
        "params": params,
        "optimizer": moments,
        "step": jnp.zeros((), jnp.int32),
        "tokens": jnp.zeros((), jnp.float32),
        "rng": jax.random.key_data(key),
    }


def all_finite(loss: Float[Array, ""], norms: dict[str, Float[Array, ""]]) -> Bool[Array, ""]:
    """Returns whether a loss and the norms of all its gradients are finite."""
    return jnp.isfinite(loss) & jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))


def next_state(
    state: dict, batch: dict, params: PyTree, moments: PyTree, finite: Bool[Array, ""]
) -> dict:
    """Returns the state after a step with these params and moments. Unless finite, both stay unchanged."""

    def choose(new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    return {
        "params": choose(params, state["params"]),
        "optimizer": choose(moments, state["optimizer"]),
        "step": state["step"] + 1,
        "tokens": state["tokens"] + batch["token_ids"].size,
        "rng": state["rng"],
    }


def reset_optimizer(state: dict) -> dict:
    """Returns the state with a new optimiser: moments, and the counts that correct their bias, are zero.

    - Weights, tokens, keys and steps stay, and with the steps the learning-rate schedule.
    - GLM-5 4.1.1 resets after each push of weights, because a new rollout policy is a new problem.
    - The old moments are donated, one leaf at a time.
    """

    def zeroed(x):
        new = jnp.zeros_like(x)  # on the devices of x, if x is bound to devices
        x.delete()
        return new

    return state | {"optimizer": jax.tree.map(zeroed, state["optimizer"])}


def _state_shardings(cfg, abstract, mesh):
    replicated = NamedSharding(mesh, P())
    params = glm5.param_shardings(cfg, mesh)
    return {
        "params": params,
        "optimizer": state_shardings(abstract["optimizer"], params),
        "step": replicated,
        "tokens": replicated,
        "rng": replicated,
    }
