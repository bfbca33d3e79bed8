"""Compares Muon Split with whole-matrix Muon and AdamW on MLA, and with GQA-8 (GLM-5 2.1, Table 1).

    glm5 run muon_split:tiny --workdir=DIR     # or :small

Every optimiser is tuned separately: at least five peak learning rates, a factor of two apart. The grid is extended
around the best, at most three times, until it is bracketed. AdamW is tuned with two lengths of warm-up too. Each
optimiser then trains the same steps on the same batches from the same weights for every seed. Reported, with all seeds
and their spread:

- held-out loss in nats per token after the last step, on rows that no training sees;
- the largest attention logit of any layer, averaged over the last 5% of the steps;
- steps that Muon Split needs to reach AdamW's final loss: along its own run, whose rate has not yet fallen there (an
  upper bound), and in shorter runs with a complete schedule for a share of the steps;
- the loss of MLA with either Muon minus that of grouped-query attention with whole Muon, as in the paper's table
  (8 key and value heads, or half of fewer heads: `presets.ablation`).

:tiny    two layers for two CPU cores, 250 steps of 1,024 tokens: about 50 trainings of half a minute.
         Results: docs/results/ablations.md.
:small   12 layers, 1.2B parameters, for one accelerator: pretrain.py:small for 2,000 steps, on the data that it names.
"""

import dataclasses
import pathlib

from experiments import pretrain
from experiments.ablations.arms import (
    AblationRuns,
    Arm,
    Tuned,
    grid,
    steps_to,
    tune,
    tune_without_divergence,
)
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
from glm5_jax.training.experiment import choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step_config import StepConfig

SEEDS = (0, 1, 2, 3, 4)
SHARES = (0.4, 0.6)  # of the steps, for which Muon Split also runs a complete schedule
TARGET_SHARE = 0.6
MUON_RATE, ADAMW_RATE = 1e-2, 5e-3  # centres of the first tuning grids
GROUPED = "whole Muon, GQA-8"  # the arm that MLA is compared with
WARM_UPS = (1, 3)  # multiples of the config's warm-up steps, of which AdamW uses the better one
OPTIMISERS = {
    "Muon Split": {"split": "head"},
    "whole Muon": {"split": "whole"},
    "AdamW": {"matrices": "adamw"},
}


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """Returns the configuration shared by all arms. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> ExperimentConfig:
    """Trains one million parameters, half of them the vocabulary's, with MLA and dense feed-forwards only."""
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
        optimizer=OptimizerConfig(
            ns_dtype="float32", lm_head="adamw"
        ),  # bfloat16 products are emulated on CPU
        schedule=ScheduleConfig(peak=1e-2, end=5e-4, warmup_steps=25, total_steps=250),
        step=StepConfig(remat="none"),
        train=TrainConfig(eval_interval=25, sample_interval=0, save_interval=0, eval_batches=4),
    )


def small() -> ExperimentConfig:
    """Uses the model and the batches of pretrain.py:small."""
    base = pretrain.get_config("small")
    return dataclasses.replace(
        base,
        name="muon_split:small",
        schedule=ScheduleConfig(peak=5e-3, end=2.5e-4, warmup_steps=200, total_steps=2000),
        train=TrainConfig(log_interval=10, eval_interval=100, sample_interval=0, save_interval=200),
        sample=SampleConfig(),
    )


def arms(config: ExperimentConfig) -> dict[str, Arm]:
    """Returns every optimiser's arm by name, and GROUPED."""
    whole_muon = OPTIMISERS["whole Muon"]
    changes = {name: (config.model, change) for name, change in OPTIMISERS.items()}
    changes[GROUPED] = presets.ablation("gqa", config.model), whole_muon
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


def with_warmup(arm: Arm, factor: float) -> Arm:
    """Returns the arm with its warm-up steps multiplied by a factor."""
    (stage,) = arm.stages
    steps = round(factor * stage.schedule.warmup_steps)
    schedule = dataclasses.replace(stage.schedule, warmup_steps=steps)
    return Arm(arm.name, (dataclasses.replace(stage, schedule=schedule),))


def tune_arm(runs: AblationRuns, arm: Arm) -> list[Tuned]:
    """Returns the arm at its best rate on the first seed; for AdamW one for each warm-up, the better first."""
    adamw = arm.stages[0].optimizer.matrices == "adamw"
    rates = grid(ADAMW_RATE if adamw else MUON_RATE)
    candidates = [
        tune(runs, with_warmup(arm, factor), rates, seeds=SEEDS[:1])
        for factor in (WARM_UPS if adamw else (1,))
    ]
    return sorted(candidates, key=lambda t: t.loss)


