"""Configs become editable for flags and freeze back with every check."""

import ast
import dataclasses

import pytest

from glm5_jax import presets
from glm5_jax.runtime.config_fields import check_path, tree_of
from glm5_jax.runtime.config_flags import flags_between, to_frozen, to_mutable


def test_a_round_trip_changes_nothing():
    for name in presets.PRESETS:
        config = presets.get(name)
        assert to_frozen(to_mutable(config)) == config


def test_edits_arrive_and_the_original_stays():
    config = presets.tiny()
    twin = to_mutable(config)
    twin.num_hidden_layers = 2
    twin.rope_parameters.rope_theta = 500
    twin.eos_token_id = [1, 2]
    frozen = to_frozen(twin)
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
def test_wrong_values_are_refused(field, value, message):
    twin = to_mutable(presets.tiny())
    setattr(twin, field, value)
    with pytest.raises(ValueError, match=message):
        to_frozen(twin)


def test_a_refusal_inside_names_the_part():
    twin = to_mutable(presets.tiny())
    twin.rope_parameters.rope_theta = -1.0
    with pytest.raises(ValueError, match="^rope_parameters: .*rope_theta is -1.0"):
        to_frozen(twin)


def test_none_can_be_given_as_text():
    @dataclasses.dataclass(frozen=True)
    class Config:
        folder: str | None = "there"

    twin = to_mutable(Config())
    twin.folder = "none"
    assert to_frozen(twin) == Config(None)


def test_dataclasses_in_a_tuple_may_be_written_as_dicts():
    @dataclasses.dataclass(frozen=True)
    class Source:
        kind: str
        weight: float = 1.0

    @dataclasses.dataclass(frozen=True)
    class Config:
        sources: tuple[Source, ...] = ()

    # A function's classes cannot be looked up by name, so the types are written out.
    Config.__annotations__["sources"] = tuple[Source, ...]
    twin = to_mutable(Config())
    twin.sources = [{"kind": "text", "weight": 2.0}]
    assert to_frozen(twin) == Config((Source("text", 2.0),))
    twin.sources = [{"sort": "text"}]
    with pytest.raises(ValueError, match="is no Source; its fields are kind, weight"):
        to_frozen(twin)
    twin.sources = ["text"]
    with pytest.raises(ValueError, match="sources is .'text',.; it must be of type tuple"):
        to_frozen(twin)


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


def test_a_dict_becomes_the_dataclass_of_a_union_that_has_its_fields_and_so_does_what_is_in_it():
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
    twin = to_mutable(Config())
    twin.sources = [{"part": {"size": 2}, "path": "x"}, {"path": "y"}]
    assert to_frozen(twin) == Config((Text("x", part=Part(2)), Text("y")))
    # Text comes first and has all the fields given, but not without a path.
    twin.sources = [{"part": {"size": 3}, "weight": 2.0}]
    assert to_frozen(twin) == Config((Task(Part(3), 2.0),))
    for wrong in ({"part": {"width": 3}}, {"sort": 1}):
        twin.sources = [wrong]
        with pytest.raises(ValueError, match="is no .*; its fields are "):
            to_frozen(twin)
    with pytest.raises(
        ValueError, match="no Text; its fields are path, weight, part; and no Task; "
    ):
        to_frozen(twin)
    for wrong, said in (
        ({"path": "x", "part": {"size": "5"}}, "sources: size is '5'; it must be of type int"),
        ({"path": "x", "part": "big"}, "sources: part is 'big'; it must be of type"),
        ({"path": 1}, "sources: path is 1; it must be of type str"),
    ):
        twin.sources = [wrong]
        with pytest.raises(ValueError, match=f"^{said}"):
            to_frozen(twin)


def test_a_tuple_within_a_dict_may_be_written_as_a_list():
    @dataclasses.dataclass(frozen=True)
    class Part:
        sizes: tuple[int, ...] = ()

    @dataclasses.dataclass(frozen=True)
    class Config:
        parts: tuple[Part, ...] = ()

    Config.__annotations__["parts"] = tuple[Part, ...]
    twin = to_mutable(Config())
    twin.parts = [{"sizes": [1, 2]}]
    assert to_frozen(twin) == Config((Part((1, 2)),))


def test_flags_make_one_config_of_another():
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

    wanted = Config(2e-5, "there", Part(name="b c"), (Part(2), Part(3, "d")))
    found = flags_between(Config(), wanted)
    assert [path for path, _ in found] == ["rate", "folder", "part.name", "parts"]
    assert flags_between(wanted, wanted) == []
    twin = to_mutable(Config())
    for path, text in found:
        *groups, name = path.split(".")
        node = twin
        for group in groups:
            node = getattr(node, group)
        setattr(node, name, text if name in ("folder", "name") else ast.literal_eval(text))
    assert to_frozen(twin) == wanted
    with pytest.raises(ValueError, match="part is a str, and no flag turns a Part into it"):
        flags_between(Config(), dataclasses.replace(wanted, part="x"))


@dataclasses.dataclass(frozen=True)
class _Listening:
    port: int = 1
    key: str | None = dataclasses.field(default=None, metadata={"flag": False})


def test_gives_no_flag_to_secrets():
    """They keep their value, and no other program can be started with it by flags."""
    twin = to_mutable(_Listening(key="secret"))
    twin.port = 2
    assert to_frozen(twin) == _Listening(2, "secret")
    with pytest.raises(ValueError, match="no field 'key'"):
        check_path(tree_of(twin), "key")
    assert flags_between(_Listening(), _Listening(2)) == [("port", "2")]
    with pytest.raises(ValueError, match="key has no flag"):
        flags_between(_Listening(), _Listening(key="secret"))
