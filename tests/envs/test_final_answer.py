"""Claims of replies: one answer, one letter, one program, found in linear time."""

import time

import pytest

from glm5_jax.envs.reasoning.final_answer import (
    MAX_CHARACTERS,
    boxed_contents,
    chosen_letter,
    final_answer,
    program,
    short_answer,
)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("72", "72"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("so \\boxed{4}, no, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{3} and \\boxed{5", "3"),
        ("\\boxed{ \\boxed{3}", "3"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("The answer is 5, as \\boxed{6} says. Answer: 7", "6"),
        ("Answer: 5\n\nOr rather\n**Final answer:** $\\sqrt{2}$", "\\sqrt{2}"),
        ("The answer is **18 dollars**.", "18"),
        ("answer = -5 cm", "-5"),
        ("She has 3.\n#### 70,000", "70000"),
        ("I count 10-5 = 5 eggs.", "5"),
        ("It costs $18 and then $20.", "20"),
        ("It is $x+1$ where y is less", "x+1"),
        ("It is $x+1$, and the rest 3", "3"),
        ("It is \\(x+1\\)", "x+1"),
        ("The answer is:\n\n$$\\frac{3}{4}$$\n", "\\frac{3}{4}"),
        ("The answer is\n\\[\n3\n\\]\nas 1 + 2 shows.", "3"),
        ("It takes 3 of 5.\n\n**Final answer:**\n\n**8 eggs**\n\nThat was 5 + 3.", "8"),
        ("### Answer:\n-5", "-5"),
        ("The answer is\n", ""),
        ("hello there", ""),
        ("", ""),
        ("\\boxed{}", ""),
    ],
)
def test_takes_last_claim_of_strongest_form(reply, answer):
    assert final_answer(reply) == answer


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1,234", "1234"),
        ("1{,}234{,}567", "1234567"),
        ("1\\,234", "1234"),
        ("\\$1,234.50", "1234.50"),
        ("$18", "18"),
        ("-$5", "-5"),
        ("−5", "-5"),
        (".5", ".5"),
        ("18.", "18"),
        ("18 fresh eggs", "18"),
        ("1.5e-3", "1.5 \\times 10^{-3}"),
        # Text that changes the value, or a list, stays.
        ("5 million", "5 million"),
        ("5 pi", "5 pi"),
        ("50 percent", "50 percent"),
        ("18 or 19", "18 or 19"),
        ("1,23", "1,23"),
        ("12, 345", "12, 345"),
        ("5x", "5x"),
        ("5 x", "5 x"),
    ],
)
def test_strips_currency_commas_and_unit_of_number(written, number):
    assert final_answer(f"\\boxed{{{written}}}") == number


@pytest.mark.parametrize("reply", ["**Answer:**\n\nOslo", "The answer is:\n`Oslo`", "Answer: Oslo"])
def test_takes_short_answer_from_line_of_claim_or_next(reply):
    assert short_answer(f"Rome? No.\n{reply}\n\nIt is in Norway.") == "Oslo"


def test_rejects_endless_answer():
    assert final_answer("\\boxed{" + "1+" * MAX_CHARACTERS + "1}") == ""


@pytest.mark.parametrize(
    "reply",
    [
        "B", "(B)", "b", "B.", "**B**", "B) text", "Option B", "answer: B", "Answer: b", "The answer is (B).",
        "\\boxed{B}", "\\boxed{\\text{B}}", "\\boxed{(B) 5}", "Answer: B) A cell", "answer: B\nAnswer: B",
        "A) no\n\\boxed{B}", "The answer is B because A is wrong", "I took long.\nB", "A cell is small.\nAnswer: B",
        "A) no\n**Answer:**\n\nB", "The answer is\n(B)", "**Answer**: `B`", "Answer: [B]", "Answer: “B”", "答案：B", "Answer: Ｂ",
    ],
)  # fmt: skip
def test_finds_claimed_letter(reply):
    assert chosen_letter(reply, 4) == "B"


@pytest.mark.parametrize(
    "reply",
    [
        "", "K", "E", "AB", "A\nB", "A) x\nB) y", "(A) (B)", "\\boxed{A}\\boxed{B}", "\\boxed{A, B}", "\\boxed{AB}",
        "answer: A or B", "answer: A and/or B", "answer: A\nanswer: B", "\\boxed{B} \\boxed{}", "answer: not B",
        "answer: Because", "A good one", "Answer: I think so", "\\boxed{B or (C)}", "\\boxed{F}", "Answer: B/C",
    ],
)  # fmt: skip
def test_finds_no_letter_or_several(reply):
    assert chosen_letter(reply, 4) == ""


def test_letters_are_limited_by_choices():
    assert [chosen_letter("J", n) for n in (9, 10)] == ["", "J"]


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nor\n  ```py3\nx = 2\n```\n```python\nx = 3\n  ```", "x = 3\n"),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("```bash\nls\n```", ""),
        ("```python\nx = 1", ""),
    ],
)
def test_takes_last_python_block_as_program(reply, code):
    assert program(reply) == code


def test_finds_outermost_boxes():
    assert boxed_contents("\\boxed{a\\boxed{b}} } \\fbox{\\}c} \\boxed{{d}") == [
        "a\\boxed{b}",
        "\\}c",
    ]


PIECES = (
    "\\(", "\\boxed{", "\\boxed{a}", "$", "$$ ", "{", "}", "```\n", "```x ", "```py\n", "1,", "1 ", ".1", "-", "A", "(A",
    "(", " ", "\n", "answer ", "answer: ", "answer:\n", "#### ", " or", "\\", "\\$", "A or ", "$1,",
)  # fmt: skip


@pytest.mark.parametrize("size", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("read", [final_answer, chosen_letter, program])
def test_reads_every_reply_in_linear_time(read, size):
    start = time.process_time()
    for piece in PIECES:
        for text in (piece, f"answer: 5 {piece}", f"x\n{piece}"):
            read(text + piece * (size // len(piece)) + "x")
    assert time.process_time() - start < 30 * size / 100_000, (
        "a pattern that is quadratic takes far longer for one of these"
    )
