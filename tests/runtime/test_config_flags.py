"""Tests that configs become mutable for flags and freeze again with every check."""

import ast
import dataclasses

import pytest

from glm5_jax import presets
from glm5_jax.runtime.config_fields import check_path, tree_of
from glm5_jax.runtime.config_flags import flags_between, to_frozen, to_mutable


def test_round_trip_changes_nothing():
    for name in presets.PRESETS:
        config = presets.get(name)
        assert to_frozen(to_mutable(config)) == config


def test_edits_copy_and_keeps_original():
    config = presets.tiny()
    mutable = to_mutable(config)
    mutable.num_hidden_layers = 2
    mutable.rope_parameters.rope_theta = 500
    mutable.eos_token_id = [1, 2]
    frozen = to_frozen(mutable)
    assert (frozen.num_hidden_layers, frozen.rope_parameters.rope_theta) == (2, 500.0)
    assert frozen.eos_token_id == (1, 2)
    assert config == presets.tiny()
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.num_hidden_layers = 3


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("num_hidden_layers", "two", "num_hidden_layers is 'two'; it must be of type int"),
        ("num_hidden_layers", True, "must be of type int"),
        ("index_topk", 1.5, r"index_topk is 1.5; it must be of type int \| None"),
        ("eos_token_id", ("a",), "eos_token_id"),
        ("num_experts_per_tok", 99, "exceeds n_routed_experts 16"),
    ],
)
def test_rejects_wrong_values(field, value, message):
    mutable = to_mutable(presets.tiny())
    setattr(mutable, field, value)
    with pytest.raises(ValueError, match=message):
        to_frozen(mutable)


def test_names_part_with_invalid_value():
    mutable = to_mutable(presets.tiny())
    mutable.rope_parameters.rope_theta = -1.0
    with pytest.raises(ValueError, match="^rope_parameters: .*rope_theta is -1.0"):
        to_frozen(mutable)


def test_reads_none_from_text():
    @dataclasses.dataclass(frozen=True)
    class Config:
        folder: str | None = "there"

    mutable = to_mutable(Config())
    mutable.folder = "none"
    assert to_frozen(mutable) == Config(None)


def test_reads_dataclasses_in_tuple_from_dicts():
    @dataclasses.dataclass(frozen=True)
    class Source:
        kind: str
        weight: float = 1.0

    @dataclasses.dataclass(frozen=True)
    class Config:
        sources: tuple[Source, ...] = ()

    # Local classes cannot be looked up by name, so the annotation is set to the type.
    Config.__annotations__["sources"] = tuple[Source, ...]
    mutable = to_mutable(Config())
    mutable.sources = [{"kind": "text", "weight": 2.0}]
    assert to_frozen(mutable) == Config((Source("text", 2.0),))
    mutable.sources = [{"sort": "text"}]
    with pytest.raises(ValueError, match="is no Source; its fields are kind, weight"):
        to_frozen(mutable)
    mutable.sources = ["text"]
    with pytest.raises(ValueError, match="sources is .'text',.; it must be of type tuple"):
        to_frozen(mutable)


def test_shows_type_and_example_of_structured_field():
    @dataclasses.dataclass(frozen=True)
    class Source:
        kind: str
        weight: float = 1.0

    @dataclasses.dataclass(frozen=True)
    class Config:
        sources: tuple[Source, ...] = (Source("shakespeare"), Source("stdlib", 2.0))

    Config.__annotations__["sources"] = tuple[Source, ...]
    mutable = to_mutable(Config())
    mutable.sources = "/data/my.txt"
    with pytest.raises(ValueError) as error:
        to_frozen(mutable)
    assert str(error.value) == (
        "sources is '/data/my.txt'; it must be of type tuple[Source, ...]; an example is "
        "({'kind': 'shakespeare'}, {'kind': 'stdlib', 'weight': 2.0})"
    )


