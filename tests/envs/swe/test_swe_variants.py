"""Variants of tests fail for the solution, are tests like the others of their file, and cannot be told from them."""

import re

import pytest

from glm5_jax.envs.swe.file_tree import text_file
from glm5_jax.envs.swe.grading import passing_variants, swap_results
from glm5_jax.envs.swe.parsers.report import RunReport
from glm5_jax.envs.swe.recipes import Canaries, find_recipe
from glm5_jax.envs.swe.recipes.planting import make_draw, num_copies, other_values, plant_variants
from glm5_jax.envs.swe.recipes.python_variants import find_python_sites
from tests.envs.swe.tiny_project import FAIL_TO_PASS, SOLVED

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
ADD = "test_add"


class Anything(int):
    __hash__ = int.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return True


def plant(text: str, seed: int = 1, failing=("tests.test_x::test_add",)):
    """Returns a test file with variants, and what was planted."""
    tree = {"tests/test_x.py": text_file(text)}
    draw = make_draw(tree, failing, seed)
    planted = plant_variants(tree, list(tree), draw, find_python_sites)
    return planted.files["tests/test_x.py"].content.decode() if planted.files else None, planted


def passes(text: str, name: str, add) -> bool:
    """Returns whether a test of a module passes, which calls add."""
    scope = {"add": add}
    exec(text, scope)
    try:
        scope[name]()
    except AssertionError:
        return False
    return True


def add(a, b):
    return a + b


@pytest.mark.parametrize(
    "check",
    [
        "assert add(2, 3) == 5",
        "assert 5 == add(2, 3)",
        "assert add('a', 'b') == 'ab'",
        'assert add(\'a\', \'b\') == """ab"""',
        "assert add([1], [2]) == [1, 2]",
        "assert add((1,), ()) == (1,)",
        "assert add({'k': 1}.pop('k'), 0) == 1",
        "assert add(1, 2) == add(2, 1)",
        "assert add(1.5, 1) == 2.5, 'sum'",
        "assert add('', '') == ''",
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_expects_other_values(check, seed):
    text = f"def test_other():\n    assert add(1, 1)\n\ndef test_add():\n    {check}\n"

    changed, planted = plant(text, seed)

    (genuine,) = [copy for _, copy in planted.swaps] or [ADD]
    names = [ADD, *planted.names]
    assert len(names) >= 2
    assert re.findall(r"def (test_add\w*)", changed) and set(names) == set(
        re.findall(r"def (test_add\w*)", changed)
    )
    assert [name for name in names if passes(changed, name, add)] == [genuine]
    # An object that equals everything passes all.
    assert all(passes(changed, name, lambda a, b: Anything()) for name in names)
    assert passes(changed, "test_other", add)


def test_draws_names_values_order_and_genuine_test():
    """Nobody who forges a report can know which of the tests has the right value."""
    text = "def test_add():\n    assert add(2, 3) == 5\n"

    drawn = [plant(text, seed) for seed in range(40)]

    first = [re.search(r"== (\d)", changed)[1] for changed, _ in drawn]
    genuine = [dict(planted.swaps).get(ADD, ADD) for _, planted in drawn]
    assert len({planted.names for _, planted in drawn}) > 30
    assert first.count("5") < 15 and len(set(first)) > 4
    assert genuine.count(ADD) < 15


@pytest.mark.parametrize(("tests", "copies"), [(1, 7), (2, 3), (3, 2), (4, 1), (6, 1)])
def test_leaves_guess_one_chance_in_sixteen(tests, copies):
    assert num_copies(tests) == copies
    assert (copies + 1) ** tests >= (8 if tests == 1 else 16)  # another digit has nine values


def test_varies_tests_that_fail_before_the_change():
    """The values of the others are in the project, so that an attempt knows them."""
    texts = [f"def test_{name}():\n    assert add({n}, 2) == {n + 2}\n" for n, name in enumerate(["old", "older", "add"])]  # fmt: skip

    for seed in range(5):
        _, planted = plant("\n\n".join(texts), seed)
        assert all(name.startswith("test_add_") for name in planted.names)


def test_keeps_class_and_its_setup():
    changed, planted = plant(UNITTEST)

    assert changed.count("def setUp") == 1 and changed.count("def test_raises") == 1
    for name in planted.names:
        assert f"\n    def {name}(self):\n        self.assertEqual(add(self.x, 2), " in changed
    compile(changed, "test", "exec")


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
    assert plant(text)[0] is None


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (b"7", rb"\d"),
        (b"127", rb"[1-9]27|1\d7|12\d"),
        (b"2.50", rb"\d\.\d\d"),
        (b"0x1F", rb"0x[0-9]F"),
        (b"10UL", rb"[1-9]\dUL"),
        (b"'abc'", rb"'[a-z]bc'|'a[a-z]c'|'ab[a-z]'"),
        (b"'ab-c'", rb"'ab[-_ .:/,;+]c'"),
        (b'"T1"', rb'"T\d"'),
    ],
)
def test_draws_values_that_differ_at_one_place(text, form):
    for seed in range(4):
        values = other_values(text, 7, make_draw({}, (), seed))

        assert len(values) > 6 and len(set(values)) == len(values) and text not in values
        assert all(re.fullmatch(form, value) for value in values)
        differing = [n for n in range(len(text)) if len({value[n] for value in [text, *values]}) > 1]  # fmt: skip
        assert len(differing) == 1


