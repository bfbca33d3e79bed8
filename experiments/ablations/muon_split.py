"""Muon Split against whole-matrix Muon against AdamW on MLA, and against GQA-8 (GLM-5 2.1, Table 1).

    python -m experiments.ablations.muon_split [tiny|small] [WORKDIR]

Every optimiser is tuned by itself: at least five peak learning rates, a factor of two apart, around the
best of which the grid is extended, three times at most, until it is bracketed; AdamW with two lengths of
warm-up besides. Each then trains the same steps on the same batches from the same weights for every
seed. Reported, with all seeds and their spread:

- held-out loss in nats per token after the last step, on rows that no training sees;
- the largest attention logit of any layer, averaged over the last 5% of the steps;
- steps that Muon Split needs to AdamW's final loss: along its own run, whose rate has not yet fallen
  there (an upper bound), and in runs with a whole schedule of their own for a share of the steps;
- what MLA with either Muon loses against grouped-query attention with whole Muon, as in the paper's table
  (8 key and value heads, or half of fewer heads: `presets.ablation`).

:tiny    two layers for two CPU cores, 250 steps of 1,024 tokens: about 50 trainings of half a minute. What
         it found: LOG.md.
:small   12 layers, 1.2B parameters, for one accelerator: pretrain.py:small for 2,000 steps, on
         the data that it names.
"""

import dataclasses
import sys

from experiments import pretrain
from experiments.ablations.arms import Arm, Runs, Tuned, grid, steady, steps_to, tune
from experiments.ablations.command import ablate
from experiments.ablations.findings import (
    Finding,
    Spread,
    Table,
    paired,
    tuned_plots,
    tuning_table,
    verdict,
)
from glm5_jax import presets
from glm5_jax.data.mixture import DataConfig
from glm5_jax.training.experiment import ExperimentConfig, SampleConfig, choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step import StepConfig

SEEDS = (0, 1, 2, 3, 4)
SHARES = (0.4, 0.6)  # of the steps, that Muon Split is given a whole schedule for
TARGET_SHARE = 0.6
MUON_RATE, ADAMW_RATE = 1e-2, 5e-3  # the middles of the grids that tuning begins with
GROUPED = "whole Muon, GQA-8"  # the arm that MLA is held against
WARM_UPS = (1, 3)  # times the steps of the config, of which AdamW gets the better
OPTIMISERS = {
    "Muon Split": {"split": "head"},
    "whole Muon": {"split": "whole"},
    "AdamW": {"matrices": "adamw"},
}


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """What all arms have in common; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> ExperimentConfig:
    """One million parameters, half of them the vocabulary's; nothing but MLA and dense feed-forward."""
    model = dataclasses.replace(
        presets.tiny(),
        attention="dense",
        index_topk=None,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_nextn_predict_layers=0,
    )
    return ExperimentConfig(
        name="muon_split:tiny",
        model=model,
        data=DataConfig(sequence_length=128),
        batch=BatchRampConfig(start=1024, end=1024, ramp_tokens=0, multiple=1024),
        optimizer=OptimizerConfig(ns_dtype="float32"),  # bfloat16 products are emulated on CPU
        schedule=ScheduleConfig(peak=1e-2, end=5e-4, warmup_steps=25, total_steps=250),
        step=StepConfig(remat="none"),
        train=TrainConfig(eval_interval=25, sample_interval=0, save_interval=0, eval_batches=4),
    )


def small() -> ExperimentConfig:
    """The model and the batches of pretrain.py:small."""
    base = pretrain.get_config("small")
    return dataclasses.replace(
        base,
        name="muon_split:small",
        schedule=ScheduleConfig(peak=5e-3, end=2.5e-4, warmup_steps=200, total_steps=2000),
        train=TrainConfig(log_interval=10, eval_interval=100, sample_interval=0, save_interval=200),
        sample=SampleConfig(),
    )


def arms(config: ExperimentConfig) -> dict[str, Arm]:
    """Every optimiser by name, and GROUPED."""
    whole = OPTIMISERS["whole Muon"]
    changes = {name: (config.model, change) for name, change in OPTIMISERS.items()}
    changes[GROUPED] = presets.ablation("gqa", config.model), whole
    return {
        name: Arm(
            name,
            (
                dataclasses.replace(
                    config,
                    name=f"{config.name} {name}",
                    model=model,
                    optimizer=dataclasses.replace(config.optimizer, **change),
                ),
            ),
        )
        for name, (model, change) in changes.items()
    }


def warmed(arm: Arm, factor: float) -> Arm:
    """The arm with a warm-up of so many times the steps."""
    (stage,) = arm.stages
    steps = round(factor * stage.schedule.warmup_steps)
    schedule = dataclasses.replace(stage.schedule, warmup_steps=steps)
    return Arm(arm.name, (dataclasses.replace(stage, schedule=schedule),))


