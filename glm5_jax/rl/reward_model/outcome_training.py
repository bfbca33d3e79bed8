"""Training of an outcome reward model: of two replies to one conversation, the preferred one is to score higher.

    loss = mean over pairs of -log sigmoid(score(chosen) - score(rejected))

That is the model of Bradley and Terry, as in InstructGPT (arXiv 2203.02155, 3.4); GLM-5 discloses nothing of it: pairs
of a step and rate are Llama 2's (arXiv 2307.09288, 3.2.2), the other defaults ours. The head begins at 0, so the first
loss is log 2. A checkpoint is that of a model with one array more, which `may_differ=("^score/",)` leaves behind.
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

from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import Batch
from glm5_jax.data.preferences import Preference, read_preferences
from glm5_jax.data.sources import is_held_out
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import Region, check_batch
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.rl.config import policy_alone
from glm5_jax.rl.reward_model import outcome_model
from glm5_jax.rl.reward_model.outcome_model import (
    HEAD,
    lay_side_by_side,
    scale_of,
    score_all,
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
from glm5_jax.training.step import Step, StepConfig, next_state


def margins_of(scores, pair, count: int):
    """[count]: of each pair, the score of the chosen reply less that of the rejected one.

    scores wide[b t]; pair int32[b t]: n at the last token of the chosen reply of pair n (from 1), -n at that of
    the rejected one, else 0.
    """
    own = jnp.where(pair == 0, 0, jnp.sign(pair) * scores)
    return jnp.zeros(count + 1, scores.dtype).at[jnp.abs(pair)].add(own)[1:]


def bradley_terry(margins):
    """The loss of pairs with these margins, in nats."""
    return -jnp.mean(jax.nn.log_sigmoid(margins))


def adam() -> OptimizerConfig:
    """The language model's own head and the MTP layer take no part, and the indexer stays as in all of GLM-5's RL;
    frozen=("^(?!score/)",) trains the new head alone."""
    return OptimizerConfig(matrices="adamw", frozen=("indexer/", "^mtp/", "^lm_head/"))


def falling() -> ScheduleConfig:
    """Llama 2's, for its largest model: to a tenth, after 3% of the steps. How many they are is ours."""
    return ScheduleConfig(kind="cosine", peak=5e-6, end=5e-7, warmup_steps=30, total_steps=1000)


@dataclasses.dataclass(frozen=True)
class OutcomeConfig(StageConfig):
    """A run that learns from pairs of replies.

    Attributes:
      files: of pairs (data/preferences.py).
      pairs: of a step.
      length: tokens of a row, and at most of a conversation with its reply.
      rows: of a batch: a multiple of this, in powers of two.
      variant: the chat layout.
      held_out_fraction: share of the conversations that the model is judged by.
      examined: pairs at most that it is judged by, and that give the scores' mean and deviation.
    """

    optimizer: OptimizerConfig = dataclasses.field(default_factory=adam)
    schedule: ScheduleConfig = dataclasses.field(default_factory=falling)
    step: StepConfig = dataclasses.field(default_factory=policy_alone)
    requires_checkpoint: bool = True
    files: tuple[str, ...] = ()
    pairs: int = 512
    length: int = 8192
    rows: int = 8
    variant: str = "glm5"
    held_out_fraction: float = 0.05
    examined: int = 512

    def __post_init__(self):
        for name in ("pairs", "length", "rows", "examined"):
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
        """The pairs to learn from. ValueError as `read_preferences`."""
        if not self.files:
            raise ValueError("there are no files; give --experiment.files=\"('PAIRS.jsonl',)\"")
        return [pair for file in self.files for pair in read_preferences(file)]

    def make_stage(self, workdir, evaluator=None, previous_stage=None, **options):
        return OutcomeTraining(
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
    """As `training.step.make_step`, for batches of so many pairs. evaluate(params, batch) -> (summed loss, number of
    pairs); score(params, batch): see `token_scores`."""
    names = outcome_model.letters(cfg)
    groups = groups_of(optimizer_config, names)
    frozen = [path for path, group in flatten(groups).items() if group == "frozen"]
    optimizer = make_optimizer(optimizer_config, names, mesh)
    scores = outcome_model.token_scores(cfg, config.execution(), mesh)

    def objective(moving, still, batch):
        margins = margins_of(scores(unflatten(moving | still), batch), batch["pair"], pairs)
        return bradley_terry(margins), margins

    def begun(key, params):
        return {
            "params": params,
            "optimizer": optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
            "tokens": jnp.zeros((), jnp.float32),
            "rng": jax.random.key_data(key),
        }

    def initialise(key, params=None):
        init_key, run_key = jax.random.split(key)
        if params is None:
            params = glm5.init_params(cfg, init_key, "float32", mesh)
        head = jnp.zeros(cfg.hidden_size, jnp.float32)
        # The weights go in and come out: two copies would not fit where they fill the memory.
        return jax.jit(begun, donate_argnums=1, out_shardings=where)(
            run_key, {**params, HEAD: {"weight": head}}
        )

    def train(state, batch):
        return update(state, batch, schedule(state["step"]))

    def update(state, batch, learning_rate):
        params = state["params"]
        moving = flatten(params)
        still = {path: moving.pop(path) for path in frozen}
        (loss, margins), grads = jax.value_and_grad(objective, has_aux=True)(moving, still, batch)
        grads = unflatten(grads | jax.tree.map(jnp.zeros_like, still))
        norms = gradient_norms(grads, groups)
        finite = jnp.isfinite(loss) & jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
        updates, moments = optimizer.update(grads, state["optimizer"], params)
        moved = optax.apply_updates(params, jax.tree.map(lambda u: learning_rate * u, updates))

        state = next_state(state, batch, moved, moments, finite)
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

    abstract = jax.eval_shape(begun, jax.random.key(0), outcome_model.abstract(cfg))
    out = where = None
    if mesh is not None:
        whole, params = NamedSharding(mesh, P()), outcome_model.shardings(cfg, mesh)
        where = {name: whole for name in abstract} | {
            "params": params,
            "optimizer": state_shardings(abstract["optimizer"], params),
        }
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, where
        )
        out = (where, whole)
    return Step(
        initialise,
        abstract,
        jax.jit(train, donate_argnums=0, out_shardings=out),
        update,
        jax.jit(evaluate),
        jax.jit(scores),
        True,
    )


