"""The benchmark of the orchestrator's traffic, at a small size: token records do not pass through the orchestrator."""

import dataclasses

import pytest

from experiments.benchmarks import orchestrator_traffic


@pytest.mark.slow
def test_traffic_is_independent_of_tokens(tmp_path):
    results = []
    for tokens in (20, 200):
        workload = dataclasses.replace(
            orchestrator_traffic.make_workload(1, tokens),
            batch_groups=2,
            max_staleness=0,
            median_answer_s=0.05,
            speed=1e4,
        )
        results.append(orchestrator_traffic.measure(workload, 1, tmp_path / str(tokens)))
    short, long = results
    assert long["tokens"] > 4 * short["tokens"] > 0
    for peer in ("from gateway", "to trainer"):
        assert 0 < long["bytes"][peer] < 1.2 * short["bytes"][peer]
    assert "16 rollouts" in orchestrator_traffic.describe(short)


def test_rejects_invalid_options(capsys):
    assert orchestrator_traffic.main(["--batches=0"]) == 2
    assert "--batches is 0; it must be at least 1" in capsys.readouterr().err
    assert orchestrator_traffic.main(["--tokens=2"]) == 2