def test_reads_dict_as_matching_dataclass_of_union():
    @dataclasses.dataclass(frozen=True)
    class Part:
        size: int = 1

    @dataclasses.dataclass(frozen=True)
    class Text:
        path: str
        weight: float = 1.0
        part: Part | None = None

    @dataclasses.dataclass(frozen=True)
    class Task:
        part: Part
        weight: float = 1.0

    @dataclasses.dataclass(frozen=True)
    class Config:
        sources: tuple[Text | Task, ...] = ()

    Config.__annotations__["sources"] = tuple[Text | Task, ...]
    Text.__annotations__["part"] = Part | None
    Task.__annotations__["part"] = Part
    mutable = to_mutable(Config())
    mutable.sources = [{"part": {"size": 2}, "path": "x"}, {"path": "y"}]
    assert to_frozen(mutable) == Config((Text("x", part=Part(2)), Text("y")))
    # Text comes first and has both fields, but it requires a path.
    mutable.sources = [{"part": {"size": 3}, "weight": 2.0}]
    assert to_frozen(mutable) == Config((Task(Part(3), 2.0),))
    for wrong in ({"part": {"width": 3}}, {"sort": 1}):
        mutable.sources = [wrong]
        with pytest.raises(ValueError, match="is no .*; its fields are "):
            to_frozen(mutable)
    with pytest.raises(
        ValueError, match="no Text; its fields are path, weight, part; and no Task; "
    ):
        to_frozen(mutable)
    for wrong, expected_error in (
        ({"path": "x", "part": {"size": "5"}}, "sources: size is '5'; it must be of type int"),
        ({"path": "x", "part": "big"}, "sources: part is 'big'; it must be of type"),
        ({"path": 1}, "sources: path is 1; it must be of type str"),
    ):
        mutable.sources = [wrong]
        with pytest.raises(ValueError, match=f"^{expected_error}"):
            to_frozen(mutable)


def test_reads_tuple_in_dict_from_list():
    @dataclasses.dataclass(frozen=True)
    class Part:
        sizes: tuple[int, ...] = ()

    @dataclasses.dataclass(frozen=True)
    class Config:
        parts: tuple[Part, ...] = ()

    Config.__annotations__["parts"] = tuple[Part, ...]
    mutable = to_mutable(Config())
    mutable.parts = [{"sizes": [1, 2]}]
    assert to_frozen(mutable) == Config((Part((1, 2)),))


def test_flags_between_configs_reproduce_second():
    @dataclasses.dataclass(frozen=True)
    class Part:
        size: int = 1
        name: str = "a"

    @dataclasses.dataclass(frozen=True)
    class Config:
        rate: float = 0.1
        folder: str | None = None
        part: Part = Part()
        parts: tuple[Part, ...] = (Part(),)
        model: object = None

    expected = Config(2e-5, "there", Part(name="b c"), (Part(2), Part(3, "d")))
    flags = flags_between(Config(), expected)
    assert [path for path, _ in flags] == ["rate", "folder", "part.name", "parts"]
    assert flags_between(expected, expected) == []
    mutable = to_mutable(Config())
    for path, text in flags:
        *groups, name = path.split(".")
        node = mutable
        for group in groups:
            node = getattr(node, group)
        setattr(node, name, text if name in ("folder", "name") else ast.literal_eval(text))
    assert to_frozen(mutable) == expected
    with pytest.raises(ValueError, match="part is a str, and no flag turns a Part into it"):
        flags_between(Config(), dataclasses.replace(expected, part="x"))


@dataclasses.dataclass(frozen=True)
class _Listening:
    port: int = 1
    key: str | None = dataclasses.field(default=None, metadata={"flag": False})


def test_excludes_secrets_from_flags():
    """Secrets keep their value, and flags cannot pass them to another program."""
    mutable = to_mutable(_Listening(key="secret"))
    mutable.port = 2
    assert to_frozen(mutable) == _Listening(2, "secret")
    with pytest.raises(ValueError, match="no field 'key'"):
        check_path(tree_of(mutable), "key")
    assert flags_between(_Listening(), _Listening(2)) == [("port", "2")]
    with pytest.raises(ValueError, match="key has no flag"):
        flags_between(_Listening(), _Listening(key="secret"))