class Pair(NamedTuple):
    """Two replies to one conversation, each with it, as ids."""

    chosen: list[int]
    rejected: list[int]


def rendered(
    preferences: Sequence[Preference], tokenizer: Tokenizer, config: OutcomeConfig
) -> tuple[list[Pair], list[Pair]]:
    """(pairs to learn from, pairs to be judged by), of which no conversation is on both sides. ValueError names a
    pair that cannot be laid out, or cannot be told apart."""
    sides: tuple[list[Pair], list[Pair]] = [], []
    for number, one in enumerate(preferences, 1):
        try:
            pair = Pair(
                *(
                    outcome_model.read(
                        (*one.messages, reply), tokenizer, config.variant, config.length, one.tools
                    )
                    for reply in (one.chosen, one.rejected)
                )
            )
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}") from None
        if pair.chosen == pair.rejected:
            raise ValueError(f"pair {number}: both replies read alike; drop it")
        asked = json.dumps([one.messages, one.tools], sort_keys=True)
        sides[is_held_out(asked, config.held_out_fraction)].append(pair)
    for side, name in zip(sides, ("learn from", "be judged by")):
        if not side:
            raise ValueError(
                f"of {len(preferences)} pairs none is there to {name}, held_out_fraction "
                f"{config.held_out_fraction}; add pairs or change the fraction"
            )
    return sides


class Pairs:
    """Endless batches of pairs, each epoch in an order of its own; a `training.stages.BatchSource`."""

    def __init__(self, pairs: Sequence[Pair], config: OutcomeConfig):
        self._pairs, self._config = pairs, config
        self._drawn = 0
        self._digest = hashlib.blake2b(json.dumps(pairs).encode(), digest_size=8).hexdigest()

    def next(self, batch_size: int) -> Batch:
        """The next pairs, in rows of a multiple of batch_size."""
        drawn = self._draw(self._config.pairs)
        replies = [ids for pair in drawn for ids in pair]
        batch, ends = lay_side_by_side(replies, self._config.length, batch_size)
        batch["pair"] = np.zeros_like(batch["token_ids"])
        for number, (chosen, rejected) in enumerate(zip(ends[::2], ends[1::2]), 1):
            batch["pair"][chosen], batch["pair"][rejected] = number, -number
        return batch

    def _draw(self, count: int) -> list[Pair]:
        found: list[Pair] = []
        while len(found) < count:
            epoch, at = divmod(self._drawn, len(self._pairs))
            order = np.random.default_rng((self._config.seed, epoch)).permutation(len(self._pairs))
            own = order[at : at + count - len(found)]
            found += [self._pairs[i] for i in own]
            self._drawn += len(own)
        return found

    def state(self) -> dict:
        return {"drawn": self._drawn, "pairs": self._digest}

    def check(self, state: dict) -> None:
        """ValueError if a position belongs to other pairs."""
        if state["pairs"] != self._digest:
            raise ValueError(
                "the run was on other pairs; resume with the same, or start a new workdir"
            )

    def restore(self, state: dict) -> None:
        self.check(state)
        self._drawn = state["drawn"]

    def close(self) -> None:
        """Nothing was started."""


class OutcomeTraining(Stage):
    """Training of a reward model; when it ends, `outcome_model.SCORER` in its workdir says how to use it."""

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

    def _check(self) -> None:
        config = self.config
        if jax.process_count() > 1:
            raise ValueError(
                f"{config.name} trains in one process and this pod has {jax.process_count()}; start it in one, on "
                "all devices of a host"
            )

    def _make_step(self, step_maker: Callable[..., Step], **options) -> Step:
        return super()._make_step(step_maker, pairs=self.config.pairs, **options)

    def _open(self) -> BatchSource:
        learnt, self._judged = rendered(self._preferences, self.tokenizer, self.config)
        self._known = learnt[: self.config.examined]
        return Pairs(learnt, self.config)

    def _rows(self, tokens_seen: int) -> int:
        return self.config.rows

    def _describe_step(self) -> str:
        return f"{self.config.pairs} pairs per step"

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]]:
        config = self.config

        def scores(state, pairs: Sequence[Pair]) -> np.ndarray:
            replies = [ids for pair in pairs for ids in pair]
            found = score_all(
                self._step.score, state["params"], replies, config.length, config.rows
            )
            return np.reshape(found, (-1, 2))

        def evaluate(state, done):
            margins = -np.diff(scores(state, self._judged[: config.examined]))
            told = {
                "held_out/accuracy": float(np.mean(margins > 0)),
                "held_out/preference": float(np.mean(np.logaddexp(0, -margins))),
            }
            if done == config.steps:
                mean, std = scale_of(scores(state, self._known))
                write_scorer(
                    self.workdir,
                    step=done,
                    length=config.length,
                    variant=config.variant,
                    mean=mean,
                    std=std,
                )
            return told

        return evaluate
