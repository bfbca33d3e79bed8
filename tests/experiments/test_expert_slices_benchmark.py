"""The counted rows equal those that the tokens of a balanced router send."""

import numpy as np
import pytest

from experiments.benchmarks.expert_slices import main, one_level, two_levels
from glm5_jax.model.expert_dispatch import slices_of


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_rows_equal_those_of_random_choices(slices):
    draw, (experts, chosen, devices) = np.random.default_rng(0), (32, 4, 16)
    ids = np.stack([draw.permutation(experts)[:chosen] for _ in range(20_000)])
    place, home = ids * devices // experts, draw.integers(devices, size=(len(ids), 1))
    inside, far = devices // slices, ids * slices // experts != home // (devices // slices)
    sizes = experts, chosen, devices, slices
    assert one_level(*sizes).across == pytest.approx(far.sum(1).mean(), rel=0.03)
    near = (place != home) & ~far
    assert one_level(*sizes).inside == pytest.approx(near.sum(1).mean(), rel=0.03)
    crossing = np.asarray(slices_of(ids, experts // slices, slices)).copy()
    np.put_along_axis(crossing, home // inside, False, axis=1)
    assert two_levels(*sizes).across == pytest.approx(crossing.sum(1).mean(), rel=0.03)
    # In every slice the device at the token's position passes it on.
    passed = place % inside != home % inside
    assert two_levels(*sizes).inside == pytest.approx(passed.sum(1).mean(), rel=0.03)


def test_prints_row_for_each_number_of_slices(capsys):
    assert main(["--devices=8"]) == 0
    printed = capsys.readouterr().out
    assert "8 of 256 experts on 8 devices" in printed and "4.01x" in printed
    assert main(["--devices=24"]) == 2
    assert "must be at least 2 and divide the 256 experts" in capsys.readouterr().err
    assert main(["--preset=glm9"]) == 2
