"""Redundant attention: trained and measured arms, and FLOPs next to GLM-5's formulas."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from experiments.ablations import attention_mass as ablation, retriever
from experiments.ablations.attention_mass import RETRIEVER, TEXT, counts, first_length
from glm5_jax import presets
from glm5_jax.checkpoint import store
from glm5_jax.checkpoint.models import check_arithmetic
from glm5_jax.evals.attention_mass import Mass
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("without_pictures")

GLM5 = presets.glm5()
# Of a query and a layer, two per multiply-add: 64 heads of 256 for keys and values; 32 of 128.
DENSE, INDEX, LATENT = 65_536, 8_192, 2 * 64 * (576 + 512)
PROJECTIONS = 2 * (2048 * 32 * 128 + 6144 * 128 + 6144 * 32)


@pytest.mark.parametrize("t", [8192, 202_752])
def test_prefill_counts_equal_formulas(t):
    seen, chosen = (t + 1) / 2, (2048 * 2049 / 2 + (t - 2048) * 2048) / t
    flops = counts(GLM5, t)
    sparse = DENSE * chosen + INDEX * seen + PROJECTIONS
    assert flops["prefill, attention only"] == pytest.approx((DENSE * seen, sparse), rel=1e-6)
    folds = 2 * 512 * 64 * (192 + 256)
    assert flops["prefill, attention in the kernels"] == pytest.approx(
        (folds + DENSE * seen, folds + LATENT * chosen + INDEX * seen + PROJECTIONS), rel=1e-6
    )
    layer, attention = flops["prefill, whole layer"], flops["prefill, attention only"]
    rest = np.subtract(layer, attention)
    # MLA's projections, the router, eight experts and the shared one (3 x 37.7M numbers / 3).
    assert rest == pytest.approx([2 * (165.02e6 + 1.57e6 + 9 * 37.75e6)] * 2, rel=1e-3)


def test_decoding_counts_equal_formulas():
    t = 131_072
    flops = counts(GLM5, t)
    dense, sparse = flops["decode, attention only"]
    assert dense == 2 * 64 * (576 + 576) * t
    assert sparse == pytest.approx(LATENT * 2048 + INDEX * t + PROJECTIONS)
    layer = flops["decode, whole layer"]
    assert np.subtract(layer, (dense, sparse)) == pytest.approx(
        [2 * (165.02e6 + 1.57e6 + 9 * 37.75e6)] * 2, rel=1e-3
    )
    dense, sparse = flops["decode, bytes of attention"]
    assert dense == pytest.approx(2 * 576 * t, rel=1e-2)
    assert sparse == pytest.approx(2 * (128 * t + 576 * 2048), rel=2e-2)


def test_counts_few_keys_once():
    """A selection of up to index_topk keys is all of them."""
    dense, sparse = counts(GLM5, 1024)["prefill, attention only"]
    assert sparse == pytest.approx(dense + INDEX * 512.5 + PROJECTIONS, rel=1e-6)


def test_finds_first_length_with_ratio():
    what = "prefill, attention only"
    at = first_length(GLM5, what, 2.0)
    for t, more in ((at - 1, False), (at, True)):
        dense, sparse = counts(GLM5, t)[what]
        assert (dense >= 2 * sparse) == more
    assert first_length(GLM5, what, 9.0) is None  # never more than 65,536 / 8,192


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_last_stage_trains_only_indexers(variant, tmp_path):
    setup = ablation.get_config(variant)
    arms = ablation.arms(setup, tmp_path)
    for arm in arms.values():
        for before, after in itertools.pairwise(arm.stages):
            check_arithmetic(before.name, before.model, after.model, after.may_differ)
        assert all(stage.model.attention == "dense" for stage in arm.stages)
        last = arm.stages[-1]
        assert last.optimizer.frozen and last.step.index_weight and last.may_differ == ("indexer",)
        assert last.model.index_topk is not None
    text = arms[TEXT].stages[-1]
    assert setup.length <= text.data.sequence_length
    assert setup.mass.edges[-1] == setup.length + 1 and max(setup.mass.top_k) < setup.length
    assert ablation.RETRIEVED.edges[-1] == ablation.LENGTH + 1


@pytest.mark.slow
def test_measures_retriever_on_its_tasks(tmp_path, monkeypatch):
    trial = ablation.arms(ablation.get_config(), tmp_path)[RETRIEVER].trial(seed=1)
    Tokenizer.load(retriever.tokenizer(tmp_path)).save(tmp_path / "run" / "tokenizer")
    params = glm5.init_params(trial.stages[-1].model, jax.random.key(0))
    monkeypatch.setattr(store, "load_params", lambda folder, abstract: params)
    monkeypatch.setattr(retriever, "ROWS", 2)
    row = ablation.measure(ablation.get_config(), trial, tmp_path / "run")
    assert [(m["layer"], m["end"]) for m in row["mass"]] == [
        (layer, end) for layer in (0, 1) for end in (33, 65, 129)
    ]
    for m in row["mass"]:
        for low, high in zip(m["selected"], m["best"]):
            assert 0 < low <= high + 1e-6 <= 1 + 2e-6


@pytest.mark.slow
def test_measures_text_model_on_held_out_documents(tmp_path, monkeypatch):
    setup = dataclasses.replace(ablation.get_config(), rows=3)
    trial = ablation.arms(setup, tmp_path)[TEXT].trial(seed=1)
    Tokenizer.default().save(tmp_path / "tokenizer")
    seen = []

    def note(params, cfg, rows, config, **_):
        seen.append((rows.shape, config))
        return [
            Mass(
                layer=0,
                start=1,
                end=2,
                selected=(0.5,),
                best=(0.75,),
                recent=(0.25,),
                keys=(1.0,),
                redundant=(0.0,),
            )
        ]

    monkeypatch.setattr(store, "load_params", lambda folder, abstract: None)
    monkeypatch.setattr(ablation, "attention_mass", note)
    row = ablation.measure(setup, trial, tmp_path)
    assert seen == [((3, 1024), setup.mass)]
    assert row["mass"][0]["best"] == (0.75,)


def fake_rows(config, layers, seeds=3, redundant=(0.95, 0.5)):
    buckets = list(zip(config.edges, config.edges[1:]))
    ks = len(config.top_k)

    def mass(layer, bucket, seed):
        selected, best, recent = (
            tuple(np.full(ks, x + 0.01 * seed).tolist()) for x in (0.6 + layer / 10, 0.8, 0.3)
        )
        start, end = bucket
        return dataclasses.asdict(
            Mass(
                layer=layer,
                start=start,
                end=end,
                selected=selected,
                best=best,
                recent=recent,
                keys=(7.0 + layer, 50.0),
                redundant=redundant,
            )
        )

    return [
        {"mass": [mass(layer, b, seed) for layer in range(layers) for b in buckets]}
        for seed in range(seeds)
    ]


def test_finding_reports_targets():
    setup = ablation.get_config()
    rows = {TEXT: fake_rows(setup.mass, 4), RETRIEVER: fake_rows(ablation.RETRIEVED, 2)}
    result = ablation.finding(setup, rows, "command")
    assert "90% of the attention lies on 8.5 ± 0.0" in result.verdicts[0]
    assert result.verdicts[0].endswith("about 90%: met")
    assert result.verdicts[1].endswith("about 90%: not met")
    # Layers 0 to 3 hold 0.6 to 0.9, seeds add 0, 1 and 2 percent.
    assert "the indexer's 80 keys hold 76.0%" in result.verdicts[2]
    assert result.verdicts[3].startswith("retriever, 65 to 128 visible keys")
    by_layer, by_length, *_, counted = result.tables
    assert [row[0] for row in by_layer.rows] == ["0", "1", "2", "3", "all"]
    assert [row[0] for row in by_length.rows] == [
        "65 to 128", "129 to 256", "257 to 512", "513 to 1024"
    ]  # fmt: skip
    assert [row[0] for row in counted.rows][-2:] == ["131,072", "202,752"]
    assert len(result.plots) == 5
    assert any("at no length" not in v and "1.5x at" in v for v in result.verdicts[6:])
