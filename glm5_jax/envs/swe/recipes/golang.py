"""Recipe for Go modules, with the JSON events of go test."""

import posixpath
import re
from collections.abc import Sequence

from glm5_jax.envs.swe.file_tree import FileTree, text_file
from glm5_jax.envs.swe.recipes.plan import (
    RESULTS,
    SEED,
    Canaries,
    ProjectPlan,
    RecipeError,
    first_focus,
    matching,
    text_of,
)
from glm5_jax.envs.swe.recipes.planting import CanaryDraw
from glm5_jax.envs.swe.recipes.token_variants import plant_token_variants

# Statements that fail a test.
_FAILURES = (
    "if {one} != {two} {{ t.Fail() }}",
    't.Errorf("%d is not %d", {one}, {two})',
    "t.FailNow()",
    "if got := {one}; got != {two} {{ t.Fatal(got) }}",
)
_REQUIRE = re.compile(r"^\s*(?:require\s+)?([\w.-]+\.\w+/\S+) v\S+", re.MULTILINE)


class GoRecipe:
    """Recipe of Go: modules without dependencies, or with those in `vendor`."""

    name = "go-test/1"
    language = "go"
    build_folders: tuple[str, ...] = ()

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a module. Raises RecipeError if its dependencies are not in the tree."""
        if "go.mod" not in tree:
            raise RecipeError("there is no go.mod at the top; leave the project out")
        needed = _REQUIRE.findall(text_of(tree, "go.mod"))
        has_vendor = "vendor/modules.txt" in tree
        if needed and not has_vendor:
            raise RecipeError(
                f"go.mod requires {', '.join(needed[:3])}; vendor the dependencies (go mod vendor)"
            )
        test = f"go test -json -count=1 -vet=off ./... > {RESULTS}/go.json"
        return ProjectPlan(
            recipe=self.name,
            log_parser="go",
            test_cmds=(test,),
            shuffled_cmds=(test.replace("./...", f"-shuffle={SEED} ./..."),),
            # Fills the cache of compiled packages, which would cost each run some seconds.
            setup_cmds=("go test -count=1 -vet=off -run '^$' ./...",),
            apt=("golang-go",),
            variables={
                "GOFLAGS": "-mod=vendor" if has_vendor else "-mod=mod",
                "GOPROXY": "off",
                "GOTOOLCHAIN": "local",
                "GO111MODULE": "on",
                "GOPATH": "/tmp/home/go",
            },
            per_test_cmd="go test -count=1 -run '^{name}$' ./...",
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns a test file in the package of the first one in focus."""
        near = first_focus(focus, matching(tree, "*_test.go"), "Go")
        package = re.search(r"^package (\w+)", text_of(tree, near), re.MULTILINE)
        passing, failing = draw.word("a").capitalize(), draw.word("z").capitalize()
        one, two = draw.random.sample(range(1000), 2)
        failure = draw.random.choice(_FAILURES).format(one=one, two=two)
        source = (
            f'package {package[1] if package else "main"}\n\nimport "testing"\n\n'
            f"func Test{passing}(t *testing.T) {{}}\n\nfunc Test{failing}(t *testing.T) {{ {failure} }}\n"
        )
        path = posixpath.join(posixpath.dirname(near), f"{draw.word()}_test.go")
        variants = plant_token_variants(tree, focus, "go", draw)
        return Canaries(
            files={path: text_file(source)},
            passing=f"Test{passing}",
            failing=f"Test{failing}",
            variant_files=variants.files,
            variants=variants.names,
            swaps=variants.swaps,
        )
