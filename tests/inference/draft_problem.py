"""Defines small models that draft, one with a high acceptance rate, and a test of distributions."""

import dataclasses
import functools

import jax
import numpy as np

from tests.model import golden as goldens
from tests.oracles import glm5 as oracle

DRAFTS, NEW = 3, 14
HOT = 6.0  # a high temperature flattens all distributions, so that drafts are often accepted
MASK = np.ones((3, 9), np.int32)
MASK[1, :4] = 0
MTP = "model.layers.1."


@functools.cache
def fixture():
    """Returns (cfg, params, prompts int[3 9], config and weights of the oracle) of transformers' golden.

    It has only the first layer and the MTP layer, which compile fast.
    """
    golden = goldens.load("hf_tiny_a")
    cfg = dataclasses.replace(
        golden.cfg, num_hidden_layers=1, indexer_types=None, eos_token_id=(), pad_token_id=None
    )
    params = {k: v for k, v in golden.params.items() if k != "moe_layers"}
    config, weights = oracle.load(goldens.FOLDER / golden.name)
    weights |= {k.replace("layers.4.", "layers.1."): v for k, v in weights.items() if ".4." in k}
    prompts = np.random.default_rng(0).integers(3, cfg.vocab_size, MASK.shape)
    return cfg, params, np.where(MASK, prompts, 0), config | {"num_hidden_layers": 1}, weights


def make_predictable(params):
    """Returns weights whose next token depends mostly on the last token, so that drafts are often right."""
    params = jax.tree.map(np.array, params)
    mtp, d = params["mtp"], params["final_norm"].shape[0]
    params["embed"]["weight"] *= 30
    mtp["eh_proj"] *= 0.1
    mtp["eh_proj"][:d] += 8 * np.eye(d)
    mtp["enorm"][:] = 1
    mtp["norm"] = params["final_norm"]
    for part in (params["dense_layers"]["mlp"], mtp["block"]["experts"], mtp["block"]["shared"]):
        part["down"] *= 0.1
    return params


def chi_square(counts, probs, total):
    """Returns (statistic, degrees of freedom) of counts. Outcomes expected fewer than five times are merged."""
    rare = probs * total < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(probs[~rare], probs[rare].sum()) * total
    expected = np.maximum(expected, 1e-9)
    return ((counts - expected) ** 2 / expected).sum(), len(expected) - 1


def is_plausible(counts, probs, total):
    """Returns whether the statistic is within five standard deviations of its expectation."""
    statistic, freedom = chi_square(counts, probs, total)
    return statistic < freedom + 5 * np.sqrt(2 * freedom)
