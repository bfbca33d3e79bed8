"""Checks the 25 kinds of verifiable instructions of IFEval (Zhou et al. 2023), each by one function of a reply.

They mean what the benchmark's code means, including its surprises: keywords also match inside longer words,
a rule `---` is a bullet, a word is a run of `\\w`. Four parts may differ from the benchmark:

- the language is detected by languages.py instead of langdetect;
- sentences and words in capitals are counted without NLTK;
- keywords are plain text instead of regular expressions; no prompt of the benchmark has one where that
  matters;
- a star with nothing after it on its line is no bullet.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from glm5_jax.envs.instructions.languages import NAMES, may_be

RELATIONS = ("at least", "less than")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class Kind(NamedTuple):
    """Kind of instruction.

    Attributes:
      keeps: function that returns whether a reply follows the instruction; called with the reply and the
          arguments by name.
      arguments: check of each argument, a key of `CHECKS`, by its name.
    """

    keeps: Callable[..., bool]
    arguments: Mapping[str, str] = {}


# Keywords


def has_keywords(reply: str, keywords: Sequence[str]) -> bool:
    """Returns whether a reply has all keywords, ignoring case."""
    return all(_count(reply, keyword) for keyword in keywords)


def has_keyword_often(reply: str, keyword: str, frequency: int, relation: str) -> bool:
    """Returns whether the number of matches of a keyword satisfies a relation, ignoring case."""
    return _holds(_count(reply, keyword.strip()), relation, frequency)


def avoids_words(reply: str, forbidden_words: Sequence[str]) -> bool:
    """Returns whether no forbidden word occurs as a separate word, ignoring case."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", reply, re.IGNORECASE) for word in forbidden_words
    )


