"""An ablation as an experiment: its page, its exit codes, and its variants."""

import inspect

import pytest

from experiments.ablations import (
    attention_kinds,
    attention_mass,
    command,
    dsa_stages,
    error_masking,
    mla_heads,
    mtp,
    muon_split,
    reinforcement,
    sft_attention,
    stale_policies,
    text_in_text_out,
    thinking,
    topk_determinism,
)
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Table
from glm5_jax.checkpoint.store import SaveError
from glm5_jax.training.metrics import TrainingStopped
from launch import run as launch

SMALL = (
    attention_kinds,
    attention_mass,
    dsa_stages,
    error_masking,
    mla_heads,
    mtp,
    muon_split,
    sft_attention,
    thinking,
    topk_determinism,
)


def make_finding(runs, config, command):
    """Replaces an ablation's work: reports its arguments."""
    return Finding(
        title=f"{config.name} in {runs.workdir}",
        command=command,
        verdicts=(f"peak {config.schedule.peak}",),
        tables=(Table(title="t", columns=("a",), rows=(("b",),)),),
    )


def test_prints_finding_and_writes_page(tmp_path, capsys, monkeypatch):
    """`run` of launch reads the command line, applies the flags, and passes on the words."""
    monkeypatch.setattr(launch.command_line, "load", lambda spec: (Ablation, muon_split.small()))
    words = ["muon_split:small", f"--workdir={tmp_path}", "--schedule.peak=0.25"]
    assert launch.main(["run", *words]) == 0
    page = (tmp_path / "report" / "muon_split.html").read_text()
    command = f"glm5 run {' '.join(words)}"
    assert f"muon_split:small in {tmp_path}" in page and command in page
    out = capsys.readouterr().out
    assert "peak 0.25" in out and f"command: {command}" in out
    assert f"page: {tmp_path / 'report' / 'muon_split.html'}" in out


class Ablation:
    """Module of an ablation."""

    @staticmethod
    def run(config, workdir, command):
        return ablate("muon_split", config, workdir, command, make_finding)


def test_refuses_workdir_that_is_file(capsys):
    assert ablate("muon_split", muon_split.tiny(), __file__, "command", make_finding) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "is a file; give a folder" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", [TrainingStopped, SaveError])
def test_prints_why_run_stopped(kind, tmp_path, capsys):
    def stop(*_):
        raise kind("it was\nstopped")

    assert ablate("muon_split", muon_split.tiny(), tmp_path, "command", stop) == 1
    assert capsys.readouterr().err == "error: it was\nstopped\n"


def test_mtp_drafts_with_every_trained_arm(tmp_path, monkeypatch):
    """Its runs measure, and keep the measured weights."""
    seen = {}
    monkeypatch.setattr(
        command, "AblationRuns", lambda workdir, evaluator, **options: seen.update(options)
    )
    finding = Finding(title="A title", command="command", verdicts=(), tables=())
    monkeypatch.setattr(mtp, "compare", lambda runs, config, command: finding)
    assert mtp.run(mtp.get_config("tiny"), tmp_path, "command") == 0
    assert seen == {"measure": mtp.measure_drafts, "keep": True}


def test_names_variants_of_every_ablation():
    others = {stale_policies: "tiny, chains", text_in_text_out: "tiny, tools"}
    for module in (*SMALL, reinforcement, *others):
        words = f"unknown variant 'huge'; use one of {others.get(module, 'tiny')}"
        with pytest.raises(ValueError, match=words):
            module.get_config("huge")


def test_every_ablation_runs_as_experiment():
    for module in (*SMALL, reinforcement, stale_policies, text_in_text_out):
        names = list(inspect.signature(module.run).parameters)
        assert names[1:] == ["workdir", "command"], module


def test_refuses_field_of_ablation_with_arms(capsys):
    assert launch.main(["run", "thinking:tiny", "--train.steps=5"]) == 2
    error = capsys.readouterr().err
    assert "no field 'train'" in error and error.count("\n") == 1
