"""Names and meanings of the fields of config dataclasses, with hints for names that do not exist.

A tree of fields is a nested dict: a group of fields is a dict, a single value is None. `tree_of` takes it from a config;
launch/experiment_files.py reads it from source code.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

FieldTree = dict[str, "FieldTree | None"]

# Common names of other programs, and the fields that they mean here.
COMMON_NAMES: Mapping[str, str] = {
    "lr": "schedule.peak",
    "learning_rate": "schedule.peak",
    "max_lr": "schedule.peak",
    "min_lr": "schedule.end",
    "batch_size": "batch.start",
    "global_batch_size": "batch.start",
    "seq_len": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "max_steps": "train.steps",
    "num_layers": "model.num_hidden_layers",
    "num_experts": "model.n_routed_experts",
    "max_grad_norm": "optimizer.clip_norm",
    "tensor_parallel_size": "mesh.tensor",
    "expert_parallel_size": "mesh.expert",
    "data_parallel_size": "mesh.data",
    "context_parallel_size": "mesh.context",
    "max_model_len": "engine.max_length",
    "model_path": "checkpoint",
    "load": "checkpoint",
    "resume_from": "checkpoint",
    "output_dir": "workdir",
    "out_dir": "workdir",
    "save": "workdir",
}


def tree_of(config: Any) -> FieldTree:
    """Returns the tree of a dataclass, or of its mutable copy."""
    values = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return {n: tree_of(v) if dataclasses.is_dataclass(v) else None for n, v in values}


def check_path(tree: FieldTree, path: str, prefix: str = "", others: Collection[str] = ()) -> None:
    """Raises ValueError, with the most similar names, unless `path` ("model.hidden_size") names a single value.

    Args:
      tree: all fields.
      path: name to check.
      prefix: text in front of each name that is offered, such as "--".
      others: names that are no fields but may be meant; they are offered after "--".
    """
    node: FieldTree | None = tree
    done: list[str] = []
    for name in path.split("."):
        location = f" in {'.'.join(done)}" if done else ""
        if node is None:
            raise ValueError(f"no field {name!r}{location}, which is a single value")
        if name not in node:
            offers = [f"{prefix}{offer}" for offer in suggest(tree, path)]
            if done:
                # A name of another group is rarely meant; the fields of this one are listed instead.
                group = f"{prefix}{'.'.join(done)}."
                offers = [offer for offer in offers if offer.startswith(group)]
            else:
                meant = COMMON_NAMES.get(name, name)
                offers = [f"--{o}" for o in close_names(meant, others)] + offers
            if offers:
                raise ValueError(f"no field {name!r}{location}; did you mean {', '.join(offers)}?")
            known = [f"{prefix}{'.'.join([*done, field])}" for field in node]
            raise ValueError(f"no field {name!r}{location}; there are {', '.join(known) or 'none'}")
        node = node[name]
        done.append(name)
    if node is not None:
        raise ValueError(f"{path} is a group of fields; set one of them: {', '.join(node)}")


def suggest(tree: FieldTree, path: str, count: int = 3) -> list[str]:
    """Returns the paths that a wrong path may mean, the likeliest first; empty if none is similar.

    These are fields of that name in other groups, the field that other programs call so, similar names in the group
    that was named, longer names with that word, and similar names anywhere.
    """
    *groups, name = path.split(".")
    paths = list(_paths(tree))
    exact = [p for p in paths if p.rpartition(".")[2] == name]
    meant = COMMON_NAMES.get(name)
    common = [p for p in paths if p == meant or p.endswith(f".{meant}")] if meant else []
    group = ".".join(groups)
    siblings = [p for p in paths if p.rpartition(".")[0] == group]
    near = [
        f"{group}.{n}".lstrip(".")
        for n in close_names(name, [p.rpartition(".")[2] for p in siblings])
    ]
    similar = difflib.get_close_matches(path, paths, n=count, cutoff=0.85)
    names = close_names(name, {p.rpartition(".")[2] for p in paths}, cutoff=0.75)
    elsewhere = [p for n in names for p in paths if p.rpartition(".")[2] == n]
    longer = [p for p in paths if name in p.rpartition(".")[2].split("_")]
    ranked = [
        *sorted(exact, key=lambda p: p.count(".")),
        *common,
        *near,
        *longer,
        *similar,
        *elsewhere,
    ]
    return list(dict.fromkeys(ranked))[:count]


def unknown_variant(variant: str, variants: Collection[str]) -> str:
    """Returns the error message for an unknown variant, with the most similar one and all that exist."""
    close = close_names(variant, variants, count=1, cutoff=0.5)
    offer = f"did you mean {close[0]}? There are" if close else "use one of"
    return f"unknown variant {variant!r}; {offer} {join_variants(variants)}"


def join_variants(variants: Collection[str]) -> str:
    """Returns the names of variants as text. Some hold a comma."""
    return (" or " if any("," in name for name in variants) else ", ").join(variants)


def field_meanings(config_class: type) -> dict[str, str]:
    """Returns the meanings of a dataclass's fields, from the `Attributes:` of its docstring and of its bases."""
    meanings: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(cls):
            meanings |= attributes_of(cls.__doc__ or "")
    return meanings


def attributes_of(docstring: str) -> dict[str, str]:
    """Returns {name: meaning} of the section `Attributes:`. Names that share a line, `a, b: ...`, share the meaning."""
    lines = iter(inspect.cleandoc(docstring).splitlines())
    meanings: dict[str, str] = {}
    names: list[str] = []
    if not any(line == "Attributes:" for line in lines):
        return meanings
    for line in lines:
        if line and not line.startswith(" "):
            break
        entry = re.fullmatch(r"  (\w+(?:, \w+)*): (.+)", line)
        if entry:
            names = entry[1].split(", ")
            meanings |= dict.fromkeys(names, entry[2])
        elif line.strip():
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    return meanings


def _paths(tree: FieldTree, group: str = "") -> Iterator[str]:
    """Yields the paths of all single values."""
    for name, node in tree.items():
        if node is None:
            yield f"{group}{name}"
        else:
            yield from _paths(node, f"{group}{name}.")


def close_names(
    name: str, known: Collection[str], count: int = 3, cutoff: float = 0.6
) -> list[str]:
    """Returns the names that are similar to one, the most similar first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)
