"""Recipe of environments that a model built: commands come from the instance, planted tests from the language's recipe."""

from collections.abc import Sequence

from glm5_jax.envs.swe.file_tree import FileTree
from glm5_jax.envs.swe.recipes.plan import Canaries, ProjectPlan, ProjectRecipe, RecipeError
from glm5_jax.envs.swe.recipes.planting import CanaryDraw

AGENT_PREFIX = "agent:"


class AgentRecipe:
    """Recipe of a project whose commands a model wrote.

    Args:
      recipe: recipe of the language.
    """

    def __init__(self, recipe: ProjectRecipe):
        self.name, self.language = f"{AGENT_PREFIX}{recipe.name}", recipe.language
        self.build_folders = recipe.build_folders
        self._recipe = recipe

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Raises RecipeError, because only a model or an instance has the commands."""
        raise RecipeError(f"{self.name} has no commands of its own; take those of the instance")

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns the planted tests of the language's recipe."""
        return self._recipe.canaries(tree, focus, draw)
