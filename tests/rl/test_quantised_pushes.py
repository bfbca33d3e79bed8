"""Pushes to engines with rotated and quantised weights: they load what experiments/quantise.py would have written."""

import numpy as np
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import calibrate, rotation, table
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.inference.request import EngineConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.rl.weights.pusher import PushFailed
from glm5_jax.rl.weights.weight_sync import NetworkPusher
from tests.rl.pushing import NARROW, OPTIONS, SMALL, TOKENIZER, bits, params, serving

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
