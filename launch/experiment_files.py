"""Finds experiments by name, and reads their descriptions, variants and config fields from source.

An experiment is a Python file that defines `get_config(variant)`. Those of this repository are found by name: `pretrain`
is experiments/pretrain.py, and `muon_split` is experiments/ablations/muon_split.py.
"""

import ast
import dataclasses
import difflib
import functools
import pathlib
from collections.abc import Mapping

from glm5_jax.runtime.config_fields import FieldTree, unknown_variant
from launch import source
from launch.source import ROOT, Definition, SourceModule

FOLDERS = ("experiments", "experiments/ablations")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentSource:
    """An experiment's file as far as it can be read without importing it.

    Attributes:
      path: the file.
      description: its docstring.
      default: variant that is used if none is given; empty: not known.
      variants: names of the variants; None: they cannot be read from the source.
    """

    path: pathlib.Path
    description: str
    default: str
    variants: tuple[str, ...] | None

    @property
    def summary(self) -> str:
        """Returns the first sentence of the description on one line."""
        paragraph = " ".join(self.description.split("\n\n")[0].split())
        return paragraph.partition(". ")[0].rstrip(".:")


class OptionalGroup(dict):
    """Fields of a group that may be None, and then is a single value."""


@functools.cache
def shipped() -> Mapping[str, pathlib.Path]:
    """Returns the files of this repository's experiments by name."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py")))
    return {path.stem: path for path in paths if _is_experiment(path)}


def _is_experiment(path: pathlib.Path) -> bool:
    return _get_config(source.read_module(path)) is not None


def _shipped_file(name: str) -> pathlib.Path | None:
    """Returns the file of this repository's experiment of a name, without reading the others; None: there is none."""
    paths = [ROOT / folder / f"{name}.py" for folder in FOLDERS if name.isidentifier()]
    return next((path for path in paths if path.is_file() and _is_experiment(path)), None)


def locate(spec: str) -> tuple[pathlib.Path, str]:
    """Returns the file and the variant of NAME:VARIANT or FILE.py:VARIANT; the variant may be empty.

    A relative FILE.py that the working folder lacks is looked up in the folder of this repository, so that
    experiments/pretrain.py is found from everywhere. Raises ValueError if there is no such file.
    """
    name, _, variant = spec.partition(":")
    if file := _shipped_file(name):
        return file, variant
    path = pathlib.Path(name)
    if path.suffix == ".py":
        for file in (path, ROOT / path):
            if file.is_file():
                return file, variant
    close = difflib.get_close_matches(path.stem, shipped(), n=3, cutoff=0.6)
    offer = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(shipped())}"
    raise ValueError(
        f"{name} is not the name or the file of an experiment; {offer}"
        + ("" if close else "; or give the path of a Python file")
    )


def read(path: pathlib.Path) -> ExperimentSource:
    """Returns an experiment's description and variants. Raises ValueError if it defines no get_config."""
    module = source.read_module(path)
    definition = _get_config(module)
    if definition is None:
        raise ValueError(f"{path} has no get_config(variant), so it is not an experiment")
    default, variants = "", None
    if isinstance(definition.node, ast.FunctionDef):
        defaults = definition.node.args.defaults
        if defaults and isinstance(defaults[-1], ast.Constant):
            default = str(defaults[-1].value)
        variants = _variants(definition)
    description = ast.get_docstring(module.tree) or ""
    return ExperimentSource(path=path, description=description, default=default, variants=variants)


def find(spec: str) -> tuple[ExperimentSource, str]:
    """Returns the source and the variant of NAME:VARIANT or FILE.py:VARIANT; without a variant, the default one.

    Raises ValueError if there is no such experiment, or its source lists the variants and this is none of them.
    """
    path, variant = locate(spec)
    experiment = read(path)
    if variant and experiment.variants is not None and variant not in experiment.variants:
        raise ValueError(unknown_variant(variant, experiment.variants))
    return experiment, variant or experiment.default


