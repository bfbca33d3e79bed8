"""What differs between the jax versions that are supported, and the private names that tests need."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu, tpu as pltpu


def emulator(name: str, **params):
    """Parameters under which a Pallas form ("tpu" or "gpu") runs in jax's emulator of that chip on a CPU.

    detect_races=True makes `races_found` tell afterwards whether two accesses were unordered.
    """
    if name == "tpu":
        return pltpu.InterpretParams(**params)
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


def load(ref, index, layout):
    """ref[index] in registers of a Mosaic GPU layout."""
    if JAX_VERSION < (0, 11):
        return plgpu.load(ref, index, layout=layout, optimized=False)
    return plgpu.load(ref.at[index] if index else ref, layout=layout, optimized=False)


def transposed(ref):
    """The transposed view of a two-dimensional Mosaic GPU ref."""
    return plgpu.transpose_ref(ref, (1, 0)) if JAX_VERSION < (0, 11) else ref.T
