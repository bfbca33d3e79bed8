"""Every kind of instruction has replies that follow it, and near misses."""

import asyncio
import json
import time

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.envs.instructions.constraints import (
    KINDS,
    RELATIONS,
    count_capital_words,
    count_sentences,
    has_bullets,
    has_words,
    is_json,
)
from glm5_jax.envs.instructions.ifeval import (
    SHIPPED,
    Accuracy,
    Instructions,
    VerifiableInstruction,
    accuracy,
    instructions,
    readings,
    task,
    tasks,
)
from glm5_jax.rl.types import Attempt, Task

AT_LEAST, LESS = RELATIONS

# Kind, arguments, replies that follow the instruction, near misses.
VECTORS = [
    (
        "keywords:existence", {"keywords": ["river", "C++"]}, ["The RIVER runs on c++.", "C++ has no riverbank."],
        ["The river runs on C+.", "C++ is not a r iver.", "Neither."],
    ),
    (
        "keywords:frequency", {"keyword": "war", "frequency": 2, "relation": AT_LEAST},
        ["War and war.", "Towards the warm sea: twice inside a word."], ["War, then peace.", "wa r war"],
    ),
    (
        "keywords:frequency", {"keyword": "a.b ", "frequency": 2, "relation": LESS}, ["a.b and axb", "none"],
        ["a.b A.B", "a.ba.b"],
    ),
    (
        "keywords:forbidden_words", {"forbidden_words": ["field", "rock"]},
        ["fields and rocks", "a rock_garden", "f ield"], ["A Field.", "rock", "on-the-rock-again"],
    ),
    (
        "keywords:letter_frequency", {"letter": "!", "let_frequency": 3, "let_relation": AT_LEAST},
        ["!!!", "Oh! No! Yes!"], ["!!", "Oh! No! Yes"],
    ),
    (
        "keywords:letter_frequency", {"letter": "T", "let_frequency": 2, "let_relation": LESS}, ["The end", "no one"],
        ["The cat", "TT"],
    ),
    (
        "language:response_language", {"language": "hi"}, ["यह एक अच्छा दिन है।"],
        ["This is a good day.", "हा राजा आहे आणि ती राणी आहे.", "Yah ek accha din hai."],
    ),
    (
        "length_constraints:number_sentences", {"num_sentences": 3, "relation": AT_LEAST},
        ["One. Two! Three?", "One.\nTwo.\nThree", "他来了。她走了。完了！"],
        ["One. Two!", "One, two, three.", "Mr. A. Smith paid 3.50 at 5 p.m. today. So.", "1.\n2.\n3."],
    ),
    (
        "length_constraints:number_sentences", {"num_sentences": 2, "relation": LESS},
        ["Dr. Who came... late.", "No stop\nand a new line"], ["He came. She left.", 'He said "Go." She went.'],
    ),
    (
        "length_constraints:number_paragraphs", {"num_paragraphs": 2},
        ["One.\n***\nTwo.", "***One***Two***", "a *** b"],
        ["One.\n\nTwo.", "a***b***c", "a\n***\n***\nb", "a ** b", "***"],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, ["a***b***c"], ["a\n***\n***\nb", "a***b"]),
    (
        "length_constraints:number_words", {"num_words": 4, "relation": AT_LEAST},
        ["one two three four", "don't stop now"], ["one two three", "one-two, three..."],
    ),
    (
        "length_constraints:number_words", {"num_words": 4, "relation": LESS}, ["one two three"],
        ["one two three four", "don't stop now"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
        ["Hi.\n\nweekend, at last", 'Hi.\n\n"Weekend\'s here"', "a\nb\n\n'Weekend'\n\n"],
        [
            "Weekend.\n\nHi.",
            "Hi.\nWeekend",
            "Hi.\n\nWeekends are good",
            "Hi.\n\n*Weekend*",
            "a\n\nWeekend\n\nc",
            "\n\n\n\nHi.\n\nWeekend",  # the second paragraph is empty
        ],
    ),
    (
        "detectable_content:number_placeholders", {"num_placeholders": 2},
        ["[name] lives at [address].", "[a][b]", "[[x] [y]"],
        ["[name] lives.", "[na\nme] [address]", "(a) (b)", "]a[ [b]"],
    ),
    (
        "detectable_content:postscript", {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Write.", "p. s. more", "Bye. P.S."], ["Bye.\nPS: write", "P.S"],
    ),
    (
        "detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S more", "p. p. s"],
        ["P.S. more", "PPS"],
    ),
    (
        "detectable_format:number_bullet_lists", {"num_bullets": 2},
        ["* a\n* b", "Here:\n- a\n  - b\nDone.", "*a\n-b"],
        ["* a", "* a\n* b\n* c", "* a\n** b", "a * b\n* c", "1. a\n2. b", "* a\n* b\n---"],
    ),
    (
        "detectable_format:constrained_response", {}, ["My answer is yes.", " So: My answer is maybe. "],
        ["My answer is yes", "my answer is no.", "Yes."],
    ),
    (
        "detectable_format:number_highlighted_sections", {"num_highlights": 2},
        ["*one* and *two*", "**one** *two*", "**one** two **three**"],
        ["*one* and two", "**once**", "*one\nline*", "** **", "* * *x*"],
    ),
    (
        "detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION9 SECTION 10"],
        ["Section 1\na\nSection 2", "SECTION 1\na", "SECTION I\nSECTION II", "SECTION  1 SECTION 2"],
    ),
    (
        "detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[]\n```", "3"],
        ["{'a': 1}", 'Here: {"a": 1}', '{"a": 1', '```python\n{"a": 1}\n```', "[" * 100_000],
    ),
    (
        "detectable_format:title", {}, ["<<Of joy>>\nText", "so: << a >> b"],
        ["<Of joy>", "<<>>", "<< >>", "<<of\njoy>>", ">>a<<"],
    ),
    (
        "combination:two_responses", {}, ["one\n******\ntwo", "******one******two******"],
        ["one ****** one", "one ***** two", "a******b******c", "a******\n******b", "a****** "],
    ),
    (
        "combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."},
        ["Write a poem. Roses are red.", "\n write a Poem.\n\nRoses"],
        ["Sure! Write a poem. Roses", "Write a poem: roses", "Write  a poem."],
    ),
    (
        "startend:end_checker", {"end_phrase": "That is all."},
        ["So. That is all.", "so that IS all.", '"That is all." '],
        ["That is all. Bye.", "That is all", "That is all.)"],
    ),
    ("startend:quotation", {}, ['"All\nof it"', ' "" '], ["All of it", '"All of it', '"', "'All'", "“All”"]),
    (
        "change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": AT_LEAST},
        ["I like NASA and COVID-19.", "A B C", "(U.S.) **BOLD** NASA's"],
        ["I like NASA and Covid-19.", "ONE TWO", "iOS, mRNA 123"],
    ),
    (
        "change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": LESS},
        ["only ONE here", "none"], ["ONE TWO", "WELL-KNOWN FACT"],
    ),
    (
        "change_case:english_capital", {}, ["THIS IS THE END!", "3 OF THE 4"],
        ["THIS IS THE eND!", "DAS IST DER TAG UND DIE NACHT", "ЭТО И ТО", "123"],
    ),
    (
        "change_case:english_lowercase", {}, ["this is the end!", "3 of the 4"],
        ["This is the end!", "das ist der tag und die nacht", "это и то", "123"],
    ),
    ("punctuation:no_comma", {}, ["a; b", "也，好"], ["a, b", ","]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "arguments", "keeps", "breaks"), VECTORS, ids=lambda v: str(v)[:40]
)
def test_distinguishes_replies_from_near_misses(kind, arguments, keeps, breaks):
    one = VerifiableInstruction(kind, arguments)
    assert [reply for reply in keeps if not one.is_followed(reply)] == []
    assert [reply for reply in breaks if one.is_followed(reply)] == []
    assert not one.is_followed("") and not one.is_followed(" \n")