def tuned(runs: Runs, arm: Arm) -> list[Tuned]:
    """The arm at its best rate on the first seed; of AdamW, with two warm-ups, the better one first."""
    adamw = arm.stages[0].optimizer.matrices == "adamw"
    rates = grid(ADAMW_RATE if adamw else MUON_RATE)
    found = [
        tune(runs, warmed(arm, factor), rates, seeds=SEEDS[:1])
        for factor in (WARM_UPS if adamw else (1,))
    ]
    return sorted(found, key=lambda t: t.loss)


def run(runs: Runs, config: ExperimentConfig, command: str) -> Finding:
    """Tunes, trains and compares all arms."""
    tried, rows = {}, {}
    for name, arm in arms(config).items():
        best, *others = tuned(runs, arm)
        best, rows[name] = steady(runs, best, SEEDS)
        tried[name] = [best, *others]
    split = tried["Muon Split"][0]
    shorter = {share: runs(split.trials(SEEDS, share)) for share in SHARES}
    return finding(config, command, tried, rows, shorter)


def finding(config, command, tried, rows, shorter) -> Finding:
    """Tables, plots and verdicts from the rows of the arms {name: rows by seed}, of their tuning {name:
    list of `Tuned`, the best first} and of Muon Split's shorter runs {share: rows by seed}."""
    losses = {}
    for name, found in tried.items():
        for t in found:
            steps = t.arm.stages[0].schedule.warmup_steps
            losses[name + (f", {steps} warm-up steps" if len(found) > 1 else "")] = t.losses
    spread = {
        name: {key: Spread.of(row[key] for row in found) for key in ("loss", "max_logit")}
        for name, found in rows.items()
    }
    table = Table(
        f"{config.name}: {config.schedule.total_steps} steps of {config.batch.end:,} tokens, "
        f"{len(SEEDS)} seeds",
        ("arm", "best rate", "held-out loss, nats per token", "largest logit at the end"),
        tuple(
            (name, f"{tried[name][0].rate:.3g}", f"{s['loss']:.4f}", f"{s['max_logit']:.2f}")
            for name, s in spread.items()
        ),
        "Mean ± half of Student's 95% interval (lowest .. highest seed).",
    )
    split, whole, adamw = (rows[name] for name in OPTIMISERS)
    verdicts = [*_against_whole(split, whole), _against_adamw(split, adamw, shorter)]
    for name, found in (("Muon Split", split), ("whole Muon", whole)):
        more = paired(_losses(found), _losses(rows[GROUPED]))
        verdicts.append(f"{name} on MLA: loss minus that of {GROUPED} is {more:+.4f}")
    lines = {name: [r["curve"] for r in found] for name, found in rows.items()}
    short = Table(
        "Muon Split with a whole schedule for a share of the steps",
        ("share", "held-out loss", "minus AdamW's after all steps, by seed"),
        tuple(
            (
                f"{share:g}",
                f"{Spread.of(_losses(found)):.4f}",
                f"{paired(_losses(found), _losses(adamw)):+.4f}",
            )
            for share, found in shorter.items()
        ),
    )
    title = "Muon Split against whole Muon against AdamW"
    tables = (table, short, tuning_table(losses.items()))
    return Finding(title, command, tuple(verdicts), tables, tuned_plots(lines, losses))


def _losses(rows):
    return [row["loss"] for row in rows]


def _against_whole(split, whole) -> list[str]:
    worse = paired(_losses(split), _losses(whole))
    logits = paired((r["max_logit"] for r in split), (r["max_logit"] for r in whole))
    return [
        f"Muon Split's loss minus whole Muon's is {worse:+.4f}, by seed; no worse: {verdict(-worse)}",
        f"Muon Split's largest logit minus whole Muon's is {logits:+.2f}; "
        f"lower: {verdict(-logits, strictly=True)}",
    ]


def _against_adamw(split, adamw, shorter) -> str:
    level = Spread.of(_losses(adamw)).mean
    total = split[0]["steps"]
    along = [steps_to(row["curve"], level) for row in split]
    more = {share: paired(_losses(found), _losses(adamw)) for share, found in shorter.items()}
    reached = [share for share in more if more[share].mean <= 0]
    ratio = "never" if None in along else f"{Spread.of(x / total for x in along):.2f}"
    own = f"{min(reached):g}" if reached else f"none of {', '.join(f'{s:g}' for s in SHARES)}"
    allowed = [share for share in reached if share <= TARGET_SHARE]
    met = verdict(-more[max(allowed)]) if allowed else "not met"
    return (
        f"Muon Split is at AdamW's final loss ({level:.4f}) after {ratio} of its steps along its own run, "
        f"and with a whole schedule for a share of the steps: {own}; at most {TARGET_SHARE:g}: {met}"
    )


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments, [VARIANT [WORKDIR]]."""
    return ablate("muon_split", arguments, get_config, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
