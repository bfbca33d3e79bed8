"""Trains an outcome reward model on pairs of replies to one conversation, so that the preferred reply scores higher.

    loss = mean over pairs of -log sigmoid(score(chosen) - score(rejected))

This is the Bradley-Terry model, as in InstructGPT (arXiv 2203.02155, 3.4). GLM-5 discloses nothing about it. The
number of pairs per step and the learning rate are Llama 2's (arXiv 2307.09288, 3.2.2); the other defaults are our
choice. The head starts at 0, so the first loss is log 2. A checkpoint has one array more than a language model's,
which `may_differ=("^score/",)` ignores.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int

from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import Batch, take_rows
from glm5_jax.data.preferences import Preference, read_preferences
from glm5_jax.data.sources import is_held_out
from glm5_jax.model import glm5
from glm5_jax.parallel import multihost
from glm5_jax.parallel.mesh import Region, check_batch
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.rl.config import policy_step_config
from glm5_jax.rl.reward_model import outcome_model
from glm5_jax.rl.reward_model.outcome_model import (
    HEAD,
    mean_and_std,
    pack_sequences,
    score_sequences,
    write_scorer,
)
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.optimizer import (
    OptimizerConfig,
    gradient_norms,
    groups_of,
    make_optimizer,
    state_shardings,
)
from glm5_jax.training.schedule import ScheduleConfig
from glm5_jax.training.stages import BatchSource, Stage
from glm5_jax.training.step import Step, all_finite, new_state, next_state
from glm5_jax.training.step_config import StepConfig


def pair_margins(
    scores: Float[Array, "b t"], pair: Int[Array, "b t"], count: int
) -> Float[Array, " n"]:
    """Returns the margin of each pair: the score of the chosen reply minus that of the rejected one.

    pair is n at the last token of the chosen reply of pair n (from 1), -n at that of the rejected one, and 0 elsewhere.
    """
    signed = jnp.where(pair == 0, 0, jnp.sign(pair) * scores)
    return jnp.zeros(count + 1, scores.dtype).at[jnp.abs(pair)].add(signed)[1:]


def bradley_terry_loss(margins: Float[Array, " n"]) -> Float[Array, ""]:
    """Returns the mean loss of pairs with these margins, in nats."""
    return -jnp.mean(jax.nn.log_sigmoid(margins))


def reward_model_optimizer_config() -> OptimizerConfig:
    """Returns AdamW that trains neither LM head, MTP layer nor indexer.

    The first two take no part in the loss; the indexer is frozen in all of GLM-5's RL.
    frozen=("^(?!score/)",) trains only the new head.
    """
    return OptimizerConfig(matrices="adamw", frozen=("indexer/", "^mtp/", "^lm_head/"))


def cosine_schedule_config() -> ScheduleConfig:
    """Returns Llama 2's schedule for its largest model: to a tenth, after 3% of the steps.

    The number of steps is our choice.
    """
    return ScheduleConfig(kind="cosine", peak=5e-6, end=5e-7, warmup_steps=30, total_steps=1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutcomeConfig(StageConfig):
    """Configuration of a run that trains a reward model on pairs of replies.

    Attributes:
      files: files of pairs (data/preferences.py).
      pairs: pairs of a step.
      length: tokens of a row, and maximum tokens of a conversation with its reply.
      rows: divisor of a batch's rows; the quotient is a power of two.
      variant: name of the chat layout.
      held_out_fraction: share of the conversations that are held out for evaluation.
      max_eval_pairs: maximum pairs of an evaluation, and of the measurement of the scores' mean and deviation.
    """

    optimizer: OptimizerConfig = dataclasses.field(default_factory=reward_model_optimizer_config)
    schedule: ScheduleConfig = dataclasses.field(default_factory=cosine_schedule_config)
    step: StepConfig = dataclasses.field(default_factory=policy_step_config)
    requires_checkpoint: bool = True
    files: tuple[str, ...] = ()
    pairs: int = 512
    length: int = 8192
    rows: int = 8
    variant: str = "glm5"
    held_out_fraction: float = 0.05
    max_eval_pairs: int = 512

    def __post_init__(self):
        for name in ("pairs", "length", "rows", "max_eval_pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}; it must be between 0 and 1"
            )
        if self.step.rows_per_device is not None:
            raise ValueError(
                f"step.rows_per_device is {self.step.rows_per_device}; a pair may stand in two rows, so use None"
            )

    @property
    def row_length(self) -> int:
        return self.length

    def check_rows(self, region: Region) -> None:
        check_batch(self.rows, self.length, region)

    @property
    def chat_variant(self) -> str:
        return self.variant

    def preferences(self) -> list[Preference]:
        """Returns the pairs of all files. Raises ValueError as `read_preferences` does."""
        if not self.files:
            raise ValueError("there are no files; give --experiment.files=\"('PAIRS.jsonl',)\"")
        return [pair for file in self.files for pair in read_preferences(file)]

    def make_stage(self, workdir, evaluator=None, previous_stage=None, **options):
        return OutcomeTrainer(
            self, workdir, self.preferences(), previous_stage=previous_stage, **options
        )


def make_outcome_step(
    cfg: ModelConfig,
    config: StepConfig,
    optimizer_config: OptimizerConfig,
    schedule,
    mesh=None,
    pairs: int = 1,
) -> Step:
    """Builds the training step of a reward model, as `training.step.make_step`, for batches of `pairs` pairs.

    evaluate(params, batch) returns (summed loss, number of pairs); `make_token_scorer` documents score(params, batch).
    """
    names = outcome_model.axis_letters(cfg)
    groups = groups_of(optimizer_config, names)
    frozen_paths = [path for path, group in flatten(groups).items() if group == "frozen"]
    optimizer = make_optimizer(optimizer_config, names, mesh)
    scores = outcome_model.make_token_scorer(cfg, config.execution(), mesh)

    def objective(trainable, frozen_params, batch):
        margins = pair_margins(
            scores(unflatten(trainable | frozen_params), batch), batch["pair"], pairs
        )
        return bradley_terry_loss(margins), margins

    def initial_state(key, params):
        return new_state(params, optimizer.init(params), key)

    def initialise(key, params=None):
        init_key, run_key = jax.random.split(key)
        if params is None:
            params = glm5.init_params(cfg, init_key, "float32", mesh)
        head = jnp.zeros(cfg.hidden_size, jnp.float32)
        # Weights are donated, because two copies might not fit into memory.
        return jax.jit(initial_state, donate_argnums=1, out_shardings=state_sharding)(
            run_key, {**params, HEAD: {"weight": head}}
        )

    def train(state, batch):
        return update(state, batch, schedule(state["step"]))

    def update(state, batch, learning_rate):
        params = state["params"]
        trainable = flatten(params)
        frozen_params = {path: trainable.pop(path) for path in frozen_paths}
        (loss, margins), grads = jax.value_and_grad(objective, has_aux=True)(
            trainable, frozen_params, batch
        )
        grads = unflatten(grads | jax.tree.map(jnp.zeros_like, frozen_params))
        norms = gradient_norms(grads, groups)
        finite = all_finite(loss, norms)
        updates, moments = optimizer.update(grads, state["optimizer"], params)
        new_params = optax.apply_updates(params, jax.tree.map(lambda u: learning_rate * u, updates))

        state = next_state(state, batch, new_params, moments, finite)
        metrics = {
            "loss": {"total": loss, "preference": loss},
            "accuracy": jnp.mean(margins > 0),
            "margin": jnp.mean(margins),
            "grad_norm": norms,
            "learning_rate": learning_rate,
            "skipped": ~finite,
        }
        return state, metrics

    def evaluate(params, batch):
        return objective(flatten(params), {}, batch)[0] * pairs, jnp.asarray(pairs)

    abstract = jax.eval_shape(initial_state, jax.random.key(0), outcome_model.abstract_params(cfg))
    step_shardings = state_sharding = None
    if mesh is not None:
        replicated, params = NamedSharding(mesh, P()), outcome_model.param_shardings(cfg, mesh)
        state_sharding = {name: replicated for name in abstract} | {
            "params": params,
            "optimizer": state_shardings(abstract["optimizer"], params),
        }
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract,
            state_sharding,
        )
        step_shardings = (state_sharding, replicated)
    return Step(
        initialise,
        abstract,
        jax.jit(train, donate_argnums=0, out_shardings=step_shardings),
        update,
        jax.jit(evaluate),
        jax.jit(scores),
        True,
    )


class Pair(NamedTuple):
    """Token ids of two chats that are one conversation with two replies.

    Attributes:
      chosen, rejected: ids of the chat with the preferred reply, and with the other.
    """

    chosen: list[int]
    rejected: list[int]


def render_pairs(
    preferences: Sequence[Preference], tokenizer: Tokenizer, config: OutcomeConfig
) -> tuple[list[Pair], list[Pair]]:
    """Returns (training pairs, held-out pairs). All pairs of a conversation are on one side.

    Raises ValueError, with its number, if a pair exceeds a row, or if both of its replies are rendered alike.
    """
    training: list[Pair] = []
    held_out: list[Pair] = []
    for number, preference in enumerate(preferences, 1):
        messages, tools = preference.messages, preference.tools
        try:
            chosen, rejected = (
                outcome_model.encode_chat(
                    (*messages, reply), tokenizer, config.variant, config.length, tools
                )
                for reply in (preference.chosen, preference.rejected)
            )
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}") from None
        if chosen == rejected:
            raise ValueError(f"pair {number}: both replies read alike; drop it")
        conversation = json.dumps([messages, tools], sort_keys=True)
        side = held_out if is_held_out(conversation, config.held_out_fraction) else training
        side.append(Pair(chosen, rejected))
    for side, purpose in ((training, "training"), (held_out, "evaluation")):
        if not side:
            raise ValueError(
                f"of {len(preferences)} pairs none is left for {purpose}, held_out_fraction "
                f"{config.held_out_fraction}; add pairs or change the fraction"
            )
    return training, held_out


class PairSource:
    """Endless batches of pairs in a new random order in each epoch; a `training.stages.BatchSource`.

    group, num_groups: a process of a pod gets part `group` of `num_groups` equal parts of a batch's rows.
    """

    def __init__(
        self, pairs: Sequence[Pair], config: OutcomeConfig, group: int = 0, num_groups: int = 1
    ):
        self._pairs, self._config = pairs, config
        self._group, self._num_groups = group, num_groups
        self._drawn = 0
        self._digest = hashlib.blake2b(json.dumps(pairs).encode(), digest_size=8).hexdigest()

    def next(self, batch_size: int) -> Batch:
        """Returns the next batch, whose number of rows is a multiple of batch_size."""
        drawn = self._draw(self._config.pairs)
        replies = [ids for pair in drawn for ids in pair]
        multiple = batch_size * self._num_groups
        batch, ends = pack_sequences(replies, self._config.length, multiple)
        batch["pair"] = np.zeros_like(batch["token_ids"])
        for number, (chosen, rejected) in enumerate(zip(ends[::2], ends[1::2]), 1):
            batch["pair"][chosen], batch["pair"][rejected] = number, -number
        return take_rows(batch, self._group, self._num_groups)

    def _draw(self, count: int) -> list[Pair]:
        """Returns the next pairs."""
        pairs: list[Pair] = []
        while len(pairs) < count:
            epoch, start = divmod(self._drawn, len(self._pairs))
            order = np.random.default_rng((self._config.seed, epoch)).permutation(len(self._pairs))
            indices = order[start : start + count - len(pairs)]
            pairs += [self._pairs[i] for i in indices]
            self._drawn += len(indices)
        return pairs

    def state(self) -> dict:
        return {"drawn": self._drawn, "pairs": self._digest}

    def check(self, state: dict) -> None:
        """Raises ValueError if the state belongs to other pairs."""
        if state["pairs"] != self._digest:
            raise ValueError(
                "the run was on other pairs; resume with the same, or start a new workdir"
            )

    def restore(self, state: dict) -> None:
        self.check(state)
        self._drawn = state["drawn"]

    def close(self) -> None:
        """Does nothing, because the source holds no resources."""


class OutcomeTrainer(Stage[OutcomeConfig]):
    """Trains a reward model, and at the end writes `outcome_model.SCORER`, which `OutcomeModel.load` reads."""

    def __init__(
        self,
        config: OutcomeConfig,
        workdir,
        preferences: Sequence[Preference],
        step_maker: Callable[..., Step] = make_outcome_step,
        previous_stage: Stage | None = None,
    ):
        self._preferences = preferences
        super().__init__(config, workdir, step_maker, previous_stage)

    def _make_step(self, step_maker: Callable[..., Step], **options) -> Step:
        return super()._make_step(step_maker, pairs=self.config.pairs, **options)

    def _open(self) -> BatchSource:
        training, held_out = render_pairs(self._preferences, self.tokenizer, self.config)
        self._held_out_pairs = held_out[: self.config.max_eval_pairs]
        self._scale_pairs = training[: self.config.max_eval_pairs]
        return PairSource(training, self.config, self._group, self._num_groups)

    def _rows(self, tokens_seen: int) -> int:
        return self.config.rows // self._num_groups

    def _describe_step(self) -> str:
        return f"{self.config.pairs} pairs per step"

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]]:
        config = self.config

        def score_pairs(state, pairs: Sequence[Pair]) -> np.ndarray:
            """Returns the scores of the chosen and the rejected replies, [n 2]."""
            replies = [ids for pair in pairs for ids in pair]
            scores = score_sequences(
                self.score, state["params"], replies, config.length, config.rows
            )
            return np.reshape(scores, (-1, 2))

        def evaluate(state, done):
            margins = -np.diff(score_pairs(state, self._held_out_pairs))
            if done == config.steps:
                mean, std = mean_and_std(score_pairs(state, self._scale_pairs))
                fields = {"length": config.length, "variant": config.variant}
                fields |= {"step": done, "mean": mean, "std": std}
                multihost.run_on_first(lambda: write_scorer(self.workdir, **fields))
            return {
                "held_out/accuracy": float(np.mean(margins > 0)),
                "held_out/preference": float(np.mean(np.logaddexp(0, -margins))),
            }

        return evaluate
