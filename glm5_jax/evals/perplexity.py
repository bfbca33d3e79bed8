"""Evaluates the held-out loss in bits per byte, and n-gram baselines on the same tokens."""

import contextlib

from glm5_jax.data.loader import held_out_batches
from glm5_jax.data.mixture import training_documents
from glm5_jax.evals.base import (
    KneserNeyBigram,
    NgramCounts,
    Unigram,
    baseline_bits_per_byte,
    bits_per_byte,
    predicted_bytes,
)
from glm5_jax.training.pretraining import Setting


class HeldOut:
    """Evaluates parameters on held-out rows of every data source, the same rows at every call."""

    def __init__(self, setting: Setting):
        """Reads `train.eval_batches` batches of each source. Raises ValueError if a source has none."""
        self._setting = setting
        self._token_bytes = setting.tokenizer.token_bytes()
        data, rows = setting.config.data, setting.batch_rows
        max_rows = rows * setting.config.train.eval_batches
        self._batches = {
            source.name: list(
                held_out_batches(data, source, setting.tokenizer, rows, max_rows=max_rows)
            )
            for source in data.sources
        }

    def __call__(self, params) -> dict[str, float]:
        """Returns the loss over all sources, in nats per token and bits per byte, and bits per byte of each source."""
        out, total_nll, total_targets, total_bytes = {}, 0.0, 0.0, 0
        for name, batches in self._batches.items():
            nll, num_bytes = 0.0, 0
            for batch in batches:
                batch_nll, targets = self._setting.evaluate(params, self._setting.place(batch))
                nll, total_targets = nll + float(batch_nll), total_targets + float(targets)
                num_bytes += predicted_bytes(batch, self._token_bytes)
            if len(self._batches) > 1:
                out[f"held_out/{name}/bits_per_byte"] = bits_per_byte(nll, num_bytes)
            total_nll, total_bytes = total_nll + nll, total_bytes + num_bytes
        overall = {
            "held_out/loss": total_nll / total_targets,
            "held_out/bits_per_byte": bits_per_byte(total_nll, total_bytes),
        }
        return overall | out

    def baselines(self) -> dict[str, float]:
        """Returns the bits per byte of a unigram and a Kneser-Ney bigram on the same tokens.

        Each source has separate baselines, counted over its training documents, so they use the source of every token.
        At most an equal part of `train.baseline_tokens` is counted per source. If that left out text, `tokens` is the
        number of counted tokens.
        """
        config, tokenizer = self._setting.config, self._setting.tokenizer
        data, vocab_size = config.data, config.model.vocab_size
        max_tokens = max(2, config.train.baseline_tokens // len(data.sources))  # a bigram takes two
        bits, total_bytes, num_tokens, is_truncated = {"unigram": 0.0, "bigram": 0.0}, 0, 0, False
        for source in data.sources:
            with contextlib.closing(training_documents(data, source, tokenizer)) as documents:
                counts = NgramCounts.of(documents, vocab_size, max_tokens)
            num_tokens, is_truncated = (
                num_tokens + int(counts.tokens.sum()),
                is_truncated or counts.is_truncated,
            )
            batches = self._batches[source.name]
            num_bytes = sum(predicted_bytes(batch, self._token_bytes) for batch in batches)
            for name, kind in (("unigram", Unigram), ("bigram", KneserNeyBigram)):
                fitted = kind.fit(counts)
                bits[name] += num_bytes * baseline_bits_per_byte(fitted, batches, self._token_bytes)
            total_bytes += num_bytes
        baselines = {name: value / total_bytes for name, value in bits.items()}
        return baselines | ({"tokens": num_tokens} if is_truncated else {})
