"""Tests that long-context tasks are solvable from their prompt, of exact length, and reproducible."""

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


def markers_of(task_source) -> dict[str, int]:
    return TokenRenderer(TOKENIZER, task_source.config).markers


@pytest.mark.parametrize("kind,haystack", FORMS)
def test_text_reader_finds_answers(kind, haystack):
    task_source = tasks(kind, "text", haystack=haystack)
    for i in range(12):
        task = task_source.task(i)
        prompt = TOKENIZER.decode(task.prompt, errors="replace")
        want = [TOKENIZER.decode(answer).removeprefix(",")[1:] for answer in task.answers]
        results = oracle.solve_text(kind, prompt)
        if kind == "mrcr":  # the oracle includes the line end that closes the round
            results = [results[0].removesuffix("\n")]
        assert results == want
        assert len(task.token_ids) == LENGTH["text"]


@pytest.mark.parametrize("value_tokens", [1, 3])
@pytest.mark.parametrize("kind,haystack", FORMS)
def test_token_reader_finds_answers(kind, haystack, value_tokens):
    task_source = tasks(
        kind, haystack=haystack, value_tokens=value_tokens, num_chains=2, num_repeats=3,
        reply_tokens=5,
    )  # fmt: skip
    markers = markers_of(task_source)
    for i in range(40):
        task = task_source.task(i)
        results = oracle.solve_tokens(kind, task.prompt.tolist(), markers, task_source.config)
        assert results == [answer.tolist() for answer in task.answers]
        assert len(task.token_ids) == LENGTH["tokens"]


@pytest.mark.parametrize("surface", ["tokens", "text"])
def test_depths_locate_needles(surface):
    for kind, count in (("needle", 1), ("multi_key", 1), ("multi_value", 4), ("multi_query", 4)):
        task_source = tasks(kind, surface)
        for i in range(5):
            task = task_source.task(i)
            assert len(task.depths) == count
            for depth, answer in zip(task.depths, task.answers, strict=True):
                start = round(depth * len(task.prompt))
                note = task.prompt[start : start + 40].tolist()
                if surface == "tokens":
                    assert [note[0], note[2]] == [markers_of(task_source)["note"], answer[0]]
                else:
                    text = TOKENIZER.decode(note, errors="replace").split("\n")[0]
                    value = TOKENIZER.decode(answer).strip(", ")
                    assert text.startswith("Note: the code of") and text.endswith(f"is {value}.")


def test_draws_needles_and_keys_uniformly():
    """Neither the position of the needle nor its rank among the notes reveals it."""
    for haystack in ("noise", "notes"):
        task_source = tasks("multi_key", haystack=haystack)
        results = [task_source.task(i) for i in range(400)]
        depths = np.array([task.depths[0] for task in results])
        assert np.abs(np.histogram(depths, 4, (0, 1))[0] - 100).max() < 35  # 4 sigma
        first = [task.prompt[-1] == _keys(task_source, task)[0] for task in results]
        assert np.mean(first) < 0.4  # the rate is 1/4 or less
    fourth = [tasks("mrcr", num_repeats=4, reply_tokens=3).task(i).prompt[-3] for i in range(60)]
    assert len(set(fourth)) == 4  # all four requests are targets


def _keys(task_source, task):
    notes = np.flatnonzero(task.prompt == markers_of(task_source)["note"])
    return task.prompt[notes + 1]


def test_fills_haystack_of_notes_completely():
    task_source = tasks("multi_key", haystack="notes")
    for i in range(20):
        keys = _keys(task_source, task_source.task(i)).tolist()
        assert len(keys) == (128 - 3) // 3 and len(set(keys)) == len(keys)


def test_takes_haystack_from_source_text():
    task = tasks("needle", "text").task(3)
    text = SHAKESPEARE.read_text("utf-8")
    lines = TOKENIZER.decode(task.prompt).split("\n")[2:-4]
    haystack = [line for line in lines if line and not line.startswith("Note: ")]
    assert len(haystack) > 10 and all(f"{line}\n" in text for line in haystack)


def test_word_frequencies_follow_zipf_law():
    task_source = tasks("frequent", length=2000, num_frequent=5, zipf=1.5)
    task = task_source.task(0)
    words, counts = np.unique(task.prompt[:-1], return_counts=True)
    top = np.sort(counts)[::-1]
    assert [words[counts == n][0] for n in top[:5]] == [a[0] for a in task.answers]
    np.testing.assert_allclose(top[:8], top[0] / np.arange(1, 9) ** 1.5, atol=1.01)


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_depend_only_on_seed_and_index(kind):
    small = {"reply_tokens": 4}
    task_source, repeated = tasks(kind, **small), tasks(kind, **small)
    ids = {i: repeated.task(i).token_ids for i in (7, 2, 5)}  # drawn in another order
    for i, expected in ids.items():
        np.testing.assert_array_equal(task_source.task(i).token_ids, expected)
    others = (tasks(kind, seed=1, **small), tasks(kind, stream="evaluation", **small))
    for other in others:
        assert (other.task(7).token_ids != ids[7]).any()
    assert (task_source.task(8).token_ids != ids[7]).any()


