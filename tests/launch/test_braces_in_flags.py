"""Tests that launchers pass flags with words in braces to programs as the user wrote them."""

from glm5_jax.runtime.placement import WORDS, substitute_words
from launch import run_plan


def test_keeps_braces_of_flags(tmp_path):
    workdir = f"--workdir={tmp_path}/{{host}}"
    argv = ["launch.local", "pretrain:tiny", r"--name=\boxed{answer}", workdir]
    plan = run_plan.read(argv, run_plan.define(), devices=1)
    [role] = plan.roles
    words = substitute_words(role.argv, dict.fromkeys(WORDS, "x"))
    assert workdir in words and r"--experiment.name=\boxed{answer}" in words
