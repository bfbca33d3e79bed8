"""The report on a pod's train step, and the messages without a report."""

import json
from types import SimpleNamespace

import pytest

from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model.expert_dispatch import crossing_share
from glm5_jax.parallel.mesh import abstract_mesh
from glm5_jax.training.step_flops import trace_step
from launch import command_line, compile as pod, pods
from launch.aot import program_report
from launch.aot.program_report import SHAPES
from launch.aot.programs import saved_activation_bytes
from launch.rehearsal import arithmetic

# Few layers, no Newton-Schulz and no MTP, which take most of the time to trace.
SMALL_POD = [
    "compile",
    "--experiment=experiments/pretrain.py:tiny",
    "--experiment.mesh.fsdp=4",
    "--experiment.mesh.expert=2",
    "--experiment.model.num_hidden_layers=2",
    "--experiment.model.num_nextn_predict_layers=0",
    "--experiment.step.mtp_steps=0",
    "--experiment.optimizer.matrices=adamw",
]
MESH = {"fsdp": 4, "expert": 2}


@pytest.fixture(scope="module")
def program():
    """Returns the train step of the small pod."""
    return pod.lower_step(command_line.parse(SMALL_POD).config, abstract_mesh(MESH))


@pytest.fixture(scope="module")
def report(program):
    mesh = abstract_mesh(MESH)
    return program_report.report_of("tiny", SHAPES, program, mesh, None, 0.0)[0]


def test_describes_step_from_shapes(report):
    out = program_report.describe(report)
    assert "train step on 8 devices of no topology, fsdp 4, expert 2" in out
    assert "8 rows of 128 tokens, 128 tokens per device" in out
    assert "saved activations" in out and "temporaries" not in out


def test_prints_cost_of_push_like_rehearsal(monkeypatch, capsys):
    """The compiler of the pod is not needed for it."""
    target = pods.parse("v5p:8x8x16")
    report = SimpleNamespace(fits=True)
    monkeypatch.setattr(pod, "make_target_mesh", lambda *args: (abstract_mesh(MESH), target))
    monkeypatch.setattr(pod, "lower_programs", lambda *args: [SimpleNamespace(name="train step")])
    monkeypatch.setattr(pod, "report_of", lambda *args: (report, None))
    monkeypatch.setattr(pod, "describe", lambda report: "described")
    argv = ["compile", "--experiment=experiments/rl_agentic.py:glm5"]
    argv += ["--experiment.model.num_hidden_layers=4", "--topology=v5p:8x8x16"]
    assert pod.main(argv) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    cluster = arithmetic.Cluster("slurm", "v5p", None)
    note = next(arithmetic.check_push(command_line.parse(argv[:3]).config, cluster))
    assert line == f"push: {note.text}"
    assert "GB for each of 64 engines: a trainer's host sends" in line
    assert "s while engines sample" in line
    assert pod.main([*argv, "--experiment.engine.quantization=fp8"]) == 0
    num_gb = [int(text.split()[1]) for text in (line, capsys.readouterr().out.splitlines()[-1])]
    assert 0.5 < num_gb[1] / num_gb[0] < 0.6  # a byte a weight, and two of those that stay plain


@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "v5p:2x2x2"])
def test_passes_options_and_shortcuts_of_pod_to_its_compiler(name, program, monkeypatch):
    class Refused(Exception):
        pass

    def refuse(compiler_options):
        raise Refused(compiler_options)

    refusing = program._replace(lowered=SimpleNamespace(compile=refuse))
    monkeypatch.setattr(program_report, "program_hash", lambda lowered: "0")
    target = pods.parse(name)
    with pytest.raises(Refused) as caught:
        program_report.report_of("tiny", name, refusing, abstract_mesh(MESH), target, 0.0)
    (options,) = caught.value.args
    assert options.pop("xla_dump_to")
    assert options == target.options | target.shortcuts


