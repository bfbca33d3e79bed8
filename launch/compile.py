"""Compiles an experiment's programs for a pod, without the pod, and reports memory, FLOPs and communication.

    python -m launch.compile --experiment=experiments/pretrain.py:glm5 [--topology=v5p:8x8x16]

An experiment that trains has one program, its train step. One that serves (experiments/serve.py) has two, prefill and
decode, for sequences of --experiment.engine.max_length tokens; each data-parallel rank decodes
--experiment.engine.max_num_seqs of them:

    python -m launch.compile --experiment=experiments/serve.py:glm5 --experiment.mesh.expert=32 --quantised

The served model is --experiment.checkpoint, of which only the config is read, or --model (glm5, glm5_2, glm4_7_flash, small,
tiny; default: the variant), whose fields are set with --model.FIELD=VALUE. With --quantised the weights are W4A8, otherwise
in the model's dtype. The report also has the minimum cost of a million tokens: a bound from peaks, not a speed.

Without --topology the programs are only lowered, for the number of chips of --experiment.mesh: bytes per device and FLOPs
follow from the shapes, in less than a minute. --topology compiles them for chips of another machine, by the real compiler
(launch/test.sh aot installs it), and adds temporary memory, collectives and the minimum time of a step, and of a push of
weights to a run's engines:

    v5p:8x8x16     a TPU and its topology (v5e, v5p, v6e, tpu7x)     (744B: 3 to 12 GiB, 2 to 25 minutes of two cores)
    4*v6e:16x16    four slices of one, with a slower network between them
    h200:1x128x8   128 hosts of 8 NVIDIA GPUs (h200, h100)
    cpu            this machine; the program's hash is the one that a run on it writes into its log

For tpu7x, equal SparseCore programs are compiled once, while a run compiles each of them (launch/xla_flags.py, OFFLINE).

--json prints one JSON line for each program. --hash prints only the hashes and compiles nothing. --hlo=FILE writes the
compiled text, for two programs to FILE-prefill and FILE-decode. Fields of the experiment are set as in launch.run. The exit
code is 0 if all programs fit or none was compiled, 3 if one does not fit, and 2 for a user's error.
"""

import ctypes
import dataclasses
import json
import os
import pathlib
import sys
import time

if __name__ == "__main__":  # the compilers need no device, and jax would take those of a pod
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault(
        "TPU_SKIP_MDS_QUERY", "1"
    )  # libtpu would query the cloud's metadata server
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is used
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # buffer reports come from compiling

from absl import flags
from ml_collections import config_flags

from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.config import ModelConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import abstract_mesh, make_mesh
from glm5_jax.parallel.program_hash import program_hash
from glm5_jax.runtime.config_flags import to_frozen, to_mutable
from glm5_jax.runtime.console import spinner
from glm5_jax.runtime.terminal import print_error
from glm5_jax.training.experiment import StageConfig
from launch import pods
from launch.aot.program_report import SHAPES, describe, report_of
from launch.aot.programs import Program, lower_step
from launch.aot.serving_programs import lower_decode, lower_prefill
from launch.command_line import check_fields, expand, parse, spec_of
from launch.rehearsal.arithmetic import is_quantised
from launch.rehearsal.push_cost import describe_push, push_cost

NOT_FITTING = 3  # exit code
MODEL = "--model"


def make_target_mesh(topology: str | None, axes: dict[str, int], expert_slices: int):
    """Returns (mesh, pod) with these axes on a topology; mesh None: one device of this machine. Raises ValueError."""
    if topology is None:
        return abstract_mesh(axes), None
    if topology == "cpu":
        mesh = make_mesh(axes, expert_slices=expert_slices)
        return mesh if mesh.size > 1 else None, None  # like a run
    pod = pods.parse(topology)
    return pods.make_pod_mesh(pod, axes, expert_slices), pod


def read_served_model(
    config, variant: str, argv: list[str], quantised: bool
) -> tuple[ModelConfig, bool]:
    """Returns the model of an experiment that serves, and whether it is W4A8.

    Raises ValueError unless exactly one model is named.
    """
    names = [arg.partition("=")[2] for arg in argv if arg.partition("=")[0] == MODEL]
    has_model_flags = names or any(arg.startswith(f"{MODEL}.") for arg in argv)
    if config.checkpoint is not None:
        if has_model_flags:
            raise ValueError(f"--experiment.checkpoint and {MODEL} both name a model; give one")
        cfg, packed = models.read_config(config.checkpoint)
        return cfg, packed or quantised
    name = names[-1] if names else variant
    if name not in presets.PRESETS:
        raise ValueError(
            f"no model {name!r}; use {MODEL}={', '.join(presets.PRESETS)}, or --experiment.checkpoint=DIR"
        )
    mutable, values = to_mutable(presets.get(name)), flags.FlagValues()
    check_fields("model", mutable, argv)
    config_flags.DEFINE_config_dataclass(
        "model",
        mutable,
        "served model",
        flag_values=values,
        sys_argv=argv,
        parse_fn=lambda _: mutable,
    )
    values(argv, known_only=True)
    try:
        return to_frozen(values["model"].value), quantised
    except ValueError as error:
        raise ValueError(f"{MODEL}.{error}") from None


