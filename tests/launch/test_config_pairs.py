"""Two absurd values at once are accepted, or refused by one error that names a field, within a few seconds."""

import itertools
import random

import pytest

from glm5_jax.runtime.config_flags import to_frozen, to_mutable
from tests.launch.config_pairs import RECIPES, fields_of, load_config, try_pair

SEED = 20261127
SAMPLE = 40  # pairs of a recipe in each run of the tests
MANY = 12_000  # in the slow tests: all pairs of each recipe but rl_agentic, which has 36,000


def problems(recipe: str, count: int) -> list[str]:
    """Returns what is wrong with the answers to `count` pairs of fields, or to all if there are fewer."""
    config, draw = load_config(recipe), random.Random(SEED)
    pairs = list(itertools.combinations(fields_of(config), 2))
    chosen = draw.sample(pairs, min(count, len(pairs)))
    results = (try_pair(config, pair, draw) for pair in chosen)
    return [f"{result.problem} {result.values!a:.300}" for result in results if result.problem]


@pytest.mark.parametrize("recipe", RECIPES)
def test_names_field_of_absurd_pair(recipe):
    assert problems(recipe, SAMPLE) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_names_field_of_absurd_pairs(recipe):
    assert problems(recipe, MANY) == []


@pytest.mark.parametrize(
    ("recipe", "path", "value", "message"),
    [
        ("pretrain:tiny", "optimizer.muon_rms", 10**400, "optimizer.muon_rms is too large"),
        ("serve:tiny", "server.host", "a\0b", "server: host is 'a.*no name or address"),
        ("serve:tiny", "server.host", "../..", "server: host is .*no name or address"),
        ("evaluate:questions", "verifier.code_memory_bytes", 10**400, None),
        ("rl_agentic:tiny", "agent_timeout_s", float("nan"), "agent_timeout_s is nan; it must be"),
        ("rl_agentic:tiny", "length", -1, "length is -1; use at least 1"),
    ],
    ids=["float", "null byte", "path", "bytes", "time limit", "length"],
)
def test_checks_value(recipe, path, value, message):
    mutable = to_mutable(load_config(recipe))
    *groups, name = path.split(".")
    node = mutable
    for group in groups:
        node = getattr(node, group)
    setattr(node, name, value)
    if message is None:  # as large as it is, it is a number of bytes
        assert to_frozen(mutable) is not None
    else:
        with pytest.raises(ValueError, match=message):
            to_frozen(mutable)