def test_every_kind_has_vectors():
    assert {kind for kind, *_ in VECTORS} == set(KINDS) and len(KINDS) == 25


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It was I. He left.", 2),
        ("Dr. Smith met Mr. J. R. Jones at 3.5 p.m. today. They ate.", 2),
        ("We left at 5 p.m. The end.", 2),
        ("1. Do this.\n2) Do that.\n- 3. Rest.", 3),
        ("Wait... what? Yes.", 2),
        ("See example.com?x=1 for v1.2. It works.", 2),
        ("यह है। वह है।", 2),
        ("What?! No way!!! Ok", 3),
        ("a." + " " * 50 + "b.", 2),
        ("... !? .", 0),
    ],
)
def test_counts_sentences(text, count):
    assert count_sentences(text) == count


def test_counts_words_in_capitals():
    assert count_capital_words("THE Usa's NASA's. A--B C—D x_Y 42 I'M AT&T") == 9


@given(st.lists(st.text("ab-* \n", max_size=6), max_size=8))
def test_counts_lines_as_bullets(lines):
    lines = [line.replace("\n", "") for line in lines]
    want = sum(
        line.strip()[:1] == "-"
        or (line.lstrip()[:1] == "*" and line.lstrip()[1:2] not in ("", "*"))
        for line in lines
    )
    assert has_bullets("\n".join(lines), want)
    assert not has_bullets("\n".join(lines), want + 1)


