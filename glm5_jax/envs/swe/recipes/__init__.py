"""Provides rules that build and test projects of nine languages without a model: one recipe for each build system."""

from glm5_jax.envs.swe.file_tree import FileTree
from glm5_jax.envs.swe.paths import is_test_path, language_of
from glm5_jax.envs.swe.recipes.agent import AGENT_PREFIX, AgentRecipe
from glm5_jax.envs.swe.recipes.cmake import CMakeRecipe
from glm5_jax.envs.swe.recipes.golang import GoRecipe
from glm5_jax.envs.swe.recipes.java import JavaRecipe
from glm5_jax.envs.swe.recipes.node import JavaScriptRecipe, TypeScriptRecipe
from glm5_jax.envs.swe.recipes.php import PhpRecipe
from glm5_jax.envs.swe.recipes.plan import (
    RECIPE_FOLDER,
    RESULTS,
    WORKDIR,
    Canaries,
    ProjectPlan,
    ProjectRecipe,
    RecipeError,
)
from glm5_jax.envs.swe.recipes.python import PythonRecipe
from glm5_jax.envs.swe.recipes.ruby import RubyRecipe

_RECIPES: tuple[ProjectRecipe, ...] = (
    CMakeRecipe("c"),
    CMakeRecipe("cpp"),
    GoRecipe(),
    JavaRecipe(),
    JavaScriptRecipe(),
    PhpRecipe(),
    PythonRecipe(),
    RubyRecipe(),
    TypeScriptRecipe(),
)
_VENDORED = {"vendor", "third_party", "node_modules", "external", "debian"}


def find_recipe(name: str) -> ProjectRecipe:
    """Returns a recipe by its name and version. Raises RecipeError if there is none."""
    if name.startswith(AGENT_PREFIX):
        return AgentRecipe(find_recipe(name.removeprefix(AGENT_PREFIX)))
    for recipe in _RECIPES:
        if recipe.name == name:
            return recipe
    known = ", ".join(recipe.name for recipe in _RECIPES)
    raise RecipeError(f"recipe {name!r} is not known; use one of {known}")


def detect_language(tree: FileTree) -> str:
    """Returns the language with most bytes of sources, tests and vendored folders aside. Raises RecipeError.

    Headers of C count for C++ where the project has C++ sources, and JavaScript for TypeScript if there is more of that.
    """
    sizes = _language_sizes(tree, has_tests=False) or _language_sizes(tree, has_tests=True)
    if not sizes:
        raise RecipeError("the tree has no sources of a supported language; leave it out")
    language = max(sorted(sizes), key=sizes.__getitem__)
    if language == "c" and (sizes.get("cpp") or _is_cpp(tree)):
        return "cpp"
    # A package may hold its compiled sources too.
    if language == "javascript" and sizes.get("typescript") and any(is_test_path(p) for p in tree if p.endswith(".ts")):  # fmt: skip
        return "typescript"
    return language


def _language_sizes(tree: FileTree, has_tests: bool) -> dict[str, int]:
    """Returns the bytes of sources by language, without vendored folders."""
    sizes: dict[str, int] = {}
    for path, file in tree.items():
        language = language_of(path)
        if language and (has_tests or not is_test_path(path)):
            if not _VENDORED & set(path.split("/")):
                sizes[language] = sizes.get(language, 0) + len(file.content)
    return sizes


def _is_cpp(tree: FileTree) -> bool:
    """Returns whether the tests are C++, as of a library of headers."""
    return any(language_of(path) == "cpp" and is_test_path(path) for path in tree)


def detect_recipe(tree: FileTree) -> ProjectRecipe:
    """Returns the recipe for a project by its language. Raises RecipeError if there is none."""
    language = detect_language(tree)
    for recipe in _RECIPES:
        if recipe.language == language:
            return recipe
    raise RecipeError(f"there is no recipe for {language}")


__all__ = [
    "RECIPE_FOLDER",
    "RESULTS",
    "WORKDIR",
    "Canaries",
    "ProjectRecipe",
    "RecipeError",
    "ProjectPlan",
    "detect_language",
    "detect_recipe",
    "find_recipe",
]
