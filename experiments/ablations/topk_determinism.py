"""Measures how nondeterministic key selection changes log-probabilities in RL (GLM-5 3.2).

    glm5 run topk_determinism:tiny --workdir=DIR     # or :small

In GLM-5's RL a nondeterministic top-k broke training within a few steps; torch.topk in the training engine repaired
it. Here the retriever of retriever.py is adapted to sparse attention (warm-up, then the sparse stage), and answers
questions about notes with other rules of selection than the exact one (among equal scores, the lower index). Every
rule runs three times over the same rows:

- twice as training does, the row at once;
- once as a rollout does, half of the row as prefill and the other half token by token through a cache that has room
  for more.

Answers are sampled at temperature 1 from the rollout with the exact rule, each after the right answers before it.
Reported, with all seeds and their spread:

- the share of selections that differ between two training passes, and between training and rollout;
- the difference of the sampled tokens' log-probabilities between training and rollout;
- answers that stay right, and the share of the exact rule's keys that a rollout selects.

Emulated here: XLA on a CPU is deterministic, so chance is a random order of equal scores, drawn at every call.
`lax.approx_max_k` is exact on a CPU. Its behaviour on a TPU is emulated: only the best of every few keys, here of
neighbours, is a candidate. jax chooses their number by the array's length: two for 2,048 of 131,072 keys, four for
2,048 of 202,752. So a rollout whose cache has room for more selects differently. (For as few keys as here it would be
exact.) The rules are those of selection_rules.py; the library has only the exact one.

:tiny    for two CPU cores: 128 tokens, 8 selected keys. Comparing the rules takes 150 s of CPU time to
         compile, once, and about 25 s a seed.
:small   more steps and rows, on one accelerator
"""

import dataclasses
import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from experiments import dsa_sparse, dsa_warmup
from experiments.ablations import retriever
from experiments.ablations.arms import AblationRuns, Arm, Trial, last_stage
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table
from experiments.ablations.selection_rules import (
    Pass,
    Rule,
    approx_native,
    exact,
    forward,
    in_bfloat16,
    in_float8,
    in_fours,
    in_pairs,
    lax_top_k,
    masked_scores,
    random_ties,
    rollout,
    rounded_ties,
    train,
)
from glm5_jax.checkpoint import store
from glm5_jax.config import ModelConfig
from glm5_jax.data.synthetic import LongContextTasks
from glm5_jax.evals.ruler import STREAM
from glm5_jax.metrics import charts
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.pretraining import ExperimentConfig

SEEDS = (0, 1, 2)
QUANTILES = tuple(i / 20 for i in range(21))
CHART_MIN = 1e-8  # smallest value that charts show
NAME = "sparse retriever"
RATIO = 0.2  # distance of a policy's ratio from 1 at which PPO clips it (2017, 1707.06347)
GATE = 1e-6  # mean |log-probability| difference that GLM-5's RL code requires, with exact top-k on both sides


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkSetup:
    """Training and comparison of the rules.

    Attributes:
      name: name of the setup.
      top_k: number of selected keys.
      warm_up: steps of the indexers' warm-up.
      sparse, sparse_rate: steps and constant rate of the sparse stage.
      capacity: tokens that a rollout's cache can hold.
      rows: rows on which rules are compared.
    """

    name: str
    top_k: int
    warm_up: int
    sparse: int
    sparse_rate: float
    capacity: int
    rows: int


def get_config(variant: str = "tiny") -> TopkSetup:
    """Returns the variant's setup. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> TopkSetup:
    """Selects a sixteenth of the keys."""
    return TopkSetup(
        name="topk_determinism:tiny",
        top_k=8,
        warm_up=80,
        sparse=80,
        sparse_rate=1e-3,
        capacity=256,
        rows=64,
    )


def small() -> TopkSetup:
    """Uses more steps, cache and rows than :tiny."""
    return TopkSetup(
        name="topk_determinism:small",
        top_k=8,
        warm_up=400,
        sparse=800,
        sparse_rate=1e-3,
        capacity=1024,
        rows=1024,
    )


def arm(setup: TopkSetup, workdir: str | os.PathLike) -> Arm:
    """Returns the retriever's arm, from random weights to sparse attention."""
    dense = retriever.stages(NAME, workdir, retriever.model())
    length = dense[-1].data.sequence_length
    indexed = retriever.model(index_topk=setup.top_k)
    base = retriever.stage(NAME, workdir, length, setup.warm_up, indexed, **retriever.LAST)
    schedule = dsa_warmup.make_warmup_schedule(setup.warm_up)
    warm = dsa_warmup.freeze_trunk(base, f"{NAME} warm-up", schedule=schedule)
    sparse = dsa_sparse.sparsify_stage(base, f"{NAME} sparse", setup.sparse_rate, setup.sparse)
    return Arm(NAME, (*dense, warm, sparse))


