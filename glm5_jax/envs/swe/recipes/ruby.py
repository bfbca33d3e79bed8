"""Recipe for Ruby projects with RSpec or minitest, with Debian's gems."""

import pathlib
import posixpath
import re
from collections.abc import Sequence

from glm5_jax.envs.swe.file_tree import FileTree, text_file
from glm5_jax.envs.swe.recipes.failing_assertions import MINITEST, RSPEC
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

_REQUIRE = re.compile(r"^require ['\"]([\w/-]+)['\"]", re.MULTILINE)
_LIBRARIES = pathlib.Path("/usr/lib/ruby")
_MINITEST = ("test_*.rb", "*_test.rb")


class RubyRecipe:
    """Recipe of Ruby: sources on the load path, no bundler, integration specs left out.

    CI is not set, because helpers then load gems that measure coverage.
    """

    name = "ruby/1"
    language = "ruby"
    build_folders: tuple[str, ...] = ("coverage/",)

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project, by the kind of its tests."""
        if matching(tree, "*_spec.rb"):
            return self._rspec_plan(tree)
        if matching(tree, *_MINITEST):
            return self._minitest_plan()
        raise RecipeError("the project has no *_spec.rb and no test_*.rb; leave it out")

    def _rspec_plan(self, tree: FileTree) -> ProjectPlan:
        rspec = (
            f"env -u CI rspec -I lib -I spec --format json --out {RESULTS}/rspec.json --format progress "
            "--pattern 'spec/**/*_spec.rb' --exclude-pattern 'spec/integration/**/*_spec.rb'"
        )
        return ProjectPlan(
            recipe=self.name,
            log_parser="rspec",
            test_cmds=(f"{rspec} --order defined",),
            shuffled_cmds=(f"{rspec} --order rand:{SEED}",),
            apt=("ruby", "ruby-rspec", *_helper_packages(tree)),
            per_test_cmd="rspec -I lib -I spec -e {name}",
        )

    def _minitest_plan(self) -> ProjectPlan:
        def command(seed: int) -> str:
            load = 'Dir["test/**/{test_*,*_test}.rb"].sort.each { |f| require "./" + f }'
            return f"env -u CI ruby -Ilib -Itest -e '{load}' -- -v --seed {seed}"

        return ProjectPlan(
            recipe=self.name,
            log_parser="minitest",
            test_cmds=(command(1),),
            shuffled_cmds=(command(SEED),),
            apt=("ruby", "ruby-minitest"),
            per_test_cmd="ruby -Ilib -Itest {name}",
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns two test files next to the first one in focus."""
        specs = matching(tree, "*_spec.rb")
        near = first_focus(focus, specs or matching(tree, *_MINITEST), "Ruby")
        folder = posixpath.dirname(near)
        words = draw.word("a").capitalize(), draw.word("z").capitalize()
        if specs:
            names = (f"{word.lower()}_spec.rb" for word in words)
            head, line = "RSpec.describe('{}') do\n", "  it('{}') {{ {} }}\n"
            bodies = {"eq": "expect(1).to eq(1)"}, RSPEC
        else:
            names = (f"test_{word.lower()}.rb" for word in words)
            head = "require 'minitest/autorun'\nclass {} < Minitest::Test\n"
            line = "  def test_{}; {}; end\n"
            bodies = {"equal": "assert_equal(1, 1)"}, MINITEST
        files = {}
        for name, word, tests in zip(names, words, bodies):
            lines = "".join(
                line.format(test, body) for test, body in draw.statements(tests).items()
            )
            files[posixpath.join(folder, name)] = text_file(f"{head.format(word)}{lines}end\n")
        variants = plant_token_variants(tree, focus, "ruby", draw)
        return Canaries(
            files=files,
            passing=words[0],
            failing=words[1],
            variant_files=variants.files,
            variants=variants.names,
            swaps=variants.swaps,
        )


def _helper_packages(tree: FileTree) -> list[str]:
    """Returns Debian's packages of the gems that the specs' helper loads."""
    names = _REQUIRE.findall(text_of(tree, "spec/spec_helper.rb"))
    packages = []
    for name in names:
        is_local = any(path in tree for path in (f"lib/{name}.rb", f"spec/{name}.rb"))
        is_standard = any(_LIBRARIES.glob(f"*.*.*/{name}.rb"))
        if not is_local and not is_standard:
            packages.append("ruby-" + re.sub(r"[/_]", "-", name))
    return packages
