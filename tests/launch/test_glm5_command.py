"""The command `glm5`: its commands, and that setup.cfg installs it."""

import configparser
import importlib

import pytest

from launch import glm5
from launch.experiment_files import shipped
from tests.contracts.source_tree import ROOT


def test_is_installed_as_console_script():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "glm5"
    assert getattr(importlib.import_module(module), function) is glm5.main
    packages = config["options.packages.find"]["include"].split()
    assert {module.partition(".")[0] + "*", "experiments*"} <= set(packages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "no command 'lst'; did you mean list; `glm5 --help` describes them"),
        (["train"], "no command 'train'; use one of run, serve, chat, list"),
        (["list", "more"], "unexpected argument 'more'; `glm5 list` takes none"),
        (["run"], "no experiment given; try pretrain:tiny. `glm5 list` shows all"),
        (["run", "pretrain", "--lr=1"], "--lr: no field 'lr'; did you mean --schedule.peak?"),
        (["local", "pretrian:tiny", "--hosts=2"], "did you mean pretrain?"),
        (["compile", "pretrain:glm-5"], "unknown variant 'glm-5'; did you mean glm5?"),
        (["serve", "DIR", "--prt=1"], "--prt: no field 'prt'; did you mean --server.port?"),
        (["serve", "--workdir=DIR"], "use --experiment.checkpoint=DIR"),
    ],
)
def test_refuses_mistake_in_one_line(words, message, capsys):
    assert glm5.main(["glm5", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_lists_all_experiments(capsys):
    assert glm5.main(["glm5", "list"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name}:" in f"\n{out}" for name in shipped())


@pytest.mark.parametrize("words", [["--help"], ["list", "--help"]])
def test_prints_help(words, capsys):
    assert glm5.main(["glm5", *words]) == 0
    assert "glm5 serve FOLDER" in capsys.readouterr().out


def test_prints_help_and_fails_without_command(capsys):
    assert glm5.main(["glm5"]) == 2
    assert "glm5 serve FOLDER" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in glm5.COMMANDS if c not in ("list", "serve")])
def test_every_command_is_program(command):
    folder = "experiments" if command in glm5.TOOLS else "launch"
    assert callable(importlib.import_module(f"{folder}.{command}").main)


def test_passes_arguments_to_tool(capsys):
    assert glm5.main(["glm5", "check_chats", "nosuch.jsonl"]) == 2
    assert "no file nosuch.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["DIR"], ["--experiment=serve:tiny", "--experiment.checkpoint=DIR"]),
        (
            ["DIR", "--warm=true"],
            ["--experiment=serve:tiny", "--experiment.checkpoint=DIR", "--warm=true"],
        ),
        (
            ["DIR", "--experiment=serve:small"],
            ["--experiment.checkpoint=DIR", "--experiment=serve:small"],
        ),
        ([], ["--experiment=serve:tiny"]),
    ],
)
def test_serves_folder(words, expected):
    assert glm5.serve_arguments(words) == expected


@pytest.mark.parametrize(
    ("name", "refused"), [("slurm", {"slices", "tpu_topology"}), ("gke", set())]
)
def test_help_of_scheduler_names_all_flags(name, refused):
    program = importlib.import_module(f"launch.{name}")
    names = {*program.define()} - {"help", "helpshort", "helpfull", "helpxml"} - refused
    assert not [flag for flag in names if f"--{flag}" not in program.__doc__]