# {name: (rule of training, rule of rollouts)}
RULES: dict[str, tuple[Rule, Rule]] = {
    "exact": (exact, exact),
    "lax.top_k": (lax_top_k, lax_top_k),
    "random ties": (random_ties, random_ties),
    "random ties, bfloat16 scores": (rounded_ties, rounded_ties),
    "approx_max_k on a CPU": (approx_native, approx_native),
    "approx_max_k on a TPU, alike": (in_pairs, in_pairs),
    "approx_max_k on a TPU, longer cache": (in_pairs, in_fours),
    "bfloat16 index in rollouts": (exact, in_bfloat16),
    "FP8 index in rollouts": (exact, in_float8),
    "FP8 index in both": (in_float8, in_float8),
}


def compare_rules(
    params: PyTree,
    tokens: np.ndarray,
    is_answer: np.ndarray,
    cfg: ModelConfig,
    capacity: int,
    key: jax.Array,
) -> dict[str, dict]:
    """Returns {rule: differences} on rows int32[b t]; is_answer bool[b t]: the answers' tokens. params: unstacked."""
    keys = jax.random.split(key, 4)
    rows = jnp.asarray(tokens)
    exact_pass = rollout(params, rows, cfg, exact, keys[0], capacity)
    # Token t is predicted at t - 1.
    answers, is_answer_target = tokens[:, 1:], np.asarray(is_answer)[:, 1:]
    sampled = jax.random.categorical(keys[3], exact_pass.logits[:, :-1])

    def logp(out: Pass):
        logs = jax.nn.log_softmax(out.logits[:, :-1])
        return np.asarray(jnp.take_along_axis(logs, sampled[..., None], -1)[..., 0])[
            is_answer_target
        ]

    results = {}
    for name, (in_training, in_rollout) in RULES.items():
        passes = [train(params, rows, cfg, in_training, k) for k in keys[:2]]
        rolled = rollout(params, rows, cfg, in_rollout, keys[2], capacity)
        ours, again, theirs = map(logp, (*passes, rolled))
        differences = np.abs(ours - theirs).astype(np.float64)
        argmax = np.asarray(jnp.argmax(rolled.logits[:, :-1], axis=-1))
        results[name] = {
            "twice": differing_share(passes[0].topk, passes[1].topk),
            "rolled": differing_share(passes[0].topk, rolled.topk),
            "held": shared_keys(rolled.topk, exact_pass.topk),
            "twice_logp": float(np.abs(ours - again).max()),
            "mean_logp": float(differences.mean()),
            "max_logp": float(differences.max()),
            "quantiles": np.quantile(differences, QUANTILES).tolist(),
            "clipped": float(np.mean(np.abs(np.expm1(ours - theirs)) > RATIO)),
            "solved": float(np.mean((argmax == answers)[is_answer_target])),
        }
    return results


def differing_share(one: jax.Array | np.ndarray, other: jax.Array | np.ndarray) -> float:
    """Returns the share of queries whose sets topk int32[l b t k] differ, among those that leave keys out."""
    k = one.shape[-1]
    return float(np.mean(np.any(np.asarray(one) != np.asarray(other), axis=-1)[:, :, k:]))


def shared_keys(topk: jax.Array | np.ndarray, right: jax.Array | np.ndarray) -> float:
    """Returns the mean share of the keys right int32[l b t k] that are in topk, over queries that leave keys out."""
    k = topk.shape[-1]
    a, b = (np.asarray(x)[:, :, k:] for x in (topk, right))
    return float(np.mean([np.any(a == b[..., i : i + 1], axis=-1).mean() for i in range(k)]))


@functools.partial(jax.jit, static_argnames="cfg")
def share_of_ties(params: PyTree, tokens: jax.Array, cfg: ModelConfig) -> dict[str, jax.Array]:
    """Returns {dtype: share of queries whose last selected key has the score of the first one left out}.

    params: unstacked; dtype: type to which the scores are rounded.
    """
    shares_by_dtype = {"float32": [], "bfloat16": []}

    def note(index, start, segments, k, key):
        scores = masked_scores(index, start, segments)
        for dtype, shares in shares_by_dtype.items():
            best = lax.top_k(scores.astype(dtype), k + 1)[0]
            shares.append(jnp.mean(best[:, k:, k - 1] == best[:, k:, k]))
        return exact(index, start, segments, k, key)

    forward(params, tokens, cfg, note, jax.random.key(0))
    return {dtype: jnp.mean(jnp.stack(shares)) for dtype, shares in shares_by_dtype.items()}


def measure(setup: TopkSetup, trial: Trial, folder: pathlib.Path) -> dict:
    """Returns the row of the trained model: "rules" of `compare_rules`, and "tied"."""
    config = last_stage(trial.stages, ExperimentConfig)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    cfg = dataclasses.replace(
        config.model, eos_token_id=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id
    )
    params = store.load_params(folder, glm5.abstract_params(cfg))
    tasks = LongContextTasks(retriever.tasks_of(config), tokenizer, stream=STREAM)
    records = [tasks[i] for i in range(setup.rows)]
    tokens = np.stack([record.token_ids for record in records])
    is_answer = np.stack([record.loss_mask for record in records]) > 0
    key = jax.random.key(trial.seed)
    params = jax.jit(glm5.unstack, static_argnums=1)(params, cfg)
    differences = compare_rules(params, tokens, is_answer, cfg, setup.capacity, key)
    ties = {dtype: float(share) for dtype, share in share_of_ties(params, tokens, cfg).items()}
    return {"rules": differences, "tied": ties}


