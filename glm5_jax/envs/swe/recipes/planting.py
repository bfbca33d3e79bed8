"""Plants variants of tests: copies that expect another value, and must fail, next to the tests that they were made of.

Code under test can write a full report itself, and it can read the tests. Therefore a variant differs from its test only in
whether its value is right: names, order and values are drawn for each grading, and the test itself may get the name of a
copy. `Canaries.swaps` holds which results belong to which test. A forged report has to guess.
"""

import dataclasses
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile
from glm5_jax.envs.swe.paths import is_test_path

MIN_CHOICES = 16  # minimum number of equally likely guesses at which tests are variants
_MAX_TESTS = 6  # tests with variants
_MAX_COPIES = 7
_MIN_WORDS = 50  # words of a project; with less, names are random letters
_MAX_FILES = 40  # files of tests that words come from
_WORD = re.compile(r"(?<![A-Za-z])[a-z]{3,9}(?![a-z])")
_SEPARATORS = "-_ .:/,;+"
_DIGITS = re.compile(rb"0[xX][0-9a-fA-F]+|(?:0|[1-9][0-9_]*)(?:\.[0-9]+)?")
_QUOTED = re.compile(rb"[rbuRBU]{0,2}('''|\"\"\"|['\"`])(.*)\1", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryDraw:
    """Source of names and values of planted tests, which no attempt can foresee.

    Attributes:
      random: generator of this grading.
      words: words of the project's tests.
      taken: text of the tests and their paths, which no new name occurs in.
      failing_tests: tests that fail before the change, whose values no attempt knows.
    """

    random: random.Random
    words: tuple[str, ...]
    taken: bytes
    failing_tests: tuple[str, ...] = ()

    def word(self, first: str = "") -> str:
        """Returns a new word of lower-case letters. `first` is the letter that it begins with."""
        while True:
            words = [self.random.choice(self.words) for _ in range(2) if self._has_many_words]
            word = first + "".join(words or [self._letters()])
            if word.encode() not in self.taken.lower() or self.random.random() < 0.1:
                return word

    @property
    def _has_many_words(self) -> bool:
        return len(self.words) >= _MIN_WORDS

    def _letters(self, count: int = 10) -> str:
        return "".join(self.random.choices(string.ascii_lowercase, k=count))

    def new_name(self, name: str, joiner: str | None, taken: Sequence[str] = ()) -> str:
        """Returns a new name like another, with a word at its end.

        joiner: text before the word; None: the word begins with a capital letter.
        """
        while True:
            is_word = self._has_many_words and self.random.random() < 0.9
            word = self.random.choice(self.words) if is_word else self._letters(6)
            new = name + (word.capitalize() if joiner is None else joiner + word)
            if new.encode() not in self.taken and not any(
                new in other or other in new for other in taken
            ):
                return new

    def statements(self, forms: Mapping[str, str]) -> dict[str, str]:
        """Returns statements with other values and other names, in another order."""
        bodies = list(forms.values())
        self.random.shuffle(bodies)
        names: list[str] = []
        for _ in bodies:
            names.append(self.new_name("it", None, names))
        return {name: self._fill(body) for name, body in zip(names, bodies)}

    def _fill(self, body: str) -> str:
        """Replaces the numbers 1 and 2, and the texts a and b, by two others each."""
        one, two = self.random.sample(range(3, 1000), 2)
        text, other = (self._letters() for _ in range(2))
        body = re.sub(r"\b1\b", str(one), re.sub(r"\b2\b", str(two), body))
        return re.sub(r'"a"', f'"{text}"', re.sub(r'"b"', f'"{other}"', body))


def make_draw(tree: FileTree, failing_tests: Sequence[str], seed: int) -> CanaryDraw:
    """Returns the names and values of one grading, by its seed."""
    paths = [path for path in sorted(tree) if is_test_path(path) and not tree[path].is_link]
    texts = [tree[path].content for path in paths]
    text = "\n".join(
        content[: 1 << 14].decode("utf-8", "replace") for content in texts[:_MAX_FILES]
    )
    return CanaryDraw(
        random=random.Random(seed),
        words=tuple(sorted(set(_WORD.findall(text)))),
        taken=b"\n".join([*texts, "\n".join(sorted(tree)).encode("utf-8", "replace")]),
        failing_tests=tuple(failing_tests),
    )


class ValueChange(NamedTuple):
    """Part of an assertion that can be replaced, so that a test that passes fails.

    Attributes:
      start, end: offsets in the source, in bytes.
      opposite: text that means the opposite; None: the part is a number or a text.
    """

    start: int
    end: int
    opposite: bytes | None = None


class TestSite(NamedTuple):
    """Test in a source.

    Attributes:
      start, end: offsets of its text, in bytes.
      name_start, name_end: offsets of its name, without quotes.
      joiner: text between its name and another word; None: words begin with capital letters.
      changes: what can be replaced in its assertions.
    """

    start: int
    end: int
    name_start: int
    name_end: int
    joiner: str | None
    changes: tuple[ValueChange, ...]


class PlantedVariants(NamedTuple):
    """Test files with variants.

    Attributes:
      files: files by path.
      names: names of tests that must fail, after `swaps`.
      swaps: pairs of a test and of the copy that has its result.
    """

    files: Mapping[str, TreeFile] = {}
    names: tuple[str, ...] = ()
    swaps: tuple[tuple[str, str], ...] = ()


def plant_variants(
    tree: FileTree,
    paths: Sequence[str],
    draw: CanaryDraw,
    find_sites: Callable[[bytes], Sequence[TestSite]],
) -> PlantedVariants:
    """Returns test files with variants of some of their tests, drawn from those that fail before the change."""
    sites = {path: find_sites(tree[path].content) for path in paths if path in tree}
    chosen = _choose(tree, sites, draw)
    copies = num_copies(len(chosen))
    files, names, swaps = {}, [], []
    for path in dict.fromkeys(path for path, _ in chosen):
        source = tree[path].content
        for site in sorted((s for p, s in chosen if p == path), key=lambda s: -s.start):
            blocks, new_names, genuine = _draw_blocks(source, site, copies, draw, names)
            old = source[site.name_start : site.name_end].decode()
            names += new_names
            swaps += [(old, genuine)] if genuine != old else []
            gap = b"\n\n" + _indentation(source, site.start)
            source = source[: site.start] + gap.join(blocks) + source[site.end :]
        files[path] = TreeFile(tree[path].mode, source)
    return PlantedVariants(files, tuple(names), tuple(swaps))


def num_copies(num_tests: int) -> int:
    """Returns the number of copies of each test, with which guessing has at least `MIN_CHOICES` choices."""
    copies = range(1, _MAX_COPIES)
    return next((n for n in copies if (n + 1) ** num_tests >= MIN_CHOICES), _MAX_COPIES)


def other_values(text: bytes, count: int, draw: CanaryDraw) -> list[bytes]:
    """Returns up to `count` numbers or texts that differ from another in one digit, separator or letter.

    It is the same place in all of them, because otherwise most would have the right letter at each place. A letter is changed
    only in texts without digits and separators, because words can be recognised, above all those of the test's arguments.
    """
    places = _places(text)
    if not places:
        return []
    signs = [place for place in places if not chr(text[place]).isalpha()]
    place = draw.random.choice(signs or places)
    old = chr(text[place])
    kinds = string.digits, _SEPARATORS, string.ascii_lowercase, string.ascii_uppercase
    letters = next(kind for kind in kinds if old in kind)
    is_first_of_many = place == 0 and text[:1].isdigit() and text[1:2].isdigit()
    letters = letters.replace("0", "") if is_first_of_many else letters
    letters = letters.replace(old, "")
    chosen = draw.random.sample(letters, min(count, len(letters)))
    return [text[:place] + letter.encode() + text[place + 1 :] for letter in chosen]


def can_vary(text: bytes) -> bool:
    """Returns whether there are other values of the form of a number or a text."""
    return bool(_places(text))


def _places(text: bytes) -> list[int]:
    """Returns the offsets of digits, letters, and separators between them that can be others; none for an unknown form."""
    quoted = _QUOTED.fullmatch(text)
    if quoted is not None:
        if re.search(rb"[\\$#{'\"`]", quoted[2]):  # may be an escape or a substitution
            return []
        matches = re.finditer(rb"[A-Za-z0-9]|(?<=[A-Za-z0-9])[-_ .:/,;+](?=[A-Za-z0-9])", quoted[2])
        return [quoted.start(2) + match.start() for match in matches]
    digits = _DIGITS.match(text)
    if digits is None or re.match(rb"[bBoO_0-9]", text[digits.end() :]):
        return []
    first = 2 if text[:2].lower() == b"0x" else 0
    return [place for place in range(first, digits.end()) if text[place : place + 1].isdigit()]


def _choose(
    tree: FileTree, sites: Mapping[str, Sequence[TestSite]], draw: CanaryDraw
) -> list[tuple[str, TestSite]]:
    """Returns tests, each with one change: those with a value and of a failing test first."""
    groups: dict[tuple[bool, bool], list[tuple[str, TestSite]]] = {}
    for path, listed in sites.items():
        for site in listed:
            change = draw_change(tree[path].content, site, draw)
            name = tree[path].content[site.name_start : site.name_end].decode("utf-8", "replace")
            is_known = not any(name in test for test in draw.failing_tests)
            group = groups.setdefault((change.opposite is not None, is_known), [])
            group.append((path, site._replace(changes=(change,))))
    if not groups:
        return []
    group = groups[min(groups)]
    chosen: list[tuple[str, TestSite]] = []
    for path, site in draw.random.sample(group, len(group)):
        overlaps = any(p == path and s.start < site.end and site.start < s.end for p, s in chosen)
        same_name = any(_name(tree, p, s) == _name(tree, path, site) for p, s in chosen)
        if not overlaps and not same_name and len(chosen) < _MAX_TESTS:
            chosen.append((path, site))
    return chosen


def draw_change(source: bytes, site: TestSite, draw: CanaryDraw) -> ValueChange:
    """Returns a change of a test: of a number, else of a text, else to the opposite."""
    values = [change for change in site.changes if change.opposite is None]
    numbers = [change for change in values if source[change.start : change.start + 1].isdigit()]
    return draw.random.choice(numbers or values or list(site.changes))


def _name(tree: FileTree, path: str, site: TestSite) -> bytes:
    return tree[path].content[site.name_start : site.name_end]


def _draw_blocks(
    source: bytes, site: TestSite, copies: int, draw: CanaryDraw, taken: Sequence[str]
) -> tuple[list[bytes], list[str], str]:
    """Returns the texts of a test and its copies in any order, the new names, and the name with the right value."""
    (change,) = site.changes
    right = source[change.start : change.end]
    if change.opposite is None:
        values = [right, *other_values(right, copies, draw)]
    else:
        values = [right, change.opposite]
    old = source[site.name_start : site.name_end].decode()
    names: list[str] = []
    for _ in values[1:]:
        names.append(draw.new_name(old, site.joiner, [*taken, *names]))
    draw.random.shuffle(values)
    named = list(zip([old, *names], values))
    genuine = next(name for name, value in named if value == right)
    blocks = [_block(source, site, name.encode(), value) for name, value in named]
    draw.random.shuffle(blocks)
    return blocks, names, genuine


def _block(source: bytes, site: TestSite, name: bytes, value: bytes) -> bytes:
    """Returns the text of a test with another name and another value."""
    (change,) = site.changes
    edits = [(site.name_start, site.name_end, name), (change.start, change.end, value)]
    text, end = b"", site.end
    for start, stop, new in sorted(edits, reverse=True):
        text = new + source[stop:end] + text
        end = start
    return source[site.start : end] + text


def _indentation(source: bytes, start: int) -> bytes:
    line = source[source.rfind(b"\n", 0, start) + 1 : start]
    return line if not line.strip() else b""
