"""The benchmark of pushes, at a size that takes seconds."""

import re

import pytest

from experiments.benchmarks import weight_sync
from tests.mesh import cases


@pytest.mark.slow
def test_reports_all_ways_and_changes(capsys):
    cfg = cases.config("sparse", num_nextn_predict_layers=0, dtype="bfloat16")
    assert weight_sync.main(cfg, plan=((1e-5, (1, 2)),)) == 0
    output = capsys.readouterr().out
    for way in ("reshard", "shared storage", "network"):
        assert way in output
    [one, two] = re.findall(r"1e-05 *│ *[12] *│ *([\d.]+)%", output)
    assert 0 < float(one) < float(two) < 100
