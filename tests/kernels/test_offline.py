"""Compiles every Pallas form at GLM-5's shapes with the compilers of its chips."""

import jax
import pytest

from pallas_kernels.cases import KERNELS, cases
from pallas_kernels.cross_entropy import tpu as cross_entropy
from tests.kernels.implementations import implementation_names
from tests.kernels.offline import CUSTOM_CALL, TOPOLOGIES, compile_for, form_of, vmem_errors

pytestmark = pytest.mark.aot

COMPILED = [
    pytest.param(kernel, case, chip, id=f"{kernel}-{case}-{chip}")
    for kernel in KERNELS
    for chip in TOPOLOGIES
    if form_of(chip) in implementation_names(kernel)
    for case in cases(kernel)
]


def compile_at_full_size(kernel, name, chip):
    case = cases(kernel)[name]
    shapes = jax.eval_shape(lambda key: case.inputs(case.sizes, key), jax.random.key(0))
    return compile_for(chip, lambda arrays: case.run(arrays, case.sizes, form_of(chip)), shapes)


@pytest.mark.parametrize(("kernel", "name", "chip"), COMPILED)
def test_compiles_at_full_size(kernel, name, chip):
    before = len(vmem_errors())
    compiled = compile_at_full_size(kernel, name, chip)
    assert not vmem_errors()[before:], "the kernel requests more memory than the chip has"
    assert CUSTOM_CALL[form_of(chip)] in compiled.as_text(), "no Pallas kernel in the program"
    memory = compiled.memory_analysis()
    print(f"{kernel} {name} {chip}: {memory.generated_code_size_in_bytes} bytes of code")


def test_detects_excessive_memory_request(monkeypatch):
    """Only libtpu's log reports it."""
    monkeypatch.setattr(cross_entropy, "VMEM_BYTES", 64 << 20)
    jax.clear_caches()  # programs traced with the unpatched size
    before = len(vmem_errors())
    compile_at_full_size("cross_entropy", "forward", "v5p")
    jax.clear_caches()
    assert vmem_errors()[before:]
