"""What a pod's compiler makes of an experiment's programs, found out without the pod.

    python -m launch.compile --experiment=experiments/pretrain.py:glm5 [--topology=v5p:8x8x16]

An experiment that trains has one program, its step; one that serves (experiments/serve.py) two, prefill and decode, for
sequences of --experiment.engine.max_length tokens, of which each group of devices decodes --experiment.engine.max_batch:

    python -m launch.compile --experiment=experiments/serve.py:glm5 --experiment.mesh.expert=32 --quantised

What it serves is --experiment.checkpoint, of which the config alone is read, or --model (glm5, glm5_2, glm4_7_flash, small,
tiny; default: the variant), whose fields are set with --model.FIELD=VALUE. --quantised: weights in W4A8, else in the model's
dtype. Told beside the rest is the least that a million tokens cost: a bound from peaks, never a speed.

Without --topology they are only lowered, for as many chips as --experiment.mesh names: bytes per device and FLOPs
follow from the shapes, in less than a minute. --topology compiles them for chips that are not there, by the real compiler
(launch/test.sh aot installs it), and adds temporary memory, collectives and the least time of a step:

    v5p:8x8x16     a TPU and its topology (v5e, v5p, v6e, tpu7x)     (744B: 3 to 12 GiB, 2 to 25 minutes of two cores)
    4*v6e:16x16    four slices of one, with a slower network between them
    h200:1x128x8   128 hosts of 8 NVIDIA GPUs (h200, h100)
    cpu            this machine, where the program's hash is the one that a run here writes into its log

For tpu7x equal programs of the SparseCores are compiled once, where a run compiles each (launch/xla_flags.py, OFFLINE).

--json prints one line for programs instead, --hash their hashes alone, before anything is compiled. --hlo=FILE keeps the
compiled text, of two in FILE-prefill and FILE-decode. Fields of the experiment are set as in launch.run. The exit code is 0 if
all fits or nothing was compiled, 3 if something does not fit, 2 for a mistake.
"""

import ctypes
import dataclasses
import json
import os
import pathlib
import sys
import time

if __name__ == "__main__":  # the compilers need no device, and a pod's would be taken by jax
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a cloud for its machine
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody's devices are taken
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # XLA tells of buffers as it compiles

from absl import flags
from ml_collections import config_flags

from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.config import ModelConfig
from glm5_jax.core.console import waiting
from glm5_jax.core.editable import editable, freeze
from glm5_jax.core.mesh import abstract_mesh, make_mesh
from glm5_jax.core.program_hash import program_hash
from glm5_jax.inference.request import EngineConfig
from glm5_jax.training.experiment import StageConfig
from launch import pods
from launch.program_report import SHAPES, described, report_of
from launch.programs import Program, lower_step
from launch.run import check_fields, parse, spec_of
from launch.serving_programs import lower_decode, lower_prefill

NOT_FITTING = 3  # exit code
MODEL = "--model"


def mesh_of(topology: str | None, axes: dict[str, int], expert_slices: int):
    """(mesh, pod): of these axes on a topology; None for the mesh of one device here. ValueError."""
    if topology is None:
        return abstract_mesh(axes), None
    if topology == "cpu":
        mesh = make_mesh(axes, expert_slices=expert_slices)
        return mesh if mesh.size > 1 else None, None  # as a run has it
    pod = pods.parse(topology)
    return pods.mesh(pod, axes, expert_slices), pod


def served(config, variant: str, argv: list[str], quantised: bool) -> tuple[ModelConfig, bool]:
    """The model of an experiment that serves, and whether in W4A8; ValueError if none is named, or two are."""
    names = [arg.partition("=")[2] for arg in argv if arg.partition("=")[0] == MODEL]
    given = names or any(arg.startswith(f"{MODEL}.") for arg in argv)
    if config.checkpoint is not None:
        if given:
            raise ValueError(f"--experiment.checkpoint and {MODEL} both name a model; give one")
        cfg, packed = models.read_config(config.checkpoint)
        return cfg, packed or quantised
    name = names[-1] if names else variant
    if name not in presets.PRESETS:
        raise ValueError(
            f"no model {name!r}; use {MODEL}={', '.join(presets.PRESETS)}, or --experiment.checkpoint=DIR"
        )
    twin, values = editable(presets.get(name)), flags.FlagValues()
    check_fields("model", twin, argv)
    config_flags.DEFINE_config_dataclass(
        "model", twin, "what is served", flag_values=values, sys_argv=argv, parse_fn=lambda _: twin
    )
    values(argv, known_only=True)
    try:
        return freeze(values["model"].value), quantised
    except ValueError as error:
        raise ValueError(f"{MODEL}.{error}") from None