def field_tree(path: pathlib.Path, variant: str) -> FieldTree | None:
    """Returns the config fields of an experiment's variant, as its classes declare them; None if that cannot be read.

    A group whose class cannot be followed is a leaf.
    """
    definition = _get_config(source.read_module(path))
    if definition is None or not isinstance(definition.node, ast.FunctionDef):
        return None
    config = _variant_class(definition, variant) or _returned_class(definition)
    return None if config is None else _class_fields(config)


def is_certain(tree: FieldTree, path: str) -> bool:
    """Returns whether the tree decides about a path.

    It does not if a group on its way could not be followed, or if the path is a group that may be None.
    """
    node: FieldTree | None = tree
    for name in path.split("."):
        if node is None:
            return False
        if name not in node:
            return True
        node = node[name]
    return not isinstance(node, OptionalGroup)


def _get_config(module: SourceModule) -> Definition | None:
    return source.resolve(module, ast.Name("get_config"))


def _choice(get_config: Definition) -> ast.Call | None:
    """Returns the call of `choose(variant, variants, kinds)` in a get_config."""
    assert isinstance(get_config.node, ast.FunctionDef)
    return next(source.calls_of(get_config.node, "choose"), None)


def _variants(get_config: Definition) -> tuple[str, ...] | None:
    """Returns the names that a get_config chooses from."""
    call = _choice(get_config)
    if call is None or len(call.args) < 2:
        return None
    names = source.literal_strings(get_config.module, call.args[1])
    kinds = next((k.value for k in call.keywords if k.arg == "kinds"), None)
    if names is None or kinds is None:
        return names
    suffixes = source.literal_strings(get_config.module, kinds)
    return suffixes and tuple(f"{n},{kind}" if kind else n for n in names for kind in suffixes)


def _variant_class(get_config: Definition, variant: str) -> Definition | None:
    """Returns the config class of one variant: that of the function which makes it, or that class itself."""
    call = _choice(get_config)
    if call is None or len(call.args) < 2 or not isinstance(call.args[1], ast.Dict):
        return None
    for key, value in zip(call.args[1].keys, call.args[1].values):
        if isinstance(key, ast.Constant) and key.value == variant.partition(",")[0]:
            target = source.resolve(get_config.module, value)
            if target and isinstance(target.node, ast.ClassDef):
                return target
            return _returned_class(target) if target else None
    return None


def _returned_class(function: Definition) -> Definition | None:
    """Returns the class of a function's return annotation."""
    if not isinstance(function.node, ast.FunctionDef) or function.node.returns is None:
        return None
    target = source.resolve(function.module, function.node.returns)
    return target if target and isinstance(target.node, ast.ClassDef) else None


def _class_fields(config: Definition) -> FieldTree | None:
    """Returns the fields of a dataclass and its bases; None if a base cannot be followed."""
    assert isinstance(config.node, ast.ClassDef)
    fields: FieldTree = {}
    for base in config.node.bases:
        target = source.resolve(config.module, base)
        inherited = (
            _class_fields(target) if target and isinstance(target.node, ast.ClassDef) else None
        )
        if inherited is None:
            return None
        fields |= inherited
    for statement in config.node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if not _is_hidden(statement):
                fields[statement.target.id] = _annotated_fields(config, statement.annotation)
    return fields


def _is_hidden(field: ast.AnnAssign) -> bool:
    """Returns whether a field has no flag: a class variable, or one with metadata, such as a secret."""
    metadata = isinstance(field.value, ast.Call) and any(
        k.arg == "metadata" for k in field.value.keywords
    )
    return metadata or "ClassVar" in ast.unparse(field.annotation)


def _annotated_fields(config: Definition, annotation: ast.expr) -> FieldTree | None:
    """Returns the fields of the dataclass that an annotation names, also as `X | None`; None for any other type."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.right, ast.Constant):
        fields = _annotated_fields(config, annotation.left)
        return None if fields is None else OptionalGroup(fields)
    target = source.resolve(config.module, annotation)
    if target is None or not isinstance(target.node, ast.ClassDef):
        return None
    if not any("dataclass" in ast.unparse(d) for d in target.node.decorator_list):
        return None
    return _class_fields(target)
