"""Pushes to engines with rotated and quantised weights: they load what experiments/quantise.py would have written."""

import numpy as np
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import calibrate, rotation, table
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.inference.request import EngineConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.rl.programs.trainer import converter_of
from glm5_jax.rl.weights.pusher import PushFailed
from glm5_jax.rl.weights.reshard import ReshardPusher
from glm5_jax.rl.weights.weight_sync import NetworkPusher
from tests.rl.pushing import (
    NARROW,
    OPTIONS,
    SMALL,
    TOKENIZER,
    bits,
    make_engine,
    params,
    serving,
)

GROUP = 32


def recipe():
    """Returns a recipe with a rotation, and with scales of the experts."""
    up = flatten(params())["moe_layers/experts/up"]
    draw = np.random.default_rng(0)
    scale = draw.uniform(0.5, 2, (*up.shape[:-2], up.shape[-1])).astype(np.float32)
    return QuantizationRecipe(group=GROUP, rotation_seed=3, scales={"moe_layers/experts": scale})


def quantised_engine(weights):
    """Returns an engine of weights quantised by the recipe, all at once."""
    turned, cfg = rotation.rotate(weights, NARROW, seed=3)
    scale = recipe().scales["moe_layers/experts"]

    def scaled(path, w):
        match path.removeprefix("moe_layers/experts/"):
            case "up":
                return calibrate.scale_up(w, scale)
            case "down":
                return calibrate.scale_down(w, scale)
        return w

    quantised, cfg = table.quantise(map_with_path(scaled, turned), cfg, GROUP)
    return Engine(glm5.Glm5(cfg, params=quantised), TOKENIZER, EngineConfig(**OPTIONS))


@pytest.mark.slow
def test_rotated_and_quantised_engines_take_pushes():
    expected = bits(quantised_engine(params(1)))
    converter = WeightConverter(NARROW, recipe())
    with (
        serving(converter.cfg, engine=quantised_engine(params(0))) as first,
        serving(converter.cfg, engine=quantised_engine(params(0))) as second,
    ):
        assert first.bits != expected
        urls = [first.url, second.url]
        pushed = NetworkPusher(NARROW, urls, SMALL, converter).push(params(1), 1)
        assert first.bits == second.bits == expected
        plain_bytes = 2 * sum(x.size for x in flatten(params()).values())
        assert pushed.sent_bytes == pushed.full_bytes < 0.75 * plain_bytes
        message = "the new ones are not .final_norm.; push with the recipe of the engine's folder"
        with pytest.raises(PushFailed, match=message) as raised:
            NetworkPusher(converter.cfg, urls, SMALL).push(params(1), 2)
        assert raised.value.is_refused
        assert first.bits == second.bits == expected


@pytest.mark.slow
def test_fp8_engines_take_pushes():
    """Quantised by the trainer, or plain and quantised by the engine: the bits are equal."""

    def engine(weights):
        return make_engine(NARROW, weights, quantization="fp8")

    expected = bits(engine(params(1)))
    converter = converter_of(None, NARROW, quantization="fp8")
    assert converter is not None
    with (
        serving(converter.cfg, engine=engine(params(0))) as first,
        serving(converter.cfg, engine=engine(params(0))) as second,
    ):
        assert first.bits != expected
        pushed = NetworkPusher(NARROW, [first.url], SMALL, converter).push(params(1), 1)
        plain = NetworkPusher(NARROW, [second.url], SMALL).push(params(1), 1)
        assert first.bits == second.bits == expected
        assert pushed.sent_bytes < 0.75 * plain.sent_bytes
    local = engine(params(0))
    ReshardPusher([local]).push(params(1), 1)
    assert bits(local) == expected
