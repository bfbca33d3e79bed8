"""The command line in both forms, and wrong names, which are answered from source without jax."""

import dataclasses
import subprocess
import sys

import pytest
from absl import flags

from glm5_jax import presets
from glm5_jax.config import LoraConfig
from launch import command_line, run_plan
from launch.command_line import check_source, expand
from tests.contracts.source_tree import ROOT

LONG = ["run", "--experiment=pretrain:tiny", "--experiment.train.steps=50"]


@pytest.mark.parametrize(
    "words",
    [
        ["pretrain:tiny", "--train.steps=50"],
        ["pretrain:tiny", "--train.steps", "50"],
        ["--train.steps=50", "pretrain:tiny"],
        ["--experiment", "pretrain:tiny", "--experiment.train.steps", "50"],
        ["-experiment=pretrain:tiny", "-experiment.train.steps=50"],
    ],
)
def test_expands_short_form(words):
    assert sorted(expand(["run", *words])) == sorted(LONG)
    assert expand(LONG) == LONG


def test_expands_values_that_are_negative_or_follow_program_flags():
    words = ["--workdir", "out", "pretrain:tiny", "--mesh.fsdp", "-1", "--schedule.end=-1e-3"]
    assert expand(["run", *words]) == [
        "run",
        "--workdir=out",
        "--experiment=pretrain:tiny",
        "--experiment.mesh.fsdp=-1",
        "--experiment.schedule.end=-1e-3",
    ]


def test_keeps_flags_of_launcher():
    launcher_flags = run_plan.define()
    flags.DEFINE_bool("json", False, "a switch", flag_values=launcher_flags)
    words = ["--json", "pretrain:tiny", "--hosts", "2", "--nojson", "--train.steps=5"]
    assert expand(["local", *words], launcher_flags) == [
        "local",
        "--json",
        "--experiment=pretrain:tiny",
        "--hosts=2",
        "--nojson",
        "--experiment.train.steps=5",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--checkpoint=x"], True),
        (["--checkpoint", "x", "--model.lora.rank=4", "--model.int4_group=None"], True),
        (["--checkpoint=x", "--model.hidden_size=64"], False),
        (["--checkpoint=x", "--model_of_checkpoint=False"], False),
        (["--checkpoint=None"], False),
        ([], False),
    ],
)
def test_trains_model_of_checkpoint_unless_command_names_model(words, expected):
    for experiment in ("sft:tiny,mixed", "dsa_sparse:tiny", "rl_reasoning:flash"):
        config = command_line.parse(["run", experiment, *words]).config
        assert config.model_of_checkpoint == expected, experiment


def test_stages_change_their_fields_of_model_of_checkpoint():
    user = dataclasses.replace(presets.small(), attention="dense")
    for experiment, changes in (
        ("pretrain:tiny", {}),
        ("midtrain:tiny,32k", {"rope_theta": 1e6}),
        ("dsa_sparse:tiny", {"rope_theta": 1e6, "attention": "sparse"}),
        ("sft:tiny,mixed", {"int4_group": 32}),
        ("sft:flash,mixed", {"lora": LoraConfig(rank=16)}),
        ("sft:tiny_lora,mixed", {"lora": LoraConfig(rank=16)}),
        ("rl_reasoning:tiny", {}),
    ):
        config = command_line.parse(["run", experiment]).config
        rope = dataclasses.replace(
            user.rope_parameters,
            rope_theta=changes.pop("rope_theta", user.rope_parameters.rope_theta),
        )
        expected = dataclasses.replace(user, rope_parameters=rope, **changes)
        assert config.change_model(user) == expected, experiment


@pytest.mark.parametrize(
    ("experiment", "before", "after"),
    [
        ("sft:tiny_lora,mixed", {"int4_group": 32}, {"lora": LoraConfig(rank=16)}),
        ("sft:tiny,mixed", {"lora": LoraConfig(rank=4)}, {"int4_group": 32}),
    ],
)
def test_exchanges_adapters_and_quantised_training(experiment, before, after):
    model = presets.tiny()
    config = command_line.parse(["run", experiment, "--checkpoint=x"]).config
    trained = config.change_model(dataclasses.replace(model, **before))
    assert trained == dataclasses.replace(model, **after)


