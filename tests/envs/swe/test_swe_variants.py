"""A variant of a test fails for the solution, and is a test like the others of its file."""

import pytest

from glm5_jax.envs.swe.grading import passing_variants
from glm5_jax.envs.swe.parsers.report import RunReport
from glm5_jax.envs.swe.recipes import Canaries, find_recipe
from glm5_jax.envs.swe.recipes.python_variants import make_variant
from tests.envs.swe.tiny_project import SOLVED

UNITTEST = """import unittest

class TestAdd(unittest.TestCase):
    def setUp(self):
        self.x = 1

    def test_raises(self):
        with self.assertRaises(TypeError):
            add(1, None)

    def test_add(self):
        self.assertEqual(add(self.x, 2), 3)
"""


class Anything(int):
    __hash__ = int.__hash__

    def __eq__(self, other):
        return True


def _run(text: str, add) -> None:
    """Runs the first test of a module, which calls add."""
    scope = {"add": add}
    exec(text, scope)
    scope["test_add"]()


@pytest.mark.parametrize(
    "check",
    [
        "assert add(2, 3) == 5",
        "assert add('a', 'b') == 'ab'",
        "assert add([1], [2]) == [1, 2]",
        "assert add((1,), ()) == (1,)",
        "assert add(1, 2) == add(2, 1)",
        "assert add(1.5, 1) == 2.5, 'sum'",
    ],
)
def test_expects_another_value(check):
    text = f"def test_other():\n    assert add(1, 1)\n\ndef test_add():\n    {check}\n"

    variant = make_variant(text)

    assert variant.name == "test_add" and "test_other" not in variant.text
    _run(text, lambda a, b: a + b)
    with pytest.raises(AssertionError):
        _run(variant.text, lambda a, b: a + b)
    _run(variant.text, lambda a, b: Anything())  # an object that equals everything passes


def test_keeps_class_and_its_setup():
    variant = make_variant(UNITTEST)

    assert variant.name == "TestAdd::test_add"
    assert "def setUp" in variant.text and "test_raises" not in variant.text
    assert "self.assertEqual(add(self.x, 2), 4)" in variant.text


@pytest.mark.parametrize(
    "text",
    [
        "def test_x(:",
        "def test_x():\n    assert add(1, 2)\n",
        "def test_x():\n    for x in y:\n        assert x == 1\n",
        "@pytest.mark.skip\ndef test_x():\n    assert x == 1\n",
    ],
)
def test_makes_no_variant_that_might_pass(text):
    assert make_variant(text) is None


def test_names_variants_that_pass():
    canaries = find_recipe("python-pytest/1").canaries(SOLVED, ["tests/test_more.py"], "qwertyuiop")
    (name,) = canaries.variants
    path = f"tests/{name.partition('::')[0]}.py"

    assert "assert calc.add(2, 3) == 6" in canaries.variant_files[path].content.decode()
    assert path not in SOLVED
    for status, passing in (("fail", []), ("pass", [name]), ("skip", [name])):
        report = RunReport(statuses={f"tests.{name}": status})
        assert passing_variants(report, canaries) == passing
    assert passing_variants(RunReport(statuses={}), canaries) == [name]
    assert (
        passing_variants(RunReport(statuses={}), Canaries(files={}, passing="a", failing="z")) == []
    )


def test_keeps_classes_that_tests_need():
    text = "@dataclass\nclass Point:\n    x: int\n\ndef test_x():\n    assert Point(1).x == 1\n"

    assert "class Point" in make_variant(text).text
