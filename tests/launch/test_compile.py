"""The report on a pod's train step, and what the user is told if there is none."""

import pytest

from launch import compile as pod

SMALL_POD = [
    "compile",
    "--experiment=experiments/pretrain.py:tiny",
    "--experiment.mesh.fsdp=4",
    "--experiment.mesh.expert=2",
    "--experiment.model.num_hidden_layers=2",
]


def test_report_from_shapes(capsys):
    assert pod.main(SMALL_POD) == 0
    out = capsys.readouterr().out
    assert "on 8 devices: fsdp 4, expert 2; batch of 1,024 tokens, 128 per device" in out
    assert "largest weight while it is used: 0.001 GB (embed/weight)" in out
    assert "lowered for tpu in" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--experiment.mesh.expert=-1"], "leaves an axis open; set it, or give --target"),
        (["--experiment.mesh.fsdp=3"], "batch size 8 does not divide over the mesh axes"),
        (["--target=abacus:2x2"], "target 'abacus:2x2'"),
        (["--target=v5p:2x2x1", "--experiment.nonsense=1"], "nonsense"),
    ],
)
def test_mistakes_are_answered_in_one_line(changes, message, capsys):
    assert pod.main(SMALL_POD + changes) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1
