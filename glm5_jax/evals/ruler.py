"""Evaluates long-context tasks (data/synthetic.py) by kind and length, with confidence intervals.

A sample is solved if greedy decoding of its prompt would write its answers. One forward over prompt and answers decides
that: greedy decoding writes them if every answer token is the argmax at its position.

The same forward gives RULER's score, the share of correct answers, so each answer is judged after the correct previous
ones. (RULER searches the answers anywhere in the decoded text. MRCR measures the similarity of a text and the reply; this
module only checks equality.)
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.data.synthetic import KINDS, LongContextTask, LongContextTaskConfig, LongContextTasks
from glm5_jax.evals.batches import batches
from glm5_jax.evals.columns import align_columns
from glm5_jax.evals.intervals import paired_difference, wilson
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import Region, make_mesh
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.pretraining import Setting
from glm5_jax.training.stages import Evaluator
from pallas_kernels.numerics import accum_dtype

STREAM = "evaluation"  # a random stream that training data does not use
ROWS = 128  # rows of logits that are computed in one step
QUIET_S = 3.0  # time before a progress bar appears


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerConfig:
    """Options of the evaluation. Raises ValueError if a value is out of range.

    Attributes:
      kinds: kinds of tasks, of `data.synthetic.KINDS`.
      lengths: tokens of prompt and answers.
      samples: number of samples of each kind at each length (RULER: 500).
      seed: seed of the samples; two models are compared on the same samples.
      batch_size: samples that are scored in one step.
      task: all other options of the tasks, for instance their surface.
    """

    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    samples: int = 500
    seed: int = 0
    batch_size: int = 8
    task: LongContextTaskConfig = LongContextTaskConfig()

    def __post_init__(self):
        for name in ("kinds", "lengths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; name at least one, and each once")
        for name in ("samples", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for kind in self.kinds:
            for length in self.lengths:
                self.task_of(kind, length)

    def task_of(self, kind: str, length: int) -> LongContextTaskConfig:
        """Returns the config of the tasks of a kind and length."""
        return dataclasses.replace(
            self.task, kind=kind, length=length, seed=self.seed, size=self.samples
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Score:
    """Scores of the samples of one kind at one length.

    Attributes:
      exact: whether each sample is solved, bool[n].
      share: share of correct answers of each sample, float64[n].
      depth: mean depth of the needles of each sample, float64[n]; NaN without needles.
      samples: hash of the samples.
    """

    exact: np.ndarray
    share: np.ndarray
    depth: np.ndarray
    samples: str


def ruler(
    params: PyTree,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    config: RulerConfig,
    *,
    mesh: Mesh | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
    progress: bool = True,
) -> dict[str, Score]:
    """Evaluates a model, and returns {"KIND/LENGTH": Score}.

    progress: whether to show a progress bar after `QUIET_S`. Raises ValueError for a length beyond the model's positions
    or too short for a kind, and for batches that a mesh cannot split.
    """
    tasks = _tasks(tokenizer, config)
    return _score_all(params, cfg, tasks, config, mesh, execution, progress)


def score(
    params: PyTree,
    cfg: ModelConfig,
    tasks: Sequence[LongContextTask],
    batch_size: int,
    *,
    tail: int | None = None,
    mesh: Mesh | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
    on_batch: Callable[[int], None] = lambda rows: None,
) -> Score:
    """Scores tasks of one length.

    - tail: number of tokens at the end that are compared; None: length of the longest answers. One value for all kinds
      avoids recompilation.
    - on_batch: called after each batch with its number of samples.
    """
    ids = np.stack([task.token_ids for task in tasks])
    numbers = np.stack([task.answer_numbers for task in tasks])
    tail = tail or max(_answer_size(task) for task in tasks)
    parts = []
    for batch, count in batches(ids, batch_size):
        parts.append(np.asarray(correct_tokens(params, batch, cfg, tail, mesh, execution))[:count])
        on_batch(count)
    right, numbers = np.concatenate(parts), numbers[:, -tail:]
    shares = []
    for row, number in zip(right, numbers):
        answers = [row[number == n].all() for n in range(1, number.max() + 1)]
        shares.append(np.mean(answers))
    return Score(
        exact=(right | (numbers == 0)).all(1),
        share=np.array(shares),
        depth=np.array([np.mean(t.depths) if t.depths else math.nan for t in tasks]),
        samples=hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest(),
    )


def _answer_size(task: LongContextTask) -> int:
    return sum(map(len, task.answers))


@functools.partial(jax.jit, static_argnames=("cfg", "tail", "mesh", "execution"))
def correct_tokens(
    params: PyTree,
    tokens: jax.Array | np.ndarray,
    cfg: ModelConfig,
    tail: int,
    mesh: Mesh | None,
    execution: ExecutionConfig,
) -> jax.Array:
    """Returns bool[b tail]: whether each of the last tokens is the argmax after its prefix."""
    # Only `hidden` of the forward is used, so the compiler removes its logits [b t v].
    tokens = jnp.asarray(tokens)
    hidden = glm5.forward(params, tokens, cfg, mesh=mesh, execution=execution).hidden
    hidden = hidden[:, -tail - 1 : -1]
    if mesh is not None:
        # Replicated, so that every process of a pod can read the result.
        hidden = lax.with_sharding_constraint(hidden, NamedSharding(mesh, P()))
    head = vocabulary.head_weight(params, WeightGatherer(cfg, Region(), execution))
    logits = functools.partial(jnp.matmul, preferred_element_type=accum_dtype(hidden.dtype))
    best = lax.map(
        lambda row: jnp.argmax(logits(row, head)),
        hidden.reshape(-1, hidden.shape[-1]),
        batch_size=ROWS,
    )
    right = best.reshape(hidden.shape[:2]) == tokens[:, -tail:]
    return right if mesh is None else lax.with_sharding_constraint(right, NamedSharding(mesh, P()))


def _tasks(tokenizer: Tokenizer, config: RulerConfig) -> dict[int, dict[str, LongContextTasks]]:
    return {
        length: {
            kind: LongContextTasks(config.task_of(kind, length), tokenizer, stream=STREAM)
            for kind in config.kinds
        }
        for length in config.lengths
    }


def _score_all(
    params, cfg, tasks, config: RulerConfig, mesh, execution, progress
) -> dict[str, Score]:
    for length in config.lengths:
        cfg.check_length(length)
    total = len(config.kinds) * len(config.lengths) * config.samples
    seen, began, bar = 0, time.monotonic(), None
    out: dict[str, Score] = {}
    with contextlib.ExitStack() as stack:

        def on_batch(rows: int) -> None:
            nonlocal seen, bar
            seen += rows
            if progress and bar is None and time.monotonic() - began > QUIET_S:
                bar = stack.enter_context(ProgressBar(total, seen, unit="sample"))
            if bar is not None:
                bar.update(seen, f"{kind} at {length}")

        for length, kinds in tasks.items():
            # Create one kind after the other: at 128K tokens its 500 samples take a quarter of a gigabyte.
            tail = max(
                _answer_size(source.task(i))
                for source in kinds.values()
                for i in range(len(source))
            )
            for kind, source in kinds.items():
                samples = [source.task(i) for i in range(len(source))]
                out[f"{kind}/{length}"] = score(
                    params,
                    cfg,
                    samples,
                    config.batch_size,
                    tail=tail,
                    mesh=mesh,
                    execution=execution,
                    on_batch=on_batch,
                )
    return out


def metrics(scores: Mapping[str, Score]) -> dict[str, float]:
    """Returns the means by metric name: `ruler/KIND/LENGTH/exact` and `.../share`."""
    out = {}
    for name, score in scores.items():
        out[f"ruler/{name}/exact"] = float(score.exact.mean())
        out[f"ruler/{name}/share"] = float(score.share.mean())
    return out


def compare(
    a: Mapping[str, Score], b: Mapping[str, Score]
) -> dict[str, tuple[float, float, float]]:
    """Compares the exact match of two models on the same samples.

    Returns {name: (difference a - b, lower and upper 95% limit)}, with the result over all samples as "all". Raises
    ValueError if the samples differ.
    """
    if a.keys() != b.keys() or any(a[name].samples != b[name].samples for name in a):
        raise ValueError(
            "the two were not scored on the same samples; use one RulerConfig for both"
        )
    out = {name: paired_difference(a[name].exact, b[name].exact) for name in a}
    pooled_a, pooled_b = (np.concatenate([scores[name].exact for name in a]) for scores in (a, b))
    return out | {"all": paired_difference(pooled_a, pooled_b)}


def table(scores: Mapping[str, Score]) -> str:
    """Formats the scores as a text table.

    It shows the percentage of solved samples by kind and length with 95% intervals. A second row for kinds with several
    answers shows the share of correct answers. The last row is the mean over kinds.
    """
    kinds, lengths = (dict.fromkeys(name.split("/")[i] for name in scores) for i in (0, 1))

    def cell(values: np.ndarray) -> str:
        low, high = wilson(values)
        return f"{100 * values.mean():5.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    rows = [["solved, %", *(f"{length} tokens" for length in lengths)]]
    for kind in kinds:
        of_kind = [scores[f"{kind}/{length}"] for length in lengths]
        rows.append([kind, *(cell(score.exact) for score in of_kind)])
        if any((score.exact != score.share).any() for score in of_kind):
            rows.append(["  share", *(cell(score.share) for score in of_kind)])
    means = [
        np.mean([scores[f"{kind}/{length}"].exact.mean() for kind in kinds]) for length in lengths
    ]
    rows.append(["mean", *(f"{100 * mean:5.1f}" for mean in means)])
    return align_columns(rows)


class Ruler:
    """`Evaluator` (training/stages.py) that reports `metrics`, and those of another evaluator.

    An experiment passes `functools.partial(Ruler, RulerConfig(...), other=HeldOut)`.
    """

    def __init__(
        self,
        config: RulerConfig,
        setting: Setting,
        other: Callable[[Setting], Evaluator] | None = None,
    ):
        """Opens the tasks. Raises the ValueErrors of `ruler`, before any training.

        other: creates an evaluator whose metrics are added; None: none.
        """
        self._config, self._model = config, setting.config.model
        self._tasks = _tasks(setting.tokenizer, config)
        for length in config.lengths:
            self._model.check_length(length)
        axes, slices = setting.config.mesh, setting.config.step.expert_slices
        mesh = make_mesh(dataclasses.asdict(axes), expert_slices=slices)
        self._mesh = mesh if mesh.size > 1 else None
        self._execution = setting.config.step.execution()
        self._other = other and other(setting)

    def __call__(self, params) -> dict[str, float]:
        scores = _score_all(
            params, self._model, self._tasks, self._config, self._mesh, self._execution, False
        )
        return (self._other(params) if self._other else {}) | metrics(scores)

    def baselines(self) -> dict[str, float]:
        """Returns the baselines of the other evaluator."""
        return self._other.baselines() if self._other else {}
