"""The train step: one pure function over (state, batch), compiled once per batch shape."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.core.mesh import BATCH_AXES, SEQUENCE_AXES, Region, check_batch
from glm5_jax.core.tree import flatten, found, unflatten
from glm5_jax.model import glm5
from glm5_jax.model.plan import Plan
from glm5_jax.model.router import balance_bias
from glm5_jax.training.accumulation import WHOLE, accumulated, check_vocab_block
from glm5_jax.training.balance import balanced
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
from glm5_jax.training.optimizer import (
    OptimizerConfig,
    gradient_norms,
    groups_of,
    make_optimizer,
    state_shardings,
)
from glm5_jax.training.schedule import SwitchConfig, bias_update_rate, mtp_weight, switched

BATCH_KEYS = ("token_ids", "segment_ids", "positions", "loss_mask", "ce_weight")


@dataclasses.dataclass
class StepConfig:
    """What a step computes, beside the model. Sources: GLM-4.5 2.4, which GLM-5 inherits."""

    mtp_steps: int = 3  # GLM-5 2.1: one MTP layer run three times with shared weights
    mtp_weight: SwitchConfig = dataclasses.field(default_factory=mtp_weight)
    bias_update_rate: SwitchConfig = dataclasses.field(default_factory=bias_update_rate)
    balance_weight: float = 1e-4  # sequence-level balance loss
    z_weight: float = 0.0  # not in the paper; 0 turns it off
    # Of the indexers' loss; 0: they do not learn. Not disclosed: as their gradients mix with no other,
    # it matters for clipping and Adam's epsilon alone.
    index_weight: float = 0.0
    # What an indexer of IndexShare learns from: the attention of its "own" layer, or the mean of all
    # layers that it has "served" (IndexCache, arXiv 2603.12201).
    index_target: str = "own"
    # At once, at most: a device takes more of a batch in microbatches, whose gradients are added up. None: all at once.
    rows_per_device: int | None = None
    # Weights that stay whole from microbatch to microbatch, their gradients being reduced once per step: none
    # if "sharded", routed "experts", or all if "local" (training/accumulation.py).
    accumulate: str = "sharded"
    # Rows of logits at a time, where XLA makes them; the kernels that pods have for it take tiles of their own.
    loss_chunk: int = 1024
    query_block: int = 128
    gather_block: int = 32
    token_chunk: int | None = None  # tokens per device that travel to the experts at a time
    vocab_block: int | None = (
        None  # of the vocabulary that a device brings together at a time; None: all
    )
    # Groups of neighbours on the mesh axis `expert` that are far from each other, such as the slices of a pod or hosts:
    # a token crosses to each once (`core.mesh.placed`, `model.dispatch`). 1: all are near.
    expert_slices: int = 1
    # Whether rows are dealt to devices and microbatches by what they cost (training/balance.py). Rows of short
    # documents cost about the same.
    balance_rows: bool = False
    remat: str = "full"  # none, full, topk, dots, offload
    reduce_dtype: str | None = (
        None  # of gradient sums over devices (`Plan`); None: the compute dtype
    )

    def __post_init__(self):
        for name in ("rows_per_device", "loss_chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive")
        for name in ("mtp_steps", "balance_weight", "z_weight", "index_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.accumulate not in WHOLE:
            raise ValueError(f"accumulate is {self.accumulate!r}; use one of {', '.join(WHOLE)}")
        if self.index_target not in ("own", "served"):
            raise ValueError(f"index_target is {self.index_target!r}; use 'own' or 'served'")
        self.plan()

    def mtp_runs(self, cfg) -> int:
        """How often a model's MTP layer runs in a step."""
        return self.mtp_steps if cfg.num_nextn_predict_layers else 0

    def microbatches(self, rows: int, devices: int = 1) -> int:
        """In how many equal parts a batch of so many rows is taken: the fewest that leave a device (or the several that
        share a row) no more than rows_per_device at once."""
        own = rows // devices
        at_once = own if self.rows_per_device is None else self.rows_per_device
        return next(n for n in range(1, own + 1) if own % n == 0 and own // n <= at_once)

    def plan(self) -> Plan:
        return Plan(
            query_block=self.query_block,
            gather_block=self.gather_block,
            token_chunk=self.token_chunk,
            vocab_block=self.vocab_block,
            expert_slices=self.expert_slices,
            remat=self.remat,
            reduce_dtype=self.reduce_dtype,
        )


class Rates(NamedTuple):
    """What a schedule decides for one step: weight of the MTP loss, step of the router bias."""

    mtp_weight: jax.Array
    bias_rate: jax.Array


def loss_function(cfg, config: StepConfig, mesh=None, token_loss: TokenLoss | None = None):
    """`f(params, batch, rates) -> (objective, LossParts)` over a whole batch of arrays [b t]."""
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
        run = functools.partial(local, num_rows=batch["token_ids"].shape[0], plan=config.plan())
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


def _local(cfg, config: StepConfig, mesh, token_loss: TokenLoss | None):
    """`local_objective` of a model on a mesh, with what a step's config says of it, but for rows and plan."""
    return functools.partial(
        local_objective,
        cfg=cfg,
        chunk=config.loss_chunk,
        region=Region() if mesh is None else Region.of(mesh),
        index_factor=config.index_weight,
        index_served=config.index_target == "served",
        token_loss=token_loss,
    )


def _loss_weights(config: StepConfig, rates: Rates) -> LossWeights:
    return LossWeights(rates.mtp_weight, config.balance_weight, config.z_weight)


def _streams(token_loss: TokenLoss | None, batch) -> tuple[str, ...]:
    """What a token_loss reads of a batch: "old_logp" too, of a batch that is trained on in several steps."""
    return () if token_loss is None else (*token_loss.streams, *({"old_logp"} & set(batch)))


def gradient_function(
    cfg, config: StepConfig, mesh=None, frozen=(), token_loss: TokenLoss | None = None
):
    """`f(params, batch, rates) -> (objective, LossParts, gradients)`, summed over microbatches.

    frozen: paths of parameters for which no gradient is computed; it is zeros.
    """
    loss, local = (make(cfg, config, mesh, token_loss) for make in (loss_function, _local))
    mtp_steps = config.mtp_runs(cfg)

    def gradients(params, batch, rates):
        flat = flatten(params)
        still = {path: flat.pop(path) for path in frozen}
        objective, parts, grads = moving(flat, still, batch, rates)
        return objective, parts, unflatten(grads | jax.tree.map(jnp.zeros_like, still))

    def moving(flat, still, batch, rates):
        rows, length = batch["token_ids"].shape
        region = local.keywords["region"]
        check_batch(rows, length, region)
        count = config.microbatches(rows, region.size(BATCH_AXES))
        if config.balance_rows:
            learnt = {
                "mtp_steps": mtp_steps,
                "trunk": any("indexer/" not in path for path in flat),
                "indexers": config.index_weight > 0,
            }
            batch = balanced(batch, cfg, mesh, count, **learnt)
        streams = _streams(token_loss, batch)
        totals = totals_of(batch, shift(batch, mtp_steps, streams))
        if count == 1 and config.accumulate == "sharded":
            take = jax.value_and_grad(
                lambda p: loss(unflatten(p | still), batch, rates, totals), has_aux=True
            )
            (objective, parts), grads = take(flat)
            return objective, parts, grads
        # Row r goes to microbatch r % n, so that every device keeps its own rows.
        split = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
        shifted = jax.vmap(lambda part: shift(part, mtp_steps, streams))(split)
        split = {k: split[k] for k in BATCH_KEYS}

        def run(flat, still, split, totals, loss_weights):
            def objective(params, part, plan):
                return local(params, *part, totals, loss_weights, num_rows=rows, plan=plan)

            return accumulated(
                objective,
                flat,
                still,
                split,
                cfg=cfg,
                plan=config.plan(),
                region=region,
                mode=config.accumulate,
            )

        args = (flat, still, (split, shifted), totals, _loss_weights(config, rates))
        if mesh is None:
            return run(*args)
        specs = {path: s.spec for path, s in flatten(glm5.param_shardings(cfg, mesh)).items()}
        own, others = ({path: specs[path] for path in part} for part in (flat, still))
        parts = P(None, BATCH_AXES, SEQUENCE_AXES)
        stacked = P(None, *parts)
        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(own, others, (parts, Shifted(stacked, stacked, parts)), P(), P()),
            out_specs=(P(), P(), own),
            check_vma=False,
        )(*args)

    return gradients


