"""Goldens of transformers in the model's layout, and a forward that records intermediate results."""

import collections
import dataclasses
import functools
import json
import pathlib
from unittest import mock

import jax
import numpy as np

from glm5_jax.checkpoint import hf_import, hf_names
from glm5_jax.config import ModelConfig
from glm5_jax.model import attention, attention_kinds, block, decoder, glm5, moe
from pallas_kernels.lightning_indexer import index_scores

FOLDER = pathlib.Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/arrays.npz"))


@dataclasses.dataclass(frozen=True)
class Golden:
    """One golden: the imported config and float32 parameters, and the arrays that transformers computed."""

    name: str
    cfg: ModelConfig
    params: dict
    arrays: dict[str, np.ndarray]
    meta: dict

    @property
    def tokens(self) -> np.ndarray:
        return self.arrays["input_ids"].astype(np.int32)

    def prompt_of(self, continuation: str) -> np.ndarray:
        """Returns the prompt of gen_long_ids, gen_short_ids or pad_gen_ids."""
        new = self.arrays["gen_long_logits"].shape[1]
        return self.arrays[continuation][:, :-new].astype(np.int32)

    def to_float64(self):
        """Returns (config, params) for float64, as NumPy arrays."""
        cfg = dataclasses.replace(self.cfg, dtype="float64")
        return cfg, jax.tree.map(lambda x: np.asarray(x, np.float64), self.params)


@functools.cache
def load(name: str) -> Golden:
    folder = FOLDER / name
    cfg = hf_import.read_config(folder)
    params = hf_import.load_params(folder, cfg)
    meta = json.loads((folder / "meta.json").read_text())
    return Golden(name, cfg, params, dict(np.load(folder / "arrays.npz")), meta)


def to_hf_names(cfg, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts arrays by leaf path to transformers' names, with fused experts."""
    out, every_layer = {}, frozenset(range(cfg.num_hidden_layers))
    for piece in hf_names.pieces(
        cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg), every_layer
    ):
        tensor = out.setdefault(piece.name, np.full(piece.view.shape, np.nan, np.float32))
        piece.view.of(tensor)[...] = leaves[piece.path][piece.at]
    assert not any(np.isnan(tensor).any() for tensor in out.values())
    return out


@functools.cache
def traced_forward(cfg):
    """Returns a compiled f(params, tokens, segments, positions) -> (Output, intermediate results).

    The layers run in a loop instead of a scan. The results are lists in layer order: hidden_states, attn_out,
    mlp_out, topk (int32 [b t k] or None), index_scores (full layers), routing (MoE layers).
    """

    def run(params, tokens, segments, positions):
        seen = collections.defaultdict(list)
        feed_forwards = []

        def record(module, name, callback):
            plain = getattr(module, name)

            def recording(*args, **kwargs):
                out = plain(*args, **kwargs)
                callback(args, out)
                return out

            return mock.patch.object(module, name, recording)

        def record_layer(args, out):
            seen["hidden_states"].append(out[0])
            # A mixture of experts also calls mlp for its shared expert, so the last output counts.
            seen["mlp_out"].append(feed_forwards[-1])

        with (
            record(decoder, "block", record_layer),
            record(decoder, "embed", lambda args, out: seen["hidden_states"].append(out)),
            record(attention_kinds, "attention", lambda args, out: seen["attn_out"].append(out[0])),
            record(attention, "mla", lambda args, out: seen["topk"].append(args[5])),
            record(
                attention,
                "lightning_indexer",
                lambda args, _: seen["index_scores"].append(_scores(*args)),
            ),
            record(block, "mlp", lambda args, out: feed_forwards.append(out)),
            record(block, "moe", lambda args, out: feed_forwards.append(out[0])),
            record(moe, "route", lambda args, out: seen["routing"].append(out)),
        ):
            out = glm5.forward(params, tokens, cfg, positions=positions, segment_ids=segments)
        return out, dict(seen)

    compiled = jax.jit(run)
    return lambda params, *args: jax.device_get(compiled(glm5.unstack(params, cfg), *args))


def _scores(idx_q, idx_w, idx_k, *_):
    return index_scores(idx_q, idx_w, idx_k)
