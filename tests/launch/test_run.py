"""The command line: every user error is one line and exit code 2, and changes nothing."""

import dataclasses
import json
import runpy
import shlex

import pytest

from glm5_jax.checkpoint import store
from glm5_jax.training.experiment import write_config
from launch import command_line, run, stage_runner
from launch.stage_plan import plan_stages
from tests.contracts.source_tree import ROOT

TINY = f"--experiment={ROOT}/experiments/pretrain.py:tiny"
LIFE = f"--experiment={ROOT}/experiments/lifecycle.py:tiny"


def error_of(capsys, workdir, *argv) -> str:
    """Returns the error of a command, which must leave the workdir unchanged."""
    before = sorted(workdir.rglob("*"))
    code = run.main(["run", *argv, f"--workdir={workdir}"])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    progress, _, error = err.rpartition("error: ")
    assert all(shown.startswith("stage ") for shown in progress.splitlines()), err
    assert error.endswith("\n")
    assert sorted(workdir.rglob("*")) == before
    return f"error: {error}"


@pytest.mark.parametrize(
    "argv,message",
    [
        ([], "no experiment given; try pretrain:tiny. `glm5 list` shows all"),
        (
            ["--experiment=nowhere.py:tiny"],
            "nowhere.py is not the name or the file of an experiment; there are ",
        ),
        (["--experiment=README.md:tiny"], "README.md is not the name or the file of an experiment"),
        ([f"--experiment={ROOT}/launch/run.py"], "has no get_config(variant)"),
        ([TINY + "y"], "'tinyy'; did you mean tiny? There are tiny or tiny,general or"),
        ([TINY, "--workdri=x"], "--workdri: no field 'workdri'; did you mean --workdir?"),
        ([TINY, "train"], "unexpected argument 'train'"),
        ([TINY, "--distributed=host,2,2"], "use auto or HOST:PORT,N,I with 0 <= I < N"),
        (
            [TINY, "--experiment.model.hiden_size=8"],
            "in model; did you mean --experiment.model.hidden_size",
        ),
        ([TINY, "--experiment.data=x"], "--experiment.data: data is a group of fields; set one"),
        ([TINY, "--experiment.model.hidden_size=wide"], "--experiment.model.hidden_size=wide"),
        ([TINY, "--experiment.train.steps=x"], "--experiment.train.steps is 'x'; it must be"),
        ([TINY, "--experiment.model.attention=x"], "attention is 'x'; use 'dense' or 'sparse'"),
        ([TINY, "--experiment.mesh.fsdp=3"], "mesh fsdp=3 does not divide the 8 devices"),
        (
            [TINY, "--experiment.data.sequence_length=2048"],
            "exceeds max_position_embeddings 1024; shorten the sequence or extend the model's positions "
            "(--experiment.data.sequence_length=1024)",
        ),
        (
            [TINY, "--experiment.batch.start=100"],
            "batch.start is 100 tokens; it must be a multiple",
        ),
        (
            [TINY, "--experiment.data.num_shards=3"],
            "batch.start is 8 rows, which cannot be divided among data.num_shards 3; use a divisor",
        ),
        ([TINY, "--experiment.tokenizer=none.json"], "no tokenizer at none.json"),
        ([TINY, "--experiment.model.vocab_size=2000"], "the tokenizer has 2048 ids"),
        (
            [TINY, "--experiment.checkpoint=nowhere"],
            "checkpoint nowhere does not exist; give a run's",
        ),
        (
            [f"--experiment={ROOT}/experiments/dsa_warmup.py:tiny"],
            "dsa_warmup:tiny starts from trained weights; give --experiment.checkpoint=PATH",
        ),
        ([TINY, "--experiment.optimizer.clip_norm=0.0"], "clip_norm is 0.0; it must be positive"),
        ([TINY, "--experiment.schedule.warmup_steps=900000"], "warmup_steps 900000 must be in"),
        ([TINY, "--experiment.step.remat=banana"], "remat is 'banana'; use one of none, full"),
        ([TINY, "--experiment.step.loss_chunk=0"], "loss_chunk is 0; it must be positive"),
        ([TINY, "--experiment.step.reduce_dtype=foo"], "reduce_dtype is 'foo'; use one of"),
        (
            [TINY, "--experiment.step.rows_per_device=0"],
            "rows_per_device is 0; it must be positive",
        ),
        ([TINY, "--experiment.optimizer.frozen=('(',)"], "frozen pattern '(' is no regular"),
        ([TINY, "--experiment.sample.tokens=2000"], "needs 2002 positions, the model has 1024"),
        ([TINY, "--experiment.sample.prompts=('',)"], "a prompt must not be empty"),
        (
            [TINY, "--experiment.mesh.fsdp=4", "--experiment.mesh.tensor=2"]
            + ["--experiment.model.moe_intermediate_size=63"],
            "mesh axis tensor=2 does not divide moe_intermediate_size 63",
        ),
        (
            [TINY, "--experiment.mesh.fsdp=4", "--experiment.mesh.expert=2"]
            + ["--experiment.model.n_routed_experts=15"],
            "mesh axis expert=2 does not divide n_routed_experts 15",
        ),
        (
            [TINY, f"--experiment.checkpoint={ROOT}/launch"],
            "is not a checkpoint; give a run's workdir",
        ),
        (
            [TINY, f"--experiment.checkpoint={ROOT}/tests/goldens/hf_tiny_a"]
            + ["--experiment.model.hidden_size=128"],
            "hf_tiny_a is of another model, with hidden_size 64 (here 128)",
        ),
        (
            [TINY, "--experiment.data.sources=[{'chats': 'x', 'category': 'poetry'}]"],
            "error: --experiment.data.sources: category is 'poetry'; use one of general, reasoning",
        ),
        (
            [TINY, "--experiment.data.sources=[{'chats': 'x', 'colour': 'red'}]"],
            "error: --experiment.data.sources: {'chats': 'x', 'colour': 'red'} is no SourceConfig; its",
        ),
        (
            [f"--experiment={ROOT}/experiments/sft.py:tiny"],
            "'tiny'; did you mean tiny,mixed? There are tiny,interleaved or tiny,preserved or tiny,turn_level",
        ),
        (
            [TINY, "--experiment.data.sources=[{'kind': 'jsonl', 'path': 'no/*.jsonl'}]"],
            "source 'jsonl:no/*.jsonl': no file matches",
        ),
        (
            [f"--experiment={ROOT}/experiments/serve.py:tiny"],
            "has no workdir; to read this folder use --experiment.checkpoint=",
        ),
        (
            [
                f"--experiment={ROOT}/experiments/evaluate.py:harbor",
                "--distributed=localhost:1,2,0",
            ],
            "evaluate.py runs in one process; leave the flag out",
        ),
        (
            [LIFE, "--experiment.midtrain_32k.model.num_experts_per_tok=3"],
            "midtrain_32k: the checkpoint of pretrain:tiny is of a model with num_experts_per_tok 2 (here 3); set ",
        ),
        (
            [LIFE, "--experiment.midtrain_32k.batch.start=100"],
            "midtrain_32k: batch.start is 100 tokens",
        ),
        (
            [LIFE, "--experiment.midtrain_32k.model.hidden_size=64"],
            "midtrain_32k: the checkpoint of pretrain:tiny does not fit this model",
        ),
    ],
)
def test_reports_error_of_wrong_argument(capsys, tmp_path, argv, message):
    assert message in error_of(capsys, tmp_path, *argv)


