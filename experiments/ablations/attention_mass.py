"""Measures how much of attention is redundant, how much of it the indexer selects, and the saving (GLM-5 2.1.1).

    glm5 run attention_mass:tiny --workdir=DIR     # or :small

GLM-5 says that about 90% of the attention entries of long contexts are redundant, and that DSA cuts the computation of
attention by 1.5 to 2 times on long sequences. Here two models of dense attention get indexers, which train only in
DSA's warm-up: a model of text (pre-training, the last stage of mid-training, warm-up; a short lifecycle) and the
retriever of retriever.py, which must find one note among many. Reported by layer and by length, with all seeds and
their spread (evals/attention_mass.py):

- the share of attention inside the indexer's k keys, inside the best k and inside the last k;
- the number of keys that hold 90% and 99% of it.

Also reported are FLOPs of dense over sparse attention at GLM-5's shapes, from the cost models: `training.flops` and
those of the kernels. The meaning of "1.5 to 2" depends on what is counted, so several counts are listed.

:tiny    for two CPU cores, rows of 1,024 and 128 tokens
:small   the text model of pretrain.py:small, on one accelerator, with the text and the tokenizer that it
         names; rows of 8,192 tokens of the running Python's standard library
"""

import bisect
import dataclasses
import functools
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from experiments import dsa_warmup, midtrain, pretrain
from experiments.ablations import retriever
from experiments.ablations.arms import AblationRuns, Arm, Trial, last_stage
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table
from glm5_jax import presets
from glm5_jax.checkpoint import store
from glm5_jax.config import ModelConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.data.synthetic import LongContextTasks
from glm5_jax.evals.attention_mass import MassConfig, attention_mass
from glm5_jax.evals.position import long_documents
from glm5_jax.evals.ruler import STREAM
from glm5_jax.metrics import charts
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.flops import forward_flops
from glm5_jax.training.pretraining import ExperimentConfig
from pallas_kernels import dsa
from pallas_kernels.flash_mla import cost as dense_cost
from pallas_kernels.lightning_indexer import cost as indexer_cost
from pallas_kernels.sparse_flash_attention import cost as sparse_cost

SEEDS = (0, 1, 2)
TEXT, RETRIEVER = "text", "retriever"
KINDS = {"selected": "the indexer's", "best": "the best", "recent": "the last"}
REDUNDANT = 0.9  # of the attention entries, GLM-5 2.1.1
SAVED = (1.5, 2.0)  # factors of saved attention on long sequences, GLM-5 2.1.1
LONG = 131_072  # tokens: the length at which the paper compares DSA with dense attention (table 3)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 202752)
RETRIEVED = MassConfig(top_k=(2, 4, 8, 16, 32), edges=(17, 33, 65, 129))
RETRIEVER_WARM_UP = 100  # steps
LENGTH = 128  # tokens of the retriever's rows at the end of its curriculum


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMassSetup:
    """Training stages of the text model and the measurement of its attention.

    Attributes:
      name: name of the setup.
      text: stages of the text model, warm-up last.
      mass: options of the measurement.
      length, rows: tokens and number of the held-out documents.
    """

    name: str
    text: tuple[ExperimentConfig, ...]
    mass: MassConfig
    length: int
    rows: int


def get_config(variant: str = "tiny") -> AttentionMassSetup:
    """Returns the variant's setup. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> AttentionMassSetup:
    """Uses the stages of lifecycle.py:tiny with a part of their steps."""
    mass = MassConfig(top_k=(10, 20, 40, 80, 160, 320), edges=(65, 129, 257, 513, 1025))
    return AttentionMassSetup(
        name="attention_mass:tiny",
        text=_short_lifecycle("tiny", (300, 60, 60)),
        mass=mass,
        length=1024,
        rows=8,
    )


def small() -> AttentionMassSetup:
    """Uses the stages of lifecycle.py:small with a part of their steps."""
    mass = MassConfig(top_k=(128, 256, 512, 1024, 2048), edges=(513, 1025, 2049, 4097, 8193))
    return AttentionMassSetup(
        name="attention_mass:small",
        text=_short_lifecycle("small", (2000, 500, 500)),
        mass=mass,
        length=8192,
        rows=8,
    )


def _short_lifecycle(size: str, steps: Sequence[int]) -> tuple[ExperimentConfig, ...]:
    stages = (
        pretrain.get_config(size),
        # This stage stands for all of mid-training, which raises the rotary base.
        dataclasses.replace(midtrain.get_config(f"{size},200k"), may_differ=("rope_theta",)),
        dsa_warmup.get_config(size),
    )
    return tuple(map(_short, stages, steps))


def _short(stage: ExperimentConfig, steps: int) -> ExperimentConfig:
    """Returns the stage with its schedule over `steps` steps, which saves only its end."""
    train = dataclasses.replace(
        stage.train, eval_interval=0, sample_interval=0, save_interval=steps, keep=1
    )
    schedule = dataclasses.replace(stage.schedule, total_steps=steps)
    return dataclasses.replace(stage, schedule=schedule, train=train)


def arms(setup: AttentionMassSetup, workdir: str | os.PathLike) -> dict[str, Arm]:
    """Returns both models up to their indexers' warm-up."""
    dense = retriever.stages(RETRIEVER, workdir, retriever.model())
    indexed = retriever.model(index_topk=16)
    base = retriever.stage("warm-up", workdir, LENGTH, RETRIEVER_WARM_UP, indexed, **retriever.LAST)
    warm = dsa_warmup.freeze_trunk(
        base, f"{RETRIEVER} warm-up", schedule=dsa_warmup.make_warmup_schedule(RETRIEVER_WARM_UP)
    )
    return {TEXT: Arm(TEXT, setup.text), RETRIEVER: Arm(RETRIEVER, (*dense, warm))}


