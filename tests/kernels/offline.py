"""Compiles a function for one chip with that chip's compiler, without the chip."""

import os
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from launch import pods

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1", "h200": "h200:1x1"}
# Part of an error in libtpu's log. The compiler then uses less memory and succeeds.
TOO_MUCH = "of scoped Vmem requested"
CUSTOM_CALL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}


def pod_of(target: str) -> pods.Pod:
    """Returns the pod of a name. Skips the test where its compiler is not installed."""
    pod = pods.parse(target)
    if how := pods.install_hint(pod):
        pytest.skip(how)
    return pod


def form_of(chip: str) -> str:
    """Returns the name of the Pallas implementation for a chip."""
    return "gpu" if chip == "h200" else "tpu"


def compile_for(chip: str, function, *shapes, donate=()):
    """Compiles `function(*shapes)` for one device of a chip of TOPOLOGIES.

    Skips the test where the compiler is not installed.

    shapes: without shardings.
    donate: numbers of the arguments whose buffers may be reused.
    """
    device = pods.list_devices(pod_of(TOPOLOGIES[chip]))[:1]
    mesh = Mesh(np.array(device), ("one",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P())
    # A manual region, because code that is traced inside it knows the chip of its mesh.
    local = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tuple(shapes)
    )
    return jax.jit(local, donate_argnums=donate).lower(*shapes).compile()


def vmem_errors() -> list[str]:
    """Returns the lines of libtpu's log of this process that report too little memory."""
    folder = pathlib.Path(os.environ.get("TPU_LOG_DIR", "/tmp/tpu_logs"))
    logs = [log.read_text() for log in folder.glob(f"tpu_driver.*.log.ERROR.*.{os.getpid()}")]
    return [line for log in logs for line in log.splitlines() if TOO_MUCH in line]