def test_assigns_id_roles_independent_of_seed():
    special = set(TOKENIZER.special_ids.values())
    pools = []
    for seed in (0, 1):
        task_source = tasks("needle", seed=seed)
        pools.append(markers_of(task_source))
        seen = {int(i) for n in range(30) for i in task_source.task(n).token_ids}
        assert not seen & special
    assert pools[0] == pools[1]


def test_more_keys_keep_other_id_roles():
    few, many = (TokenRenderer(TOKENIZER, config("needle", num_keys=n)) for n in (32, 500))
    assert (few.markers, few.forms, few.topics) == (many.markers, many.forms, many.topics)

    def draws(surface):
        rng = np.random.default_rng(0)
        return surface.reply(rng, 300), surface.haystack(rng, 300)[0].tolist()

    assert draws(few) == draws(many)
    keys = [{*surface.keys(np.random.default_rng(0))} for surface in (few, many)]
    assert len(keys[0]) == 32 and keys[0] < keys[1]


@pytest.mark.parametrize("surface", ["tokens", "text"])
def test_masks_loss_to_answers_or_trains_all(surface):
    task_source = tasks("multi_value", surface)
    task, record = task_source.task(4), task_source[np.int64(4)]
    size = sum(map(len, task.answers))
    assert len(record) == LENGTH[surface] and record.task_id == "multi_value/4"
    np.testing.assert_array_equal(record.token_ids, task.token_ids)
    assert record.loss_mask.sum() == size and record.loss_mask[-size:].all()
    np.testing.assert_array_equal(record.ce_weight, record.loss_mask)
    assert [b - a for a, b, _ in record.spans] == [len(a) for a in task.answers]
    unmasked = tasks("multi_value", surface, loss="all")[4]
    assert unmasked.loss_mask.sum() == LENGTH[surface] - 1
    np.testing.assert_array_equal(unmasked.token_ids, record.token_ids)


@pytest.mark.parametrize("surface", ["tokens", "text"])
def test_trains_practice_questions(surface):
    """Answers of practice questions are part of the prompt and follow from the notes. Records train on all of them."""
    task_source = tasks("multi_key", surface, num_needles=6, num_questions=4, haystack="notes")
    for i in range(10):
        task = task_source.task(i)
        spans = [*task.practice, (len(task.prompt), len(task.token_ids))]
        assert len({tuple(task.token_ids[start:end].tolist()) for start, end in spans}) == 4
        for start, end in spans:
            if surface == "tokens":
                prompt = task.token_ids[:start].tolist()
                markers = markers_of(task_source)
                results = oracle.solve_tokens("multi_key", prompt, markers, task_source.config)
                assert results == [task.token_ids[start:end].tolist()]
            else:
                prompt = TOKENIZER.decode(task.token_ids[:start], errors="replace")
                answer = TOKENIZER.decode(task.token_ids[start:end])
                assert oracle.solve_text("multi_key", prompt) == [answer[1:]]
        mask = np.zeros(len(task.token_ids))
        for start, end in spans:
            mask[start:end] = 1
        np.testing.assert_array_equal(task_source[i].loss_mask, mask)
        assert [span[:2] for span in task_source[i].spans] == spans


def test_task_sequence_has_end():
    task_source = tasks("needle", size=3)
    assert len(task_source) == 3 and len(list(task_source)) == 3
    with pytest.raises(IndexError, match="item 3 of 3"):
        task_source[3]


@pytest.mark.parametrize("kind", KINDS)
def test_makes_long_texts_of_exact_length(kind):
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
def test_rejects_invalid_values(changes, message):
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
def test_rejects_impossible_config_at_construction(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        LongContextTasks(config(kind, **changes), TOKENIZER)


def test_accepts_exactly_minimum_length_of_message():
    for kind in KINDS:
        with pytest.raises(ValueError, match="it needs") as error:
            tasks(kind, length=2)
        min_length = int(str(error.value).split("it needs ")[1].split()[0])
        task_source = tasks(kind, length=min_length)
        assert all(len(task_source.task(i).token_ids) == min_length for i in range(30))
        with pytest.raises(ValueError, match="too short"):
            tasks(kind, length=min_length - 1)


def test_rejects_source_of_empty_documents():
    with pytest.raises(ValueError, match="only empty documents"):
        LongContextTasks(config("needle", "text"), TOKENIZER, source=["", ""])


def test_accepts_any_sequence_as_haystack_source():
    task_source = LongContextTasks(
        config("needle", "text"), TOKENIZER, source=["One line.", "", "Two."]
    )
    prompt = TOKENIZER.decode(task_source.task(0).prompt, errors="replace")
    assert "One line.\nTwo.\nOne line.\n" in prompt


def test_documents_every_kind():
    assert all(f"\n  {kind} " in synthetic.__doc__ for kind in KINDS)
    assert dataclasses.asdict(LongContextTaskConfig())["num_hops"] == 4