def lower_programs(config, model: tuple[ModelConfig, bool] | None, mesh, platform) -> list[Program]:
    """Lowers all programs of an experiment. Raises ValueError if that fails.

    model: result of `read_served_model`; None: the experiment trains.
    """
    if model is None:
        return [lower_step(config, mesh, platform)]
    cfg, quantised = model
    lowerings = (lower_prefill, lower_decode)
    return [
        lower_program(cfg, mesh, platform, config.engine, quantised) for lower_program in lowerings
    ]


def _is_writable(file: str) -> bool:
    folder = pathlib.Path(file).absolute().parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def main(argv: list[str]) -> int:
    """Prints the reports to standard output and returns the exit code."""
    values = flags.FlagValues()
    flags.DEFINE_string("topology", None, "topology to compile for", flag_values=values)
    flags.DEFINE_string("hlo", None, "file for the compiled text", flag_values=values)
    flags.DEFINE_bool("json", False, "one line of JSON for each program", flag_values=values)
    flags.DEFINE_bool("hash", False, "lower only, and print hashes", flag_values=values)
    flags.DEFINE_bool("quantised", False, "weights in W4A8", flag_values=values)
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    try:
        # Flags of this program.
        if MODEL in argv:
            raise ValueError(f"{MODEL} is followed by a blank; write {MODEL}=NAME")
        model_flags = [arg for arg in argv if arg.startswith((f"{MODEL}=", f"{MODEL}."))]
        experiment_argv = expand([arg for arg in argv if arg not in model_flags], values)
        rest = values(experiment_argv, known_only=True)
        if values.hash and values.hlo:
            raise ValueError(
                "--hash compiles nothing that --hlo could write; leave out one of them"
            )
        if values.hlo and (pathlib.Path(values.hlo).is_dir() or not _is_writable(values.hlo)):
            raise ValueError(
                f"--hlo={values.hlo} cannot be written; give a file in an existing folder"
            )
        if values.hlo and not values.topology:
            raise ValueError(
                f"--hlo={values.hlo} needs compiled programs; give a --topology, of a pod or cpu"
            )
        # The experiment, and the model if it serves.
        config = parse(rest, values).config
        model = None
        if isinstance(config, StageConfig):
            name = config.name
            if model_flags or values.quantised:
                flag = model_flags[0] if model_flags else "--quantised"
                raise ValueError(
                    f"{flag} is for experiments that serve; use --experiment.model.FIELD here"
                )
        elif isinstance(getattr(config, "engine", None), EngineConfig):
            file, _, variant = spec_of(rest).partition(":")
            name = f"{pathlib.Path(file).stem}:{variant}".removesuffix(":")
            model = read_served_model(config, variant, ["compile", *model_flags], values.quantised)
        else:
            raise ValueError(
                "this experiment is neither one stage of training nor a server; name one that is"
            )
        # Lowering.
        expert_slices = config.step.expert_slices if isinstance(config, StageConfig) else 1
        mesh, pod = make_target_mesh(
            values.topology, dataclasses.asdict(config.mesh), expert_slices
        )
        platform = pod.platform if pod else "cpu" if values.topology else "tpu"
        began = time.monotonic()
        with spinner(f"lowering {name}"):
            programs = lower_programs(config, model, mesh, platform)
        if values.hash:
            print(*(program_hash(program.lowered) for program in programs), sep="\n")
            return 0
    except (ValueError, flags.Error) as error:
        print_error(error)
        return 2
    # Compilation and reports.
    seconds, fits, several = (time.monotonic() - began) / len(programs), True, len(programs) > 1
    while programs:
        program, text = programs.pop(0), None  # the previous program's memory is free
        _trim()
        topology = values.topology or SHAPES
        action = "compiling" if values.topology else "counting"
        with spinner(f"{action} the {program.name} of {name} for {topology}"):
            report, text = report_of(name, topology, program, mesh, pod, seconds)
        fits &= report.fits is not False
        if values.json:
            row = dataclasses.asdict(report) | {"fits": report.fits}
            print(json.dumps(row), flush=True)
        else:
            print(describe(report), flush=True)
        if values.hlo and text:
            file = pathlib.Path(values.hlo)
            if several:
                file = file.with_stem(f"{file.stem}-{program.name}")
            file.write_text(text)
    if pod is not None and not values.json and getattr(config, "has_engine_processes", False):
        print(f"push: {describe_push(push_cost(config, pod.chip, is_quantised(config)))}")
    return 0 if fits else NOT_FITTING


def _trim() -> None:
    """Returns free memory to the system; glibc would keep 6 GB of a serving program of the 744B model."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