def score_function(cfg, config: StepConfig, mesh=None, temperature: float = 1.0):
    """`f(params, batch) -> float32[b t]`, as `Step.score`, of logits / temperature; by the learner's own forward."""
    region = Region() if mesh is None else Region.of(mesh)

    def local(params, batch, targets):
        return local_logp(
            params,
            batch,
            targets,
            temperature,
            cfg=cfg,
            plan=config.plan(),
            chunk=config.loss_chunk,
            region=region,
        )

    def score(params, batch):
        own = {k: batch[k] for k in ("token_ids", "segment_ids", "positions")}
        targets = jnp.roll(own["token_ids"], -1, axis=1)
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
        logp = jnp.roll(run(params, own, targets), 1, axis=1)
        return jnp.where(own["positions"] > 0, logp, 0)

    return score


class Step(NamedTuple):
    """A compiled training of one model: what makes its state, moves it on and judges it.

    initialise(key, params=None) -> state; abstract: the state as `jax.ShapeDtypeStruct`s that carry
    their shardings (what a checkpoint is restored into); train(state, batch) -> (state, metrics)
    donates the state; update(state, batch, learning_rate) is the same at a rate that is given, to be
    compiled by the caller (one program for all rates); evaluate(params, batch) -> (summed nll, number of
    targets) of the main head; score(params, batch) -> float32[b t], the log-prob of each token given those of its
    segment before it, 0 of a first one. trains_trunk: whether more than the indexers learns.
    """

    initialise: Callable[..., dict]
    abstract: dict
    train: Callable[[dict, dict], tuple[dict, dict]]
    update: Callable[[dict, dict, jax.Array], tuple[dict, dict]]
    evaluate: Callable[[dict, dict], tuple[jax.Array, jax.Array]]
    score: Callable[[dict, dict], jax.Array]
    trains_trunk: bool


