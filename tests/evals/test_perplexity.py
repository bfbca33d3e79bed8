"""Held-out bits per byte: the model and the baselines are scored on the same tokens."""

import dataclasses
import math

import numpy as np
import pytest

from glm5_jax.data.loader import held_out_batches
from glm5_jax.data.mixture import DataConfig, training_documents
from glm5_jax.data.sources import SourceConfig
from glm5_jax.evals.base import NgramCounts, Unigram, baseline_bits_per_byte, predicted_bytes
from glm5_jax.evals.perplexity import HeldOut
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.pretraining import ExperimentConfig, Setting

VOCAB = 2048


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, words in (("a", "to be or not to be"), ("b", "def main(): return 0")):
        for i in range(40):
            (folder / f"{name}{i}.txt").write_text(" ".join([words] * (3 + i % 5)) + f" {i}")
    sources = tuple(SourceConfig(kind="text", path=str(folder / f"{name}*.txt")) for name in "ab")
    data = DataConfig(sources=sources, sequence_length=32, held_out_fraction=0.3, num_threads=0)
    config = ExperimentConfig(data=data, train=TrainConfig(eval_batches=2))

    def evaluate(log_probs, batch):
        weight = batch["loss_mask"]
        return -(log_probs[batch["token_ids"]] * weight).sum(), weight.sum()

    return Setting(
        config=config,
        tokenizer=Tokenizer.default(),
        batch_rows=3,
        place=lambda batch: batch,
        evaluate=evaluate,
    )


def fit_unigram(setting, source):
    documents = training_documents(setting.config.data, source, setting.tokenizer)
    return Unigram.fit(NgramCounts.of(documents, VOCAB))


def test_unigram_model_scores_like_unigram_baseline(setting):
    data, sizes = setting.config.data, setting.tokenizer.token_bytes()
    model = fit_unigram(setting, data.sources[0])
    got = HeldOut(setting)(model.log_probs)
    bits, total_bytes, targets = 0.0, 0, 0.0
    for source in data.sources:
        batches = list(held_out_batches(data, source, setting.tokenizer, 3, max_rows=6))
        want = baseline_bits_per_byte(model, batches, sizes)
        assert got[f"held_out/{source.name}/bits_per_byte"] == pytest.approx(want, rel=1e-6)
        num_bytes = sum(predicted_bytes(batch, sizes) for batch in batches)
        bits, total_bytes = bits + want * num_bytes, total_bytes + num_bytes
        targets += sum(float(batch["loss_mask"].sum()) for batch in batches)
    assert got["held_out/bits_per_byte"] == pytest.approx(bits / total_bytes, rel=1e-6)
    assert got["held_out/loss"] == pytest.approx(bits * math.log(2) / targets, rel=1e-6)


def test_fits_baselines_to_each_source(setting):
    held_out = HeldOut(setting)
    baselines = held_out.baselines()
    assert list(baselines) == ["unigram", "bigram"]
    assert baselines["bigram"] < 0.7 * baselines["unigram"]
    of_one = held_out(fit_unigram(setting, setting.config.data.sources[0]).log_probs)
    assert baselines["unigram"] < of_one["held_out/bits_per_byte"]


def test_partial_baselines_report_token_count(setting):
    def baselines(tokens, num_threads):
        train = dataclasses.replace(setting.config.train, baseline_tokens=tokens)
        data = dataclasses.replace(setting.config.data, num_threads=num_threads)
        config = dataclasses.replace(setting.config, train=train, data=data)
        return HeldOut(dataclasses.replace(setting, config=config)).baselines()

    full, cut = baselines(2**24, 0), baselines(101, 0)
    assert "tokens" not in full and cut["tokens"] == 100  # 50 of each source
    assert cut["unigram"] > full["unigram"]
    assert baselines(101, 3) == cut
    assert baselines(1, 0)["tokens"] == 4


def test_second_evaluation_gives_same_numbers(setting):
    uniform = np.full(VOCAB, -math.log(VOCAB))
    held_out = HeldOut(setting)
    assert held_out(uniform) == held_out(uniform) == HeldOut(setting)(uniform)
    assert held_out(uniform)["held_out/loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)
