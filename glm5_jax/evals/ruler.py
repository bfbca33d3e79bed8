"""Long-context tasks (data/synthetic.py) as an evaluation: by kind and length, with intervals.

A sample is solved if greedy decoding of its prompt would write its answers. One forward over prompt
and answers decides that: if every answer token is the argmax at its place, greedy decoding goes the
same way; at the first that is not, it leaves it. The score of RULER, the share of the answers that
are right, is taken in the same forward, so each answer is judged after the right ones before it.
(RULER looks for the answers anywhere in what was decoded; and MRCR measures how similar a text is to
the reply, of which only "all of it" is kept here.)
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
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.config import ModelConfig
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.mesh import Region, make_mesh
from glm5_jax.data.synthetic import KINDS, LongContextTasks, Task, TaskConfig
from glm5_jax.evals.batches import batches
from glm5_jax.evals.columns import aligned
from glm5_jax.evals.intervals import paired_difference, wilson
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.plan import Plan
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.pretraining import Setting
from glm5_jax.training.stages import Evaluator
from pallas_kernels.numerics import wide

STREAM = "evaluation"  # not what records are trained on
ROWS = 128  # rows of logits at a time
QUIET_SECONDS = 3.0  # before there is a progress bar


@dataclasses.dataclass(frozen=True)
class RulerConfig:
    """What to evaluate. Construction refuses values out of range (ValueError).

    Attributes:
      kinds: kinds of tasks, of `data.synthetic.KINDS`.
      lengths: tokens of prompt and answers.
      samples: of each kind at each length (RULER: 500).
      seed: of the samples; two models are compared on the same.
      batch_size: samples that are scored at a time.
      task: everything else about the tasks, for instance their surface.
    """

    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    samples: int = 500
    seed: int = 0
    batch_size: int = 8
    task: TaskConfig = TaskConfig()

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

    def task_of(self, kind: str, length: int) -> TaskConfig:
        return dataclasses.replace(
            self.task, kind=kind, length=length, seed=self.seed, size=self.samples
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """Of one kind at one length: exact bool[n], whether a sample is solved; share float64[n] of its
    answers; depth float64[n], the mean of its needles' (NaN without any); samples: a hash of them."""

    exact: np.ndarray
    share: np.ndarray
    depth: np.ndarray
    samples: str


def ruler(
    params,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    config: RulerConfig,
    *,
    mesh=None,
    plan: Plan = Plan(),
    progress: bool = True,
) -> dict[str, Score]:
    """{"KIND/LENGTH": Score} of a model. progress: show a bar when it takes more than seconds.

    ValueError for a length beyond the model's positions or too short for a kind, and for batches that
    a mesh cannot split.
    """
    tasks = _tasks(tokenizer, config)
    return _score_all(params, cfg, tasks, config, mesh, plan, progress)


def score(
    params,
    cfg: ModelConfig,
    tasks: Sequence[Task],
    batch_size: int,
    *,
    tail: int | None = None,
    mesh=None,
    plan: Plan = Plan(),
    done: Callable[[int], None] = lambda rows: None,
) -> Score:
    """Scores tasks of one length. tail: tokens at the end that are looked at (default: as many as the
    answers have; one for all kinds compiles once). done is told after each batch how many it were."""
    ids = np.stack([task.token_ids for task in tasks])
    numbers = np.stack([task.answer_numbers for task in tasks])
    tail = tail or max(_answer_size(task) for task in tasks)
    right = []
    for batch, count in batches(ids, batch_size):
        right.append(np.asarray(right_answers(params, batch, cfg, tail, mesh, plan))[:count])
        done(count)
    right, numbers = np.concatenate(right), numbers[:, -tail:]
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


def _answer_size(task: Task) -> int:
    return sum(map(len, task.answers))


@functools.partial(jax.jit, static_argnames=("cfg", "tail", "mesh", "plan"))
def right_answers(params, tokens, cfg, tail, mesh, plan):
    """bool[b tail]: whether each of the last tokens is the argmax after those before it."""
    # Of the forward only `hidden` is used, so the compiler leaves its logits [b t v] out.
    hidden = glm5.forward(params, tokens, cfg, mesh=mesh, plan=plan).hidden
    hidden = hidden[:, -tail - 1 : -1]
    if mesh is not None:
        # On every device, so that every process of a pod can read the verdict.
        hidden = lax.with_sharding_constraint(hidden, NamedSharding(mesh, P()))
    head = vocabulary.head(params, glm5.Weights(cfg, Region(), plan))
    logits = functools.partial(jnp.matmul, preferred_element_type=wide(hidden.dtype))
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