def make_step(
    cfg,
    config: StepConfig,
    optimizer_config: OptimizerConfig,
    schedule,
    mesh=None,
    token_loss: TokenLoss | None = None,
) -> Step:
    """The train step of a model on a mesh (None: one device). token_loss: what sampled tokens are learnt from.

    schedule: step (from 0) -> learning rate. The state is {params, optimizer, step, tokens, rng}: float32
    weights, the optax state, steps made, tokens seen (float32: it only feeds switches) and key data. A
    step whose loss or gradients are not finite leaves params and optimizer as they were and reports
    `skipped` 1; it counts as a step all the same.
    """
    names = glm5.letters(cfg)
    groups = groups_of(optimizer_config, names)
    frozen = [path for path, group in flatten(groups).items() if group == "frozen"]
    if len(frozen) == len(flatten(groups)):
        raise ValueError(
            f"frozen is {optimizer_config.frozen!r}, which leaves no weight that trains; leave one out of it"
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
            switched(config.mtp_weight, state["tokens"]),
            switched(config.bias_update_rate, state["tokens"]),
        )
        params = state["params"]
        total, parts, grads = gradients(params, batch, rates)
        norms = gradient_norms(grads, groups)
        finite = jnp.isfinite(total) & jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
        updates, moments = optimizer.update(grads, state["optimizer"], params)
        updates = jax.tree.map(lambda u: learning_rate * u, updates)
        # What is frozen is not even added to: -0.0 + 0.0 is 0.0.
        moved = flatten(params) | {
            path: value
            for path, value in flatten(optax.apply_updates(params, updates)).items()
            if path not in frozen
        }
        moved = _balanced(unflatten(moved), parts.load, rates.bias_rate, optimizer_config.frozen)

        state = advanced(state, batch, moved, moments, finite)
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
            metrics["router"] = {"max_over_mean": parts.load.max(-1) / mean}
        return state, metrics

    def evaluate(params, batch):
        targets = shift(batch, 0).weights.sum()
        zero = jnp.zeros(())
        _, parts = objective(params, batch, Rates(zero, zero))
        return parts.ce * targets, targets

    abstract = jax.eval_shape(
        lambda key: {
            "params": glm5.abstract(cfg, "float32"),
            "optimizer": optimizer.init(glm5.abstract(cfg, "float32")),
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


def advanced(state, batch, params, moments, finite) -> dict:
    """The state after a step that leads to these params and moments; unless finite, it has the old ones."""

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    return {
        "params": keep(params, state["params"]),
        "optimizer": keep(moments, state["optimizer"]),
        "step": state["step"] + 1,
        "tokens": state["tokens"] + batch["token_ids"].size,
        "rng": state["rng"],
    }


def with_new_moments(state) -> dict:
    """The state with an optimiser that begins: moments, and the counts that correct their bias, are zero. Weights,
    steps and with them the schedule, tokens and keys stay. GLM-5 4.1.1 does so after each push of weights, as a new
    rollout policy is a new problem. The old moments are donated, a leaf at a time."""

    def zeroed(x):
        new = jnp.zeros_like(x)  # where x is, if it is bound to that
        x.delete()
        return new

    return state | {"optimizer": jax.tree.map(zeroed, state["optimizer"])}


def _state_shardings(cfg, abstract, mesh):
    whole = NamedSharding(mesh, P())
    params = glm5.param_shardings(cfg, mesh)
    return {
        "params": params,
        "optimizer": state_shardings(abstract["optimizer"], params),
        "step": whole,
        "tokens": whole,
        "rng": whole,
    }


def _of(shardings, name):
    return None if shardings is None else shardings[name]


def _place(state, shardings):
    if shardings is None:
        # All bound to the device that given weights are bound to, as a step's results are then: or the second step would
        # be another program, compiled anew.
        shardings = jax.tree.leaves(state["params"])[0].sharding
    return jax.device_put(state, shardings)


def _balanced(params, load, rate, frozen):
    """The router biases moved towards a balanced load [l e], layer by layer (the MTP block last), but for those that a
    pattern names."""
    if load is None:
        return params
    flat = flatten(params)
    biases = ("moe_layers/router/bias", "mtp/block/router/bias")
    for path in (path for path in biases if path in flat and not found(frozen, path)):
        own = load[-1] if path.startswith("mtp") else load[: flat[path].shape[0]]
        flat[path] = balance_bias(flat[path], own, rate)
    return unflatten(flat)
