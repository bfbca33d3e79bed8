"""The benchmark of pushes, at a size that takes seconds."""

import re

import pytest

from experiments.benchmarks import weight_sync
from tests.mesh import cases


@pytest.mark.slow
def test_all_ways_and_changes_are_told(capsys):
    cfg = cases.config("sparse", num_nextn_predict_layers=0, dtype="bfloat16")
    assert weight_sync.main(cfg, plan=((1e-5, (1, 2)),)) == 0
    said = capsys.readouterr().out
    for way in ("reshard", "shared storage", "network"):
        assert way in said
    [one, two] = re.findall(r"1e-05 *│ *[12] *│ *([\d.]+)%", said)
    assert 0 < float(one) < float(two) < 100
