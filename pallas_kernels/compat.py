"""Adapters for differences between the supported jax versions, and the private jax names that are needed."""

import functools
import threading
from typing import Any

import jax
from jax._src import compiler
from jax._src.lib import tpu  # pyright: ignore[reportPrivateImportUsage]: no public name
from jax._src.lib.mlir import ir as ir  # pyright: ignore[reportPrivateImportUsage]: no public name
from jax._src.lib.mlir.dialects import (
    arith as arith,
    llvm as llvm,
    memref as memref,
    nvvm as nvvm,
    vector as vector,
)
from jax.experimental.pallas import mosaic_gpu as plgpu, tpu as pltpu
from jax.interpreters import mlir


def emulator_params(name: str, **params) -> object:
    """Returns interpret parameters for a Pallas form ("tpu" or "gpu") in jax's CPU emulator of that chip.

    With detect_races=True, `has_races` reports afterwards whether two accesses were unordered.
    """
    if name == "tpu":
        return pltpu.InterpretParams(**params)
    _patch_gpu_emulator()
    if (public := getattr(plgpu, "InterpretGPUParams", None)) is not None:
        return public(**params)
    from jax._src.pallas.mosaic_gpu.interpret import params as private

    return private.InterpretGPUParams(**params)


def has_races(name: str) -> bool:
    """Returns whether the last program that ran in the emulator with detect_races had a race.

    Raises RuntimeError if no such program has run, so that a test cannot pass without a check.
    """
    if name == "tpu":
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as private

        races = private.races
    else:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as private

        races = private.get_races()
    if races is None:
        raise RuntimeError(
            "no kernel ran with detect_races; run one with emulator_params(name, detect_races=True)"
        )
    return bool(races.races_found)


JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


@functools.cache
def _patch_gpu_emulator():
    """Patches two faults of jax's GPU emulator; jax 0.11 still has the second."""
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    if JAX_VERSION < (0, 11):
        thread_map._run_jaxpr = _make_cached_runner()
    memory: Any = shared_memory.GPUSharedMemory
    check_barriers = memory.assert_no_barriers_allocated
    # The device that finishes first sees the barriers of the others, and reports them as leaked.
    memory.assert_no_barriers_allocated = lambda self: self.num_devices > 1 or check_barriers(self)


def _make_cached_runner():
    """Returns a runner of a kernel's body for one thread that compiles each body once.

    jax's runner compiles it again in each thread and at every point of the grid.
    """
    from jax._src import core

    lock, compiled = threading.Lock(), {}

    def run(jaxpr, consts, *args):
        with lock:
            if len(compiled) > 16:
                compiled.clear()
            # The cache also holds the jaxpr; if it were freed, another one could get its id.
            if id(jaxpr) not in compiled:
                body = jax.jit(lambda consts, *args: core.eval_jaxpr(jaxpr, consts, *args) and None)
                compiled[id(jaxpr)] = jaxpr, body.lower(consts, *args).compile()
            program = compiled[id(jaxpr)][1]
        program(consts, *args)

    return run


def load(ref, index, layout):
    """Loads ref[index] into registers of a Mosaic GPU layout."""
    plgpu_load: Any = plgpu.load  # its parameters differ between the versions
    if JAX_VERSION < (0, 11):
        return plgpu_load(ref, index, layout=layout, optimized=False)
    return plgpu_load(ref.at[index] if index else ref, layout=layout, optimized=False)


def transpose_ref(ref):
    """Returns the transposed view of a two-dimensional Mosaic GPU ref."""
    return plgpu.transpose_ref(ref, (1, 0)) if JAX_VERSION < (0, 11) else ref.T


def strip_locations(module: bytes) -> str:
    """Returns the text of a kernel's MLIR bytecode without source locations."""
    with mlir.make_ir_context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(module).operation.get_asm(enable_debug_info=False))


def disable_mesh_program_cache() -> None:
    """Stops XLA:CPU from reading programs for several devices from the compilation cache.

    A cached program runs its collectives in an order that differs from device to device, and aborts the process
    where they do not match (jax 0.10.2: a dense model with fsdp=8, on every run but the first).
    """
    read_cache = compiler._cache_read

    def read_single_device(name, key, options, backend, devices, *rest):
        if len(devices) > 1:
            return None, None
        return read_cache(name, key, options, backend, devices, *rest)

    compiler._cache_read = read_single_device
