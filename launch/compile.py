"""What a pod's compiler makes of an experiment's programs, found out without the pod.

    python -m launch.compile --experiment=experiments/pretrain.py:glm5 [--topology=v5p:8x8x16]

An experiment that trains has one program, its step; one that serves (experiments/serve.py) two, prefill and decode.
Without --topology they are only lowered, for as many chips as --experiment.mesh names: bytes per device and FLOPs
follow from the shapes, in seconds. --topology compiles them for chips that are not there, by the real compiler
(launch/test.sh aot installs it), and adds temporary memory, collectives and the least time of a step:

    v5p:8x8x16     a TPU and its topology (v5e, v5p, v6e, tpu7x)     (744B: 10 GiB of memory, minutes)
    4*v6e:16x16    four slices of one, with a slower network between them
    h200:1x128x8   128 hosts of 8 NVIDIA GPUs (h200, h100)
    cpu            this machine, where the program's hash is the one that a run here writes into its log

--json prints one line for programs instead. --hlo=FILE keeps the compiled text. Fields of the experiment are set as
in launch.run. The exit code is 0 if all fits or nothing was compiled, 3 if something does not fit, 2 for a mistake.
"""

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

from absl import flags

from glm5_jax.core.mesh import abstract_mesh, make_mesh
from glm5_jax.training.experiment import StageConfig
from launch import pods
from launch.program_report import SHAPES, described, report_of
from launch.programs import Program, lower_step
from launch.run import parse

NOT_FITTING = 3  # exit code


def mesh_of(topology: str | None, axes: dict[str, int], expert_slices: int):
    """(mesh, pod): of these axes on a topology; None for the mesh of one device here. ValueError."""
    if topology is None:
        return abstract_mesh(axes), None
    if topology == "cpu":
        mesh = make_mesh(axes, expert_slices=expert_slices)
        return mesh if mesh.size > 1 else None, None  # as a run has it
    pod = pods.parse(topology)
    return pods.mesh(pod, axes, expert_slices), pod


def programs_of(config, mesh, platform: str) -> list[Program]:
    """All programs of an experiment; ValueError if it has none that can be lowered."""
    if isinstance(config, StageConfig):
        return [lower_step(config, mesh, platform)]
    raise ValueError("this experiment is not one stage of training; give the one to compile")


def main(argv: list[str]) -> int:
    """Exit code; the reports go to standard output."""
    values = flags.FlagValues()
    flags.DEFINE_string("topology", None, "what to compile for", flag_values=values)
    flags.DEFINE_string("hlo", None, "file for the compiled text", flag_values=values)
    flags.DEFINE_bool("json", False, "one line of JSON for each program", flag_values=values)
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    try:
        config = parse(values(argv, known_only=True)).config
        if not hasattr(config, "mesh"):
            raise ValueError(
                "this experiment is not one stage of training; give the one to compile"
            )
        slices = config.step.expert_slices if isinstance(config, StageConfig) else 1
        mesh, pod = mesh_of(values.topology, dataclasses.asdict(config.mesh), slices)
        platform = pod.platform if pod else "cpu" if values.topology else "tpu"
        began = time.monotonic()
        programs = programs_of(config, mesh, platform)
    except (ValueError, flags.Error) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    seconds, fits = (time.monotonic() - began) / len(programs), True
    for program in programs:
        topology = values.topology or SHAPES
        report, text = report_of(config.name, topology, program, mesh, pod, seconds)
        fits &= report.fits is not False
        if values.json:
            told = dataclasses.asdict(report) | {"fits": report.fits}
            print(json.dumps(told), flush=True)
        else:
            print(described(report), flush=True)
        if values.hlo and text:
            pathlib.Path(values.hlo).write_text(text)
    return 0 if fits else NOT_FITTING


if __name__ == "__main__":
    sys.exit(main(sys.argv))