def _score_all(params, cfg, tasks, config: RulerConfig, mesh, plan, progress) -> dict[str, Score]:
    for length in config.lengths:
        cfg.check_length(length)
    total = len(config.kinds) * len(config.lengths) * config.samples
    seen, began, bar = 0, time.monotonic(), None
    out: dict[str, Score] = {}
    with contextlib.ExitStack() as stack:

        def done(rows: int) -> None:
            nonlocal seen, bar
            seen += rows
            if progress and bar is None and time.monotonic() - began > QUIET_SECONDS:
                bar = stack.enter_context(ProgressBar(total, seen, unit="sample"))
            if bar is not None:
                bar.update(seen, f"{kind} at {length}")

        for length, kinds in tasks.items():
            # Of a kind at a time: at 128K tokens its 500 samples are a quarter of a gigabyte.
            tail = max(_answer_size(own.task(i)) for own in kinds.values() for i in range(len(own)))
            for kind, own in kinds.items():
                samples = [own.task(i) for i in range(len(own))]
                out[f"{kind}/{length}"] = score(
                    params,
                    cfg,
                    samples,
                    config.batch_size,
                    tail=tail,
                    mesh=mesh,
                    plan=plan,
                    done=done,
                )
    return out


def metrics(scores: Mapping[str, Score]) -> dict[str, float]:
    """Means by name, for a log: `ruler/KIND/LENGTH/exact` and `.../share`."""
    out = {}
    for name, found in scores.items():
        out[f"ruler/{name}/exact"] = float(found.exact.mean())
        out[f"ruler/{name}/share"] = float(found.share.mean())
    return out


def compare(
    a: Mapping[str, Score], b: Mapping[str, Score]
) -> dict[str, tuple[float, float, float]]:
    """{name: (difference a - b of exact match, lower, upper 95% limit)} of two models on the same
    samples, and over all samples as "all". ValueError if the samples are not the same."""
    if a.keys() != b.keys() or any(a[name].samples != b[name].samples for name in a):
        raise ValueError(
            "the two were not scored on the same samples; use one RulerConfig for both"
        )
    out = {name: paired_difference(a[name].exact, b[name].exact) for name in a}
    whole = [np.concatenate([scores[name].exact for name in a]) for scores in (a, b)]
    return out | {"all": paired_difference(*whole)}


def table(scores: Mapping[str, Score]) -> str:
    """Plain text: percent of solved samples by kind and length with their 95% intervals; below a kind
    with several answers the share of them. The last row is the mean over kinds."""
    kinds, lengths = (dict.fromkeys(name.split("/")[i] for name in scores) for i in (0, 1))

    def cell(values: np.ndarray) -> str:
        low, high = wilson(values)
        return f"{100 * values.mean():5.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    rows = [["solved, %", *(f"{length} tokens" for length in lengths)]]
    for kind in kinds:
        of_kind = [scores[f"{kind}/{length}"] for length in lengths]
        rows.append([kind, *(cell(found.exact) for found in of_kind)])
        if any((found.exact != found.share).any() for found in of_kind):
            rows.append(["  share", *(cell(found.share) for found in of_kind)])
    means = [
        np.mean([scores[f"{kind}/{length}"].exact.mean() for kind in kinds]) for length in lengths
    ]
    rows.append(["mean", *(f"{100 * mean:5.1f}" for mean in means)])
    return aligned(rows)


class Ruler:
    """An `Evaluator` (training/stages.py) that reports `metrics`, beside those of `beside`, if any.

    An experiment hands in `functools.partial(Ruler, RulerConfig(...), beside=HeldOut)`.
    """

    def __init__(
        self,
        config: RulerConfig,
        setting: Setting,
        beside: Callable[[Setting], Evaluator] | None = None,
    ):
        """Opens the tasks; ValueError as `ruler`, before any training."""
        self._config, self._model = config, setting.config.model
        self._tasks = _tasks(setting.tokenizer, config)
        for length in config.lengths:
            self._model.check_length(length)
        axes, slices = setting.config.mesh, setting.config.step.expert_slices
        mesh = make_mesh(dataclasses.asdict(axes), expert_slices=slices)
        self._mesh = mesh if mesh.size > 1 else None
        self._plan = setting.config.step.plan()
        self._beside = beside and beside(setting)

    def __call__(self, params) -> dict[str, float]:
        scores = _score_all(
            params, self._model, self._tasks, self._config, self._mesh, self._plan, False
        )
        return (self._beside(params) if self._beside else {}) | metrics(scores)

    def baselines(self) -> dict[str, float]:
        """Those of `beside`."""
        return self._beside.baselines() if self._beside else {}
