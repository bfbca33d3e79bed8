"""Defines what a recipe says about a project: how to prepare, rebuild and test it, and how to plant tests in it."""

import dataclasses
import fnmatch
import posixpath
from collections.abc import Mapping, Sequence
from typing import Protocol

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile
from glm5_jax.envs.swe.recipes.planting import CanaryDraw

WORKDIR = "/testbed"
RESULTS = "/results"
RECIPE_FOLDER = ".swe"  # files of a recipe in the work folder, which no attempt can change
SEED = 7  # of shuffled runs


class RecipeError(ValueError):
    """Raised for a project that no recipe can build; the text names what is missing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectPlan:
    """Commands of a project. They run in the work folder, as the agent's user and without a network.

    Attributes:
      recipe: name and version of the recipe.
      log_parser: name of the report parser.
      test_cmds: commands that run the tests and write reports into `/results`.
      shuffled_cmds: the same in another order, where the runner can change it.
      setup_cmds: commands that run once, on the tree without patches.
      rebuild_cmds: commands after each change of a file; they must succeed.
      files: files that the recipe adds to the tree.
      apt: Debian packages that must be installed.
      npm: packages that must be in the layer of Node modules.
      variables: environment variables.
      per_test_cmd: command for one test, with `{name}`.
      log_parser_source: source of a generated parser; None: a built-in one.
    """

    recipe: str
    log_parser: str
    test_cmds: tuple[str, ...]
    shuffled_cmds: tuple[str, ...]
    setup_cmds: tuple[str, ...] = ()
    rebuild_cmds: tuple[str, ...] = ()
    files: Mapping[str, TreeFile] = dataclasses.field(default_factory=dict)
    apt: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    per_test_cmd: str = ""
    log_parser_source: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canaries:
    """Tests with known results, planted next to the tests of an instance.

    Attributes:
      files: files to write into the tree.
      variant_files: files that hold the variants.
      passing, failing: words that only the names of the tests that pass, and of those that fail, contain.
      variants: ends of names of tests like those in focus that must fail, because they expect another value.
      swaps: pairs of a name and of another that stands for it: results under both change places.
    """

    files: Mapping[str, TreeFile]
    passing: str
    failing: str
    variant_files: Mapping[str, TreeFile] = dataclasses.field(default_factory=dict)
    variants: tuple[str, ...] = ()
    swaps: tuple[tuple[str, str], ...] = ()


class ProjectRecipe(Protocol):
    """Rules for the projects of one build system.

    Attributes:
      name: name and version.
      language: language of the projects.
      build_folders: folders of build outputs, which are no part of a solution; with `/` at the end only at the top.
    """

    name: str
    language: str
    build_folders: tuple[str, ...]

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project. Raises RecipeError.

        Args:
          tree: files of the project.
          focus: test files that must run; others may be left out where all would take too long.
        """
        ...

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns tests to plant, whose names and values are drawn."""
        ...


def matching(tree: FileTree, *patterns: str) -> list[str]:
    """Returns the paths of a tree whose file name matches a pattern, sorted."""
    names = (
        path for path in tree if any(fnmatch.fnmatch(posixpath.basename(path), p) for p in patterns)
    )
    return sorted(names)


def text_of(tree: FileTree, path: str) -> str:
    """Returns the text of a file; empty if it is missing or a link."""
    file = tree.get(path)
    return "" if file is None or file.is_link else file.content.decode("utf-8", "replace")


def first_focus(focus: Sequence[str], tests: Sequence[str], language: str) -> str:
    """Returns the first test file in focus that is one of the project's tests; else the first test."""
    chosen = [path for path in focus if path in tests] or list(tests)
    if not chosen:
        raise RecipeError(f"the project has no test file of {language}; leave it out")
    return chosen[0]
