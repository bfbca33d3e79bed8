"""Imports of commands: users' errors are answered without slow libraries, and the collector waits meanwhile."""

import gc
import importlib
import subprocess
import sys

from launch.imports import paused_collector
from tests.contracts.source_tree import ROOT

MISTAKES = (
    ["run", "pretrain:tiny", "--train.steps=0"],
    ["run", "sft:tiny,mixed", "--checkpoint=nowhere"],
    ["run", "rl_reasoning:addition", "--tasks=({'file': 'nowhere.jsonl'},)"],
    ["run", "evaluate:questions", "--file=nowhere.jsonl", "--endpoint.base_url=http://127.0.0.1:1"],
    ["serve", "nowhere"],
    ["chat", "nowhere"],
    ["quantise", "nowhere", "out"],
)
SLOW = {
    "grain",
    "matplotlib",
    "orbax.checkpoint",
    "tensorstore",
    "pyarrow",
    "math_verify",
    "transformers",
    "jax.experimental.pallas.mosaic_gpu",
}


def test_answers_mistakes_without_slow_libraries(tmp_path):
    code = f"""
import sys
from launch import glm5
for words in {MISTAKES!r}:
    assert glm5.main(["glm5", *words]) == 2, words
    print("slow:", {SLOW!r} & sys.modules.keys())
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["slow: set()"] * len(MISTAKES), result.stdout
    assert result.stderr.count("error: ") == len(MISTAKES)


def test_collector_waits_for_imports():
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_stays_off_if_it_was():
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_keeps_no_objects_where_models_may_exist():
    importlib.import_module("jax")
    num_frozen = gc.get_freeze_count()
    with paused_collector():
        pass
    assert gc.get_freeze_count() == num_frozen