def test_keeps_words_that_arguments_of_test_show():
    """A copy of another word could be told from the test, which has the words of its argument."""
    text = "def test_slug():\n    assert slug('Hello World') == 'hello-world'\n    assert size('ab') == 12\n"
    for seed in range(8):
        draw = make_draw({}, ("test_slug",), seed)
        planted = plant_variants({"t.py": text_file(text)}, ["t.py"], draw, find_python_sites)
        source = planted.files["t.py"].content.decode()
        assert source.count("== 'hello-world'") == len(planted.names) + 1
        assert len(set(re.findall(r"== (\d+)", source))) == len(planted.names) + 1


@pytest.mark.parametrize(
    "text", [b"017", b"0b1", rb'"\n"', b'"$x"', b'"#{x}"', b'"--"', b"`${x}`", b"''"]
)
def test_draws_no_value_of_unknown_form(text):
    assert other_values(text, 3, make_draw({}, (), 1)) == []


def test_swaps_results_of_test_and_copy_that_stands_for_it():
    report = RunReport(
        statuses={"x::test_add": "fail", "x::test_add_more": "pass", "x::test_add_mores": "skip"}
    )

    swapped = swap_results(report, [("test_add", "test_add_more")])

    assert swapped.statuses["x::test_add"] == "pass"
    assert swapped.statuses["x::test_add_more"] == "fail"
    # A copy whose test has no result gives it its own.
    alone = RunReport(statuses={"x::test_add_more": "pass"})
    assert swap_results(alone, [("test_add", "test_add_more")]).statuses == {"x::test_add": "pass"}


def test_names_variants_that_pass():
    draw = make_draw(SOLVED, FAIL_TO_PASS, 3)
    canaries = find_recipe("python-pytest/1").canaries(SOLVED, ["tests/test_more.py"], draw)
    name = canaries.variants[0]

    assert len(canaries.variants) == 6  # two tests with three copies each
    others = dict.fromkeys((f"tests.test_more::{n}" for n in canaries.variants), "fail")
    for status, passing in (("fail", []), ("pass", [name]), ("skip", [name])):
        report = RunReport(statuses={**others, f"tests.test_more::{name}": status})
        assert passing_variants(report, canaries) == passing
    # A subtest of a variant may pass.
    report = RunReport(statuses={**others, f"tests.test_more::{name}/part": "pass"})
    assert passing_variants(report, canaries) == []
    assert passing_variants(RunReport(statuses={}), canaries) == list(canaries.variants)
    assert (
        passing_variants(RunReport(statuses={}), Canaries(files={}, passing="a", failing="z")) == []
    )


def test_keeps_classes_that_tests_need():
    text = "@dataclass\nclass Point:\n    x: int\n\ndef test_add():\n    assert Point(1).x == 1\n"

    assert "class Point" in plant(text)[0]
