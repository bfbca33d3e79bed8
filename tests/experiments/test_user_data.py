"""Recipes for accelerators refuse to train on shipped and generated data only, and name the flag for the user's."""

import dataclasses
import shlex

import pytest

from glm5_jax.training.experiment import StageConfig
from launch import command_line
from tests.contracts.source_tree import ROOT

RECIPES = [
    "pretrain.py:small",
    "pretrain.py:glm5",
    "midtrain.py:small,32k",
    "dsa_warmup.py:small",
    "dsa_sparse.py:small",
    "sft.py:small,mixed",
    "sft.py:glm5,mixed",
    "rl_reasoning.py:small",
    "rl_agentic.py:small",
    "rl_agentic.py:glm5",
    "rl_general.py:small",
    "distill.py:glm5",
]


def parse(recipe: str, *words: str) -> StageConfig:
    argv = ["run", f"--experiment={ROOT}/experiments/{recipe}", "--workdir=/run", *words]
    return command_line.parse(argv).config


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_refuses_shipped_data(recipe):
    config = parse(recipe)
    with pytest.raises(
        ValueError, match="has only the small data sets of this repository"
    ) as error:
        config.check_data()
    [word] = shlex.split(f"--experiment.{config.data_example}")
    assert word.partition("=")[0] in str(error.value)
    parse(recipe, word).check_data()
    parse(recipe, "--experiment.requires_data=false").check_data()


@pytest.mark.parametrize(
    "recipe", ["pretrain.py:tiny", "sft.py:tiny,mixed", "rl_agentic.py:tiny", "distill.py:tiny"]
)
def test_small_recipe_trains_on_shipped_data(recipe):
    parse(recipe).check_data()


def test_stage_refuses_before_it_writes(tmp_path):
    config = dataclasses.replace(parse("pretrain.py:tiny"), requires_data=True)
    with pytest.raises(ValueError, match="data.sources"):
        config.make_stage(tmp_path / "run")
    assert not (tmp_path / "run").exists()
