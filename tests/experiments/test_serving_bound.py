"""The table of minimum costs of GLM-5's tokens."""

import json

import pytest

from experiments.benchmarks import serving_bound
from experiments.benchmarks.serving_bound import Bound
from glm5_jax import presets
from glm5_jax.inference.serving_cost import BOUND, SERVED, arms, chip_seconds, decode, prefill
from pallas_kernels.chips import CHIPS

GLM5 = presets.glm5()


def test_figures_are_for_a_million_tokens():
    bound = Bound.of(GLM5, "v5p", 32768, 64)
    for arm, serving in arms(CHIPS["v5p"]).items():
        seconds = chip_seconds(prefill(GLM5, serving, 32768, 4), CHIPS["v5p"])
        assert bound.prefill.totals[arm] == pytest.approx(seconds * 1e6 / 131_072)
        step = chip_seconds(decode(GLM5, serving, 32768, 64), CHIPS["v5p"])
        assert bound.decode.totals[arm] == pytest.approx(step * 1e6 / 64)
    cost = bound.decode.totals
    assert bound.decode.saved == pytest.approx(1 - cost["DSA W4A8"] / cost["dense"])


def test_long_sequences_save_more_than_short_ones():
    for chip in SERVED:
        short, long = (Bound.of(GLM5, chip, length, 128) for length in (8192, 131_072))
        for few, many in zip(short.stages, long.stages):
            assert few.saved < many.saved and 0.6 < many.saved < 1
        # Indexers cost more than they save. The saving is that of 8 bits, where products have a separate rate.
        assert short.prefill.totals["DSA"] > short.prefill.totals["dense"]
        assert (short.prefill.saved > 0.25) == ("int8" in CHIPS[chip].flops)
    assert long.attention == pytest.approx(5.24, abs=0.01)  # as performance.md 2.3


def test_table_explains_its_bound(capsys):
    assert serving_bound.main(["8192", "--batch", "32"]) == 0
    out = capsys.readouterr().out
    assert BOUND in out and "claim 50% less cost" in out
    assert "tpu7x: no int8 rate is published" in out
    assert out.count("8,192") == len(SERVED)


def test_json_holds_rows_and_components(capsys):
    assert serving_bound.main(["--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["what"] == serving_bound.TITLE
    want = [
        Bound.of(GLM5, chip, length, serving_bound.BATCH)
        for length in serving_bound.LENGTHS
        for chip in SERVED
    ]
    assert table["rows"] == [row.to_json() for row in want]
    decodes = table["rows"][0]["decode"]["seconds"]
    assert {*decodes["dense"]} < {*decodes["DSA"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "invalid int value: 'x'"),
        (["0"], "length is 0; it must be positive"),
        (["8192", "--batch=0"], "batch is 0; it must be positive"),
        (["1000000"], "exceeds max_position_embeddings 202752"),
    ],
)
def test_reports_wrong_command_in_one_line(words, message, capsys):
    assert serving_bound.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
