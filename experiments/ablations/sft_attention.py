"""SFT from the dense and from the sparse model on identical data (GLM-5, Figure 6).

    python -m experiments.ablations.sft_attention [tiny|small] [WORKDIR]

Both arms begin with the dense model of a life after mid-training. One goes through the indexers' warm-up and the
sparse stage, the other trains dense on the same batches as the sparse stage; then both are fine-tuned, dense and
sparse, on the same conversations in the same order (experiments/sft.py, mixed). Reported: the training losses, and
held-out loss at the end; all seeds, of which each has conversations of its own.

:tiny    for two CPU cores: a life of ten minutes, one for all ablations of SFT in a WORKDIR, the dense stage, then
         four minutes for each of two arms and three seeds
"""

import dataclasses
import functools
import sys

import numpy as np

from experiments import sft
from experiments.ablations.arms import Arm, Runs
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.ablations.finetuned import arm
from glm5_jax.core.metrics_log import column, read
from glm5_jax.training.experiment import StageConfig, choose

SEEDS = (0, 1, 2)
WINDOW = 50  # steps of the running mean, as in the paper's figure
DENSE, SPARSE = "dense", "sparse"


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """The variant's arms by name; ValueError lists the variants."""
    return choose(variant, {size: functools.partial(_arms, size) for size in ("tiny", "small")})


def _arms(size: str) -> dict[str, Arm]:
    sparse = arm(SPARSE, size, sft.get_config(f"{size},mixed"))
    *before, warm_up, adapted, tuned = sparse.stages
    if warm_up.model.attention == "sparse" or adapted.model.attention != "sparse":
        raise ValueError(f"{warm_up.name} and {adapted.name} are no warm-up and sparse stage")
    stages = (*before, dense(adapted), dense(tuned))
    return {SPARSE: sparse, DENSE: Arm(DENSE, stages, given=len(before) + 1)}


def dense(stage: StageConfig) -> StageConfig:
    """The stage with attention to all keys, and no indexer to train."""
    frozen = dict.fromkeys((*stage.optimizer.frozen, "indexer/"))
    return dataclasses.replace(
        stage,
        name=f"{stage.name},dense",
        model=dataclasses.replace(stage.model, attention="dense"),
        optimizer=dataclasses.replace(stage.optimizer, frozen=tuple(frozen)),
        step=dataclasses.replace(stage.step, index_weight=0.0),
    )


def run(runs: Runs, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares both arms."""
    rows, losses = {}, {}
    for name, own in arms.items():
        trials = [own.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        losses[name] = [column(read(runs.folders(trial)[-1]), "loss/ce") for trial in trials]
    return finding(rows, losses, command)


def running(values, window: int = WINDOW) -> np.ndarray:
    """Means of each window of neighbouring values."""
    return np.convolve(values, np.ones(window) / window, "valid")


def finding(rows: dict[str, list[dict]], losses: dict[str, list], command: str) -> Finding:
    """Table, plot and verdict from rows {arm: by seed} and training losses {arm: (steps, losses) by seed}."""
    smooth = {name: [running(values) for _, values in own] for name, own in losses.items()}
    shown = {
        name: [(steps[WINDOW - 1 :], list(mean)) for (steps, _), mean in zip(losses[name], own)]
        for name, own in smooth.items()
    }
    apart = [sparse / dense - 1 for sparse, dense in zip(smooth[SPARSE], smooth[DENSE])]
    mean = Spread.of(100 * float(np.mean(a)) for a in apart)
    most = 100 * max(float(np.abs(a).max()) for a in apart)
    # How far two seeds of one arm are from each other says what apart means.
    seeds = 100 * float(
        np.mean([np.abs(a / b - 1) for own in smooth.values() for a, b in zip(own, own[1:])])
    )
    end = paired(*([row["loss"] for row in rows[name]] for name in (SPARSE, DENSE)))
    distance = 100 * float(np.mean([np.abs(a) for a in apart]))
    close = distance <= seeds
    return Finding(
        "Fine-tuning from a dense and from a sparse model",
        command,
        (
            f"training loss of sparse over dense on identical data, running mean of {WINDOW} steps: {mean:+.2f}% on "
            f"average, {distance:.2f}% apart, at most {most:.2f}% at any step; two seeds of one arm are "
            f"{seeds:.2f}% apart; that the curves lie on each other is {'met' if close else 'not met'}",
            f"held-out loss of sparse minus dense at the end: {end:+.4f} nats",
        ),
        (
            Table(
                f"Fine-tuning on identical data, {len(SEEDS)} seeds",
                ("arm", "held-out loss at the end", f"training loss, last {WINDOW} steps"),
                tuple(
                    (
                        name,
                        f"{Spread.of(row['loss'] for row in found):.4f}",
                        f"{Spread.of(float(own[-1]) for own in smooth[name]):.4f}",
                    )
                    for name, found in rows.items()
                ),
                "Nats per token that the assistant says. Mean ± half of Student's 95% interval (lowest .. highest).",
            ),
        ),
        (
            Plot(
                curves(shown, y_label="Training loss, nats", log=True),
                f"Running mean over {WINDOW} steps; shadow: lowest to highest seed.",
            ),
        ),
    )


if __name__ == "__main__":
    sys.exit(ablate("sft_attention", sys.argv[1:], get_config, run))
