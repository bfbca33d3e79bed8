"""The layouts that are compiled for pods: they can be, and what is told of them is what the compilers said."""

import dataclasses
import json
import shlex

import pytest

from glm5_jax.parallel.mesh import resolve
from glm5_jax.training.experiment import StageConfig
from launch import command_line, layouts, pods
from launch.layouts import LAYOUTS, RESULTS, Layout
from tests.contracts.source_tree import ROOT

REPORT = {
    "program": "train step",
    "hash": "0123456789abcdef",
    "options": pods.parse(LAYOUTS[0].topology).options,
    "mesh": {"data": 1, "fsdp": 2, "expert": 4},
    "batch": {"rows": 4096, "length": 8},
    "argument_bytes": {"params": 2_000_000_000, "optimizer": 1_000_000_000},
    "temporary_bytes": 6_500_000_000,
    "unaliased_result_bytes": 300_000_000,
    "code_bytes": 200_000_000,
    "available_bytes": 20_000_000_000,
    "fits": True,
    "max_cached_tokens": None,
    "model_flops": 3e15,
    "parts": {"experts": 3.96e15, "newton_schulz": 0.04e15},
    "traffic": [
        {"kind": "ragged-all-to-all", "near_bytes": 2e9, "far_bytes": 1e9},
        {"kind": "all-gather", "near_bytes": 4e9, "far_bytes": 0},
        {"kind": "reduce-scatter", "near_bytes": 0.5e9, "far_bytes": 0},
    ],
    "overweight": ["all-reduce of 476 MB, 4 times"],
    "seconds": {"products": 4.0, "memory": 1.0},
    "utilisation": 0.75,
    "compiling_seconds": 61.0,
    "compiler_gib": 2.0,
}


def told(own: Layout, **changes) -> dict:
    return {own.name: {"command": shlex.join(own.command), "reports": [REPORT | changes]}}