def programs_of(config, model: tuple[ModelConfig, bool] | None, mesh, platform) -> list[Program]:
    """All programs of an experiment; ValueError if they cannot be lowered. model: of `served`, if it serves."""
    if model is None:
        return [lower_step(config, mesh, platform)]
    cfg, quantised = model
    lower = (lower_prefill, lower_decode)
    return [make(cfg, mesh, platform, config.engine, quantised) for make in lower]


def _can_be_written(file: str) -> bool:
    folder = pathlib.Path(file).absolute().parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def main(argv: list[str]) -> int:
    """Exit code; the reports go to standard output."""
    values = flags.FlagValues()
    flags.DEFINE_string("topology", None, "what to compile for", flag_values=values)
    flags.DEFINE_string("hlo", None, "file for the compiled text", flag_values=values)
    flags.DEFINE_bool("json", False, "one line of JSON for each program", flag_values=values)
    flags.DEFINE_bool("hash", False, "lower only, and print hashes", flag_values=values)
    flags.DEFINE_bool("quantised", False, "weights in W4A8", flag_values=values)
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    try:
        rest = values(argv, known_only=True)
        if values.hash and values.hlo:
            raise ValueError(
                "--hash compiles nothing that --hlo could write; leave out one of them"
            )
        if values.hlo and (pathlib.Path(values.hlo).is_dir() or not _can_be_written(values.hlo)):
            raise ValueError(
                f"--hlo={values.hlo} cannot be written; give a file in a folder that is there"
            )
        if values.hlo and not values.topology:
            raise ValueError(
                f"--hlo={values.hlo} is for what is compiled; give a --topology, of a pod or cpu"
            )
        if MODEL in rest:
            raise ValueError(f"{MODEL} is followed by a blank; write {MODEL}=NAME")
        own = [arg for arg in rest if arg.startswith((f"{MODEL}=", f"{MODEL}."))]
        config = parse([arg for arg in rest if arg not in own]).config
        name, model = getattr(config, "name", None), None
        if isinstance(config, StageConfig):
            if own or values.quantised:
                what = own[0] if own else "--quantised"
                raise ValueError(f"{what} is of what serves; use --experiment.model.FIELD here")
        elif isinstance(getattr(config, "engine", None), EngineConfig):
            file, _, variant = spec_of(rest).partition(":")
            name = f"{pathlib.Path(file).stem}:{variant}".removesuffix(":")
            model = served(config, variant, ["compile", *own], values.quantised)
        else:
            raise ValueError(
                "this experiment is not one stage of training, nor does it serve; give the one to compile"
            )
        slices = config.step.expert_slices if isinstance(config, StageConfig) else 1
        mesh, pod = mesh_of(values.topology, dataclasses.asdict(config.mesh), slices)
        platform = pod.platform if pod else "cpu" if values.topology else "tpu"
        began = time.monotonic()
        with waiting(f"lowering {name}"):
            programs = programs_of(config, model, mesh, platform)
        if values.hash:
            print(*(program_hash(program.lowered) for program in programs), sep="\n")
            return 0
    except (ValueError, flags.Error) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    seconds, fits, several = (time.monotonic() - began) / len(programs), True, len(programs) > 1
    while programs:
        program, text = programs.pop(0), None  # nothing of the last one is in memory beside it
        _trim()
        topology = values.topology or SHAPES
        what = "compiling" if values.topology else "counting"
        with waiting(f"{what} the {program.name} of {name} for {topology}"):
            report, text = report_of(name, topology, program, mesh, pod, seconds)
        fits &= report.fits is not False
        if values.json:
            told = dataclasses.asdict(report) | {"fits": report.fits}
            print(json.dumps(told), flush=True)
        else:
            print(described(report), flush=True)
        if values.hlo and text:
            file = pathlib.Path(values.hlo)
            if several:
                file = file.with_stem(f"{file.stem}-{program.name}")
            file.write_text(text)
    return 0 if fits else NOT_FITTING


def _trim() -> None:
    """Gives memory that is free back to the system; glibc would keep it, 6 GB of a serving program of 744B."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
