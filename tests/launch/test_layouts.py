"""Layouts that are compiled for pods: they are valid, and their tables show the compilers' results."""

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


def result_of(layout: Layout, **changes) -> dict:
    return {layout.name: {"command": shlex.join(layout.command), "reports": [REPORT | changes]}}


def test_names_are_unique():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_mesh_takes_all_devices_of_pod(layout):
    flags = [word for word in layout.fields if word.startswith("--experiment.")]
    config = command_line.parse(
        ["layouts", f"--experiment=experiments/{layout.experiment}", *flags]
    ).config
    pod = pods.parse(layout.topology)
    sizes = resolve(dataclasses.asdict(config.mesh), pod.num_devices)
    slices = config.step.expert_slices if isinstance(config, StageConfig) else 1
    if pod.platform == "cuda":
        pods.check_hosts(pod, sizes, slices)
    data, fsdp, *_ = sizes
    if pod.num_slices > 1:
        assert data * fsdp * slices % pod.num_slices == 0


def test_formats_row_of_table():
    [_, _, row, *rest] = layouts.format_tables(result_of(LAYOUTS[0])).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    values = dict(zip(layouts.TRAINING, cells, strict=True))
    assert values["layout"] == LAYOUTS[0].name
    assert values["mesh"] == "fsdp 2, expert 4" and values["rows x tokens"] == "4,096 x 8"
    assert (values["GB in"], values["GB between"], values["memory"]) == ("3.0", "7.0", "50% of 20")
    assert values["PFLOP needed / taken"] == "3.00 / 4.00" and values["Newton-Schulz"] == "1.00%"
    assert values["GB sent: rows / rest"] == "3 / 4.5"
    assert values["summed whole"] == "476 MB, 4 times"
    assert values["least seconds a step"] == "**products 4**, memory 1"
    assert layouts.format_tables(result_of(LAYOUTS[0], overweight=[])).count("| none |") == 1
    assert values["utilisation"] == "75%" and values["compiled"] == "61 s, 2.0 GiB"
    assert not any(LAYOUTS[0].name in line for line in rest)


def test_separates_serving_table_and_names_unfitting_layouts():
    first, second = LAYOUTS[:2]
    serving = result_of(first, program="decode", max_cached_tokens=202_752) | result_of(
        second, fits=False
    )
    training, _, rest = layouts.format_tables(serving).partition("\n\n")
    assert len(training.splitlines()) == 2, "no row"
    served, _, others = rest.partition("\n\n")
    assert "on up to 202,752" in served and second.name not in served
    assert others == f"{second.name} (train step) does not fit."


def test_writes_results_in_order_of_layouts(tmp_path):
    file = tmp_path / "layouts.jsonl"
    assert layouts.read(file) == {}
    known = result_of(LAYOUTS[1]) | result_of(LAYOUTS[0])
    layouts.write(file, known)
    names = [json.loads(line)["layout"] for line in file.read_text().splitlines()]
    assert names == [LAYOUTS[0].name, LAYOUTS[1].name]
    assert layouts.read(file) == known
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_compiles_no_known_layout_again(tmp_path, capsys):
    file, layout = tmp_path / "layouts.jsonl", LAYOUTS[0]
    layouts.write(file, result_of(layout))
    assert layouts.main(["layouts", f"--only=^{layout.name}$", f"--results={file}"]) == 0
    assert f"| {layout.name} |" in capsys.readouterr().out


@pytest.mark.parametrize("now", ["0123456789abcdef", "fedcba9876543210"])
def test_compiles_changed_program_again(now, tmp_path, monkeypatch):
    """With --stale, a row is compiled again if its lowered program or its compiler options changed."""
    file, first, calls = tmp_path / "layouts.jsonl", LAYOUTS[0], []
    layouts.write(file, result_of(first))

    def output(layout, flag):
        calls.append(flag)
        return [now] if flag == "--hash" else [json.dumps(REPORT | {"hash": now})]

    monkeypatch.setattr(layouts, "run_compiler", output)
    command = ["layouts", f"--only=^{first.name}$", f"--results={file}"]
    assert layouts.main(command) == 0 and calls == []
    assert layouts.main([*command, "--stale"]) == 0
    changed = now != REPORT["hash"]
    assert calls == ["--hash"] + ["--json"] * changed
    assert layouts.read(file) == result_of(first, hash=now)
    monkeypatch.setitem(pods.FLAGS, pods.parse(first.topology).chip, {"xla_another": "true"})
    calls.clear()
    assert layouts.main([*command, "--stale"]) == 0
    assert calls == ["--json"], "the compiler's options have changed"


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("echo 'error: no such mesh' >&2; exit 2", "no such mesh\n"),
        ("echo 'compiling  9:00' >&2; kill -9 $$", "killed by signal 9, out of memory unless"),
    ],
)
def test_reports_failed_compilation_and_keeps_rows(compiler, why, tmp_path, capsys, monkeypatch):
    file, layout = tmp_path / "layouts.jsonl", LAYOUTS[0]
    layouts.write(file, result_of(layout))
    (tmp_path / "python").write_text(f"#!/bin/sh\n{compiler}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(layouts.sys, "executable", str(tmp_path / "python"))
    command = ["layouts", f"--only=^{layout.name}$", f"--results={file}", "--again"]
    assert layouts.main(command) == 2
    error = capsys.readouterr().err.splitlines(keepends=True)[-1]
    assert error.startswith("error: -m launch.compile") and why in error
    assert layouts.read(file) == result_of(layout)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--only=no such pod", "matches no layout; there are"),
        ("--only=(", "--only=( is not a regular expression: missing ), unterminated"),
        ("--results=missing/file.jsonl", "has no folder; make missing first"),
        ("more", "is not a flag of this program"),
    ],
)
def test_reports_mistake_before_compiling(flag, why, capsys):
    assert layouts.main(["layouts", flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error and error.count("\n") == 1


def test_tables_match_results():
    """The README holds the tables as `python -m launch.layouts` prints them."""
    known = layouts.read(ROOT / RESULTS)
    assert known, "nothing was compiled"
    commands = {layout.name: shlex.join(layout.command) for layout in LAYOUTS}
    assert {name: row["command"] for name, row in known.items()}.items() <= commands.items()
    assert layouts.format_tables(known) in (ROOT / "experiments/README.md").read_text()
