"""Tests of the command that describes a checkpoint and checks whether it loads."""

import json
import shutil

import pytest

from experiments import check_checkpoint
from tests.contracts.source_tree import ROOT

GOLDENS = ROOT / "tests" / "goldens"


def check(capsys, folder, *options):
    """Returns the exit code and the printed text."""
    code = check_checkpoint.main([str(folder), *options])
    return code, capsys.readouterr().out


def copy_with(tmp_path, **fields):
    """Returns a copy of a golden checkpoint with other fields in its config.json."""
    folder = tmp_path / "copy"
    shutil.copytree(GOLDENS / "hf_tiny_a", folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_describes_hf_folder(capsys):
    code, out = check(capsys, GOLDENS / "hf_tiny_a")
    assert code == 0 and "\nloads\n" in out
    for part in ("HuggingFace folder", "glm_moe_dsa", "309,632", "196 F32", "glm5 serve"):
        assert part in out, part


def test_shows_five_examples_of_wrong_shapes(capsys, tmp_path):
    code, out = check(capsys, copy_with(tmp_path, hidden_size=48))
    assert code == 1
    assert out.count("wrong shape: ") == 5 and "more of these" in out
    assert "loads" not in out.splitlines()


def test_reports_config_before_tensors(capsys, tmp_path):
    folder = copy_with(tmp_path, hidden_act="relu", new_field=1)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    code, out = check(capsys, folder)
    assert code == 1 and "hidden_act is 'relu'" in out and "unknown fields: new_field" in out


def test_checks_adapters_against_model(capsys):
    adapters = GOLDENS / "peft_tiny_d"
    code, out = check(capsys, adapters, f"--model={GOLDENS / 'hf_tiny_d'}")
    assert code == 0 and "3, alpha 7.5" in out and "kv_a" in out and "\nloads\n" in out
    code, out = check(capsys, adapters, f"--model={GOLDENS / 'hf_tiny_a'}")
    assert code == 1 and "does not load" in out
    code, out = check(capsys, adapters)
    assert code == 0 and "not checked: give --model=FOLDER" in out


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama"}'])
def test_reports_unreadable_config(capsys, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    code, out = check(capsys, tmp_path)
    assert code == 1 and "does not load: " in out and "config.json" in out


def test_rejects_missing_folder(capsys, tmp_path):
    assert check_checkpoint.main([str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