def test_names_are_unique():
    assert len({own.name for own in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize("own", LAYOUTS, ids=lambda own: own.name)
def test_the_mesh_takes_all_devices_of_the_pod(own):
    flags = [word for word in own.fields if word.startswith("--experiment.")]
    config = command_line.parse(
        ["layouts", f"--experiment=experiments/{own.experiment}", *flags]
    ).config
    pod = pods.parse(own.topology)
    sizes = resolve(dataclasses.asdict(config.mesh), pod.num_devices)
    slices = config.step.expert_slices if isinstance(config, StageConfig) else 1
    if pod.platform == "cuda":
        pods.check_hosts(pod, sizes, slices)
    data, fsdp, *_ = sizes
    if pod.num_slices > 1:
        assert data * fsdp * slices % pod.num_slices == 0


def test_a_row_of_the_table():
    [_, _, row, *rest] = layouts.format_tables(told(LAYOUTS[0])).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    found = dict(zip(layouts.TRAINING, cells, strict=True))
    assert found["layout"] == LAYOUTS[0].name
    assert found["mesh"] == "fsdp 2, expert 4" and found["rows x tokens"] == "4,096 x 8"
    assert (found["GB in"], found["GB between"], found["memory"]) == ("3.0", "7.0", "50% of 20")
    assert found["PFLOP needed / taken"] == "3.00 / 4.00" and found["Newton-Schulz"] == "1.00%"
    assert found["GB sent: rows / rest"] == "3 / 4.5"
    assert found["summed whole"] == "476 MB, 4 times"
    assert found["least seconds a step"] == "**products 4**, memory 1"
    assert layouts.format_tables(told(LAYOUTS[0], overweight=[])).count("| none |") == 1
    assert found["utilisation"] == "75%" and found["compiled"] == "61 s, 2.0 GiB"
    assert not any(LAYOUTS[0].name in line for line in rest)


def test_what_serves_has_a_table_of_its_own_and_what_does_not_fit_is_named():
    first, second = LAYOUTS[:2]
    serving = told(first, program="decode", max_cached_tokens=202_752) | told(second, fits=False)
    training, _, rest = layouts.format_tables(serving).partition("\n\n")
    assert len(training.splitlines()) == 2, "no row"
    served, _, others = rest.partition("\n\n")
    assert "on up to 202,752" in served and second.name not in served
    assert others == f"{second.name} (train step) does not fit."


def test_results_are_kept_layout_by_layout_in_their_order(tmp_path):
    file = tmp_path / "layouts.jsonl"
    assert layouts.read(file) == {}
    known = told(LAYOUTS[1]) | told(LAYOUTS[0])
    layouts.write(file, known)
    names = [json.loads(line)["layout"] for line in file.read_text().splitlines()]
    assert names == [LAYOUTS[0].name, LAYOUTS[1].name]
    assert layouts.read(file) == known
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_what_is_known_is_not_compiled_again(tmp_path, capsys):
    file, own = tmp_path / "layouts.jsonl", LAYOUTS[0]
    layouts.write(file, told(own))
    assert layouts.main(["layouts", f"--only=^{own.name}$", f"--results={file}"]) == 0
    assert f"| {own.name} |" in capsys.readouterr().out


@pytest.mark.parametrize("now", ["0123456789abcdef", "fedcba9876543210"])
def test_what_is_of_another_program_by_now_is_compiled_again(now, tmp_path, monkeypatch):
    """Where that is asked for: what is lowered for a row is compared, and what its compiler is told; else no row is."""
    file, own, asked = tmp_path / "layouts.jsonl", LAYOUTS[0], []
    layouts.write(file, told(own))

    def output(layout, flag):
        asked.append(flag)
        return [now] if flag == "--hash" else [json.dumps(REPORT | {"hash": now})]

    monkeypatch.setattr(layouts, "run_compiler", output)
    command = ["layouts", f"--only=^{own.name}$", f"--results={file}"]
    assert layouts.main(command) == 0 and asked == []
    assert layouts.main([*command, "--stale"]) == 0
    changed = now != REPORT["hash"]
    assert asked == ["--hash"] + ["--json"] * changed
    assert layouts.read(file) == told(own, hash=now)
    monkeypatch.setitem(pods.FLAGS, pods.parse(own.topology).chip, {"xla_another": "true"})
    asked.clear()
    assert layouts.main([*command, "--stale"]) == 0
    assert asked == ["--json"], "the compiler is told something else by now"


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("echo 'error: no such mesh' >&2; exit 2", "no such mesh\n"),
        ("echo 'compiling  9:00' >&2; kill -9 $$", "killed by signal 9, out of memory unless"),
    ],
)
def test_why_a_compilation_failed_is_told_and_rows_stay(
    compiler, why, tmp_path, capsys, monkeypatch
):
    file, own = tmp_path / "layouts.jsonl", LAYOUTS[0]
    layouts.write(file, told(own))
    (tmp_path / "python").write_text(f"#!/bin/sh\n{compiler}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(layouts.sys, "executable", str(tmp_path / "python"))
    command = ["layouts", f"--only=^{own.name}$", f"--results={file}", "--again"]
    assert layouts.main(command) == 2
    error = capsys.readouterr().err.splitlines(keepends=True)[-1]
    assert error.startswith("error: -m launch.compile") and why in error
    assert layouts.read(file) == told(own)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--only=no such pod", "matches no layout; there are"),
        ("--only=(", "--only=( is not a regular expression: missing ), unterminated"),
        ("--results=missing/file.jsonl", "has no folder; make missing first"),
        ("more", "is not a flag of this program"),
    ],
)
def test_a_mistake_is_told_before_anything_is_compiled(flag, why, capsys):
    assert layouts.main(["layouts", flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error and error.count("\n") == 1


def test_the_tables_are_those_of_the_results():
    """As `python -m launch.layouts` prints them."""
    known = layouts.read(ROOT / RESULTS)
    assert known, "nothing was compiled"
    commands = {own.name: shlex.join(own.command) for own in LAYOUTS}
    assert {name: row["command"] for name, row in known.items()}.items() <= commands.items()
    assert layouts.format_tables(known) in (ROOT / "experiments/README.md").read_text()
