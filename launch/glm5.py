"""Runs the commands of this project.

    glm5 run NAME:VARIANT [--FIELD=VALUE ...] [--workdir=DIR]   runs an experiment
    glm5 serve FOLDER [--FIELD=VALUE ...]                       serves a checkpoint over HTTP
    glm5 chat [FOLDER|URL]                                      chats with a model in the terminal
    glm5 list                                                   lists the experiments and their variants

`glm5 COMMAND --help` describes a command, and `glm5 run NAME:VARIANT --help` all fields of an experiment. FOLDER is a
run's workdir, one of its checkpoints/STEP, or a HuggingFace folder.

- serve uses serve:tiny, for two CPU cores; --experiment=serve:small is for one accelerator.
- chat without an argument connects to http://127.0.0.1:8000, where serve listens.

More commands, each with --help:

- local starts several processes or programs on this machine; on_ray, slurm, gke and ssh_commands on several machines.
- compile compiles an experiment's programs for a pod, offline.
- rehearse checks a run at its size and starts its commands on this machine, with a small model.
- check_chats checks files of SFT data, check_checkpoint a checkpoint; quantise writes W4A8 weights.

Without an installation, COMMAND is `python -m launch.COMMAND` or, for the last three, `python -m experiments.COMMAND`.
"""

import importlib
import sys

from glm5_jax.runtime.config_fields import close_names
from glm5_jax.runtime.terminal import print_error, print_page
from launch import experiment_files, experiment_help
from launch.imports import paused_collector

PROGRAMS = ("local", "on_ray", "slurm", "gke", "ssh_commands", "compile", "rehearse")
TOOLS = ("check_chats", "check_checkpoint", "quantise")  # in experiments/
COMMANDS = ("run", "serve", "chat", "list", *PROGRAMS, *TOOLS)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns the exit code; argv: program's name and arguments, by default those of the process."""
    program, *words = sys.argv if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    command, *rest = words
    if command not in COMMANDS:
        close = close_names(command, COMMANDS)
        offer = (
            f"did you mean {' or '.join(close)}" if close else f"use one of {', '.join(COMMANDS)}"
        )
        print_error(f"no command {command!r}; {offer}; `glm5 --help` describes them")
        return 2
    name = f"{program} {command}"
    if command == "list":
        return _list(rest)
    if command == "serve":
        command, rest = "run", serve_arguments(rest)
    if command in PROGRAMS and rest and not rest[0].startswith("-"):
        try:
            experiment_files.find(rest[0])  # answers a misspelt name before the program imports jax
        except ValueError as error:
            print_error(error)
            return 2
    # Imported late, because many of the programs import jax.
    package = "experiments" if command in TOOLS else "launch"
    with paused_collector():
        module = importlib.import_module(f"{package}.{command}")
    return module.main(rest if command in TOOLS else [name, *rest])


def serve_arguments(words: list[str]) -> list[str]:
    """Returns the arguments of `run` for `glm5 serve WORDS`: the first word without dashes is the checkpoint."""
    named = any(word.startswith(("--experiment=", "-experiment=")) for word in words)
    arguments = [] if named else ["--experiment=serve:tiny"]
    if words and not words[0].startswith("-"):
        return [*arguments, f"--experiment.checkpoint={words[0]}", *words[1:]]
    return [*arguments, *words]


def _list(words: list[str]) -> int:
    """Prints all experiments."""
    if words in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if words:
        print_error(f"unexpected argument {words[0]!r}; `glm5 list` takes none")
        return 2
    print_page(experiment_help.describe_all())
    return 0


if __name__ == "__main__":
    sys.exit(main())
