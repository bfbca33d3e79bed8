"""Shared parts of templates: placeholders, the guard of inputs, and made-up names and words."""

import hashlib
import json
import random
from collections.abc import Mapping

WORDS = (
    "amber basin cedar delta ember fjord grove harbor island juniper kelp lagoon meadow nectar orchard pebble "
    "quarry ridge saddle thicket upland valley willow yarrow zephyr anchor beacon canyon dune estuary"
).split()
FIRST_NAMES = (
    "Ada Bela Chen Dora Emil Farah Gita Hugo Ines Jun Kofi Lena Milo Nadia Omar Pia".split()
)
LAST_NAMES = "Abe Brandt Costa Dlamini Eriksen Fischer Garcia Hansen Ito Jansen Khan Lopez Moreau Novak".split()
_PLACEHOLDER = "@{}@"
# Checks that the inputs are as they were; {} stands for a table of digests.
_INPUT_GUARD = """
INPUTS = {}


def test_inputs_unchanged():
    for name, digest in INPUTS.items():
        assert hashlib.sha256((APP / name).read_bytes()).hexdigest() == digest, name
"""
TEST_HEAD = "import hashlib\nimport pathlib\n@IMPORTS@\nAPP = pathlib.Path('/app')\n"
GUARD = "test_inputs_unchanged"


def fill(text: str, **values: object) -> str:
    """Returns the text with each @NAME@ replaced by the value of that name, in lower case."""
    for name, value in values.items():
        text = text.replace(_PLACEHOLDER.format(name.upper()), str(value))
    return text


def tests_with_guard(
    body: str, inputs: Mapping[str, bytes], imports: tuple[str, ...] = (), **values: object
) -> str:
    """Returns the text of a test file that also checks that the inputs are unchanged."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(inputs.items())}
    return tests_of(body, imports, **values) + _INPUT_GUARD.format(json.dumps(digests, indent=4))


def tests_of(body: str, imports: tuple[str, ...] = (), **values: object) -> str:
    """Returns the text of a test file with the usual head."""
    head = fill(TEST_HEAD, imports="".join(f"import {name}\n" for name in imports))
    return head + "\n\n" + fill(body, **values).strip() + "\n"


def words(rng: random.Random, count: int) -> list[str]:
    """Returns different words."""
    return rng.sample(WORDS, count)


def full_name(rng: random.Random) -> str:
    """Returns the name of a made-up person."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def sentences(rng: random.Random, count: int) -> str:
    """Returns made-up sentences, one a line."""
    lines = (
        f"The {' '.join(rng.choices(WORDS, k=rng.randint(3, 9)))} report." for _ in range(count)
    )
    return "".join(f"{line}\n" for line in lines)
