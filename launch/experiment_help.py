"""Writes the help of an experiment, with every field of its config, and the table of all experiments."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from glm5_jax.runtime.config_fields import field_meanings, join_variants
from glm5_jax.runtime.config_flags import literal_of, to_mutable, type_text
from launch.experiment_files import ExperimentSource, read, shipped

WIDTH = 118


def describe(experiment: ExperimentSource, variant: str, config: Any) -> str:
    """Returns an experiment's docstring, its variants, and the fields of one variant's config."""
    variants = ", ".join(
        f"{name} (default)" if name == experiment.default else name
        for name in experiment.variants or ()
    )
    name = f"{experiment.path.stem}:{variant}"
    parts = [experiment.description]
    if variants:
        parts.append(textwrap.fill(f"Variants: {variants}", WIDTH, subsequent_indent="  "))
    if dataclasses.is_dataclass(config):
        parts.append(f"Fields of {name}, each with its value there:")
        parts.append("\n".join(_fields(to_mutable(config), "", {})))
    else:
        parts.append(f"{name} has several arms and no flags for their fields.")
    return "\n\n".join(parts)


def describe_all() -> str:
    """Returns a table of all experiments: name, variants and first sentence."""
    lines = []
    for name, path in shipped().items():
        experiment = read(path)
        heading = f"{name}:{experiment.default}"
        others = [v for v in experiment.variants or () if v != experiment.default]
        sizes = f"  (also {join_variants(others)})" if others else ""
        lines += [
            *textwrap.wrap(f"{heading}{sizes}", WIDTH, subsequent_indent="    "),
            *textwrap.wrap(
                experiment.summary, WIDTH, initial_indent="    ", subsequent_indent="    "
            ),
        ]
    return "\n".join(lines)


def _fields(mutable: Any, path: str, shown: dict[type, str]) -> Iterator[str]:
    """Yields the lines of all fields.

    shown: path at which each large class was shown before; it is not repeated.
    """
    cls = mutable.frozen_class
    meanings, hints = field_meanings(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(mutable):
        name, value = f"{path}{field.name}", getattr(mutable, field.name)
        meaning = meanings.get(field.name, "")
        if not hasattr(value, "frozen_class"):
            yield from textwrap.wrap(
                f"--{name}={literal_of(value)}", WIDTH, subsequent_indent="    "
            )
            text = f"{type_text(hints[field.name])}; {meaning}".rstrip("; ")
            yield from textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
        elif (first := shown.get(value.frozen_class)) and not path:
            yield f"--{name}.FIELD  has the fields of --{first}"
        else:
            shown.setdefault(value.frozen_class, name)
            yield from _fields(value, f"{name}.", shown)
