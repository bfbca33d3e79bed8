"""Formulas of one meaning are rewritten to one form, without computing anything."""

import pytest

from glm5_jax.envs.reasoning.typesetting import as_interval, have_other_units, rewrite


@pytest.mark.parametrize(
    ("formula", "plain"),
    [
        (r"\color{red}5", "5"),
        (r"\textbf{north}", r"\text{north}"),
        (r"\approx 3.14", "3.14"),
        (r"x \in [0, 1)", "[0, 1)"),
        (r"(x, y) = (1, 2)", "(1, 2)"),
        (r"(y, x) = (1, 2)", "(y, x) = (1, 2)"),
        (r"12~345", "12345"),
        ("1 / 2", "1/2"),
        (r"{3 \over 4}", r"\frac{3}{4}"),
        (r"\frac{3}{-4}", r"-\frac{3}{4}"),
        (r"0.\overline{3}", r"\frac{3}{9}"),
        (r"1.2\overline{34}", r"\frac{1222}{990}"),
        ("5 m/s", r"5\text{ m/s}"),
        ("7 cm^2", r"7\text{ cm}^2"),
        ("0.\\overline{" + "3" * 60 + "}", "0.\\overline{" + "3" * 60 + "}"),
    ],
)
def test_rewrites_to_plain_form(formula, plain):
    assert rewrite(formula) == plain


@pytest.mark.parametrize(
    ("formula", "interval"),
    [
        ("1 < x < 2", "(1,2)"),
        (r"2 \ge x > 1", "(1,2]"),
        (r"x \leq 3", r"(-\infty,3]"),
        ("3 < x", r"(3,\infty)"),
        ("x > 3", r"(3,\infty)"),
        (r"x < 1 \text{ or } x > 2", r"(-\infty,1)\cup(2,\infty)"),
        ("1 < x > 2", "1 < x > 2"),
        ("x < y", "x < y"),
        ("1 < 2 < 3 < x", "1 < 2 < 3 < x"),
        ("5", "5"),
    ],
)
def test_writes_inequalities_as_intervals(formula, interval):
    assert as_interval(formula) == interval


def test_tells_units_apart():
    metres, feet = rewrite("5 m/s"), rewrite("5 ft/s")
    assert have_other_units(metres, feet)
    assert not have_other_units(metres, metres) and not have_other_units(metres, "5")
    assert have_other_units(rewrite("7 cm^2"), rewrite("7 cm^3"))
