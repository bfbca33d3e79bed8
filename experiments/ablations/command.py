"""Parses the command line that every ablation has: a variant and a workdir, both optional."""

from collections.abc import Callable, Sequence

from experiments.ablations.arms import AblationRuns
from experiments.ablations.findings import Finding
from glm5_jax.checkpoint.store import SaveError
from glm5_jax.evals.perplexity import HeldOut
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import print_error
from glm5_jax.training.experiment import ExperimentConfig
from glm5_jax.training.metrics import TrainingStopped


def ablate(
    name: str,
    arguments: Sequence[str],
    get_config: Callable[[str], ExperimentConfig],
    find: Callable[[AblationRuns, ExperimentConfig, str], Finding],
    **options,
) -> int:
    """Runs an ablation with arguments [VARIANT [WORKDIR]], prints its finding and writes its page. Returns the exit code.

    A user error prints one line and returns 2. A run that had to stop prints why and returns 1 (75 if it was stopped while
    there was nothing to save); the same command then resumes it.

    Args:
      name: name of the ablation's module.
      arguments: words of the command line.
      get_config: returns the configuration of a variant.
      find: `find(runs, config, command)` does the work, evaluated on held-out rows.
      **options: `measure` and `keep` of `AblationRuns`.
    """
    variant, workdir, *more = [*arguments, *("tiny", None)[len(arguments) :]]
    workdir = workdir or f"workdir/{name}_{variant}"
    try:
        if more:
            raise ValueError(f"unexpected argument {more[0]!r}; give a variant and a workdir")
        command = f"python -m experiments.ablations.{name} {variant} {workdir}"
        with PreemptionGuard(ends=True):
            finding = find(AblationRuns(workdir, HeldOut, **options), get_config(variant), command)
    except (ValueError, TrainingStopped, SaveError) as error:
        print_error(error)
        return 2 if isinstance(error, ValueError) else 1
    finding.print()
    print(f"page: {finding.write(workdir, name)}")
    return 0