def has_letter_often(reply: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Returns whether the count of a letter or sign satisfies a relation, ignoring case."""
    return _holds(reply.lower().count(letter.lower()), let_relation, let_frequency)


# Language and case


def is_english_capitals(reply: str) -> bool:
    """Returns whether a reply is English and all its letters are capitals."""
    return reply.isupper() and may_be(reply, "en")


def is_english_lowercase(reply: str) -> bool:
    """Returns whether a reply is English and none of its letters is a capital."""
    return reply.islower() and may_be(reply, "en")


def has_capital_words_often(reply: str, capital_frequency: int, capital_relation: str) -> bool:
    """Returns whether the number of words in capitals satisfies a relation: "I", "NASA's" and "COVID-19" are
    one each.
    """
    return _holds(count_capital_words(reply), capital_relation, capital_frequency)


def count_capital_words(text: str) -> int:
    """Returns the number of words that have capitals and no small letters except a possessive's."""
    words = re.findall(r"[^\s,;:?!()\[\]{}<>\"“”…—@#$%&]+", text.replace("--", " "))
    return sum(re.sub(r"['’]s$", "", word.strip("*_.'’")).isupper() for word in words)


# Lengths


def has_sentences(reply: str, num_sentences: int, relation: str) -> bool:
    """Returns whether the number of sentences, by `count_sentences`, satisfies a relation."""
    return _holds(count_sentences(reply), relation, num_sentences)


_ABBREVIATION = re.compile(  # titles before names, and initials
    r"(?:^|[^\w.])(?:mr|mrs|ms|dr|prof|st|capt|lt|gen|col|sgt|rev|hon|gov|sen|rep|vs|fig|approx|(?!i)[^\W\d_])$",
    re.IGNORECASE,
)
_INITIALS = re.compile(r"(?:^|[^\w.])(?:[^\W\d_]{1,2}\.)+[^\W\d_]$")  # p.m, U.S, Ph.D
_STARTS = re.compile(
    r"\s+(?:The|A|An|It|He|She|They|We|You|I|This|That|There|But|However|In|Our|Their)\b"
)
_END = re.compile(r"(?:[.!?…]+|[。！？।॥؟۔])[\"'”’»)\]*_]*")
_AHEAD = 20  # characters around a full stop that decide; without a bound a long reply takes quadratic time
_NUMBERED = re.compile(r"(?m)^[ \t]*(?:[-*+][ \t]+)?\(?\d{1,9}[.)](?=\s)")


def count_sentences(text: str) -> int:
    """Returns the number of sentences of a text.

    A sentence is a stretch with a letter or digit that ends in a mark (also of Chinese, Hindi or Arabic)
    and a space, or at the end of the text. The end of a line ends no sentence. A full stop does not count

    - after the number of a list, a title or an initial;
    - before a small letter;
    - after several initials ("p.m."), unless a word follows that often begins a sentence.
    """
    text, count, start = _NUMBERED.sub(" ", text), 0, 0
    for mark in _END.finditer(text):
        after = text[mark.end() : mark.end() + _AHEAD]
        if mark[0][0] in ".!?…" and after[:1].strip():
            continue  # 3.5, example.com, file?name
        if mark[0][0] == "." and after.strip():
            before = text[max(start, mark.start() - _AHEAD) : mark.start()]
            initials = _INITIALS.search(before) and not _STARTS.match(after)
            if after.strip()[0].islower() or _ABBREVIATION.search(before) or initials:
                continue
        count += _says_something(text[start : mark.end()])
        start = mark.end()
    return count + _says_something(text[start:])


def has_words(reply: str, num_words: int, relation: str) -> bool:
    """Returns whether the number of words satisfies a relation.

    A word is a run of letters and digits: "don't" is two.
    """
    return _holds(len(re.findall(r"\w+", reply)), relation, num_words)


def has_paragraphs(reply: str, num_paragraphs: int) -> bool:
    """Returns whether dividers `***`, no two of them adjacent, separate exactly `num_paragraphs` paragraphs."""
    first, *between = [part.strip() for part in re.split(r"\s?\*\*\*\s?", reply)]
    last = between.pop() if between else ""
    return all(between) and len(between) + bool(first) + bool(last) == num_paragraphs


def has_first_word(reply: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Returns whether blank lines separate exactly `num_paragraphs` paragraphs and the nth begins with the
    word, ignoring case.
    """
    parts = reply.split("\n\n")
    filled = sum(bool(part.strip()) for part in parts)
    # The benchmark counts the nth of all parts, empty ones included.
    if filled != num_paragraphs or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"').lower()
    return re.split(r"[.,?!'\"]", word)[0] == first_word.lower()


# Content and form


def has_placeholders(reply: str, num_placeholders: int) -> bool:
    """Returns whether a reply has at least `num_placeholders` pairs of square brackets, each on one line."""
    count = 0
    for line in reply.split("\n"):  # a pattern would take quadratic time for "[[[["
        closed = -1
        while (opened := line.find("[", closed + 1)) >= 0:
            closed = line.find("]", opened)
            if closed < 0:
                break
            count += 1
    return count >= num_placeholders


def has_postscript(reply: str, postscript_marker: str) -> bool:
    """Returns whether the marker occurs, ignoring case. "P.S." and "P.P.S" may have spaces after their full stops."""
    marker = postscript_marker.strip().lower()
    spaced = {"p.s.": r"p\.\s?s\.", "p.p.s": r"p\.\s?p\.\s?s"}
    return re.search(spaced.get(marker, re.escape(marker)), reply.lower()) is not None


def has_bullets(reply: str, num_bullets: int) -> bool:
    """Returns whether exactly `num_bullets` lines begin with `-`, or with one `*` that something follows."""
    lines = [line.lstrip() for line in reply.split("\n")]
    bullets = [line for line in lines if re.match(r"-|\*[^*]", line)]
    return len(bullets) == num_bullets


def is_an_answer(reply: str) -> bool:
    """Returns whether one of `ANSWERS` is in a reply."""
    return any(answer in reply for answer in ANSWERS)


def has_highlights(reply: str, num_highlights: int) -> bool:
    """Returns whether a reply has at least `num_highlights` stretches of a line between stars, or between
    pairs of stars.
    """
    single = [text.strip("*") for text in re.findall(r"\*[^\n*]*\*", reply)]
    double = re.findall(r"\*\*([^\n*]*)\*\*", reply)
    return sum(bool(text.strip()) for text in single + double) >= num_highlights


def has_sections(reply: str, section_spliter: str, num_sections: int) -> bool:
    """Returns whether the section word followed by a number occurs at least `num_sections` times."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", reply)) >= num_sections


def is_json(reply: str) -> bool:
    """Returns whether a reply is JSON, with or without a fence around it."""
    text = re.sub(r"^```(?:json|Json|JSON)?|```$", "", reply.strip()).strip()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(reply: str) -> bool:
    """Returns whether some line has text between double angular brackets."""
    for line in reply.split("\n"):
        _, opened, rest = line.partition("<<")
        title, closed, _ = rest.rpartition(">>")
        if opened and closed and title.strip("<>").strip():
            return True
    return False


