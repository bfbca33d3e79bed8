"""Every field of an experiment's config has a meaning: an entry in the `Attributes:` of its class or of a base."""

import dataclasses
import typing
from collections.abc import Iterator

from experiments import lifecycle, serve
from glm5_jax.runtime.config_fields import field_meanings
from launch import command_line, experiment_files


def classes_in(hint) -> Iterator[type]:
    """Yields the dataclasses in a type."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from classes_in(part)


def reachable(start: type) -> set[type]:
    """Returns a config class and all config classes in its fields."""
    classes, pending = set(), [start]
    while pending:
        cls = pending.pop()
        if cls in classes:
            continue
        classes.add(cls)
        hints = typing.get_type_hints(cls)
        pending += [c for f in dataclasses.fields(cls) for c in classes_in(hints[f.name])]
    return classes


def missing(cls: type) -> list[str]:
    meanings = field_meanings(cls)
    return [f"{cls.__name__}.{f.name}" for f in dataclasses.fields(cls) if f.name not in meanings]


def test_every_config_field_has_meaning():
    classes = {lifecycle.Lifecycle, serve.ServeConfig}
    for name in experiment_files.shipped():
        config = command_line.load(name)[1]
        if dataclasses.is_dataclass(config):
            classes.add(type(config))
    classes = set().union(*map(reachable, classes))
    assert len(classes) > 50
    assert not sorted({field for cls in classes for field in missing(cls)})


def test_notices_field_without_meaning():
    @dataclasses.dataclass
    class Config:
        """Options.

        Attributes:
          size: bytes.
        """

        size: int = 1
        name: str = ""

    assert missing(Config) == ["Config.name"]
