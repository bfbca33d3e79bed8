"""The command line of an ablation: what it runs, and what a mistake looks like."""

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


def run(arguments, find=None):
    seen = []

    def found(runs, config, command):
        seen.append((runs.workdir, config.name, command))
        return Finding(
            title="A title",
            command=command,
            verdicts=("met",),
            tables=(Table(title="t", columns=("a",), rows=(("b",),)),),
        )

    return ablate("muon_split", arguments, muon_split.get_config, find or found), seen


def test_it_prints_the_finding_and_writes_the_page(tmp_path, capsys):
    code, [(workdir, name, command)] = run(["small", str(tmp_path)])
    assert (code, workdir, name) == (0, tmp_path, "muon_split:small")
    assert command == f"python -m experiments.ablations.muon_split small {tmp_path}"
    page = tmp_path / "report" / "muon_split.html"
    assert "A title" in page.read_text()
    out = capsys.readouterr().out
    assert f"command: {command}" in out and f"page: {page}" in out


def test_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, [(workdir, name, _)] = run([])
    assert (code, str(workdir), name) == (0, "workdir/muon_split_tiny", "muon_split:tiny")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["huge"], "unknown variant 'huge'; use one of tiny, small"),
        (["tiny", "a", "b"], "unexpected argument 'b'"),
        (["tiny", __file__], "is a file; give a folder"),
    ],
)
def test_a_mistake_is_one_line(arguments, text, capsys):
    code, seen = run(arguments)
    error = capsys.readouterr().err
    assert (code, seen) == (2, [])
    assert error.startswith("error: ") and text in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", [TrainingStopped, SaveError])
def test_a_stop_says_why(kind, tmp_path, capsys):
    def stop(*_):
        raise kind("it was\nstopped")

    assert run(["tiny", str(tmp_path)], stop)[0] == 1
    assert capsys.readouterr().err == "error: it was stopped\n"


def test_mtp_drafts_with_every_trained_arm(tmp_path, monkeypatch):
    """Its runs measure, and keep the weights that they measured."""
    seen = {}
    monkeypatch.setattr(
        command, "AblationRuns", lambda workdir, evaluator, **options: seen.update(options)
    )
    finding = Finding(title="A title", command="command", verdicts=(), tables=())
    monkeypatch.setattr(mtp, "run", lambda runs, config, command: finding)
    assert mtp.main(["tiny", str(tmp_path)]) == 0
    assert seen == {"measure": mtp.measure_drafts, "keep": True}


def test_names_variants_of_every_ablation():
    others = {stale_policies: "tiny, chains", text_in_text_out: "tiny, tools"}
    for module in (*SMALL, reinforcement, *others):
        words = f"unknown variant 'huge'; use one of {others.get(module, 'tiny')}"
        with pytest.raises(ValueError, match=words):
            module.get_config("huge")


def test_answers_mistake_in_one_line_without_command(capsys):
    for module in (attention_mass, mtp, muon_split, topk_determinism):
        assert module.main(["huge"]) == 2, module
        error = capsys.readouterr().err
        assert "unknown variant 'huge'" in error and error.count("\n") == 1, (module, error)
