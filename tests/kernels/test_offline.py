"""Every Pallas form at the shapes of GLM-5, by the real compilers of the chips that it is for."""

import jax
import pytest

from pallas_kernels.cases import KERNELS, cases
from pallas_kernels.cross_entropy import tpu as cross_entropy
from tests.kernels.implementations import written
from tests.kernels.offline import CUSTOM_CALL, TOPOLOGIES, compile_for, form_of, refusals

pytestmark = pytest.mark.aot

COMPILED = [
    pytest.param(kernel, case, chip, id=f"{kernel}-{case}-{chip}")
    for kernel in KERNELS
    for chip in TOPOLOGIES
    if form_of(chip) in written(kernel)
    for case in cases(kernel)
]


def compiled_at_full_size(kernel, name, chip):
    case = cases(kernel)[name]
    shapes = jax.eval_shape(lambda key: case.inputs(case.sizes, key), jax.random.key(0))
    return compile_for(chip, lambda arrays: case.run(arrays, case.sizes, form_of(chip)), shapes)


@pytest.mark.parametrize(("kernel", "name", "chip"), COMPILED)
def test_compiles_at_full_size(kernel, name, chip):
    before = len(refusals())
    compiled = compiled_at_full_size(kernel, name, chip)
    assert not refusals()[before:], "it asks for more memory than the chip has"
    assert CUSTOM_CALL[form_of(chip)] in compiled.as_text(), "no Pallas kernel in the program"
    memory = compiled.memory_analysis()
    print(f"{kernel} {name} {chip}: {memory.generated_code_size_in_bytes} bytes of code")


def test_a_kernel_that_asks_for_more_memory_than_a_chip_has_is_noticed(monkeypatch):
    """Only libtpu's log says so."""
    monkeypatch.setattr(cross_entropy, "VMEM_BYTES", 64 << 20)
    jax.clear_caches()  # of what was traced with the kernel's own number
    before = len(refusals())
    compiled_at_full_size("cross_entropy", "forward", "v5p")
    jax.clear_caches()
    assert refusals()[before:]