@given(st.integers(0, 30), st.integers(0, 30))
def test_relations_are_opposites(count, threshold):
    text = "word " * count
    at_least = has_words(text, threshold, AT_LEAST)
    assert at_least == (count >= threshold) and at_least != has_words(text, threshold, LESS)


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_recognises_complete_json(value):
    text = json.dumps(value)
    assert is_json(text) and is_json(f"```json\n{text}\n```")
    if text[-1] in '"}]':
        assert not is_json(text[:-1])


@given(st.text())
def test_checkers_accept_any_text(text):
    for kind, arguments, *_ in VECTORS:
        assert VerifiableInstruction(kind, arguments).is_followed(text) in (True, False)


@pytest.mark.parametrize("size", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_checks_long_replies_in_linear_time(size):
    """Quadratic checks take minutes: 10^10 steps at 100,000 characters."""
    units = (
        "[",
        "<<",
        "<",
        "*",
        "\n",
        "a.",
        ". ",
        "1. ",
        '"',
        "P.",
        "***",
        "`",
        "A",
        "* \n",
        "U.S. ",
    )
    for unit in units:
        reply, started = unit * (size // len(unit)), time.process_time()
        for kind, arguments, *_ in VECTORS:
            VerifiableInstruction(kind, arguments).is_followed(reply)
        assert time.process_time() - started < size / 10_000, unit


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("keywords:all", {}, "instruction is 'keywords:all'; use one of keywords:existence"),
        ("startend:quotation", {"n": 1}, r"startend:quotation has arguments \['n'\]; it takes none"),
        ("punctuation:no_comma", [], r"the arguments of punctuation:no_comma are \[\]; give an object"),
        (
            "keywords:frequency", {"keyword": "a", "frequency": 1, "relation": None},
            r"has arguments \['frequency', 'keyword'\]; it takes \['frequency', 'keyword', 'relation'\]",
        ),
        (
            "length_constraints:number_words", {"num_words": "300", "relation": AT_LEAST},
            "num_words of length_constraints:number_words is '300'; it must be a whole number from 0",
        ),
        ("length_constraints:number_words", {"num_words": True, "relation": AT_LEAST}, "num_words .* is True"),
        ("length_constraints:number_words", {"num_words": -1, "relation": AT_LEAST}, "num_words .* is -1"),
        (
            "length_constraints:number_words", {"num_words": 3, "relation": "at most"},
            "relation .* is 'at most'; it must be one of at least, less than",
        ),
        ("keywords:existence", {"keywords": "word"}, "keywords .* is 'word'; it must be a list"),
        ("keywords:existence", {"keywords": []}, r"keywords .* is \[\]"),
        ("keywords:forbidden_words", {"forbidden_words": ["a", " "]}, "must be a list of texts that are"),
        (
            "keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": LESS},
            "letter .* is 'ab'; it must be one character",
        ),
        ("language:response_language", {"language": "xx"}, "language .* is 'xx'; it must be one of en"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 0}, "a whole number from 1"),
        ("detectable_content:postscript", {"postscript_marker": ""}, "a text that is not empty"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
            "nth_paragraph .* is 3; it may be at most num_paragraphs, 2",
        ),
    ],
)  # fmt: skip
def test_rejects_invalid_instruction(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        VerifiableInstruction(kind, arguments)


def test_drops_arguments_that_are_none():
    one = VerifiableInstruction("startend:quotation", {"num_words": None, "relation": None})
    assert one.is_followed('"yes"') and one.arguments == {}


ROW = {
    "key": 7,
    "prompt": "Say hi without commas, in quotation marks.",
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [{}, {}],
}


def test_reads_row_as_task():
    row_task = task(ROW)
    assert (row_task.id, row_task.kind) == ("ifeval-7", "instructions")
    assert row_task.messages == ({"role": "user", "content": ROW["prompt"]},)
    assert instructions(row_task.data) == tuple(
        map(VerifiableInstruction, ROW["instruction_id_list"])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "the row has no prompt"),
        ({"kwargs": [{}]}, "2 entries of instruction_id_list and 1 of kwargs"),
        ({"kwargs": None}, "kwargs is None; pass a list"),
        ({"instruction_id_list": [], "kwargs": []}, r"instruction_id_list is \[\]"),
        ({"instruction_id_list": ["a", "b"]}, "instruction is 'a'"),
    ],
)
def test_rejects_row_without_instructions(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        task(ROW | change)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(ROW | change)}\n")
    with pytest.raises(ValueError, match=f"rows.jsonl, line 2: .*{message}"):
        list(tasks(path))