def compare(runs: AblationRuns, setup: TopkSetup, command: str) -> Finding:
    """Trains the model at all seeds and compares the rules."""
    runs = AblationRuns(runs.workdir, measure=functools.partial(measure, setup))
    trained = arm(setup, runs.workdir)
    return finding(setup, runs([trained.trial(seed=seed) for seed in SEEDS]), command)


def finding(setup: TopkSetup, rows: list[dict], command: str) -> Finding:
    """Returns tables, chart and verdicts from the rows of all seeds."""
    return Finding(
        title="Deterministic selection",
        command=command,
        verdicts=(*_rule_verdicts(rows), _ties_verdict(rows)),
        tables=(_selections(setup, rows), _log_probs(rows)),
        plots=(
            Plot(
                _quantiles(rows),
                f"Quantiles, mean over the seeds; what is below {CHART_MIN:g} is drawn there.",
            ),
        ),
    )


def _spread(rows: list[dict], name: str, field: str) -> Spread:
    return Spread.of(row["rules"][name][field] for row in rows)


def _largest(rows: list[dict], name: str, field: str) -> float:
    return max(row["rules"][name][field] for row in rows)


def _selections(setup: TopkSetup, rows: list[dict]) -> Table:
    """Returns the table of differing selections by rule."""
    fields = ("twice", "rolled", "held", "solved")
    return Table(
        title=f"{setup.name}: selections of {setup.top_k} keys that differ",
        columns=(
            "rule",
            "between two training passes",
            "training and rollout",
            "of the exact keys",
            "solved",
        ),
        rows=tuple(
            (name, *(f"{_spread(rows, name, field):.2%}" for field in fields))
            for name in rows[0]["rules"]
        ),
        note="Of queries that leave keys out, all layers; mean ± half of Student's 95% interval over seeds "
        "(lowest .. highest). Solved: answers that are a rollout's most likely token.",
    )


def _log_probs(rows: list[dict]) -> Table:
    """Returns the table of differences of log-probabilities by rule."""
    return Table(
        title="Log-probabilities of sampled answers, nats",
        columns=(
            "rule",
            "largest between two training passes",
            "mean, training to rollout",
            "largest",
            f"ratio off by more than {RATIO:.0%}",
        ),
        rows=tuple(
            (
                name,
                f"{_largest(rows, name, 'twice_logp'):.2g}",
                f"{_spread(rows, name, 'mean_logp'):.2g}",
                f"{_largest(rows, name, 'max_logp'):.2g}",
                f"{_spread(rows, name, 'clipped'):.2%}",
            )
            for name in rows[0]["rules"]
        ),
        note="Absolute differences.",
    )


def _rule_verdicts(rows: list[dict]) -> list[str]:
    """Returns the verdicts on the exact rule, then on the others relative to it."""
    right = "exact"
    same = _largest(rows, right, "twice") == 0 and _largest(rows, right, "twice_logp") == 0
    difference = _spread(rows, right, "mean_logp")
    verdicts = [
        "exact rule, two training passes: "
        + (
            "the same sets and bitwise the same log-probabilities"
            if same
            else "they differ: not met"
        ),
        f"exact rule, training to rollout: {_spread(rows, right, 'rolled'):.3%} of the sets differ, mean "
        f"difference {difference:.2g} nats; below {GATE:g}: {'met' if difference.mean < GATE else 'not met'}",
    ]
    for name in list(rows[0]["rules"])[1:]:
        times = _spread(rows, name, "mean_logp").mean / max(difference.mean, 1e-12)
        verdicts.append(
            f"{name}: {_spread(rows, name, 'rolled').mean:.2%} of the sets differ between training and rollout, "
            f"mean difference of log-probabilities {times:.3g} times the exact rule's"
        )
    return verdicts


def _ties_verdict(rows: list[dict]) -> str:
    ties = {d: Spread.of(row["tied"][d] for row in rows) for d in rows[0]["tied"]}
    return (
        "equal scores at the cut: "
        + ", ".join(f"{share:.2%} of the queries in {dtype}" for dtype, share in ties.items())
        + "; chance can choose only between those"
    )


def _quantiles(rows: list[dict]) -> str:
    """Returns the chart of the quantiles of the differences by rule."""
    return charts.line_chart(
        [
            (
                name,
                [100 * q for q in QUANTILES],
                _above(row["rules"][name]["quantiles"] for row in rows),
            )
            for name in rows[0]["rules"]
        ],
        x_label="percent of the sampled tokens",
        y_label="Difference of log-probabilities, training to rollout",
        log=True,
    )


def _above(quantiles) -> list[float]:
    """Returns means over seeds, at least `CHART_MIN`, because a logarithmic axis has no zero."""
    return np.maximum(np.mean([*quantiles], axis=0), CHART_MIN).tolist()


def run(setup: TopkSetup, workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("topk_determinism", setup, workdir, command, compare)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
