"""The report on a pod's train step, and what the user is told if there is none."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from glm5_jax.core.mesh import abstract_mesh
from glm5_jax.core.metrics_log import column, read
from launch import compile as pod, pods, program_report, run

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
    assert "train step on 8 devices of no topology, fsdp 4, expert 2" in out
    assert "8 rows of 128 tokens, 128 tokens per device" in out
    assert "kept activations" in out and "temporaries" not in out


@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "v5p:2x2x2"])
def test_a_pod_s_options_and_shortcuts_reach_its_compiler(name, monkeypatch):
    class Refused(Exception):
        pass

    def refuse(compiler_options):
        raise Refused(compiler_options)

    config = run.parse([*SMALL_POD[:3], "--experiment.mesh.expert=2"]).config
    mesh = abstract_mesh({"fsdp": 4, "expert": 2})
    program = pod.lower_step(config, mesh, "tpu")
    program = program._replace(lowered=SimpleNamespace(compile=refuse))
    monkeypatch.setattr(program_report, "program_hash", lambda lowered: "0")
    target = pods.parse(name)
    with pytest.raises(Refused) as caught:
        program_report.report_of("tiny", name, program, mesh, target, 0.0)
    (options,) = caught.value.args
    assert options.pop("xla_dump_to")
    assert options == target.options | target.shortcuts


def test_hashes_alone_are_told_without_a_report(capsys):
    told = []
    for flags in ([], ["--experiment.model.hidden_size=64"]):
        assert pod.main([*SMALL_POD, *flags, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["hash"])
        assert pod.main([*SMALL_POD, *flags, "--hash"]) == 0
        assert capsys.readouterr().out == f"{told[-1]}\n"
    assert told[0] != told[1]


def test_report_on_a_step_that_learns_from_samples(capsys):
    fields = {"mesh.fsdp": 2, "mesh.expert": 2, "rows": 8, "length": 64}
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    assert pod.main(["compile", "--experiment=experiments/rl_reasoning.py:addition", *flags]) == 0
    out = capsys.readouterr().out
    assert "on 4 devices of no topology, fsdp 2, expert 2" in out
    assert "8 rows of 64 tokens, 128 tokens per device" in out


def test_json_has_the_bytes_of_each_kind(capsys):
    """float32 weights and moments, of which each device has an eighth; activations are kept layer by layer."""
    assert pod.main([*SMALL_POD, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    config = run.parse(SMALL_POD).config
    whole = 4 * config.model.num_stored_parameters
    assert whole / 8 <= told["held"]["params"] < 1.2 * whole / 8
    assert told["held"]["batch"] == 5 * 4 * 128
    assert told["fits"] is None and told["model_flops"] > 0
    deeper = [*SMALL_POD[:-1], "--experiment.model.num_hidden_layers=4", "--json"]
    assert pod.main(deeper) == 0
    more = json.loads(capsys.readouterr().out)["kept"] - told["kept"]
    assert more > 0


def test_what_is_kept_of_a_microbatch(capsys):
    """Each layer's input, on two devices, of half of their rows; in the host's memory it is not counted."""
    flags = [
        "--experiment.batch.start=2048",
        "--experiment.batch.end=2048",
        "--experiment.step.remat=full",
        "--experiment.mesh.expert=1",
        "--experiment.mesh.fsdp=2",
    ]
    kept = {}
    for change in ("accumulate=local", "rows_per_device=4", "remat=offload"):
        flags.append(f"--experiment.step.{change}")
        assert pod.main([*SMALL_POD, *flags, "--json"]) == 0
        kept[change] = json.loads(capsys.readouterr().out)["kept"]
    model = run.parse(SMALL_POD).config.model
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    inputs = layers * 1024 * model.hidden_size * 4
    assert kept == {
        "accumulate=local": inputs,
        "rows_per_device=4": inputs // 2,
        "remat=offload": 0,
    }


def test_a_step_says_what_share_of_tokens_crosses_to_a_slice_of_experts():
    """Two experts of sixteen, of which eight are elsewhere."""
    config = run.parse([*SMALL_POD, "--experiment.step.expert_slices=2"]).config
    mesh = pod.abstract_mesh(dataclasses.asdict(config.mesh))
    assert pod.lower_step(config, mesh).crossing == pytest.approx(1 - 8 * 7 / (16 * 15))


@pytest.mark.parametrize(
    ("experiment", "fields"),
    [
        (
            "rl_reasoning.py:addition",
            {"rows": 8, "rollout.prompts": 2, "rollout.group": 4}
            | {"evaluation.tasks": 0, "agreement.attempts": 0},
        ),
        ("pretrain.py:tiny", {"mesh.fsdp": 8, "sample.prompts": "()", "train.eval_interval": 0}),
    ],
)
def test_a_run_trains_with_the_program_that_is_told_beforehand(
    experiment, fields, tmp_path, capsys
):
    """On the devices of this machine."""
    fields = {"train.steps": 1} | fields
    small = ["compile", f"--experiment=experiments/{experiment}"]
    small += [f"--experiment.{name}={value}" for name, value in fields.items()]
    assert pod.main([*small, "--topology=cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    run.parse(small).config.stage(tmp_path).run()
    logged = column(read(tmp_path), "program")[1]
    assert told["hash"] in logged and told["temporaries"] > 0


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (
            "lifecycle.py:tiny",
            "is not one stage of training, nor does it serve; give the one to compile",
        ),
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
        (
            ["--experiment.mesh.expert=-1"],
            "mesh axis expert is left open (-1), and there are no devices to fill it; set mesh.expert",
        ),
        (
            ["--experiment.mesh.fsdp=3"],
            "batch.start is 1024 tokens; it must be a multiple of 768 (sequence length 128 * 6 devices",
        ),
        (["--topology=abacus:2x2"], "'abacus:2x2' is no pod"),
        (["--topology=v5p:2x2x1", "--experiment.nonsense=1"], "nonsense"),
        (["--topology=cpu", "--hlo=/nowhere/text"], "--hlo=/nowhere/text cannot be written"),
        (["--topology=cpu", "--hlo=/"], "--hlo=/ cannot be written"),
        (["--hlo=text"], "--hlo=text is for what is compiled; give a --topology"),
        (["--hash", "--hlo=text"], "--hash compiles nothing that --hlo could write; leave out one"),
    ],
)
def test_mistakes_are_answered_in_one_line(changes, message, capsys):
    assert pod.main(SMALL_POD + changes) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1
