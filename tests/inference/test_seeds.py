"""Tests seeds of requests: random by default, and different for choices of neighbouring seeds."""

import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.protocol import Reader
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling, seed_of_choice
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import PAGE, make_prompts, model

FREE = Sampling(max_tokens=4, ignore_eos=True)


def test_samples_new_replies_without_seed():
    """Covers two engines with equal configs, and a config with a seed."""
    [prompt] = make_prompts(1)

    def replies(**options):
        options = dict(page_size=PAGE, num_pages=18, max_num_seqs=4, prefill_chunk=32) | options
        engine = Engine(model(), Tokenizer.default(), EngineConfig(**options))
        return [reply.ids for reply in engine.generate([prompt] * 2, FREE)]

    assert EngineConfig().seed is None
    first, second = replies(), replies()
    assert len({*map(tuple, first + second)}) == 4
    assert replies(seed=3) == replies(seed=3) != first


def test_choices_of_neighbouring_seeds_do_not_overlap():
    seeds = [
        seed_of_choice(seed, choice) for seed in [*range(200), 2**63 - 1] for choice in range(8)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("n", [1, 4])
def test_first_choice_has_seed_of_request(n):
    reader = Reader(Tokenizer.default(), model="m")
    completion = reader.completion({"prompt": ["a", "b"], "n": n, "seed": 7}, 0)
    seeds = [request.sampling.seed for request in completion.requests]
    assert seeds == [seed_of_choice(7, choice) for choice in range(n)] * 2 and seeds[0] == 7
    sampling_params = {"max_new_tokens": 1, "n": n, "sampling_seed": 7}
    generated = reader.generate({"text": "a", "sampling_params": sampling_params}, 0)
    assert [request.sampling.seed for request in generated.requests] == seeds[:n]
    free = reader.completion({"prompt": "a", "n": n}, 0)
    assert {request.sampling.seed for request in free.requests} == {None}
