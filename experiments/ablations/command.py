"""Runs an ablation as an experiment of `launch.run`: its `run(config, workdir, command)` calls `ablate`."""

import os
from collections.abc import Callable
from typing import TypeVar

from experiments.ablations.arms import AblationRuns
from experiments.ablations.findings import Finding
from glm5_jax.checkpoint.store import SaveError
from glm5_jax.evals.perplexity import HeldOut
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import print_error
from glm5_jax.training.metrics import TrainingStopped

Config = TypeVar("Config")


def ablate(
    name: str,
    config: Config,
    workdir: str | os.PathLike,
    command: str,
    find: Callable[[AblationRuns, Config, str], Finding],
    **options,
) -> int:
    """Runs an ablation, prints its finding and writes its page. Returns the exit code.

    A user error prints one line and returns 2. A run that had to stop prints why and returns 1 (75 if it was stopped while
    there was nothing to save); the same command then resumes it.

    Args:
      name: name of the ablation's module.
      config: what its `get_config` returns, with the flags applied.
      workdir: folder of its runs.
      command: the command line, for the page.
      find: `find(runs, config, command)` does the work, evaluated on held-out rows.
      **options: `measure` and `keep` of `AblationRuns`.
    """
    try:
        with PreemptionGuard(ends=True):
            finding = find(AblationRuns(workdir, HeldOut, **options), config, command)
    except (ValueError, TrainingStopped, SaveError) as error:
        print_error(error)
        return 2 if isinstance(error, ValueError) else 1
    finding.print()
    print(f"page: {finding.write(workdir, name)}")
    return 0
