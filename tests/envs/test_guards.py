"""Guards: values by hand, and texts that look like faults but are not."""

import random

import pytest
from hypothesis import given, strategies as st

from glm5_jax.envs.instructions.guards import language_mixing, length, repetition

WORDS = [f"{a}{b}o" for a in "bcdfglmnprst" for b in "aeiou"]  # sixty different words


def words(count, seed=0):
    """Returns this many words without repeated neighbours."""
    return " ".join(f"{random.Random(f'{seed} {i}').choice(WORDS)}{i}" for i in range(count))


@pytest.mark.parametrize(
    ("size", "value"),
    [(0, 1), (100, 1), (110, 0.9045085), (125, 0.5), (140, 0.0954915), (150, 0), (999, 0)],
)
def test_length_falls_as_half_a_wave(size, value):
    assert length("a" * size, budget=100) == pytest.approx(value)


def test_length_uses_slack_and_rejects_zero():
    assert length("a" * 125, budget=100, slack=0.25) == pytest.approx(0)
    for budget, slack in ((0, 1.0), (10, 0.0)):
        with pytest.raises(ValueError, match=f"budget is {budget} and slack {slack}"):
            length("", budget, slack)


@given(st.integers(0, 400), st.integers(0, 400))
def test_length_guard_never_rises_with_length(a, b):
    a, b = sorted((a, b))
    assert length("x" * a, 100) >= length("x" * b, 100)


PHRASE = "one two three four five six seven eight nine ten and twelve. "


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (PHRASE * 4, 1),  # a refrain
        (PHRASE * 5, 0),  # 4/5 repeated
        # Five runs of twelve: all but the first "a" are in a repeated one, 15 of 61 characters.
        ("a " * 16 + "bcdefghij " * 5, 1 - (15 / 61 - 0.1) / 0.4),
        ("a " * 15 + "bcdefghij " * 5, 1),
    ],
)
def test_repetition_equals_hand_computation(text, value):
    assert repetition(text) == pytest.approx(value)


def test_every_constant_of_repetition_counts():
    text = PHRASE * 5 + words(60)
    assert 0 < repetition(text) < 1
    base = repetition(text)
    assert repetition(text, free=0.2) > base and repetition(text, worst=0.9) > base
    assert repetition(text, scales=((12, 5),)) == repetition(text, scales=((49, 4),)) == 1
    passage = words(80) + ". "
    assert repetition(passage * 2) == 1 and repetition(passage * 3) == 0
    assert repetition(passage * 3, scales=((12, 4),)) == 1
    with pytest.raises(ValueError, match="free is 0.5 and worst 0.5"):
        repetition("", free=0.5)


LOOPS = {
    "sentence": "I am sorry, but I cannot say more than this about what you asked me. " * 12,
    "line": words(30) + "\n" + "and so on and so on\n" * 60,
    "passage between others": "".join(f"{words(30, i)}. {words(30, 'x')}. " for i in range(12)),
    "numbered": "".join(f"{i}. " + words(40, "y") + "\n" for i in range(20)),
    "one word": "very " * 100,
    "one letter": "a" * 4000,
    "laughter": "ha" * 2000,
    "signs": "!" * 3000,
    "emoji": "😂" * 500,
    "emoji apart": "😂 " * 500,
    "Chinese": "我不知道应该怎么回答这个问题。" * 10,
    "Thai": "ฉันไม่รู้ว่าจะตอบอย่างไร" * 12,
    "in code": "```python\n" + "x = x + 1\n" * 200 + "```",
    "in unclosed code": "```\n" + "do it again and again " * 40,
    "in a table": "|a|b|\n|---|---|\n" + "|one|two|\n" * 200,
    "capitals": "".join(
        random.Random(i).choice((c.upper(), c))
        for i, c in enumerate("let us go on and on again " * 40)
    ),
    "signs after words": "".join(
        f"{word}{random.Random(i).choice('.,;!?')} "
        for i, word in enumerate("go on and on".split() * 60)
    ),
    "after code": "```\nx = 1\n```\n" + "I cannot say more than this about it. " * 20,
}


@pytest.mark.parametrize("name", LOOPS)
def test_detects_loops(name):
    assert repetition(LOOPS[name]) < 0.2


