"""The command line that every ablation has: a variant and a workdir, both optional."""

import sys
from collections.abc import Callable, Sequence

from experiments.ablations.arms import Runs
from experiments.ablations.findings import Finding
from glm5_jax.checkpoint.store import SaveError
from glm5_jax.core.stopping import StopSignal
from glm5_jax.evals.perplexity import HeldOut
from glm5_jax.training.experiment import ExperimentConfig
from glm5_jax.training.metrics import TrainingStopped


def ablate(
    name: str,
    arguments: Sequence[str],
    get_config: Callable[[str], ExperimentConfig],
    find: Callable[[Runs, ExperimentConfig, str], Finding],
    **options,
) -> int:
    """Runs the ablation `name` with arguments [VARIANT [WORKDIR]], prints what it found and writes its
    page; returns the exit code.

    find(runs, config, command) does the work, judged on held-out rows; options: `measure` and `keep` of
    `Runs`. An error of the user is one line and 2, a run that had to stop says why and gives 1 (75 if it was told to
    while there was nothing to save); the same command then goes on.
    """
    variant, workdir, *more = [*arguments, *("tiny", None)[len(arguments) :]]
    workdir = workdir or f"workdir/{name}_{variant}"
    try:
        if more:
            raise ValueError(f"unexpected argument {more[0]!r}; give a variant and a workdir")
        command = f"python -m experiments.ablations.{name} {variant} {workdir}"
        with StopSignal(ends=True):
            found = find(Runs(workdir, HeldOut, **options), get_config(variant), command)
    except (ValueError, TrainingStopped, SaveError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    found.print()
    print(f"page: {found.write(workdir, name)}")
    return 0
