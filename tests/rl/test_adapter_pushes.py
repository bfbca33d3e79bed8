"""Adapters that are pushed alone: few bytes, and the same engine as after a push of merged weights."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from glm5_jax.config import LoraConfig
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.inference.shards.receiver import check_offer
from glm5_jax.model import glm5
from glm5_jax.model.lora import is_adapter, merge_adapters
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.rl.weights.offers import make_offer
from glm5_jax.rl.weights.weight_sync import NetworkPusher
from tests.model.small import one_layer
from tests.rl.pushing import SMALL, make_engine, params, serving

SPARSE = one_layer(first_k_dense_replace=0, moe_intermediate_size=24, max_position_embeddings=64)
# k_b and v_b have one A, and so have gate and up of the experts.
CFG = dataclasses.replace(SPARSE, lora=LoraConfig(rank=2, targets=("/attn/", "/experts/")))


@contextlib.contextmanager
def serving_base(port=0):
    """Serves an engine with other weights than the trainer's."""
    engine = make_engine(SPARSE, params(0, SPARSE))
    with serving(SPARSE, engine=engine, port=port) as server:
        yield server


def trained(seed):
    """Returns weights of a model whose frozen part is always the same, and whose adapters depend on the seed."""
    weights, rng = glm5.init_params(CFG, jax.random.key(1)), np.random.default_rng(seed)

    def train(path, x):
        return jax.numpy.asarray(rng.normal(0, 0.3, x.shape), x.dtype) if is_adapter(path) else x

    return map_with_path(train, weights)


def adapter_bytes(weights):
    return sum(x.nbytes for path, x in flatten(weights).items() if is_adapter(path))


def greedy_reply(server):
    """Returns the text and log-probs of a greedy reply."""
    body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0}
    status, reply = server.request("/v1/completions", body | {"logprobs": 1})
    assert status == 200, reply
    [choice] = reply["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_later_pushes_send_adapters_only():
    expected = make_engine(SPARSE, params(0, SPARSE))
    with serving_base() as first, serving_base() as second:
        pusher = NetworkPusher(CFG, [first.url, second.url], SMALL)
        results = {}
        for version in (1, 2):
            weights = trained(version)
            results[version] = pusher.push(weights, version)
            expected.update_weights(merge_adapters(weights, CFG), version)
            loaded, merged = (
                flatten(engine.computation.params) for engine in (first.engine, expected)
            )
            assert loaded.keys() == merged.keys() and first.bits == second.bits
            for path, weight in loaded.items():
                np.testing.assert_allclose(weight, merged[path], rtol=1e-6, atol=1e-6)
            for engine in (first, second):
                assert engine.version_and_checksum == (version, results[version].checksum)
    assert results[1].sent_bytes == results[1].full_bytes
    assert results[2].sent_bytes == adapter_bytes(weights) < results[1].sent_bytes / 5
    assert [ack.mode for ack in results[2].acks] == ["delta"] * 2


@pytest.mark.slow
def test_replies_equal_those_after_push_of_merged_weights():
    with serving_base() as adapted, serving_base() as merged:
        pusher = NetworkPusher(CFG, [adapted.url], SMALL)
        replies = []
        for version in (1, 2):
            weights = trained(version)
            pusher.push(weights, version)
            NetworkPusher(SPARSE, [merged.url], SMALL).push(merge_adapters(weights, CFG), version)
            (text, logprobs), (wanted_text, wanted) = map(greedy_reply, (adapted, merged))
            assert text == wanted_text
            np.testing.assert_allclose(logprobs, wanted, atol=1e-5)
            replies.append(logprobs)
        assert replies[0] != replies[1]


def test_sends_frozen_weights_to_restarted_engine():
    with serving_base() as steady:
        with serving_base() as server:
            port = int(server.url.rpartition(":")[2])
            pusher = NetworkPusher(CFG, [steady.url, server.url], SMALL)
            pusher.push(trained(1), 1)
        with serving_base(port) as server:
            weights = trained(2)
            result = pusher.push(weights, 2)
            assert [ack.mode for ack in result.acks] == ["delta", "full"]
            assert server.bits == steady.bits
            # A new trainer, too, sends nothing but the adapters.
            again = NetworkPusher(CFG, [steady.url, server.url], SMALL)
            assert again.push(trained(3), 3).sent_bytes == adapter_bytes(weights)
            assert server.bits == steady.bits


def test_sends_other_frozen_weights_again():
    with serving_base() as server:
        pusher = NetworkPusher(CFG, [server.url], SMALL)
        pusher.push(trained(1), 1)
        # Merged weights of another trainer take the place of the frozen ones.
        NetworkPusher(SPARSE, [server.url], SMALL).push(merge_adapters(trained(2), CFG), 2)
        result = pusher.push(trained(3), 3)
        assert result.sent_bytes == result.full_bytes


def test_rejects_adapters_that_do_not_fit():
    engine = make_engine(SPARSE, params(0, SPARSE))
    offer, _ = make_offer(trained(1), CFG, 1)
    check_offer(offer, SPARSE, engine.weights)
    [name] = [n for n in offer.arrays if n.endswith("attn/o_lora_b")]
    shorter = offer.arrays[name].replace(shape=(1, 3, 5))
    for changes, message in (
        ({"arrays": offer.arrays | {name: shorter}}, "the adapters do not fit their targets"),
        ({"lora_scale": None}, "without lora_scale"),
        ({"arrays": offer.arrays | {"x_lora_b": shorter}}, "the adapters of x have no target"),
    ):
        with pytest.raises(ValueError, match=message):
            check_offer(offer.replace(**changes), SPARSE, engine.weights)
    converter = WeightConverter(SPARSE, QuantizationRecipe(group=16))
    with pytest.raises(ValueError, match="cannot be pushed to quantised engines; merge them"):
        NetworkPusher(CFG, ["http://a"], SMALL, converter)