def has_no_comma(reply: str) -> bool:
    """Returns whether a reply has no ","; commas of other scripts are allowed."""
    return "," not in reply


def has_two_responses(reply: str) -> bool:
    """Returns whether a reply consists of two different responses separated by six stars."""
    first, *between = [part.strip() for part in reply.split("*" * 6)]
    last = between.pop() if between else ""
    responses = [part for part in (first, *between, last) if part]
    return all(between) and len(responses) == 2 and responses[0] != responses[1]


def repeats_prompt(reply: str, prompt_to_repeat: str) -> bool:
    """Returns whether a reply begins with the prompt, ignoring case."""
    return reply.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(reply: str, end_phrase: str) -> bool:
    """Returns whether a reply ends in a phrase, ignoring case and quotation marks."""
    return reply.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(reply: str) -> bool:
    """Returns whether double quotation marks surround a reply."""
    return re.fullmatch(r'".*"', reply.strip(), re.DOTALL) is not None


def _count(text: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def _holds(count: int, relation: str, threshold: int) -> bool:
    return count >= threshold if relation == "at least" else count < threshold


def _says_something(text: str) -> bool:
    return any(map(str.isalnum, text))


KINDS = {
    "keywords:existence": Kind(has_keywords, {"keywords": "words"}),
    "keywords:frequency": Kind(
        has_keyword_often, {"keyword": "text", "frequency": "count", "relation": "relation"}
    ),
    "keywords:forbidden_words": Kind(avoids_words, {"forbidden_words": "words"}),
    "keywords:letter_frequency": Kind(
        has_letter_often,
        {"letter": "letter", "let_frequency": "count", "let_relation": "relation"},
    ),
    "language:response_language": Kind(may_be, {"language": "language"}),
    "length_constraints:number_sentences": Kind(
        has_sentences, {"num_sentences": "count", "relation": "relation"}
    ),
    "length_constraints:number_paragraphs": Kind(has_paragraphs, {"num_paragraphs": "number"}),
    "length_constraints:number_words": Kind(
        has_words, {"num_words": "count", "relation": "relation"}
    ),
    "length_constraints:nth_paragraph_first_word": Kind(
        has_first_word,
        {"num_paragraphs": "number", "nth_paragraph": "number", "first_word": "text"},
    ),
    "detectable_content:number_placeholders": Kind(has_placeholders, {"num_placeholders": "count"}),
    "detectable_content:postscript": Kind(has_postscript, {"postscript_marker": "text"}),
    "detectable_format:number_bullet_lists": Kind(has_bullets, {"num_bullets": "count"}),
    "detectable_format:constrained_response": Kind(is_an_answer),
    "detectable_format:number_highlighted_sections": Kind(
        has_highlights, {"num_highlights": "count"}
    ),
    "detectable_format:multiple_sections": Kind(
        has_sections, {"section_spliter": "text", "num_sections": "count"}
    ),
    "detectable_format:json_format": Kind(is_json),
    "detectable_format:title": Kind(has_title),
    "combination:two_responses": Kind(has_two_responses),
    "combination:repeat_prompt": Kind(repeats_prompt, {"prompt_to_repeat": "text"}),
    "startend:end_checker": Kind(ends_with, {"end_phrase": "text"}),
    "startend:quotation": Kind(is_quoted),
    "change_case:capital_word_frequency": Kind(
        has_capital_words_often, {"capital_frequency": "count", "capital_relation": "relation"}
    ),
    "change_case:english_capital": Kind(is_english_capitals),
    "change_case:english_lowercase": Kind(is_english_lowercase),
    "punctuation:no_comma": Kind(has_no_comma),
}


def _is_text(value) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# Kind of argument -> (its description for errors, a test of it).
CHECKS: Mapping[str, tuple[str, Callable[..., bool]]] = {
    "text": ("a text that is not empty", _is_text),
    "words": (
        "a list of texts that are not empty",
        lambda value: (
            isinstance(value, (list, tuple)) and bool(value) and all(map(_is_text, value))
        ),
    ),
    "count": ("a whole number from 0", _is_count),
    "number": ("a whole number from 1", lambda value: _is_count(value) and value > 0),
    "letter": ("one character", lambda value: _is_text(value) and len(value) == 1),
    "relation": (f"one of {', '.join(RELATIONS)}", lambda value: value in RELATIONS),
    "language": (
        f"one of {', '.join(NAMES)}",
        lambda value: isinstance(value, str) and value in NAMES,
    ),
}