def measure(setup: AttentionMassSetup, trial: Trial, folder: pathlib.Path) -> dict:
    """Returns {"mass": fields of `evals.attention_mass.Mass` by layer and length}, for the row of a trained arm."""
    config = last_stage(trial.stages, ExperimentConfig)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    model = dataclasses.replace(
        config.model, eos_token_id=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id
    )
    params = store.load_params(folder, glm5.abstract_params(model))
    if trial.arm == TEXT:
        rows = long_documents(
            SourceConfig(kind="stdlib"),
            tokenizer,
            setup.length,
            setup.rows,
            held_out_fraction=config.data.held_out_fraction,
        )
        mass, batch = setup.mass, 1
    else:
        tasks = LongContextTasks(
            retriever.task(LENGTH, retriever.LAST["questions"]), tokenizer, stream=STREAM
        )
        rows = np.stack([tasks.task(i).token_ids for i in range(retriever.ROWS)])
        mass, batch = RETRIEVED, retriever.ROWS
    masses = attention_mass(
        params, model, rows, mass, batch_size=batch, execution=config.step.execution()
    )
    return {"mass": [dataclasses.asdict(m) for m in masses]}


def compare(runs: AblationRuns, setup: AttentionMassSetup, command: str) -> Finding:
    """Trains both models at all seeds and measures them."""
    runs = AblationRuns(runs.workdir, measure=functools.partial(measure, setup))
    rows = {
        name: runs([arm.trial(seed=seed) for seed in SEEDS])
        for name, arm in arms(setup, runs.workdir).items()
    }
    return finding(setup, rows, command)


def finding(setup: AttentionMassSetup, rows: dict[str, list[dict]], command: str) -> Finding:
    """Returns tables, charts and verdicts from the rows of both models by seed, and from shapes."""
    masses = {TEXT: setup.mass, RETRIEVER: RETRIEVED}
    measured = [MeasuredModel(name, masses[name], arm_rows) for name, arm_rows in rows.items()]
    # Counts of FLOPs and bytes, from shapes only.
    table, chart, counted = flops_finding(presets.glm5())
    by_k = (model.plot_by_keys() for model in measured)
    by_length = (model.plot_by_length() for model in measured)
    return Finding(
        title="Redundant attention, and what leaving it out saves",
        command=command,
        verdicts=(*(text for model in measured for text in model.verdicts()), *counted),
        tables=(*(part for model in measured for part in model.tables()), table),
        plots=(*by_k, *by_length, chart),
    )


