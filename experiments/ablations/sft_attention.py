"""Compares SFT of a dense and of a sparse model on identical data (GLM-5, Figure 6).

    glm5 run sft_attention:tiny --workdir=DIR     # or :small

Both arms start from the dense model of a lifecycle after mid-training. One goes through the indexers' warm-up and the
sparse stage. The other trains dense on the same batches as the sparse stage. Then both are fine-tuned, dense and
sparse, on the same conversations in the same order (experiments/sft.py, mixed). Reported: the training losses, and
held-out loss at the end, for all seeds; each seed has its own conversations.

:tiny    for two CPU cores: a lifecycle of ten minutes, one for all ablations of SFT in a WORKDIR, the dense stage,
         then four minutes for each of two arms and three seeds
"""

import dataclasses
import functools
import pathlib

import numpy as np
from numpy.typing import ArrayLike

from experiments import sft
from experiments.ablations.arms import AblationRuns, Arm
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.ablations.finetuned import arm
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.training.experiment import StageConfig, choose

SEEDS = (0, 1, 2)
WINDOW = 50  # steps of the running mean, as in the paper's figure
DENSE, SPARSE = "dense", "sparse"


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """Returns the variant's arms by name. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {"tiny": functools.partial(_arms, "tiny"), "small": functools.partial(_arms, "small")},
    )


def _arms(size: str) -> dict[str, Arm]:
    sparse = arm(SPARSE, size, sft.get_config(f"{size},mixed"))
    *before, warm_up, adapted, tuned = sparse.stages
    if warm_up.model.attention == "sparse" or adapted.model.attention != "sparse":
        raise ValueError(f"{warm_up.name} and {adapted.name} are no warm-up and sparse stage")
    stages = (*before, dense(adapted), dense(tuned))
    return {SPARSE: sparse, DENSE: Arm(DENSE, stages, num_fixed=len(before) + 1)}


def dense(stage: StageConfig) -> StageConfig:
    """Returns the stage with attention to all keys and a frozen indexer."""
    frozen = dict.fromkeys((*stage.optimizer.frozen, "indexer/"))
    return dataclasses.replace(
        stage,
        name=f"{stage.name},dense",
        model=dataclasses.replace(stage.model, attention="dense"),
        optimizer=dataclasses.replace(stage.optimizer, frozen=tuple(frozen)),
        step=dataclasses.replace(stage.step, index_weight=0.0),
    )


def compare(runs: AblationRuns, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares both arms."""
    rows, losses = {}, {}
    for name, trained_arm in arms.items():
        trials = [trained_arm.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        losses[name] = [column(read(runs.folders(trial)[-1]), "loss/ce") for trial in trials]
    return finding(rows, losses, command)


def running_mean(values: ArrayLike, window: int = WINDOW) -> np.ndarray:
    """Returns the means of each window of neighbouring values."""
    return np.convolve(np.asarray(values), np.ones(window) / window, "valid")


def finding(rows: dict[str, list[dict]], losses: dict[str, list], command: str) -> Finding:
    """Returns table, plot and verdict from rows {arm: by seed} and training losses {arm: (steps, losses) by seed}."""
    smooth = {
        name: [running_mean(values) for _, values in seed_means]
        for name, seed_means in losses.items()
    }
    shown = {
        name: [
            (steps[WINDOW - 1 :], list(mean)) for (steps, _), mean in zip(losses[name], seed_means)
        ]
        for name, seed_means in smooth.items()
    }
    differences = [sparse / dense - 1 for sparse, dense in zip(smooth[SPARSE], smooth[DENSE])]
    mean = Spread.of(100 * float(np.mean(a)) for a in differences)
    largest = 100 * max(float(np.abs(a).max()) for a in differences)
    # The distance between two seeds of one arm is the scale for the distance between the arms.
    seeds = 100 * float(
        np.mean(
            [
                np.abs(a / b - 1)
                for seed_means in smooth.values()
                for a, b in zip(seed_means, seed_means[1:])
            ]
        )
    )
    end = paired(*([row["loss"] for row in rows[name]] for name in (SPARSE, DENSE)))
    distance = 100 * float(np.mean([np.abs(a) for a in differences]))
    close = distance <= seeds
    return Finding(
        title="Fine-tuning from a dense and from a sparse model",
        command=command,
        verdicts=(
            f"training loss of sparse over dense on identical data, running mean of {WINDOW} steps: {mean:+.2f}% on "
            f"average, {distance:.2f}% apart, at most {largest:.2f}% at any step; two seeds of one arm are "
            f"{seeds:.2f}% apart; that the curves lie on each other is {'met' if close else 'not met'}",
            f"held-out loss of sparse minus dense at the end: {end:+.4f} nats",
        ),
        tables=(
            Table(
                title=f"Fine-tuning on identical data, {len(SEEDS)} seeds",
                columns=("arm", "held-out loss at the end", f"training loss, last {WINDOW} steps"),
                rows=tuple(
                    (
                        name,
                        f"{Spread.of(row['loss'] for row in arm_rows):.4f}",
                        f"{Spread.of(float(seed_means[-1]) for seed_means in smooth[name]):.4f}",
                    )
                    for name, arm_rows in rows.items()
                ),
                note="Nats per token that the assistant says. Mean ± half of Student's 95% interval (lowest .. highest).",
            ),
        ),
        plots=(
            Plot(
                curves(shown, y_label="Training loss, nats", log=True),
                f"Running mean over {WINDOW} steps; shadow: lowest to highest seed.",
            ),
        ),
    )


def run(arms: dict[str, Arm], workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("sft_attention", arms, workdir, command, compare)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