def test_names_line_that_is_no_json(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: the row has no prompt"):
        list(tasks(path))
    path.write_text("{\n")
    with pytest.raises(ValueError, match="line 1: "):
        list(tasks(path))


def test_shipped_prompts_have_every_kind():
    shipped = list(tasks())
    assert SHIPPED.name == "ifeval.jsonl" and len(shipped) == 271
    assert len({task.id for task in shipped}) == 271
    all_instructions = [one for task in shipped for one in instructions(task.data)]
    assert {one.kind for one in all_instructions} == set(KINDS) and len(all_instructions) == 427


def test_shipped_prompts_can_be_followed():
    """The replies consist of the arguments of the shipped prompts."""
    builders = {
        "keywords:existence": lambda a: " ".join(a["keywords"]),
        "keywords:frequency": lambda a: (
            f"{a['keyword']} " * (a["frequency"] - (a["relation"] == LESS)) + "."
        ),
        "keywords:letter_frequency": lambda a: (
            a["letter"] * (a["let_frequency"] - (a["let_relation"] == LESS)) + "\u3000."
        ),
        "length_constraints:number_words": lambda a: (
            "w " * (a["num_words"] - (a["relation"] == LESS))
        ),
        "length_constraints:number_sentences": lambda a: (
            "We go. " * (a["num_sentences"] - (a["relation"] == LESS))
        ),
        "detectable_format:multiple_sections": lambda a: "".join(
            f"{a['section_spliter']} {i}\ntext\n" for i in range(a["num_sections"])
        ),
        "detectable_format:number_bullet_lists": lambda a: "* point\n" * a["num_bullets"],
        "length_constraints:number_paragraphs": lambda a: "***".join(["p"] * a["num_paragraphs"]),
        "length_constraints:nth_paragraph_first_word": lambda a: "\n\n".join(
            f"{a['first_word']} is" for _ in range(a["num_paragraphs"])
        ),
        "combination:repeat_prompt": lambda a: a["prompt_to_repeat"] + "\n\nYes.",
        "startend:end_checker": lambda a: "So. " + a["end_phrase"],
        "detectable_content:postscript": lambda a: "Bye. " + a["postscript_marker"] + " x",
    }
    tried = 0
    for prompt in tasks():
        for one in instructions(prompt.data):
            if one.kind in builders:
                reply = builders[one.kind](one.arguments)
                assert one.is_followed(reply), (one, reply[:200])
                tried += 1
    assert tried > 200


def test_loose_mode_drops_outer_lines_and_stars():
    assert readings("a*\nb\n\n*c") == [
        "a*\nb\n\n*c", "b\n\n*c", "a*\nb", "b", "a\nb\n\nc", "b\n\nc", "a\nb", "b",
    ]  # fmt: skip
    quoted = VerifiableInstruction("startend:quotation")
    for reply in ('Sure:\n"a b"', '"a b"\nAnything else?', 'Sure:\n"a b"\nBye', '**"a b"**'):
        assert quoted.is_followed(reply, loose=True) and not quoted.is_followed(reply)
    assert not quoted.is_followed('Sure: "a b"', loose=True)
    # Each line by itself would follow both; an empty rest follows nothing.
    assert not VerifiableInstruction("punctuation:no_comma").is_followed(",", loose=True)


def reward_of(verifier, task, reply, **attempt):
    messages = ({"role": "assistant", "content": reply},)
    return asyncio.run(verifier(task, Attempt(messages=messages, **attempt)))


def test_rewards_all_or_share():
    row_task = task(ROW)
    half = {"punctuation:no_comma": 1.0, "startend:quotation": 0.0}
    assert reward_of(Instructions(), row_task, '"hi"').value == 1
    got = reward_of(Instructions(), row_task, "hi")
    assert got.value == 0 and got.parts == half
    got = reward_of(Instructions("share"), row_task, "hi")
    assert got.value == 0.5 and got.parts == half
    assert reward_of(Instructions(loose=True), row_task, 'Sure\n"hi"').value == 1
    assert reward_of(Instructions("share"), row_task, "").value == 0
    with pytest.raises(ValueError, match="reward is 'some'; use one of all, share"):
        Instructions("some")


def test_repeated_kind_has_two_parts():
    twice = task(
        ROW
        | {
            "instruction_id_list": ["keywords:frequency"] * 2,
            "kwargs": [
                {"keyword": "war", "frequency": 1, "relation": AT_LEAST},
                {"keyword": "war", "frequency": 2, "relation": LESS},
            ],
        }
    )
    got = reward_of(Instructions("share"), twice, "war war")
    assert got.parts == {"keywords:frequency": 1.0, "keywords:frequency.1": 0.0}
    assert got.value == 0.5


def test_failed_attempt_gives_no_reward():
    got = reward_of(Instructions(), task(ROW), '"hi"', finish_reason="failed", error="engine died")
    assert got.value is None and got.error == "engine died"
    broken = Task(id="x", kind="instructions", messages=task(ROW).messages, data={"kwargs": []})
    got = reward_of(Instructions(), broken, '"hi"')
    assert got.value is None and "instruction_id_list is None" in got.error


def test_truncated_reply_scores_zero():
    """Some instructions require many words."""
    got = reward_of(Instructions(), task(ROW), '"hi"', finish_reason="length")
    assert (got.value, got.error) == (0.0, "the attempt was cut off")


def test_computes_accuracy_by_prompt_and_instruction():
    """Four prompts of two instructions follow strictly 2, 1, 1, 0 of them, and loosely 2, 2, 1, 0."""
    row_task = task(ROW)
    replies = ['"hi"', 'Sure\n"hi"', "hi", "a, b"]
    got = accuracy((row_task, reply) for reply in replies)
    assert got == Accuracy(1 / 4, 4 / 8, 2 / 4, 5 / 8)
    with pytest.raises(ValueError, match="give at least one"):
        accuracy([])
