"""Variants of SFT: their data, and their changes of the sparse model that they start from."""

import dataclasses

import pytest

from experiments import dsa_sparse, sft
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.optimizer import groups_of

SIZES = ("tiny", "small", "glm5")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", sft.KINDS)
def test_kind_reads_its_mode_and_mixed_reads_all(size, kind):
    config = sft.get_config(f"{size},{kind}")
    sources = config.data.sources
    assert sum(source.weight for source in sources) == pytest.approx(1)
    modes = {source.mode for source in sources}
    assert modes == ({"interleaved", "preserved", "turn_level"} if kind == "mixed" else {kind})
    if kind == "mixed":
        categories = {source.category for source in sources}
        assert categories == {"general", "reasoning", "coding", "agent"}
    assert config.data.packing == "best_fit" and config.requires_checkpoint


@pytest.mark.parametrize("size", SIZES)
def test_starts_from_sparse_model_with_int4_experts(size):
    before, config = dsa_sparse.get_config(size), sft.get_config(f"{size},mixed")
    assert config.model == dataclasses.replace(before.model, int4_group=config.model.int4_group)
    assert config.model.int4_group == (32 if size == "tiny" else 128)
    assert glm5.abstract_params(config.model) == glm5.abstract_params(before.model)
    assert config.data.sequence_length == before.data.sequence_length
    assert config.step.index_weight > 0
    groups = flatten(groups_of(config.optimizer, glm5.axis_letters(config.model)))
    assert {p for p, g in groups.items() if g == "frozen"} == {
        p for p in groups if p.endswith("router/bias")
    }


def test_default_length_is_that_of_paper():
    config = sft.get_config("glm5,mixed")
    assert config.data.sequence_length == 202_752


@pytest.mark.slow
def test_shipped_samples_fit_into_tiny_rows():
    """Opening a source raises an error for the first sample that is too long."""
    data = sft.get_config("tiny,mixed").data
    for source in data.sources:
        for training in (True, False):
            assert len(source.open(Tokenizer.default(), data.held_out_fraction, training=training))


def test_lists_kinds_for_unknown_kind():
    with pytest.raises(
        ValueError,
        match="unknown variant 'tiny,deep'; did you mean tiny,mixed. There are tiny,interleaved",
    ):
        sft.get_config("tiny,deep")