@pytest.mark.slow
def test_prints_report_as_json(report, capsys):
    assert pod.main([*SMALL_POD, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    same = {
        "hash": report.hash,
        "argument_bytes": report.argument_bytes,
        "saved_activation_bytes": report.saved_activation_bytes,
        "fits": None,
    }
    assert {name: result[name] for name in same} == same


@pytest.mark.slow
def test_prints_another_hash_for_another_program(report, capsys):
    assert pod.main([*SMALL_POD, "--experiment.optimizer.weight_decay=0.5", "--hash"]) == 0
    [other] = capsys.readouterr().out.splitlines()
    assert len(other) == len(report.hash) and other != report.hash


@pytest.mark.slow
def test_prints_hash_of_json(report, capsys):
    assert pod.main([*SMALL_POD, "--hash"]) == 0
    assert capsys.readouterr().out == f"{report.hash}\n"


@pytest.mark.slow
def test_reports_step_that_trains_on_samples(capsys):
    fields = {"mesh.fsdp": 2, "mesh.expert": 2, "rows": 8, "length": 64}
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    assert pod.main(["compile", "--experiment=experiments/rl_reasoning.py:addition", *flags]) == 0
    out = capsys.readouterr().out
    assert "on 4 devices of no topology, fsdp 2, expert 2" in out
    assert "8 rows of 64 tokens, 128 tokens per device" in out


def test_reports_bytes_of_each_kind(report):
    """float32 weights and moments; each device has an eighth."""
    total = 4 * command_line.parse(SMALL_POD).config.model.num_stored_parameters
    assert total / 8 <= report.argument_bytes["params"] < 1.2 * total / 8
    assert report.argument_bytes["batch"] == 5 * 4 * 128
    assert report.saved_activation_bytes > 0 and report.fits is None and report.model_flops > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "share"),
    [
        ({"accumulate": "local"}, 1),
        ({"accumulate": "local", "rows_per_device": 4}, 1 / 2),
        ({"accumulate": "local", "rows_per_device": 4, "remat": "offload"}, 0),
    ],
)
def test_counts_saved_bytes_of_microbatch(step, share):
    """The input of each layer on two devices; bytes in host memory do not count."""
    fields = {"batch.start": 2048, "batch.end": 2048, "mesh.expert": 1, "mesh.fsdp": 2}
    fields |= {f"step.{name}": value for name, value in ({"remat": "full"} | step).items()}
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    config = command_line.parse([*SMALL_POD, *flags]).config
    traced = trace_step(config, abstract_mesh({"fsdp": 2}))
    model = config.model
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    inputs = layers * 1024 * model.hidden_size * 4
    assert saved_activation_bytes(traced.traced.jaxpr.jaxpr) == share * inputs


def test_counts_share_of_tokens_that_crosses_slices():
    """Two of sixteen experts per token; eight experts are in the other slice."""
    assert crossing_share(16, 2, 2) == pytest.approx(1 - 8 * 7 / (16 * 15))


@pytest.mark.slow
def test_lowers_step_with_share_of_tokens_that_crosses():
    config = command_line.parse([*SMALL_POD, "--experiment.step.expert_slices=2"]).config
    assert pod.lower_step(config, abstract_mesh(MESH)).crossing == crossing_share(16, 2, 2) < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "fields"),
    [
        (
            "rl_reasoning.py:addition",
            {"rows": 8, "rollout.prompts": 2, "rollout.group": 4}
            | {"evaluation.tasks": 0, "mismatch.attempts": 0},
        ),
        ("pretrain.py:tiny", {"mesh.fsdp": 8, "sample.prompts": "()", "train.eval_interval": 0}),
    ],
)
def test_run_trains_with_reported_program(experiment, fields, tmp_path, capsys):
    """Runs on the devices of this machine."""
    fields = {"train.steps": 1} | fields
    small = ["compile", f"--experiment=experiments/{experiment}"]
    small += [f"--experiment.{name}={value}" for name, value in fields.items()]
    assert pod.main([*small, "--topology=cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    command_line.parse(small).config.make_stage(tmp_path).run()
    logged = column(read(tmp_path), "program")[1]
    assert result["hash"] in logged and result["temporary_bytes"] > 0


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (
            "lifecycle.py:tiny",
            "is neither one stage of training nor a server; name one that is",
        ),
        ("reward_model.py:tiny", "reward_model:tiny does not train by make_step"),
    ],
)
def test_refuses_unsupported_experiment_in_one_line(experiment, message, capsys):
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
        (["--topology=abacus:2x2"], "'abacus:2x2' is not a pod"),
        (["--topology=v5p:2x2x1", "--experiment.nonsense=1"], "nonsense"),
        (["--topology=cpu", "--hlo=/nowhere/text"], "--hlo=/nowhere/text cannot be written"),
        (["--topology=cpu", "--hlo=/"], "--hlo=/ cannot be written"),
        (["--hlo=text"], "--hlo=text needs compiled programs; give a --topology"),
        (["--hash", "--hlo=text"], "--hash compiles nothing that --hlo could write; leave out one"),
    ],
)
def test_reports_mistake_in_one_line(changes, message, capsys):
    assert pod.main(SMALL_POD + changes) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1