@dataclasses.dataclass(frozen=True)
class MeasuredModel:
    """A model with the rows of its seeds.

    Attributes:
      name: name of the arm.
      config: measures of its rows.
      rows: row of each seed.
    """

    name: str
    config: MassConfig
    rows: list[dict]

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The measured ranges of visible keys, (first, end)."""
        return list(dict.fromkeys((m["start"], m["end"]) for m in self.rows[0]["mass"]))

    @property
    def last_bucket(self) -> str:
        """The range with the most keys, as text."""
        return f"{self.buckets[-1][0]} to {self.buckets[-1][1] - 1} visible keys"

    def spread_of_last(self, *args, **options) -> Spread:
        """Returns `_spread` of the range with the most keys."""
        return _spread(self.rows, *args, bucket=self.buckets[-1], **options)

    def tables(self) -> tuple[Table, Table]:
        """Returns the measures by layer and by length."""
        config, long = self.config, self.spread_of_last
        layers = sorted({m["layer"] for m in self.rows[0]["mass"]})
        by_layer = Table(
            title=f"{self.name}: attention by layer, {self.last_bucket}",
            columns=_columns("layer", config),
            rows=tuple(
                (str(layer), *_cells(functools.partial(long, layer=layer), config))
                for layer in layers
            )
            + (("all", *_cells(long, config)),),
            note="Means over queries; ± half of Student's 95% interval over seeds (lowest .. highest).",
        )
        by_length = Table(
            title=f"{self.name}: attention by length, all layers",
            columns=_columns("visible keys", config),
            rows=tuple(
                (
                    f"{a} to {b - 1}",
                    *_cells(functools.partial(_spread, self.rows, bucket=(a, b)), config),
                )
                for a, b in self.buckets
            ),
        )
        return by_layer, by_length

    def verdicts(self) -> list[str]:
        """Returns the verdicts on redundant keys, and on the keys of the indexer."""
        long, middle, verdicts = self.spread_of_last, _middle(self.config), []
        for i, level in enumerate(self.config.levels):
            spared = long("redundant", i)
            met = "met" if spared.mean >= REDUNDANT else "not met"
            verdicts.append(
                f"{self.name}, {self.last_bucket}: {level:.0%} of the attention lies on {long('keys', i):.1f} keys, "
                f"so {spared:.1%} of the entries are redundant; about {REDUNDANT:.0%}: {met}"
            )
        k = self.config.top_k[middle]
        verdicts.append(
            f"{self.name}, {self.last_bucket}: the indexer's {k} keys hold {long('selected', middle):.1%} of the "
            f"attention, the best {k} {long('best', middle):.1%}, the last {k} {long('recent', middle):.1%}"
        )
        return verdicts

    def plot_by_keys(self) -> Plot:
        """Returns the chart of the shares by number of keys."""
        counts = list(self.config.top_k)
        lines = [
            (label, counts, [self.spread_of_last(kind, i).mean for i in range(len(counts))])
            for kind, label in KINDS.items()
        ]
        chart = charts.line_chart(lines, x_label="keys", y_label=f"Share of attention, {self.name}")
        return Plot(chart, f"{self.last_bucket}; mean of layers and seeds.")

    def plot_by_length(self) -> Plot:
        """Returns the chart of the shares by number of visible keys."""
        middle, ends = _middle(self.config), [end - 1 for _, end in self.buckets]
        lines = [
            (label, ends, [_spread(self.rows, kind, middle, bucket=b).mean for b in self.buckets])
            for kind, label in KINDS.items()
        ]
        chart = charts.line_chart(
            lines,
            x_label="visible keys, up to",
            y_label=f"Share of attention in {self.config.top_k[middle]} keys, {self.name}",
        )
        return Plot(chart, "Mean of layers and seeds.")


def _middle(config: MassConfig) -> int:
    return len(config.top_k) // 2


def _spread(
    rows: list[dict], field: str, index: int, *, bucket: tuple[int, int], layer: int | None = None
) -> Spread:
    """Returns the spread over seeds of a field of `Mass` at a length, for one layer or the mean of all."""
    return Spread.of(
        statistics.fmean(
            m[field][index]
            for m in row["mass"]
            if (m["start"], m["end"]) == bucket and layer in (None, m["layer"])
        )
        for row in rows
    )


def _columns(first: str, config: MassConfig) -> tuple[str, ...]:
    k = config.top_k[_middle(config)]
    selected = (f"in {label} {k}" for label in KINDS.values())
    needed = (x for level in config.levels for x in (f"keys for {level:.0%}", "not needed"))
    return (first, *selected, *needed)


def _cells(spread: Callable[..., Spread], config: MassConfig) -> list[str]:
    cells = [f"{spread(kind, _middle(config)):.1%}" for kind in KINDS]
    for i in range(len(config.levels)):
        cells += [f"{spread('keys', i):.1f}", f"{spread('redundant', i):.1%}"]
    return cells


def _layer_flops(cfg: ModelConfig, t: int) -> float:
    """Returns FLOPs of a token's forward through one layer of experts, averaged over t tokens."""
    more = dataclasses.replace(cfg, num_hidden_layers=cfg.num_hidden_layers + 1)
    return forward_flops(more, t) - forward_flops(cfg, t)


