"""Tests of `python -m pallas_kernels.bench`: its output, its baselines and its errors."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backends, baselines, bench
from pallas_kernels.cases import COMPOSED, KERNELS, cases


def run(capsys, *args):
    code = bench.main([*args, "--small", "--seconds", "0.01"])
    return code, capsys.readouterr().out.splitlines()


def test_prints_times_of_xla_and_libraries_per_case(capsys, tmp_path):
    code, lines = run(capsys, "top_k", "--json", str(tmp_path / "lines.jsonl"))
    assert code == 0 and "No accelerator" in lines[1]
    assert [line.split()[:3] for line in lines[2:]] == [
        "top_k decode xla".split(),
        "top_k prefill xla".split(),
    ]
    assert all(
        "x lax.top_k" in line and " ms" in line and "failed" not in line for line in lines[2:]
    )
    records = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [record["case"] for record in records] == ["decode", "prefill"]
    for record in records:
        assert record["seconds"] >= record["best_seconds"] > 0
        assert record["libraries"]["lax.top_k"] > 0
        assert record["gb_per_s"] == pytest.approx(4 * 3 * 20500 / record["seconds"] / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["decode", "backward"])
def test_measures_one_case_at_other_sizes(capsys, case):
    code, lines = run(capsys, "grouped_matmul", "--case", case, "--shape", "m=96,filled=90")
    assert code == 0 and len(lines) == 3 and "x lax.ragged_dot" in lines[2]


def test_rejects_baseline_with_other_results(capsys, monkeypatch):
    wrong = baselines.Baseline("jax", lambda x, sizes: x["scores"][:, : sizes["k"]].astype(int))
    monkeypatch.setitem(baselines.BASELINES, ("top_k", "decode"), {"wrong": wrong})
    code, lines = run(capsys, "top_k", "--case", "decode")
    assert "x wrong" not in lines[2] and "wrong failed: ValueError: its results differ" in lines[2]


def test_reports_failing_kernel_by_exit_code(capsys, monkeypatch):
    broken = cases("top_k")["decode"]._replace(run=lambda *args: 1 / 0)
    monkeypatch.setitem(cases("top_k"), "decode", broken)
    monkeypatch.setattr(baselines, "BASELINES", {})
    code, lines = run(capsys, "top_k", "--case", "decode")
    assert code == 1 and "XLA failed: ZeroDivisionError" in lines[2]


def test_times_every_result_of_a_call():
    """XLA would remove the products of the second result if the bench used only the first."""

    def function(x):
        return x @ x, (x.T @ x).T @ x

    program = bench.repeat_in_loop(function)
    x = jnp.ones((24, 24))
    text = jax.jit(program).lower(x, 3).compile().as_text()
    assert text.count(" dot(") + text.count("__onednn$matmul") == 3
    once, thrice = (float(program(x, calls)) for calls in (1, 3))
    assert thrice == 3 * once == 3 * (24 + 24 * 24)


def test_checks_the_timed_sizes_on_request(monkeypatch):
    wrong = cases("top_k")["decode"]

    def first(x, sizes, _):
        return x["scores"][:, : sizes["k"]].astype(int)

    forms = {"xla": first, "gpu": lambda *args: first(*args).at[0, 0].add(1)}
    case = wrong._replace(run=lambda x, sizes, form: forms[form](x, sizes, form))
    monkeypatch.setitem(cases("top_k"), "decode", case)
    monkeypatch.setattr(bench.backends, "platform", lambda: "gpu")
    monkeypatch.setattr(baselines, "BASELINES", {})
    record = bench.measure("top_k", "decode", dict(case.small), 0.01, full_check=True)
    assert record["difference"] == record["full_check"]["difference"]
    assert record["difference"] == pytest.approx(1 / (3 * 500))
    assert "full size: same bits twice, 6.7e-04 from XLA" in bench.format_line(record)


def test_auto_skips_opt_in_forms(monkeypatch):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    monkeypatch.setattr(backends, "is_hopper", lambda: True)
    x = jnp.zeros((1, 1, 64, 64), jnp.bfloat16)
    g, state = jnp.zeros((1, 1, 64)), jnp.zeros((1, 1, 64, 64))
    args = (x, x, x, g, g, state, 64)
    assert backends.select_backend("gated_delta", "auto", *args).name == "xla"
    assert backends.select_backend("gated_delta", "gpu", *args).name == "gpu"
    assert backends.select_backend("top_k", "auto", jnp.zeros((2, 64)), 8).name == "gpu"


def test_baselines_belong_to_cases():
    for kernel, case in baselines.BASELINES:
        assert kernel in KERNELS + COMPOSED and case in cases(kernel)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["top_k", "--case", "no"], "no case 'no'; top_k has decode, prefill"),
        (["top_k", "--shape", "m=x"], "m needs a positive integer"),
        (["top_k", "--shape", "y=4"], "has no size 'y'"),
        (["top_k", "--json", "nowhere/records.jsonl"], "No such file or directory: 'nowhere/"),
    ],
)
def test_rejects_invalid_arguments(capsys, args, message):
    with pytest.raises(SystemExit):
        bench.main(args)
    assert message in capsys.readouterr().err
