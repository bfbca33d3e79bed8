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


def test_report_on_a_step_that_learns_from_samples(capsys):
    fields = {"mesh.fsdp": 2, "mesh.expert": 2, "rows": 8, "length": 64}
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    assert pod.main(["compile", "--experiment=experiments/rl_reasoning.py:addition", *flags]) == 0
    out = capsys.readouterr().out
    assert "on 4 devices: fsdp 2, expert 2; batch of 512 tokens, 128 per device" in out


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ("lifecycle.py:tiny", "is not one stage of training; give the one to compile"),
        ("reward_model.py:tiny", "reward_model:tiny learns by a step of its own"),
    ],
)
def test_what_is_not_lowered_is_answered_in_one_line(experiment, message, capsys):
    mesh = [] if "lifecycle" in experiment else ["--experiment.mesh.fsdp=2"]
    assert pod.main(["compile", f"--experiment=experiments/{experiment}", *mesh]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1


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
