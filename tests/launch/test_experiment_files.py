"""Descriptions, variants and fields that are read from source agree with what the modules return."""

import ast
import dataclasses

import pytest

# Imports most modules of experiments, outside the time of the tests.
from experiments import lifecycle  # noqa: F401
from experiments.ablations import attention_kinds  # noqa: F401
from glm5_jax.runtime.config_fields import FieldTree, check_path, tree_of
from glm5_jax.runtime.config_flags import to_frozen, to_mutable
from launch import command_line, experiment_files, experiment_help
from launch.experiment_files import field_tree, find, is_certain, locate, read, shipped
from tests.contracts.source_tree import ROOT


def leaves(tree: FieldTree, group: str = ""):
    for name, node in tree.items():
        yield from [f"{group}{name}"] if node is None else leaves(node, f"{group}{name}.")


def test_finds_every_experiment():
    files = {path for folder in experiment_files.FOLDERS for path in (ROOT / folder).glob("*.py")}
    assert set(shipped().values()) == {p for p in files if "get_config" in vars_of(p)}
    assert {"pretrain", "task_pass_rates", "muon_split"} <= set(shipped())
    assert len(shipped()) == len(set(shipped().values()))


def vars_of(path) -> set[str]:
    """Returns the names that a file defines at its top level, by a search that does not parse it."""
    lines = path.read_text().splitlines()
    return {"get_config" for line in lines if line.startswith(("def get_config(", "get_config ="))}


@pytest.mark.parametrize("name", shipped())
def test_reads_variants_and_fields_as_module_has_them(name):
    experiment = read(shipped()[name])
    assert experiment.summary and experiment.variants
    assert experiment.default in experiment.variants
    module, default = command_line.load(name)
    for variant in experiment.variants:
        config = module.get_config(variant)
        if not dataclasses.is_dataclass(config):
            continue
        mutable = to_mutable(config)
        assert to_frozen(mutable) == config
        tree = field_tree(shipped()[name], variant)
        assert tree is not None
        for path in leaves(tree_of(mutable)):
            if is_certain(tree, path):
                check_path(tree, path)
    with pytest.raises(ValueError, match="unknown variant 'nosuch'"):
        module.get_config("nosuch")


def test_locates_names_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def get_config(variant): ...\n")
    assert locate("pretrain:small") == (ROOT / "experiments" / "pretrain.py", "small")
    assert locate("experiments/pretrain.py")[0] == ROOT / "experiments" / "pretrain.py"
    assert str(locate("mine.py:x")[0]) == "mine.py"
    for wrong in ("nowhere.py", "README.md:tiny", "x:tiny"):
        with pytest.raises(ValueError, match="there are .*pretrain.*or give the path of a Python"):
            locate(wrong)


def test_describes_variants_and_fields():
    spec = "pretrain:tiny"
    config = command_line.load(spec)[1]
    text = experiment_help.describe(*find(spec), config)
    assert text.startswith("Pre-trains on plain text")
    assert "Variants: tiny (default), tiny,general, tiny,code, small," in text
    for field in leaves(tree_of(to_mutable(config))):
        assert f"\n--{field}=" in text, field
    assert "--train.steps=None\n    int | None; last step of the run; None: the last one" in text
    assert (
        "--data.sources=({'kind': 'shakespeare'}, {'kind': 'stdlib'})\n    tuple[SourceConfig"
        in text
    )


def test_describes_repeated_stage_once():
    config = command_line.load("lifecycle:tiny")[1]
    text = experiment_help.describe(*find("lifecycle"), config)
    assert "\n--midtrain_32k.FIELD  has the fields of --pretrain\n" in text
    assert "\n--rl_agentic.max_staleness=" in text


@pytest.mark.parametrize("name", sorted(shipped()))
def test_file_that_is_run_as_program_prints_its_command(name):
    source = shipped()[name].read_text("utf-8")
    assert source.endswith(
        'if __name__ == "__main__":\n    print((__doc__ or "").split("\\n\\n")[1].strip())\n'
    )
    command = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[1].strip()
    assert command.startswith("glm5 ") and name in command
