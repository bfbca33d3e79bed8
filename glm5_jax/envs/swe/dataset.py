"""Stores software engineering instances with what their environments are built from.

    DATASET/instances.jsonl     instances
    DATASET/sources.jsonl       where the base tree of each instance comes from
    DATASET/archives/<sha256>   archives of sources, as `fetch` keeps them

The environment of an instance is built from these files when it is used first, and kept in a store of layers.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence

import msgspec

from glm5_jax.envs.swe.builder import RuleBuilder
from glm5_jax.envs.swe.file_tree import FileTree, digest_tree
from glm5_jax.envs.swe.instance import (
    InstanceError,
    SweInstance,
    check_gradable,
    read_records,
    write_records,
)
from glm5_jax.envs.swe.layers import StoredLayer
from glm5_jax.envs.swe.recipes import ProjectPlan, find_recipe
from glm5_jax.envs.swe.recipes.agent import AGENT_PREFIX
from glm5_jax.envs.swe.sources import SourceTree, make_tree

INSTANCES, SOURCES, ARCHIVES = "instances.jsonl", "sources.jsonl", "archives"


class InstanceSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin of the base tree of an instance.

    Attributes:
      instance_id: name of the instance.
      archive: sha256 of the archive of sources.
      name: file name of the archive.
      url: where it can be fetched; empty if it is in the dataset only.
      patches: diffs that apply to it, in order.
      removed: files that are left out after that, such as hidden tests.
      focus: test files that must run.
    """

    instance_id: str
    archive: str
    name: str = ""
    url: str = ""
    patches: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    focus: tuple[str, ...] = ()


class SweDataset:
    """Instances of a folder. Raises InstanceError for a missing or wrong file.

    Attributes:
      folder: folder of the dataset.
      instances: instances by name.
      sources: sources by name of the instance.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = pathlib.Path(folder)
        for name in (INSTANCES, SOURCES):
            if not (self.folder / name).is_file():
                raise InstanceError(
                    f"{self.folder} has no {name}; build one with experiments/build_environments.py"
                )
        records = read_records(self.folder / INSTANCES, SweInstance)
        self.instances = {instance.instance_id: instance for instance in records}
        origins = read_records(self.folder / SOURCES, InstanceSource)
        self.sources: Mapping[str, InstanceSource] = {item.instance_id: item for item in origins}
        for name, instance in self.instances.items():
            check_gradable(instance)
            if name not in self.sources:
                raise InstanceError(
                    f"{self.folder / SOURCES} has no instance {name}; add its source"
                )

    def source_tree(self, name: str, *, keeps_removed: bool = False) -> SourceTree:
        """Returns the source of an instance's base tree. Raises InstanceError if its archive is missing.

        keeps_removed: whether files that the base tree lacks are in it.
        """
        source = self.sources[name]
        place = self.folder / ARCHIVES / source.archive
        if not place.is_file():
            raise InstanceError(
                f"{place} ({source.name}) is missing; fetch it with experiments/build_environments.py:fetch"
            )
        return SourceTree(
            archive=place, patches=source.patches, removed=() if keeps_removed else source.removed
        )

    async def layer(self, name: str, builder: RuleBuilder) -> StoredLayer:
        """Returns the environment of an instance, with its base tree.

        Raises InstanceError if the sources give another tree, RecipeError for missing packages, and BuildError.
        """
        instance, source = self.instances[name], self.sources[name]
        tree = await make_tree(self.source_tree(name, keeps_removed=True))
        plan = _plan_of(instance, tree, source.focus)
        base = {path: file for path, file in tree.items() if path not in source.removed}
        digest = digest_tree(base)
        if digest != instance.base_commit:
            raise InstanceError(
                f"the sources of {name} make {digest}, and its base_commit is {instance.base_commit}; build it again"
            )
        return await builder.set_up(base, plan, instance.language)


def _plan_of(instance: SweInstance, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
    """Returns the plan of an instance's environment.

    tree: tree with all tests, because some recipes list those that run.
    """
    environment = instance.environment
    if not environment.recipe.startswith(AGENT_PREFIX):
        return find_recipe(environment.recipe).plan(tree, focus)
    return ProjectPlan(
        recipe=environment.recipe,
        log_parser=instance.log_parser,
        log_parser_source=instance.log_parser_source,
        test_cmds=instance.test_cmds,
        shuffled_cmds=instance.test_cmds,
        setup_cmds=environment.setup_cmds,
        variables=environment.variables,
    )


def write_dataset(
    folder: str | os.PathLike,
    instances: Sequence[SweInstance],
    sources: Sequence[InstanceSource],
    archives: Sequence[pathlib.Path] = (),
) -> None:
    """Writes a dataset, whose files appear under their names only when they are complete."""
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        add_archive(place, archive)
    write_records(place / SOURCES, sources)
    write_records(place / INSTANCES, instances)


def add_archive(folder: pathlib.Path, archive: pathlib.Path) -> str:
    """Copies an archive into a dataset and returns its sha256."""
    with open(archive, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    place = folder / ARCHIVES / digest
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_name(f".unfinished-{digest}")
        shutil.copyfile(archive, unfinished)
        os.replace(unfinished, place)
    return digest
