"""What differs between the jax versions that are supported, and the private names that are needed."""

import functools
import threading

import jax
from jax._src import compiler
from jax._src.lib import tpu
from jax._src.lib.mlir import ir as ir
from jax._src.lib.mlir.dialects import (
    arith as arith,
    llvm as llvm,
    memref as memref,
    nvvm as nvvm,
    vector as vector,
)
from jax.experimental.pallas import mosaic_gpu as plgpu, tpu as pltpu
from jax.interpreters import mlir


def emulator(name: str, **params):
    """Parameters under which a Pallas form ("tpu" or "gpu") runs in jax's emulator of that chip on a CPU.

    detect_races=True makes `races_found` tell afterwards whether two accesses were unordered.
    """
    if name == "tpu":
        return pltpu.InterpretParams(**params)
    _mend_gpu_emulator()
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(**params)
    from jax._src.pallas.mosaic_gpu.interpret import params as private

    return private.InterpretGPUParams(**params)


def races_found(name: str) -> bool:
    """Whether the last program that ran in the emulator with detect_races had a race.

    RuntimeError if no such program has run, so that a test cannot pass by looking at nothing.
    """
    if name == "tpu":
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as private

        races = private.races
    else:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as private

        races = private.get_races()
    if races is None:
        raise RuntimeError("no kernel ran with detect_races; there is nothing to tell")
    return bool(races.races_found)


JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


@functools.cache
def _mend_gpu_emulator():
    """Two faults of jax's emulator, of which jax 0.11 still has the second."""
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    if JAX_VERSION < (0, 11):
        thread_map._run_jaxpr = _compiling_once()
    memory = shared_memory.GPUSharedMemory
    look = memory.assert_no_barriers_allocated
    # The device that is done first finds the barriers of the others, and calls them forgotten.
    memory.assert_no_barriers_allocated = lambda self: self.num_devices > 1 or look(self)


def _compiling_once():
    """Runs a kernel's body for one thread: each thread compiled it anew, at every point of the grid."""
    from jax._src import core

    lock, compiled = threading.Lock(), {}

    def run(jaxpr, consts, *args):
        with lock:
            if len(compiled) > 16:
                compiled.clear()
            # The jaxpr is kept beside its program, or another could get its id.
            if id(jaxpr) not in compiled:
                body = jax.jit(lambda consts, *args: core.eval_jaxpr(jaxpr, consts, *args) and None)
                compiled[id(jaxpr)] = jaxpr, body.lower(consts, *args).compile()
            program = compiled[id(jaxpr)][1]
        program(consts, *args)

    return run


def load(ref, index, layout):
    """ref[index] in registers of a Mosaic GPU layout."""
    if JAX_VERSION < (0, 11):
        return plgpu.load(ref, index, layout=layout, optimized=False)
    return plgpu.load(ref.at[index] if index else ref, layout=layout, optimized=False)


def transposed(ref):
    """The transposed view of a two-dimensional Mosaic GPU ref."""
    return plgpu.transpose_ref(ref, (1, 0)) if JAX_VERSION < (0, 11) else ref.T


def without_places(module: bytes) -> str:
    """The text of a kernel's module in MLIR's bytecode, without the lines of source that its operations come from."""
    with mlir.make_ir_context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        return ir.Module.parse(module).operation.get_asm(enable_debug_info=False)


def read_no_program_of_a_mesh() -> None:
    """XLA:CPU runs the collectives of a program that it reads from the cache in an order that differs from
    device to device, and aborts the process where they do not fit together (jax 0.10.2: a dense model with
    fsdp=8, on every run but the first)."""
    read = compiler._cache_read

    def read_for_one_device(name, key, options, backend, devices, *rest):
        if len(devices) > 1:
            return None, None
        return read(name, key, options, backend, devices, *rest)

    compiler._cache_read = read_for_one_device
