"""Runs an experiment.

    glm5 run pretrain:tiny --train.steps=50 --workdir=DIR
    glm5 run pretrain:tiny --help     # its description and all its fields
    glm5 list                         # all experiments

The long form has the same effect, and needs no installation:

    python -m launch.run --experiment=experiments/pretrain.py:tiny --experiment.train.steps=50 --workdir=DIR

An experiment is NAME:VARIANT or FILE.py:VARIANT. Any of its fields can be set with --FIELD=VALUE, which is short for
--experiment.FIELD=VALUE. --workdir is the folder of all outputs (default: workdir/NAME_VARIANT); the same command
continues a run that was stopped or killed. `serve` only reads and has no workdir.

An experiment of several stages trains them in order. --stage=NAME trains only one of them, after those before it; all
flags stay those of the experiment. So each stage can have hosts of its own (launch/stage_plan.py).

Exit codes:
  0   the run is finished
  1   the run had to stop; the reason is printed
  2   a user's error, printed in one line before training starts
  75  SIGTERM or Ctrl-C to any process: the state since the last checkpoint is saved, all processes exit, and launchers
      restart them. A second signal ends the process without saving.

On a pod start the same command on every host, with a workdir that all hosts see and --distributed=auto (TPU pods, Slurm,
MPI and Kubernetes are recognised). Elsewhere use --distributed=HOST:PORT,N,I for process I of N; process 0 is on HOST.
launch/local.py, on_ray.py, slurm.py and gke.py do this and restart processes that die.

The number of processes may change between two starts if one axis of the mesh is -1. The batches and their contents stay
the same (`DataConfig.num_shards`); on fewer devices each has more rows, step.rows_per_device of them at a time.
"""

import contextlib
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping

from absl import flags

from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import clean_logging, print_error, print_page
from launch import command_line, experiment_files, experiment_help, xla_flags
from launch.imports import paused_collector

HELP = {"-h", "--help"}


def main(argv: list[str]) -> int:
    """Runs the experiment and returns the exit code; argv[0] is the program's name."""
    clean_logging()
    xla_flags.reserve_gpu_memory(os.environ)
    try:
        if HELP & set(argv[1:]):
            print_page(describe([word for word in argv if word not in HELP]))
            return 0
        with PreemptionGuard(ends=True):
            command = command_line.parse(argv)
            if command.distributed:
                join_pod(command.distributed)
            if command.stage is not None:
                from launch import stage_plan  # imported late, because it imports jax

                stage_plan.check_stages_before(command)
                command = stage_plan.select_stage(command)
    except (ValueError, flags.Error) as error:
        print_error(error)
        return 2
    if run := getattr(command.module, "run", None):
        inputs = {"workdir": command.workdir, "command": shlex.join(["glm5", "run", *argv[1:]])}
        names = inspect.signature(run).parameters
        arguments = [inputs[name] for name in inputs if name in names]
        with contextlib.ExitStack() as stack:
            lock = None
            if "workdir" in names:
                try:
                    # Two processes would overwrite each other's results.
                    lock = stack.enter_context(FolderLock(command.workdir))
                except OSError as error:
                    print_error(error)
                    return 2
            code = end_with_pod(lambda: run(command.config, *arguments), command.distributed)
            if lock and code == 2:
                lock.remove_unused_folder()
            return code or 0
    if serve := getattr(command.module, "serve", None):
        code = end_with_pod(lambda: serve(command.config, command.workdir), command.distributed)
        if code is not None:
            return code
    # All processes of a pod save and end together, so that none loses its progress.
    with PreemptionGuard(ends=True, unsaved=bool(command.distributed)) as stop:
        with paused_collector():
            from launch import stage_runner  # imported late, because it imports jax
        return stage_runner.run_stages(command.module, command.config, command.workdir, stop)


def end_with_pod(serve: Callable[[], int | None], distributed: str | None) -> int | None:
    """Returns the exit code of a server, or None if this process is no server.

    A process of a pod that has failed ends here. At a normal exit jax waits for the other processes, which may wait for
    this one. After a stop signal it has to wait, because the end of the first process would abort the others.
    """
    if not distributed:
        return serve()
    try:
        code = serve()
    except Exception:
        traceback.print_exc()
        code = 1
    if code not in (None, 0, EXIT_RESTART):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def describe(argv: list[str]) -> str:
    """Returns the help of the experiment in the arguments; without one, that of this program and a list. Raises ValueError."""
    argv = command_line.expand(argv)
    if len(argv) == 1:
        return f"{__doc__}\nExperiments:\n\n{experiment_help.describe_all()}"
    command_line.check_source(argv)
    spec = command_line.spec_of(argv)
    experiment, variant = experiment_files.find(spec)
    return experiment_help.describe(experiment, variant, command_line.load(spec)[1])


def join_pod(distributed: str) -> None:
    """Joins the processes of a pod, after which jax sees the devices of all. Raises ValueError."""
    import jax  # imported late, so that a mistyped flag fails at once

    if distributed == "auto":
        from launch import local

        gpus = local.this_machine().devices if _has_its_host(os.environ) else []
        try:
            jax.distributed.initialize(local_device_ids=range(len(gpus)) if gpus else None)
        except ValueError as error:
            raise ValueError(
                f"--distributed=auto: neither a TPU pod nor Slurm, MPI or Kubernetes is recognised here ({error}); use "
                "HOST:PORT,N,I"
            ) from None
        return
    try:
        address, count, index = distributed.split(",")
        if not (":" in address and 0 <= int(index) < int(count)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--distributed={distributed}; use auto or HOST:PORT,N,I with 0 <= I < N"
        ) from None
    # Without this, jax would detect the scheduler and give each process one GPU.
    jax.distributed.initialize(
        address, int(count), int(index), cluster_detection_method="deactivate"
    )


def _has_its_host(environment: Mapping[str, str]) -> bool:
    """Returns whether Slurm or MPI started this process as the only one of its host.

    Such a process takes all GPUs of its host. jax would take one, because it expects a process for each GPU.
    """
    if "SLURM_NTASKS" in environment:
        return environment["SLURM_NTASKS"] == environment.get("SLURM_STEP_NUM_NODES")
    return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