def test_refuses_empty_data(capsys, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    sources = [{"kind": "jsonl", "path": str(tmp_path / "*.jsonl")}]
    line = error_of(capsys, tmp_path, TINY, f"--experiment.data.sources={sources}")
    assert "1 file(s), but no document in them" in line


def test_refuses_workdir_that_is_file(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert run.main(["run", TINY, f"--workdir={tmp_path / 'file'}"]) == 2
    assert "is a file; give a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_names_fields_that_differ_from_workdir(capsys, tmp_path):
    config = command_line.parse(["run", TINY])[1]
    other = dataclasses.replace(
        config,
        seed=7,
        model=dataclasses.replace(config.model, hidden_size=64),
        train=dataclasses.replace(config.train, keep=5, log_interval=3),
        mesh=dataclasses.replace(config.mesh, data=4),
    )
    write_config(tmp_path, other)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    line = error_of(capsys, tmp_path, TINY)
    assert "model.hidden_size was 64, is 128; seed was 7, is 0); use its values" in line
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7


def test_refuses_small_disk(capsys, tmp_path, monkeypatch):
    usage = store.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=50_000_000))
    assert "3 checkpoints of " in error_of(capsys, tmp_path, TINY)


def test_parses_flags_and_default_workdir():
    argv = ["run", TINY, "--experiment.optimizer.ns_coefficients=(1.0,2.0,3.0)"]
    argv += ["--experiment.train.steps=9", "--experiment.model.norm_topk_prob=false"]
    argv += ["--experiment.schedule.peak=3e-4", "--experiment.sample.prompts=('a b',)"]
    command = command_line.parse(argv)
    config, workdir = command.config, command.workdir
    assert config.optimizer.ns_coefficients == (1.0, 2.0, 3.0)
    assert (config.steps, config.model.norm_topk_prob) == (9, False)
    assert (config.schedule.peak, config.sample.prompts) == (3e-4, ("a b",))
    assert str(workdir) == "workdir/pretrain_tiny"


