"""Tests names of config fields: hints for wrong ones, and the meanings in docstrings."""

import dataclasses

import pytest

from glm5_jax import presets
from glm5_jax.runtime.config_fields import (
    attributes_of,
    check_path,
    field_meanings,
    suggest,
    tree_of,
    unknown_variant,
)

TREE = {
    "checkpoint": None,
    "schedule": {"peak": None, "end": None},
    "train": {"steps": None, "keep": None},
    "optimizer": {"ns_steps": None},
}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("num_hiden_layers", "no field 'num_hiden_layers'; did you mean num_hidden_layers"),
        (
            "rope_parameters.rope_teta",
            "in rope_parameters; did you mean rope_parameters.rope_theta",
        ),
        ("hidden_size.x", "in hidden_size, which is a single value"),
        ("rope_parameters", "rope_parameters is a group of fields; set one of them: rope_theta"),
    ],
)
def test_suggests_field_for_wrong_path(path, message):
    with pytest.raises(ValueError, match=message):
        check_path(tree_of(presets.tiny()), path)


def test_accepts_path_of_field():
    check_path(tree_of(presets.tiny()), "rope_parameters.rope_theta")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("steps", ["train.steps", "optimizer.ns_steps"]),
        ("lr", ["schedule.peak"]),
        ("train.step", ["train.steps"]),
        ("train.peak", ["schedule.peak"]),
        ("resume_from", ["checkpoint"]),
        ("ns", ["optimizer.ns_steps"]),
        ("colour", []),
    ],
)
def test_suggests_fields_by_similar_and_common_names(path, expected):
    assert suggest(TREE, path)[: len(expected)] == expected
    assert bool(suggest(TREE, path)) == bool(expected)


def test_suggests_field_of_stage_for_common_name():
    assert suggest({"sft": TREE}, "learning_rate") == ["sft.schedule.peak"]


def test_suggests_flags_and_lists_fields():
    with pytest.raises(ValueError, match="no field .workdri.; did you mean --workdir"):
        check_path(TREE, "workdri", "--", {"workdir"})
    with pytest.raises(ValueError, match="no field 'colour' in train; there are --train.steps, "):
        check_path(TREE, "train.colour", "--")


@pytest.mark.parametrize(
    ("variant", "variants", "message"),
    [
        ("tinyy", ["tiny", "small"], "did you mean tiny? There are tiny, small"),
        ("huge", ["tiny", "small"], "use one of tiny, small"),
        ("x", ["tiny,a", "tiny,b"], "use one of tiny,a or tiny,b"),
    ],
)
def test_names_similar_variant(variant, variants, message):
    assert unknown_variant(variant, variants) == f"unknown variant {variant!r}; {message}"


def test_reads_meanings_from_docstring():
    docstring = """Options.

    Attributes:
      width: columns; None: as many
        as fit: at least one.
      left, right: margins, in characters.

    Further text: no attribute.
    """
    assert attributes_of(docstring) == {
        "width": "columns; None: as many as fit: at least one.",
        "left": "margins, in characters.",
        "right": "margins, in characters.",
    }
    assert attributes_of("Options without the section.") == {}


def test_inherits_meanings_of_base_class():
    @dataclasses.dataclass
    class Base:
        """Base.

        Attributes:
          size: bytes of the base.
          name: its name.
        """

    @dataclasses.dataclass
    class Derived(Base):
        """Derived.

        Attributes:
          size: bytes of both.
        """

    assert field_meanings(Derived) == {"size": "bytes of both.", "name": "its name."}