def compare(runs: AblationRuns, config: ExperimentConfig, command: str) -> Finding:
    """Tunes, trains and compares all arms."""
    candidates, rows = {}, {}
    for name, arm in arms(config).items():
        best, *others = tune_arm(runs, arm)
        best, rows[name] = tune_without_divergence(runs, best, SEEDS)
        candidates[name] = [best, *others]
    split = candidates["Muon Split"][0]
    shorter = {share: runs(split.trials(SEEDS, share)) for share in SHARES}
    return finding(config, command, candidates, rows, shorter)


def finding(
    config: ExperimentConfig,
    command: str,
    tried: dict[str, list[Tuned]],
    rows: dict[str, list[dict]],
    shorter: dict[float, list[dict]],
) -> Finding:
    """Returns tables, plots and verdicts of the arms.

    Args:
      config: configuration shared by all arms.
      command: command line of the run.
      tried: {name: list of `Tuned`, the best first}.
      rows: {name: rows by seed}.
      shorter: {share: rows by seed} of Muon Split's shorter runs.
    """
    # Losses of tuning; the name has the warm-up steps if there are several lengths.
    losses = {}
    for name, candidates in tried.items():
        for candidate in candidates:
            steps = candidate.arm.stages[0].schedule.warmup_steps
            suffix = f", {steps} warm-up steps" if len(candidates) > 1 else ""
            losses[name + suffix] = candidate.losses
    # Final losses and logits of every arm.
    spread = {
        name: {key: Spread.of(row[key] for row in arm_rows) for key in ("loss", "max_logit")}
        for name, arm_rows in rows.items()
    }
    table = Table(
        title=f"{config.name}: {config.schedule.total_steps} steps of {config.batch.end:,} tokens, "
        f"{len(SEEDS)} seeds",
        columns=("arm", "best rate", "held-out loss, nats per token", "largest logit at the end"),
        rows=tuple(
            (name, f"{tried[name][0].rate:.3g}", f"{s['loss']:.4f}", f"{s['max_logit']:.2f}")
            for name, s in spread.items()
        ),
        note="Mean ± half of Student's 95% interval (lowest .. highest seed).",
    )
    # Comparisons of the arms, and of Muon Split's shorter runs.
    split, whole_muon, adamw = (rows[name] for name in OPTIMISERS)
    verdicts = [*_against_whole(split, whole_muon), _against_adamw(split, adamw, shorter)]
    for name, arm_rows in (("Muon Split", split), ("whole Muon", whole_muon)):
        more = paired(_losses(arm_rows), _losses(rows[GROUPED]))
        verdicts.append(f"{name} on MLA: loss minus that of {GROUPED} is {more:+.4f}")
    lines = {name: [r["curve"] for r in arm_rows] for name, arm_rows in rows.items()}
    short = Table(
        title="Muon Split with a whole schedule for a share of the steps",
        columns=("share", "held-out loss", "minus AdamW's after all steps, by seed"),
        rows=tuple(
            (
                f"{share:g}",
                f"{Spread.of(_losses(arm_rows)):.4f}",
                f"{paired(_losses(arm_rows), _losses(adamw)):+.4f}",
            )
            for share, arm_rows in shorter.items()
        ),
    )
    title = "Muon Split against whole Muon against AdamW"
    tables = (table, short, tuning_table(losses.items()))
    return Finding(
        title=title,
        command=command,
        verdicts=tuple(verdicts),
        tables=tables,
        plots=tuned_plots(lines, losses),
    )


def _losses(rows):
    return [row["loss"] for row in rows]


def _against_whole(split, whole_muon) -> list[str]:
    worse = paired(_losses(split), _losses(whole_muon))
    logits = paired((r["max_logit"] for r in split), (r["max_logit"] for r in whole_muon))
    return [
        f"Muon Split's loss minus whole Muon's is {worse:+.4f}, by seed; no worse: {verdict(-worse)}",
        f"Muon Split's largest logit minus whole Muon's is {logits:+.2f}; "
        f"lower: {verdict(-logits, strictly=True)}",
    ]


def _against_adamw(split, adamw, shorter) -> str:
    level = Spread.of(_losses(adamw)).mean
    total = split[0]["steps"]
    along = [steps_to(row["curve"], level) for row in split]
    more = {share: paired(_losses(arm_rows), _losses(adamw)) for share, arm_rows in shorter.items()}
    reached = [share for share in more if more[share].mean <= 0]
    ratio = "never" if None in along else f"{Spread.of(x / total for x in along):.2f}"
    smallest = f"{min(reached):g}" if reached else f"none of {', '.join(f'{s:g}' for s in SHARES)}"
    allowed = [share for share in reached if share <= TARGET_SHARE]
    met = verdict(-more[max(allowed)]) if allowed else "not met"
    return (
        f"Muon Split is at AdamW's final loss ({level:.4f}) after {ratio} of its steps along its own run, "
        f"and with a whole schedule for a share of the steps: {smallest}; at most {TARGET_SHARE:g}: {met}"
    )


def run(config: ExperimentConfig, workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("muon_split", config, workdir, command, compare)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
