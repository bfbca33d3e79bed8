"""Long-context tasks: solvable from their prompt alone, of exact length, the same everywhere."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.data import synthetic
from glm5_jax.data.sources import SHAKESPEARE
from glm5_jax.data.synthetic import KINDS, LongContextTaskConfig, LongContextTasks
from glm5_jax.data.task_renderers import TokenRenderer
from glm5_jax.text.tokenizer import Tokenizer
from tests.oracles import long_context as oracle

TOKENIZER = Tokenizer.default()
NOTES = [(kind, "notes") for kind in ("needle", "multi_key", "multi_value", "multi_query")]
FORMS = [(kind, "noise") for kind in KINDS] + NOTES
LENGTH = {"tokens": 128, "text": 700}


def config(kind, surface="tokens", **changes):
    return LongContextTaskConfig(
        kind=kind, surface=surface, **({"length": LENGTH[surface]} | changes)
    )


def tasks(kind, surface="tokens", *, stream="train", **changes):
    return LongContextTasks(config(kind, surface, **changes), TOKENIZER, stream=stream)


def markers_of(drawn) -> dict[str, int]:
    return TokenRenderer(TOKENIZER, drawn.config).markers


@pytest.mark.parametrize("kind,haystack", FORMS)
def test_a_reader_of_the_text_finds_the_answers(kind, haystack):
    drawn = tasks(kind, "text", haystack=haystack)
    for i in range(12):
        task = drawn.task(i)
        prompt = TOKENIZER.decode(task.prompt, errors="replace")
        want = [TOKENIZER.decode(answer).removeprefix(",")[1:] for answer in task.answers]
        found = oracle.solve_text(kind, prompt)
        if kind == "mrcr":  # the reply, and the line end that closed its round
            found = [found[0].removesuffix("\n")]
        assert found == want
        assert len(task.token_ids) == LENGTH["text"]


@pytest.mark.parametrize("value_tokens", [1, 3])
@pytest.mark.parametrize("kind,haystack", FORMS)
def test_a_reader_of_the_tokens_finds_the_answers(kind, haystack, value_tokens):
    drawn = tasks(
        kind, haystack=haystack, value_tokens=value_tokens, num_chains=2, num_repeats=3,
        reply_tokens=5,
    )  # fmt: skip
    markers = markers_of(drawn)
    for i in range(40):
        task = drawn.task(i)
        found = oracle.solve_tokens(kind, task.prompt.tolist(), markers, drawn.config)
        assert found == [answer.tolist() for answer in task.answers]
        assert len(task.token_ids) == LENGTH["tokens"]


@pytest.mark.parametrize("surface", ["tokens", "text"])
def test_depths_are_where_the_needles_are(surface):
    for kind, count in (("needle", 1), ("multi_key", 1), ("multi_value", 4), ("multi_query", 4)):
        drawn = tasks(kind, surface)
        for i in range(5):
            task = drawn.task(i)
            assert len(task.depths) == count
            for depth, answer in zip(task.depths, task.answers, strict=True):
                start = round(depth * len(task.prompt))
                note = task.prompt[start : start + 40].tolist()
                if surface == "tokens":
                    assert [note[0], note[2]] == [markers_of(drawn)["note"], answer[0]]
                else:
                    text = TOKENIZER.decode(note, errors="replace").split("\n")[0]
                    value = TOKENIZER.decode(answer).strip(", ")
                    assert text.startswith("Note: the code of") and text.endswith(f"is {value}.")


def test_needles_lie_everywhere_and_any_key_is_asked():
    """Neither its place nor its rank among the notes gives the needle away."""
    for haystack in ("noise", "notes"):
        drawn = tasks("multi_key", haystack=haystack)
        found = [drawn.task(i) for i in range(400)]
        depths = np.array([task.depths[0] for task in found])
        assert np.abs(np.histogram(depths, 4, (0, 1))[0] - 100).max() < 35  # 4 sigma
        first = [task.prompt[-1] == _keys(drawn, task)[0] for task in found]
        assert np.mean(first) < 0.4  # the first of four, or of all
    fourth = [tasks("mrcr", num_repeats=4, reply_tokens=3).task(i).prompt[-3] for i in range(60)]
    assert len(set(fourth)) == 4  # which of the four requests is meant


def _keys(drawn, task):
    notes = np.flatnonzero(task.prompt == markers_of(drawn)["note"])
    return task.prompt[notes + 1]


def test_a_haystack_of_notes_leaves_room_for_none_more():
    drawn = tasks("multi_key", haystack="notes")
    for i in range(20):
        keys = _keys(drawn, drawn.task(i)).tolist()
        assert len(keys) == (128 - 3) // 3 and len(set(keys)) == len(keys)


def test_the_haystack_is_the_sources_text():
    task = tasks("needle", "text").task(3)
    text = SHAKESPEARE.read_text("utf-8")
    lines = TOKENIZER.decode(task.prompt).split("\n")[2:-4]
    own = [line for line in lines if line and not line.startswith("Note: ")]
    assert len(own) > 10 and all(f"{line}\n" in text for line in own)


def test_frequencies_fall_with_the_rank():
    drawn = tasks("frequent", length=2000, num_frequent=5, zipf=1.5)
    task = drawn.task(0)
    words, counts = np.unique(task.prompt[:-1], return_counts=True)
    top = np.sort(counts)[::-1]
    assert [words[counts == n][0] for n in top[:5]] == [a[0] for a in task.answers]
    np.testing.assert_allclose(top[:8], top[0] / np.arange(1, 9) ** 1.5, atol=1.01)


@pytest.mark.parametrize("kind", KINDS)
def test_items_depend_on_seed_and_index_alone(kind):
    small = {"reply_tokens": 4}
    drawn, again = tasks(kind, **small), tasks(kind, **small)
    ids = {i: again.task(i).token_ids for i in (7, 2, 5)}  # in another order
    for i, want in ids.items():
        np.testing.assert_array_equal(drawn.task(i).token_ids, want)
    others = (tasks(kind, seed=1, **small), tasks(kind, stream="evaluation", **small))
    for other in others:
        assert (other.task(7).token_ids != ids[7]).any()
    assert (drawn.task(8).token_ids != ids[7]).any()


def test_roles_of_ids_are_the_same_for_all_seeds_and_never_special():
    special = set(TOKENIZER.special_ids.values())
    pools = []
    for seed in (0, 1):
        drawn = tasks("needle", seed=seed)
        pools.append(markers_of(drawn))
        seen = {int(i) for n in range(30) for i in drawn.task(n).token_ids}
        assert not seen & special
    assert pools[0] == pools[1]


def test_more_keys_leave_every_role_as_it_is():
    few, many = (TokenRenderer(TOKENIZER, config("needle", num_keys=n)) for n in (32, 500))
    assert (few.markers, few.forms, few.topics) == (many.markers, many.forms, many.topics)

    def drawn(surface):
        rng = np.random.default_rng(0)
        return surface.reply(rng, 300), surface.haystack(rng, 300)[0].tolist()

    assert drawn(few) == drawn(many)
    keys = [{*surface.keys(np.random.default_rng(0))} for surface in (few, many)]
    assert len(keys[0]) == 32 and keys[0] < keys[1]


@pytest.mark.parametrize("surface", ["tokens", "text"])
def test_records_train_on_the_answers_or_on_all(surface):
    drawn = tasks("multi_value", surface)
    task, record = drawn.task(4), drawn[np.int64(4)]
    size = sum(map(len, task.answers))
    assert len(record) == LENGTH[surface] and record.task_id == "multi_value/4"
    np.testing.assert_array_equal(record.token_ids, task.token_ids)
    assert record.loss_mask.sum() == size and record.loss_mask[-size:].all()
    np.testing.assert_array_equal(record.ce_weight, record.loss_mask)
    assert [b - a for a, b, _ in record.spans] == [len(a) for a in task.answers]
    whole = tasks("multi_value", surface, loss="all")[4]
    assert whole.loss_mask.sum() == LENGTH[surface] - 1
    np.testing.assert_array_equal(whole.token_ids, record.token_ids)


@pytest.mark.parametrize("surface", ["tokens", "text"])
def test_earlier_questions_are_practice(surface):
    """Their answers stand in the prompt, and are what the notes say; records train on all of them."""
    drawn = tasks("multi_key", surface, num_needles=6, num_questions=4, haystack="notes")
    for i in range(10):
        task = drawn.task(i)
        spans = [*task.practice, (len(task.prompt), len(task.token_ids))]
        assert len({tuple(task.token_ids[start:end].tolist()) for start, end in spans}) == 4
        for start, end in spans:
            if surface == "tokens":
                prompt = task.token_ids[:start].tolist()
                markers = markers_of(drawn)
                found = oracle.solve_tokens("multi_key", prompt, markers, drawn.config)
                assert found == [task.token_ids[start:end].tolist()]
            else:
                prompt = TOKENIZER.decode(task.token_ids[:start], errors="replace")
                answer = TOKENIZER.decode(task.token_ids[start:end])
                assert oracle.solve_text("multi_key", prompt) == [answer[1:]]
        mask = np.zeros(len(task.token_ids))
        for start, end in spans:
            mask[start:end] = 1
        np.testing.assert_array_equal(drawn[i].loss_mask, mask)
        assert [span[:2] for span in drawn[i].spans] == spans


def test_a_sequence_ends():
    drawn = tasks("needle", size=3)
    assert len(drawn) == 3 and len(list(drawn)) == 3
    with pytest.raises(IndexError, match="item 3 of 3"):
        drawn[3]


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_exact_too(kind):
    assert len(tasks(kind, "text", length=8000).task(0).token_ids) == 8000


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(kind="haystack"), "kind is 'haystack'; use one of needle, multi_key"),
        (dict(surface="image"), "surface is 'image'; use one of text, tokens"),
        (dict(loss="none"), "loss is 'none'; use one of answers, all"),
        (dict(haystack="hay"), "haystack is 'hay'; use one of noise, notes"),
        (dict(length=1), "length is 1; it must be at least 2"),
        (dict(seed=-1), "seed is -1; it must be at least 0"),
        (dict(num_needles=0), "num_needles is 0; it must be at least 1"),
        (dict(num_repeats=1), "num_repeats is 1; it must be at least 2"),
        (dict(num_repeats=9), r"num_repeats is 9; it must be 2..8"),
        (dict(num_keys=23), "num_keys is 23; it must be at least 24"),
        (dict(kind="multi_key", num_questions=5), "num_questions is 5; only kind 'multi_key' asks"),
        (dict(kind="multi_value", num_questions=2), "num_questions is 2; only kind 'multi_key'"),
        (dict(zipf=0.9), "zipf is 0.9; it must be at least 1"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LongContextTaskConfig(**changes)


@pytest.mark.parametrize(
    "kind,changes,message",
    [
        ("needle", dict(length=5), "length 5 is too short for kind 'needle' on tokens: it needs 6"),
        ("needle", dict(surface="text", length=50), "length 50 is too short for kind 'needle' on te"),
        ("frequent", dict(length=8), "length 8 is too short for kind 'frequent'"),
        ("needle", dict(num_noise=2000), "num_noise 2000 with 18 markers exceed the tokenizer's 20"),
        ("multi_key", dict(haystack="notes", num_keys=40), "num_keys 40 is too small for kind 'mul"),
        ("multi_value", dict(num_values=3), "needs 4 different values or replies"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_any_work(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        LongContextTasks(config(kind, **changes), TOKENIZER)


def test_a_task_fits_exactly_at_the_length_that_the_message_names():
    for kind in KINDS:
        with pytest.raises(ValueError, match="it needs") as error:
            tasks(kind, length=2)
        least = int(str(error.value).split("it needs ")[1].split()[0])
        drawn = tasks(kind, length=least)
        assert all(len(drawn.task(i).token_ids) == least for i in range(30))
        with pytest.raises(ValueError, match="too short"):
            tasks(kind, length=least - 1)


def test_a_source_of_empty_documents_is_refused():
    with pytest.raises(ValueError, match="only empty documents"):
        LongContextTasks(config("needle", "text"), TOKENIZER, source=["", ""])


def test_any_sequence_of_texts_is_a_haystack():
    drawn = LongContextTasks(config("needle", "text"), TOKENIZER, source=["One line.", "", "Two."])
    prompt = TOKENIZER.decode(drawn.task(0).prompt, errors="replace")
    assert "One line.\nTwo.\nOne line.\n" in prompt


def test_every_kind_is_in_the_docstring():
    assert all(f"\n  {kind} " in synthetic.__doc__ for kind in KINDS)
    assert dataclasses.asdict(LongContextTaskConfig())["num_hops"] == 4