@functools.lru_cache(maxsize=4096)
def counts(cfg: ModelConfig, t: int) -> dict[str, tuple[float, float]]:
    """Returns {quantity: (dense, sparse)} of one layer and one token of a model with indexers.

    "prefill" averages over all tokens of a context of t. "decode" is the token after t - 1 others. Values are FLOPs, or
    bytes of cache. Sparse includes the indexer and its projections.
    """
    dense = dataclasses.replace(cfg, attention="dense")
    sparse = dataclasses.replace(cfg, attention="sparse")
    n, h, r, u = (
        cfg.num_attention_heads,
        cfg.qk_nope_head_dim,
        cfg.qk_rope_head_dim,
        cfg.v_head_dim,
    )
    assert cfg.index_topk is not None, "the model has indexers"
    c, k = cfg.kv_lora_rank, min(cfg.index_topk, t)
    i, j = cfg.index_n_heads, cfg.index_head_dim
    latents = {"b": 1, "t": 1, "n": n, "x": c + r}
    rest = _layer_flops(dense, 1) - 2 * n * (h + r + u)  # a first token attends to itself
    projections = _layer_flops(sparse, 1) - _layer_flops(dense, 1) - 2 * i * j
    dense_layer, sparse_layer = _layer_flops(dense, t), _layer_flops(sparse, t)

    folds = 2 * c * n * (h + u)
    expanded = dense_cost.forward(1, t, t, n, n, h + r, u, start=0).flops / t + folds
    sizes = {"t": t, "n": n, "h": h, "r": r, "u": u, "c": c, "i": i, "j": j, "k": k}
    chosen = dsa.cost(sizes).flops / t

    every = dense_cost.forward(**latents, s=t, m=1, y=c + r, start=t - 1, shared=True)
    scored = indexer_cost.select(b=1, t=1, s=t, i=i, j=j, k=k, start=t - 1)
    picked = sparse_cost.forward(**latents, k=k, y=c)
    some = scored.flops + picked.flops + projections
    return {
        "prefill, attention only": (dense_layer - rest, sparse_layer - rest),
        "prefill, attention in the kernels": (expanded, chosen + projections),
        "prefill, whole layer": (dense_layer, sparse_layer),
        "decode, attention only": (every.flops, some),
        "decode, whole layer": (rest + every.flops, rest + some),
        "decode, bytes of attention": (every.bytes, scored.bytes + picked.bytes),
    }


def first_length(cfg: ModelConfig, quantity: str, ratio: float) -> int | None:
    """Returns the first length, at most the model's, at which dense takes `ratio` times as much as sparse; None if none."""

    def enough(t):
        dense, sparse = counts(cfg, t)[quantity]
        return dense >= ratio * sparse

    lengths = range(1, cfg.max_position_embeddings + 1)
    # Ratios are below one for short lengths, and rise from about index_topk on.
    index = bisect.bisect_left(lengths, True, key=enough)
    return lengths[index] if index < len(lengths) else None


def flops_finding(cfg: ModelConfig) -> tuple[Table, Plot, list[str]]:
    """Returns dense over sparse by length as table and chart, and the lengths at which counts reach the paper's factors."""
    lengths = [t for t in LENGTHS if t <= cfg.max_position_embeddings]
    counts_by_length = [counts(cfg, t) for t in lengths]
    names = list(counts_by_length[0])
    ratios = {
        name: [dense / sparse for dense, sparse in (x[name] for x in counts_by_length)]
        for name in names
    }
    table = Table(
        title="Dense over sparse at GLM-5's shapes, one layer, forward, indexer included",
        columns=("tokens", *names),
        rows=tuple(
            (f"{t:,}", *(f"{ratios[name][i]:.2f}" for name in names)) for i, t in enumerate(lengths)
        ),
        note="The first and third columns count every key of a head at its own width, selected or not (model "
        "FLOPs). The kernels multiply selected keys as latents, twice as wide, which the second column "
        "counts. In decoding both do. Up to 2,048 tokens nothing is left out: the model then runs dense "
        "attention, here the indexer is counted all the same.",
    )
    chart = charts.line_chart(
        [(name, lengths, ratios[name]) for name in names],
        x_label="tokens",
        y_label="Dense over sparse attention",
        log=True,
        levels=tuple((f"paper, {x}x", x) for x in SAVED),
    )
    verdicts = []
    for name in names:
        low, high = (first_length(cfg, name, x) for x in SAVED)
        span = " and ".join(
            f"{x}x at {at:,} tokens" if at else f"{x}x at no length"
            for x, at in zip(SAVED, (low, high))
        )
        verdicts.append(f"{name}: dense takes {span}, {ratios[name][-1]:.1f}x at {lengths[-1]:,}")
    long = [i for i, t in enumerate(lengths) if t >= LONG]
    smallest, largest = (pick(r[i] for r in ratios.values() for i in long) for pick in (min, max))
    below, above = SAVED
    verdict = "met" if below <= smallest and largest <= above else "met only by some counts"
    verdicts.append(
        f"from {LONG:,} tokens on, the counts are {smallest:.1f} to {largest:.1f} times; the paper's {below} to "
        f"{above} times: {'every count is higher' if smallest > above else verdict}"
    )
    return table, Plot(chart, "Ratios of FLOPs, and of bytes where the name says so."), verdicts


def run(setup: AttentionMassSetup, workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("attention_mass", setup, workdir, command, compare)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
