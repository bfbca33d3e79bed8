"""Stages of an experiment that are planned and started one by one, each with hosts and programs of its own."""

import pytest

from experiments import lifecycle, rl_reasoning, sft
from glm5_jax.checkpoint import store
from launch import command_line, run, run_plan, slurm
from launch.stage_plan import check_stages_before, needs_plan_per_stage, select_stage
from tests.contracts.source_tree import ROOT

LIFE = f"--experiment={ROOT}/experiments/lifecycle.py"
STAGES = [*lifecycle.get_config("tiny").__dataclass_fields__]


def parse(variant, *argv):
    return command_line.parse(["launch.run", f"{LIFE}:{variant}", "--workdir=/run", *argv])


def read(variant, *argv):
    """Returns the plan of a job of 256 hosts."""
    values = slurm.define()
    flags = ["--hosts=256", "--devices=4", "--workdir=/run", *argv]
    return run_plan.read(["launch.slurm", f"{LIFE}:{variant}", *flags], values)


def test_selects_stage_with_its_module_folder_and_checkpoint():
    command = select_stage(parse("glm5", "--stage=rl_reasoning"))
    assert command.module is rl_reasoning and str(command.workdir) == "/run/rl_reasoning"
    assert command.config.checkpoint == "/run/sft" and command.config.has_engine_processes
    last = select_stage(parse("glm5", "--stage=distill")).config
    assert [teacher.checkpoint for teacher in last.teachers][:2] == [
        "/run/sft",
        "/run/rl_reasoning",
    ]
    assert select_stage(parse("glm5", "--stage=sft")).module is sft
    assert {*lifecycle.STAGE_MODULES} == {*STAGES}


def test_flags_of_all_stages_stay_valid():
    flags = "--experiment.sft.train.steps=3", "--experiment.rl_reasoning.rows=512"
    assert select_stage(parse("glm5", "--stage=rl_reasoning", *flags)).config.rows == 512


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([f"{LIFE}:tiny", "--stage=rl"], "--stage: unknown variant 'rl'; "),
        ([f"{LIFE}:tiny", "--stage=distill_agentic"], "unknown variant 'distill_agentic'"),
        (
            [f"--experiment={ROOT}/experiments/pretrain.py:tiny", "--stage=sft"],
            "--stage=sft: the experiment is one stage; leave it out",
        ),
    ],
)
def test_rejects_unknown_stage(argv, words):
    with pytest.raises(ValueError, match=words):
        select_stage(command_line.parse(["launch.run", *argv]))


def test_refuses_stage_whose_predecessor_is_unfinished(tmp_path, capsys, monkeypatch):
    argv = ["launch.run", f"{LIFE}:tiny", f"--workdir={tmp_path}"]
    assert run.main([*argv, "--stage=sft"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/pretrain has 0 of 1150 steps; train --stage=pretrain first" in error
    check_stages_before(command_line.parse([*argv, "--stage=pretrain"]))
    monkeypatch.setattr(store, "latest_step", lambda folder: 10**9)
    check_stages_before(command_line.parse([*argv, "--stage=distill"]))


def test_launcher_plans_stages_one_by_one():
    assert needs_plan_per_stage(lifecycle.get_config("tiny"))
    assert not needs_plan_per_stage(sft.get_config("tiny,mixed"))
    with pytest.raises(ValueError, match=f"with --stage=NAME: {STAGES[0]}, .*, distill$"):
        read("glm5")


def test_plan_of_stage_has_its_programs():
    plan = read("glm5", "--stage=rl_reasoning")
    names = [role.name for role in plan.roles]
    assert {"engine", "gateway", "orchestrator", "task-0", "train"} <= {*names}
    assert str(plan.workdir) == "/run/rl_reasoning"
    for role in plan.roles:
        assert "--stage=rl_reasoning" in role.argv and "--workdir=/run" in role.argv
        assert not any(word.startswith("--experiment.program.") for word in role.argv)
    [engine] = [role for role in plan.roles if role.name == "engine"]
    assert "--experiment.rl_reasoning.program.role=engine" in engine.argv
    [trainer] = read("glm5", "--stage=sft").roles
    assert (trainer.hosts, trainer.devices) == (256, 4) and "--stage=sft" in trainer.argv


def test_program_of_stage_reads_its_role():
    flags = "--stage=rl_reasoning", "--experiment.rl_reasoning.program.role=engine"
    assert select_stage(parse("glm5", *flags)).config.program.role == "engine"
