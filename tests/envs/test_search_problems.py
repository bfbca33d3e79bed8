"""Rejects questions that do not need their hops; the shipped questions need them."""

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


def changed_problem(hop=None, **changes):
    """Returns the good problem with changes to it, or to the hop of a number."""
    hops = list(GOOD.hops)
    if hop is not None:
        hops[hop] = dataclasses.replace(hops[hop], **changes)
        changes = {}
    return dataclasses.replace(GOOD, **{"hops": tuple(hops), **changes})


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (changed_problem(question="Did the founder of the place of Songs of Quo come from Brun?"), "'Brun' occurs in the question"),
        (changed_problem(question="Did the founder of the place of Songs of Quo come from a Brun Town?"), "'Brun' occurs"),
        (changed_problem(question="Where did the founder of Velm of Songs of Quo come from?"), "'Velm' occurs in the question"),
        (changed_problem(question="Where did the founder of the place of the book come from?"), "no name to search for"),
        # Passage 2 has both Osk's name and his origin.
        (changed_problem(question="Where did the mason Osk come from?"), "passage 2 has the names"),
        (changed_problem(hops=HOPS[:1]), "has 1 hops; 2 to 4"),
        (changed_problem(hops=HOPS + HOPS), "has 6 hops"),
        (changed_problem(0, passage=9), "hop 1 is in passage 9, which does not exist"),
        (changed_problem(0, passage=-1), "hop 1 is in passage -1"),
        (changed_problem(0, passage=2), "passage 2 does not contain 'Velm'"),
        (changed_problem(2, answer="Orn"), "which does not answer it"),
        (changed_problem(1, question="Who founded Velm?"), "no later hop asks about hop 1"),
        (changed_problem(1, question="Who founded #2?"), "hop 2 asks about a hop that is not before it"),
        (changed_problem(1, question="Who founded #0 and #1?"), "hop 2 asks about"),
        (changed_problem(0, passage=0, answer="Velm"), "two of its hops have one passage"),
        (changed_problem(answers=()), "each must have a word"),
        (changed_problem(answers=("Brun", "the")), "each must have a word"),
    ],
)  # fmt: skip
def test_rejects_question_that_does_not_need_its_hops(problem, why):
    check(GOOD, CORPUS)
    with pytest.raises(ValueError, match=why):
        check(problem, CORPUS)


def test_passage_may_have_answer_and_some_names():
    two = changed_problem(
        question="Where did the founder of the place of Songs of Quo on the Orn come from?"
    )
    check(two, Corpus([*CORPUS.passages, Passage("Orn", "It flows through Brun.")]))
    with pytest.raises(ValueError, match="passage 4 has the names"):
        check(
            two, Corpus([*CORPUS.passages, Passage("Orn", "Through Brun, as in the Songs of Quo.")])
        )


def test_names_are_capitalised_words_or_numbers():
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

    def test_all_need_their_hops(self):
        problems = self.problems()
        assert len(problems) == 46 and len(corpus_of(MUSIQUE).passages) == 1890
        assert {len(problem.hops) for problem in problems} == {2, 3, 4}

    def test_rejects_all_with_answer_in_question(self):
        for problem in self.problems():
            for answer in (*problem.answers, problem.hops[0].answer):
                leaked = f"{problem.question} It is {answer}, or is it not?"
                with pytest.raises(ValueError, match="occurs in the question"):
                    check(dataclasses.replace(problem, question=leaked), corpus_of(MUSIQUE))

    def test_rejects_all_with_passage_that_has_everything(self):
        for problem in self.problems()[:5]:
            [*passages] = corpus_of(MUSIQUE).passages
            passages.append(Passage("All", f"{problem.question} {problem.answers[-1]}"))
            with pytest.raises(ValueError, match="passage 1890 has the names"):
                check(problem, Corpus(passages))

    def test_rejects_each_without_one_of_its_passages(self):
        for problem in self.problems()[::8]:
            for hop in problem.hops:
                passages = list(corpus_of(MUSIQUE).passages)
                passages[hop.passage] = Passage("Gone", "")
                with pytest.raises(ValueError, match="does not contain"):
                    check(problem, Corpus(passages))


def write_lines(tmp_path, *lines):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_reads_questions_and_passages(tmp_path):
    line = {"question": GOOD.question, **GOOD.data}
    assert read_problems(write_lines(tmp_path, line, line), CORPUS) == [GOOD, GOOD]
    passages = write_lines(tmp_path, *(p._asdict() for p in CORPUS.passages))
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
def test_names_invalid_line(tmp_path, change, why):
    line = {"question": GOOD.question, **GOOD.data}
    with pytest.raises(ValueError, match=why):
        read_problems(write_lines(tmp_path, line, line | change), CORPUS)
    with pytest.raises(ValueError, match="line 1: give a title and a text"):
        Corpus.read(write_lines(tmp_path, {"title": "x"}))
    for broken in ("[]", "{"):
        path = write_lines(tmp_path)
        path.write_text(broken)
        with pytest.raises(ValueError, match="line 1: "):
            read_problems(path, CORPUS)


def test_says_matches_complete_words():
    assert says(" tarin osk ", "Osk") and not says(" tarin osk ", "sk") and not says(" a ", "...")