def test_plans_folder_and_flags_of_every_stage(tmp_path):
    spec = f"--experiment={ROOT}/experiments/lifecycle.py:tiny"
    config = command_line.parse(["run", spec, "--experiment.dsa_warmup.train.steps=9"]).config
    stages = {s.folder.name: s.config for s in plan_stages(config, tmp_path)}
    fields = [field.name for field in dataclasses.fields(config)]
    absent = ("pretrain_code", "distill_reasoning", "distill_agentic")
    assert list(stages) == [name for name in fields if name not in absent]
    assert [name for name, stage in stages.items() if stage.steps == 9] == ["dsa_warmup"]


def test_stage_starts_from_previous_stage(tmp_path):
    config = command_line.parse(["run", TINY])[1]
    two = dataclasses.make_dataclass("Two", ["first", "second"])(config, config)
    stages = list(plan_stages(two, tmp_path))
    assert [s.config.checkpoint for s in stages] == [None, str(tmp_path / "first")]


def test_resolves_teacher_by_stage_name(tmp_path):
    spec = f"--experiment={ROOT}/experiments/lifecycle.py:tiny,each"
    config = command_line.parse(["run", spec]).config
    stages = {s.folder.name: s.config for s in plan_stages(config, tmp_path)}
    for name, count in (("distill_reasoning", 2), ("distill_agentic", 3), ("distill", 4)):
        teachers = [teacher.checkpoint for teacher in stages[name].teachers]
        earlier = ["sft", "rl_reasoning", "rl_agentic", "rl_general"][:count]
        assert teachers == [str(tmp_path / one) for one in earlier]
    assert stages["rl_agentic"].checkpoint == str(tmp_path / "distill_reasoning")
    # A launcher of all programs resumes from there, too.
    words = stages["rl_agentic"].programs()
    assert f"--experiment.checkpoint={tmp_path / 'distill_reasoning'}" in words


def test_formats_times_like_clock():
    assert [stage_runner.clock_of(x) for x in (0, 59.9, 125, 3661)] == [
        "0:00",
        "0:59",
        "2:05",
        "61:01",
    ]
    assert stage_runner.shares_of({"sft": 4.5, "distill": 2}) == "sft 4:30, distill 2:00"


def test_stage_of_programs_leaves_accelerators_free(monkeypatch, tmp_path, capsys):
    import jax

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    words = ("--experiment=a.py:small", "--experiment.tasks=({'folder': 'x y'},)")
    assert stage_runner.run_programs(words, tmp_path / "rl_agentic") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rl_agentic: this stage is several programs, and this program")
    start = line[line.index("launch.local ") :].partition(" (or")[0]
    assert shlex.split(start)[1:] == [*words, f"--workdir={tmp_path / 'rl_agentic'}"]


RL = ["rl_reasoning", "rl_agentic", "rl_general", "distill"]


@pytest.mark.parametrize("variant", ["tiny", "small", "glm5"])
@pytest.mark.parametrize("file", ["pretrain", "dsa_warmup", "dsa_sparse", "sft", *RL, "lifecycle"])
def test_loads_every_variant_of_every_experiment(file, variant):
    kind = ",mixed" if file == "sft" else ""
    command_line.load(f"{ROOT}/experiments/{file}.py:{variant}{kind}")


@pytest.mark.parametrize(
    "file", ["pretrain", "midtrain", "dsa_warmup", "dsa_sparse", "sft", *RL[2:], "lifecycle"]
)
def test_experiment_file_prints_its_command(file, capsys):
    runpy.run_path(f"{ROOT}/experiments/{file}.py", run_name="__main__")
    command = f"glm5 run {file}:tiny"
    assert capsys.readouterr().out.startswith(command)


def test_prints_help_with_all_experiments(capsys):
    assert run.main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--experiment.FIELD=VALUE" in out
    assert "reward_model:tiny  (also small)\n    Trains" in out
    assert "lifecycle:tiny  (also tiny,each or small or" in out
    assert "muon_split:tiny  (also small)" in out


@pytest.mark.parametrize(
    ("code", "distributed", "ends_at_once"),
    [
        (1, "auto", True),
        (75, "auto", False),
        (0, "auto", False),
        (None, "auto", False),
        (1, None, False),
    ],
)
def test_ends_process_of_pod_at_once_only_after_failure(
    monkeypatch, code, distributed, ends_at_once
):
    ended = []
    monkeypatch.setattr(run.os, "_exit", ended.append)
    assert run.end_with_pod(lambda: code, distributed) == code
    assert ended == ([code] if ends_at_once else [])
