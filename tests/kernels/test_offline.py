"""Every Pallas form at the shapes of GLM-5, by the real compilers of the chips that it is for."""

import jax
import pytest

from pallas_kernels.cases import KERNELS, cases
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


@pytest.mark.parametrize(("kernel", "name", "chip"), COMPILED)
def test_compiles_at_full_size(kernel, name, chip):
    case = cases(kernel)[name]
    shapes = jax.eval_shape(lambda key: case.inputs(case.sizes, key), jax.random.key(0))
    before = len(refusals())
    compiled = compile_for(chip, lambda arrays: case.run(arrays, case.sizes, form_of(chip)), shapes)
    assert not refusals()[before:], "it asks for more memory than the chip has"
    assert CUSTOM_CALL[form_of(chip)] in compiled.as_text(), "no Pallas kernel in the program"
    memory = compiled.memory_analysis()
    print(f"{kernel} {name} {chip}: {memory.generated_code_size_in_bytes} bytes of code")
