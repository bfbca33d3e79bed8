"""Loss by position, compared with the plain forward and with a model of known losses."""

import functools
import json
import re

import jax
import numpy as np
import pytest

from glm5_jax.data.sources import SourceConfig, is_held_out, open_source
from glm5_jax.evals.position import Bucket, long_documents, loss_by_position, table
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.text.tokenizer import Tokenizer
from tests.evals.test_ruler import CFG, params

TOKENIZER = Tokenizer.default()
DOCUMENTS = np.random.default_rng(1).integers(0, CFG.vocab_size, (5, 45)).astype(np.int32)


@functools.cache
def losses():
    logits = glm5.forward(params(), DOCUMENTS, CFG).logits
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    return -np.take_along_axis(log_probs[:, :-1], DOCUMENTS[:, 1:, None], -1)[..., 0]


def test_buckets_are_means_over_their_positions():
    nll = losses()  # entry i is of position i + 1
    buckets = loss_by_position(params(), CFG, DOCUMENTS, batch_size=2)
    assert [(b.start, b.end) for b in buckets] == [
        (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 45),
    ]  # fmt: skip
    for b in buckets:
        of_document = nll[:, b.start - 1 : b.end - 1].mean(1)
        assert b.loss == pytest.approx(of_document.mean(), rel=1e-5)
        assert b.margin == pytest.approx(1.96 * of_document.std(ddof=1) / 5**0.5, rel=1e-3)
    mean = sum(b.loss * (b.end - b.start) for b in buckets) / 44
    assert mean == pytest.approx(nll.mean(), rel=1e-5)


def test_uses_chosen_edges():
    buckets = loss_by_position(params(), CFG, DOCUMENTS, batch_size=2, edges=[5, 40, 45])
    assert buckets[1].loss == pytest.approx(losses()[:, 39:44].mean(), rel=1e-5)
    (single,) = loss_by_position(params(), CFG, DOCUMENTS[:1], batch_size=2, edges=[1, 3])
    assert np.isnan(single.margin)
    for edges in ([0, 5], [5, 5], [7], [1, 46]):
        with pytest.raises(ValueError, match="must ascend within 1 .. 45"):
            loss_by_position(params(), CFG, DOCUMENTS, edges=edges)


def test_documents_are_held_out_and_long_enough(tmp_path):
    texts = [f"document {i} " * (3 + i % 7) for i in range(200)] + [""]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    rows = long_documents(source, TOKENIZER, 20, 4, held_out_fraction=0.2)
    wanted = [t for t in texts if t and is_held_out(t, 0.2) and len(TOKENIZER.encode(t)) >= 19][:4]
    assert rows.shape == (4, 20)
    for row, text in zip(rows, wanted, strict=True):
        assert row.tolist() == [*TOKENIZER.encode(text), TOKENIZER.eos_id][:20]
    with pytest.raises(ValueError, match="no held-out document has 900 tokens, the longest has"):
        long_documents(source, TOKENIZER, 900, 4)


def test_reads_only_held_out_passages_of_book(tmp_path):
    """The split is by passage, so a hash of the full book would read training text."""
    passages = [f"<{i}> " + "x" * 4000 for i in range(40)]
    (tmp_path / "book.txt").write_text("\n\n".join(passages))
    source = SourceConfig(kind="books", path=str(tmp_path / "book.txt"))
    (row,) = long_documents(source, TOKENIZER, 3000, 1, held_out_fraction=0.2)
    text = TOKENIZER.decode(row.tolist())
    stored = open_source(SourceConfig(kind="passages", path=source.path))
    held_out = [
        x[: x.index(">") + 1] for x in (stored[i] for i in range(40)) if is_held_out(x, 0.2)
    ]
    assert len(held_out) > 3 and re.findall(r"<\d+>", text) == held_out[: text.count("<")]


def test_table_has_line_per_bucket():
    lines = table(
        [
            Bucket(start=1, end=2, loss=2.0, margin=0.5),
            Bucket(start=2, end=9, loss=1.0, margin=float("nan")),
        ]
    ).splitlines()
    assert lines[1].split() == ["1", "..", "1", "2.000", "+-", "0.500", "7.39"]
    assert lines[2].split() == ["2", "..", "8", "1.000", "2.72"]


def test_mesh_keeps_losses():
    mesh = make_mesh(fsdp=2, context=2, devices=jax.devices()[:4])
    placed = jax.device_put(params(), glm5.param_shardings(CFG, mesh))
    rows = DOCUMENTS[:, :44]
    a = loss_by_position(placed, CFG, rows, batch_size=2, mesh=mesh, edges=[1, 9, 44])
    nll = losses()
    want = [nll[:, :8].mean(), nll[:, 8:43].mean()]
    np.testing.assert_allclose([x.loss for x in a], want, rtol=1e-5)