def test_reads_both_forms_alike():
    short = command_line.parse(["run", "pretrain:tiny", "--train.steps", "50", "--seed=7"])
    long = command_line.parse([*LONG, "--experiment.seed=7"])
    assert short.config == long.config
    assert (short.config.steps, short.config.seed) == (50, 7)
    assert short.workdir == long.workdir


# Mistakes of new users.
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no experiment given; try pretrain:tiny"),
        (
            ["pretrian:tiny"],
            "pretrian is not the name or the file of an experiment; did you mean pretrain?",
        ),
        (["experiments/pretrian.py:tiny"], "did you mean pretrain?"),
        (
            ["pretrain:tinyy"],
            "unknown variant 'tinyy'; did you mean tiny? There are tiny or tiny,general or",
        ),
        (["sft:tiny"], "unknown variant 'tiny'; did you mean tiny,mixed?"),
        (["lifecycle:tiny,eech"], "did you mean tiny,each?"),
        (["task_pass_rates:tiney"], "did you mean tiny?"),
        (["pretrain", "more"], "unexpected argument 'more'"),
        (["pretrain", "--steps=50"], "no field 'steps'; did you mean --stage, --train.steps,"),
        (["pretrain", "--train.step=50"], "no field 'step' in train; did you mean --train.steps?"),
        (["pretrain", "--lr=1e-3"], "--lr: no field 'lr'; did you mean --schedule.peak?"),
        (["pretrain", "--batch_size=8"], "did you mean --batch.start?"),
        (["pretrain", "--output_dir=x"], "did you mean --workdir?"),
        (["pretrain", "--experiment.train.step=5"], "did you mean --experiment.train.steps?"),
        (["pretrain", "--mesh.model=2"], "no field 'model' in mesh; there are --mesh.data"),
        (["pretrain", "--data=x"], "--data: data is a group of fields; set one of them: sources"),
        (
            ["pretrain", "--model.rope_parameters.theta=1"],
            "did you mean --model.rope_parameters.rope_theta",
        ),
        (["reward_model:tiny", "--pair=3"], "did you mean --pairs"),
        (["serve", "--port=1"], "did you mean --server.port"),
        (["lifecycle", "--sft.train.step=1"], "did you mean --sft.train.steps"),
    ],
)
def test_answers_wrong_names_from_source(words, message):
    with pytest.raises(ValueError) as error:
        check_source(["run", *words])
    assert message in str(error.value)


def test_answers_wrong_names_without_importing_jax():
    code = (
        "import sys; from launch import run\n"
        "assert run.main(['run', 'pretrain:tiny', '--lr=1']) == 2\n"
        "assert run.main(['run', 'pretrain:tinyy', '--help']) == 2\n"
        "print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_leaves_unknown_classes_to_parser(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses\n\n\nConfig = dataclasses.make_dataclass('Config', [('size', int, 3)])\n\n\n"
        "def get_config(variant='a'):\n    return Config()\n"
    )
    check_source(["run", f"{file}:whatever", "--sise=3"])
    assert command_line.parse(["run", str(file), "--size=4"]).config.size == 4
    with pytest.raises(ValueError, match="no field 'sise'; did you mean --experiment.size"):
        command_line.parse(["run", str(file), "--sise=4"])


def test_names_line_of_file_that_is_not_python(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\ndef get_config(:\n")
    with pytest.raises(ValueError, match="mine.py is not valid Python in line 2"):
        check_source(["run", str(file)])


def test_finds_shipped_experiments_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec in ("pretrain:tiny", "experiments/pretrain.py:tiny"):
        assert command_line.load(spec)[1].name == "pretrain:tiny"


def test_offers_flags_of_launcher():
    with pytest.raises(ValueError, match="no field 'hots'; did you mean --hosts"):
        run_plan.read(["local", "pretrain:tiny", "--hots=2"], run_plan.define())


def test_refuses_zero_devices():
    with pytest.raises(flags.IllegalFlagValueError, match="devices=0"):
        run_plan.read(["local", "pretrain:tiny", "--devices=0"], run_plan.define())
