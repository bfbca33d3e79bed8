"""Questions that do not take their hops are refused, and those that are shipped do."""

import dataclasses
import json

import pytest

from glm5_jax.data.sources import ASSETS
from glm5_jax.envs.search.passages import Corpus, Passage, says
from glm5_jax.envs.search.problems import (
    Hop,
    Problem,
    check,
    fill_question,
    names_of,
    read_problems,
)
from glm5_jax.envs.search.tools import MUSIQUE, corpus_of

CORPUS = Corpus(
    [
        Passage("Velm", "Velm is a town on the Orn. Its first stone was laid by Tarin Osk."),
        Passage("Songs of Quo", "A book that plays in Velm."),
        Passage("Tarin Osk", "A mason who came from Brun."),
        Passage("Brun", "A town. Osk is a common name here."),
    ]
)
HOPS = (
    Hop("Where does Songs of Quo play?", "Velm", 1),
    Hop("Who founded #1?", "Tarin Osk", 0),
    Hop("Where did #2 come from?", "Brun", 2),
)
GOOD = Problem(
    "Where did the founder of the place of Songs of Quo come from?", ("Brun", "Brun town"), HOPS
)


def changed(hop=None, **changes):
    """The good problem, with changes to it or to the hop of a number."""
    hops = list(GOOD.hops)
    if hop is not None:
        hops[hop] = dataclasses.replace(hops[hop], **changes)
        changes = {}
    return dataclasses.replace(GOOD, **{"hops": tuple(hops), **changes})


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (changed(question="Did the founder of the place of Songs of Quo come from Brun?"), "'Brun' occurs in the question"),
        (changed(question="Did the founder of the place of Songs of Quo come from a Brun Town?"), "'Brun' occurs"),
        (changed(question="Where did the founder of Velm of Songs of Quo come from?"), "'Velm' occurs in the question"),
        (changed(question="Where did the founder of the place of the book come from?"), "no name to search for"),
        # Passage 2 alone says Osk's name and where he came from.
        (changed(question="Where did the mason Osk come from?"), "passage 2 has the names"),
        (changed(hops=HOPS[:1]), "has 1 hops; 2 to 4"),
        (changed(hops=HOPS + HOPS), "has 6 hops"),
        (changed(0, passage=9), "hop 1 is in passage 9, which does not exist"),
        (changed(0, passage=-1), "hop 1 is in passage -1"),
        (changed(0, passage=2), "passage 2 does not contain 'Velm'"),
        (changed(2, answer="Orn"), "which does not answer it"),
        (changed(1, question="Who founded Velm?"), "no later hop asks about hop 1"),
        (changed(1, question="Who founded #2?"), "hop 2 asks about a hop that is not before it"),
        (changed(1, question="Who founded #0 and #1?"), "hop 2 asks about"),
        (changed(0, passage=0, answer="Velm"), "two of its hops have one passage"),
        (changed(answers=()), "each must have a word"),
        (changed(answers=("Brun", "the")), "each must have a word"),
    ],
)  # fmt: skip
def test_a_question_that_does_not_take_its_hops_is_refused(problem, why):
    check(GOOD, CORPUS)
    with pytest.raises(ValueError, match=why):
        check(problem, CORPUS)


def test_one_passage_may_say_the_answer_and_some_names_but_not_all():
    two = changed(
        question="Where did the founder of the place of Songs of Quo on the Orn come from?"
    )
    check(two, Corpus([*CORPUS.passages, Passage("Orn", "It flows through Brun.")]))
    with pytest.raises(ValueError, match="passage 4 has the names"):
        check(
            two, Corpus([*CORPUS.passages, Passage("Orn", "Through Brun, as in the Songs of Quo.")])
        )


def test_names_are_words_with_a_capital_or_a_digit_but_the_first():
    assert names_of("Who met Élan O'Hara in 1869? The end of it, McRae.") == {
        "elan",
        "o",
        "hara",
        "1869",
        "mcrae",
    }
    assert names_of("where is it?") == names_of("Paris") == set()


class TestShipped:
    def problems(self):
        return read_problems(ASSETS / "musique_questions.jsonl", corpus_of(MUSIQUE))

    def test_all_take_their_hops(self):
        found = self.problems()
        assert len(found) == 46 and len(corpus_of(MUSIQUE).passages) == 1890
        assert {len(problem.hops) for problem in found} == {2, 3, 4}

    def test_with_the_answer_in_the_question_all_are_refused(self):
        for problem in self.problems():
            for answer in (*problem.answers, problem.hops[0].answer):
                leaked = f"{problem.question} It is {answer}, or is it not?"
                with pytest.raises(ValueError, match="occurs in the question"):
                    check(dataclasses.replace(problem, question=leaked), corpus_of(MUSIQUE))

    def test_with_a_passage_that_says_all_of_it_all_are_refused(self):
        for problem in self.problems()[:5]:
            [*passages] = corpus_of(MUSIQUE).passages
            passages.append(Passage("All", f"{problem.question} {problem.answers[-1]}"))
            with pytest.raises(ValueError, match="passage 1890 has the names"):
                check(problem, Corpus(passages))

    def test_without_one_of_its_passages_each_is_refused(self):
        for problem in self.problems()[::8]:
            for hop in problem.hops:
                passages = list(corpus_of(MUSIQUE).passages)
                passages[hop.passage] = Passage("Gone", "")
                with pytest.raises(ValueError, match="does not contain"):
                    check(problem, Corpus(passages))


def written(tmp_path, *lines):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_own_questions_are_read(tmp_path):
    line = {"question": GOOD.question, **GOOD.data}
    assert read_problems(written(tmp_path, line, line), CORPUS) == [GOOD, GOOD]
    passages = written(tmp_path, *(p._asdict() for p in CORPUS.passages))
    assert Corpus.read(passages).passages == CORPUS.passages
    assert fill_question(HOPS[2], ["Velm", "Tarin Osk"]) == "Where did Tarin Osk come from?"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hops": []}, "line 2: it has 0 hops"),
        ({"hops": [{"question": "?"}]}, "line 2: it needs question, answers and hops"),
        ({"hops": 3}, "line 2: it needs"),
        ({"answers": [1]}, "line 2: it needs"),
        ({"question": None}, "line 2: it needs"),
        ({"hops": [dataclasses.asdict(HOPS[0]) | {"passage": True}]}, "a passage is no number"),
    ],
)
def test_lines_that_are_none_are_named(tmp_path, change, why):
    line = {"question": GOOD.question, **GOOD.data}
    with pytest.raises(ValueError, match=why):
        read_problems(written(tmp_path, line, line | change), CORPUS)
    with pytest.raises(ValueError, match="line 1: give a title and a text"):
        Corpus.read(written(tmp_path, {"title": "x"}))
    for broken in ("[]", "{"):
        path = written(tmp_path)
        path.write_text(broken)
        with pytest.raises(ValueError, match="line 1: "):
            read_problems(path, CORPUS)


def test_says_goes_by_whole_words():
    assert says(" tarin osk ", "Osk") and not says(" tarin osk ", "sk") and not says(" a ", "...")