POEM = """O the wind and the rain and the long way home,
  hey ho, the wind and the rain,
{}
  hey ho, the wind and the rain,
for the rain it raineth every day.
"""
FINE = {
    "empty": "",
    "short": "no no no no no no no",
    "prose": words(2000),
    "poem": "\n".join(POEM.format(words(9, i)) for i in range(4)),
    "list": "".join(f"- The name of the {w} is not yet known.\n" for w in words(40).split()),
    "numbered list": "".join(f"{i}. {w}: see page {i}\n" for i, w in enumerate(words(60).split())),
    "table": "| day | state | ok |\n| --- | --- | --- |\n"
    + "".join(f"| {i} | passed | yes |\n" for i in range(80)),
    "table of one word": "".join(f"| {i} " + "| yes " * 14 + "|\n" for i in range(60)),
    "code": "```python\n"
    + "".join(
        f"def f{i}(x):\n    if x is None:\n        return None\n    return x + {i}\n\n"
        for i in range(40)
    )
    + "```",
    "braces": "```c\n" + "".join(f"if (a == {i}) {{\n  go();\n}}\n" for i in range(60)) + "```",
    "data": "```\n" + "".join(f"{i}" + ", 0" * 16 + "\n" for i in range(100)) + "```",
    "rules": "\n".join(f"{words(20, i)}\n\n---\n" for i in range(30)),
    "dialogue": "".join(f"Anna: {words(8, i)}\nBen: I do not think so.\n" for i in range(30)),
    "long address": "https://example.org/" + words(60).replace(" ", "/"),
    "counting": " ".join(map(str, range(500))),
    "JSON": "```json\n["
    + ",\n".join(f'{{"id": {i}, "ok": true, "tags": []}}' for i in range(60))
    + "]\n```",
}


@pytest.mark.parametrize("name", FINE)
def test_accepts_legitimate_repetition(name):
    assert repetition(FINE[name]) == 1


@given(st.text(max_size=200), st.text(max_size=40))
def test_guards_stay_within_their_range(text, prompt):
    for value in (repetition(text * 9), language_mixing(text, prompt), length(text, 20)):
        assert 0 <= value <= 1


RU = "Расскажи, как работает память у человека."
EN = "Tell me how a person's memory works."


@pytest.mark.parametrize(
    ("text", "prompt", "value"),
    [
        ("Short and plain.", EN, 1),
        # 2 Chinese of 18 letters: (1/9 - 0.01) / 0.19
        ("abcdefghijklmnop 记忆", EN, 1 - (1 / 9 - 0.01) / 0.19),
        # 1 of 100: free
        ("a" * 99 + "ж", EN, 1),
        ("Она хранит следы.", EN, 0),
        ("It keeps traces.", RU, 0),
        # 3 of 10 letters are Latin: borrowed; 5 of 10: 0.2 more than allowed
        ("abc следыот", RU, 1),
        ("abcd следыо", RU, 1 - (0.1 - 0.01) / 0.19),
        ("记忆 следыотд", RU, 0),
    ],
)
def test_mixing_equals_hand_computation(text, prompt, value):
    assert language_mixing(text, prompt) == pytest.approx(value)


def test_every_constant_of_mixing_counts():
    text = "abcdefghijklmnop 记忆"
    base = language_mixing(text, EN)
    assert (
        language_mixing(text, EN, free=0.05) > base and language_mixing(text, EN, worst=0.5) > base
    )
    assert language_mixing("abcd следыо", RU, borrowed=0.4) == 1
    assert language_mixing(text, EN, languages=("zh",)) == 1


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("Память хранит следы.", "Answer in Russian: how does memory work?"),
        ("मेरा नाम है", "Write your entire response in the Hindi language."),
        ("今日は良い天気です。", "Translate into Japanese: the weather is good."),
        ("The weather is good today.", "Переведи на английский: сегодня хорошая погода."),
        ("The weather is good.", "把这句话翻译成英文：今天天气很好。"),
        ("漢字とかな", "ひらがなで書いてください"),
        ("이것은 漢字 입니다", "한국어로 답해 주세요"),
        ("Die Antwort ist „schön“.", EN),
        ("α and β, with Σ over γ", EN),
        ("Функция print в Python выводит текст.", "Что делает print в Python?"),
        ("Вот код:\n```python\nfor value in values:\n    print(value)\n```\n", RU),
        ("Смотри https://example.org/a/very/long/address и `numpy.linalg.norm(values)`.", RU),
        ("Ответ $\\frac{alpha}{beta}$ верен.", RU),
        ("память", "Please tell me where the word память comes from."),
        ("Any Ελληνικά and русский", "12 + 3"),
        ("42", RU),
        ("", RU),
    ],
)
def test_accepts_requested_languages(text, prompt):
    assert language_mixing(text, prompt) == 1


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("```\nПамять хранит следы всего.", EN),  # an open fence hides nothing
        ("Memory keeps 痕迹 of 一切 that 发生", EN),
        ("Память keeps the traces of all events", "Что такое память в Python?"),
        ("Пaмять and memory are stored in the brain somewhere", RU),
    ],
)
def test_detects_unrequested_languages(text, prompt):
    assert language_mixing(text, prompt) < 0.5
