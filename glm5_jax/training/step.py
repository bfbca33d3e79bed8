"""Train step: one pure function of (state, batch), compiled once per batch shape.

`make_step` assembles it: the loss and its gradients over microbatches, the optimiser, the router biases and
the metrics. `StepConfig` holds its options.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Bool, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.router import balance_bias
from glm5_jax.parallel.tree import flatten, matches_any, unflatten
from glm5_jax.training.accumulation import PREGATHERED
from glm5_jax.training.gradients import (
    Rates,
    gradient_function,
    loss_function,
    score_function,
)
from glm5_jax.training.loss import (
    TokenLoss,
    shift,
)
from glm5_jax.training.optimizer import (
    OptimizerConfig,
    gradient_norms,
    groups_of,
    make_optimizer,
    state_shardings,
)
from glm5_jax.training.schedule import TwoPhaseConfig, bias_update_rate, mtp_weight, value_at

INDEX_TARGETS = ("own_layer", "shared_layers")


@dataclasses.dataclass(kw_only=True)
class StepConfig:
    """Options of a train step. Sources: GLM-4.5 2.4, which GLM-5 inherits."""

    mtp_steps: int = 3  # GLM-5 2.1: one MTP layer run three times with shared weights
    mtp_weight: TwoPhaseConfig = dataclasses.field(default_factory=mtp_weight)
    bias_update_rate: TwoPhaseConfig = dataclasses.field(default_factory=bias_update_rate)
    balance_weight: float = 1e-4  # sequence-level balance loss
    z_weight: float = 0.0  # not in the paper; 0 turns it off
    # Weight of the indexers' loss; 0: indexers are not trained. Not disclosed. It matters only for
    # clipping and Adam's epsilon, because no other loss reaches the indexers.
    index_weight: float = 0.0
    # Attention that an indexer of IndexShare is trained on: that of its layer ("own_layer"), or the mean
    # of all layers that use its keys ("shared_layers"; IndexCache, arXiv 2603.12201).
    index_target: str = "own_layer"
    # Maximum rows of a microbatch per device; None: no microbatches.
    rows_per_device: int | None = None
    # Weights that stay gathered over all microbatches, with one gradient reduction per step: none
    # ("sharded"), routed experts ("experts"), or all ("local"); see training/accumulation.py.
    accumulate: str = "sharded"
    # Rows of logits at a time, where XLA computes them. The kernels of pods choose their tiles.
    loss_chunk: int = 1024
    query_block: int = 128
    gather_block: int = 32
    # Maximum tokens of a device that are sent to the experts at a time; None: all.
    token_chunk: int | None = None
    # Vocabulary entries that a device gathers at a time; None: all.
    vocab_block: int | None = None
    # Number of slices of the mesh axis `expert` that are connected by a slow network, such as slices of a
    # pod, or hosts. A token crosses to each once (`parallel.mesh.device_grid`, `model.expert_dispatch`).
    expert_slices: int = 1
    # Whether rows are assigned to devices and microbatches by cost (training/row_balancing.py). Rows of
    # short documents cost about the same.
    balance_rows: bool = False
    remat: str = "full"  # none, full, topk, dots, offload
    # Dtype of gradient sums over devices (`ExecutionConfig`); None: the compute dtype.
    reduce_dtype: str | None = None

    def __post_init__(self):
        for name in ("rows_per_device", "loss_chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive")
        for name in ("mtp_steps", "balance_weight", "z_weight", "index_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.accumulate not in PREGATHERED:
            raise ValueError(
                f"accumulate is {self.accumulate!r}; use one of {', '.join(PREGATHERED)}"
            )
        if self.index_target not in INDEX_TARGETS:
            targets = " or ".join(map(repr, INDEX_TARGETS))
            raise ValueError(f"index_target is {self.index_target!r}; use {targets}")
        self.execution()

    def mtp_runs(self, cfg: ModelConfig) -> int:
        """Returns how many times the model's MTP layer runs in a step."""
        return self.mtp_steps if cfg.num_nextn_predict_layers else 0

    def microbatches(self, rows: int, devices: int = 1) -> int:
        """Returns the number of equal microbatches of a batch.

        It is the smallest number that leaves at most rows_per_device rows on a device, or on the devices that share a
        row.
        """
        device_rows = rows // devices
        max_rows = device_rows if self.rows_per_device is None else self.rows_per_device
        return next(
            n
            for n in range(1, device_rows + 1)
            if device_rows % n == 0 and device_rows // n <= max_rows
        )

    def execution(self) -> ExecutionConfig:
        """Returns the options of the step's forward."""
        return ExecutionConfig(
            query_block=self.query_block,
            gather_block=self.gather_block,
            token_chunk=self.token_chunk,
            vocab_block=self.vocab_block,
            expert_slices=self.expert_slices,
            remat=self.remat,
            reduce_dtype=self.reduce_dtype,
        )


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
    """Builds the train step of a model.

    The state is {params, optimizer, step, tokens, rng}: float32 weights, the optax state, number of steps,
    tokens seen (float32, because only schedules read it) and key data. If the loss or a gradient is not finite,
    the step leaves params and optimizer unchanged and reports `skipped` 1. It counts as a step all the same.

    Args:
      schedule: step (from 0) -> learning rate.
      mesh: mesh of the run; None: one device.
      token_loss: loss on sampled tokens; None: no tokens are sampled.

    Raises ValueError if the options contradict each other, the model or the mesh.
    """
    names = glm5.axis_letters(cfg)
    groups = groups_of(optimizer_config, names)
    frozen = [path for path, group in flatten(groups).items() if group == "frozen"]
    if len(frozen) == len(flatten(groups)):
        raise ValueError(
            f"frozen is {optimizer_config.frozen!r}, which freezes all weights; leave one out of it"
        )
    optimizer = make_optimizer(optimizer_config, names, mesh)
    gradients = gradient_function(cfg, config, mesh, frozen, token_loss)
    objective = loss_function(cfg, dataclasses.replace(config, mtp_steps=0, index_weight=0.0), mesh)

    def initialise(key, params=None):
        init_key, run_key = jax.random.split(key)
        if params is None:
            params = glm5.init_params(cfg, init_key, "float32", mesh)
        return _place(
            {
                "params": params,
                "optimizer": jax.jit(optimizer.init, out_shardings=_of(shardings, "optimizer"))(
                    params
                ),
                "step": jnp.zeros((), jnp.int32),
                "tokens": jnp.zeros((), jnp.float32),
                "rng": jax.random.key_data(run_key),
            },
            shardings,
        )

    def train(state, batch):
        return update(state, batch, schedule(state["step"]))

    def update(state, batch, learning_rate):
        rates = Rates(
            value_at(config.mtp_weight, state["tokens"]),
            value_at(config.bias_update_rate, state["tokens"]),
        )
        # Gradients and the optimiser's updates.
        params = state["params"]
        total, parts, grads = gradients(params, batch, rates)
        norms = gradient_norms(grads, groups)
        finite = jnp.isfinite(total) & jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
        updates, moments = optimizer.update(grads, state["optimizer"], params)
        updates = jax.tree.map(lambda u: learning_rate * u, updates)
        # Frozen weights are left out of the sum, because -0.0 + 0.0 would be 0.0.
        updated = flatten(params) | {
            path: value
            for path, value in flatten(optax.apply_updates(params, updates)).items()
            if path not in frozen
        }
        updated = _update_router_biases(
            unflatten(updated), parts.load, rates.bias_rate, optimizer_config.frozen
        )

        # The new state, and metrics.
        state = next_state(state, batch, updated, moments, finite)
        losses = {"total": total, "ce": parts.ce, "balance": parts.balance, **parts.parts}
        if config.mtp_runs(cfg):
            losses["mtp"] = parts.mtp
        if config.z_weight:
            losses["z"] = parts.z
        if config.index_weight:
            losses["indexer"] = jnp.sum(parts.index_loss)
        metrics = {
            "loss": losses,
            "grad_norm": norms,
            "learning_rate": learning_rate,
            "max_logit": parts.max_logit,
            "skipped": ~finite,
        }
        if config.index_weight:
            metrics["index_loss"] = parts.index_loss
        if token_loss is not None:
            metrics["policy"] = parts.stats
        if parts.load is not None:
            mean = jnp.maximum(parts.load.mean(-1), 1e-9)
            metrics["router"] = {"load_imbalance": parts.load.max(-1) / mean}
        return state, metrics

    def evaluate(params, batch):
        targets = shift(batch, 0).weights.sum()
        zero = jnp.zeros(())
        _, parts = objective(params, batch, Rates(zero, zero))
        return parts.ce * targets, targets

    abstract = jax.eval_shape(
        lambda key: {
            "params": glm5.abstract_params(cfg, "float32"),
            "optimizer": optimizer.init(glm5.abstract_params(cfg, "float32")),
            "step": jnp.zeros((), jnp.int32),
            "tokens": jnp.zeros((), jnp.float32),
            "rng": jax.random.key_data(key),
        },
        jax.random.key(0),
    )
    shardings = None if mesh is None else _state_shardings(cfg, abstract, mesh)
    if mesh is not None:
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
        )
    out = None if mesh is None else (shardings, NamedSharding(mesh, P()))
    return Step(
        initialise,
        abstract,
        jax.jit(train, donate_argnums=0, out_shardings=out),
        update,
        jax.jit(evaluate),
        jax.jit(score_function(cfg, config, mesh, token_loss.temperature if token_loss else 1.0)),
        bool(set(jax.tree.leaves(groups)) - {"indexer", "frozen"}),
    )


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


def _of(shardings, name):
    return None if shardings is None else shardings[name]


def _place(state, shardings):
    if shardings is None:
        # All leaves are bound to the device of the initial weights, because the results of a step are. Else
        # the second step would be another program, and compile again.
        shardings = jax.tree.leaves(state["params"])[0].sharding
    return jax.device_put(state, shardings)


def _update_router_biases(params, load, rate, frozen):
    """Moves the router biases towards a balanced load [l e], layer by layer, the MTP block last.

    frozen: patterns of biases to leave unchanged.
    """
    if load is None:
        return params
    flat = flatten(params)
    biases = ("moe_layers/router/bias", "mtp/block/router/bias")
    for path in (path for path in biases if path in flat and not matches_any(frozen, path)):
        layer_load = load[-1] if path.startswith("mtp") else load[: flat[path].shape[0]]
        flat[path] = balance_bias(flat[path], layer_load, rate)
    return unflatten(flat)
