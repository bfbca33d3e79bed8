"""Lists the projects in `data/` as pairs of trees, one or two for each of the nine languages."""

import dataclasses
import pathlib

from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.sources import Change, SourceTree, make_change

DATA = pathlib.Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixtureProject:
    """Change of a project.

    Attributes:
      language: language of the project.
      archive: name of its archive, without suffix.
      before: patches of the base tree.
      after: patches of the solved tree.
      hidden: test files that the base tree lacks.
      license: SPDX name.
      programs: programs that the machine needs.
    """

    language: str
    archive: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    license: str = "MIT"
    programs: tuple[str, ...] = ()

    @property
    def is_mutation(self) -> bool:
        """Returns whether the base tree has a bug that was made."""
        return "mutation" in self.before

    @property
    def trees(self) -> tuple[SourceTree, SourceTree]:
        """Returns the sources before and after the change."""
        archive = DATA / f"{self.archive}.tar.xz"

        def tree(names: tuple[str, ...], removed: tuple[str, ...] = ()) -> SourceTree:
            texts = [
                (DATA / f"{self.archive}-{name}.patch").read_bytes().decode("utf-8")
                for name in names
            ]
            return SourceTree(archive=archive, patches=tuple(texts), removed=removed)

        return tree(self.before, self.hidden), tree(self.after)

    async def change(self) -> Change:
        """Returns the change."""
        return await make_change(*self.trees)

    def draft(self, change: Change) -> SweInstance:
        """Returns an instance with patches, without commands and lists."""
        return SweInstance(
            instance_id=f"{self.archive}-{'mutation' if self.is_mutation else self.after[-1]}",
            repo=self.archive,
            base_commit=change.base_commit,
            language=self.language,
            license=self.license,
            source="mutation" if self.is_mutation else "fixture",
            problem_statement="See the tests.",
            patch=change.parts.code,
            test_patch=change.parts.test,
            aux_patch=change.parts.aux,
        )


_LANG3 = "src/test/java/org/apache/commons/lang3/RangeTest.java"
PROJECTS = {
    "python": FixtureProject(
        language="python", archive="xmltodict-0.13.0", after=("1",), programs=("python3",)
    ),
    "c": FixtureProject(
        language="c", archive="cjson-1.7.15", after=("1",), programs=("cmake", "ninja", "gcc")
    ),
    "cpp": FixtureProject(
        language="cpp", archive="gsl-4.0.0", after=("1",), programs=("cmake", "ninja", "g++")
    ),
    "go": FixtureProject(
        language="go",
        archive="mux-1.8.0",
        before=("mutation",),
        license="BSD-3-Clause",
        programs=("go",),
    ),
    "java": FixtureProject(
        language="java",
        archive="commons-lang-3.12.0",
        before=("mutation",),
        hidden=(_LANG3,),
        license="Apache-2.0",
        programs=("javac",),
    ),
    "javascript": FixtureProject(
        language="javascript",
        archive="tmp-0.2.2",
        before=("1",),
        after=("1", "2"),
        programs=("node",),
    ),
    "typescript": FixtureProject(
        language="typescript",
        archive="zod-4.1.1",
        before=("1",),
        after=("1", "2"),
        programs=("node",),
    ),
    "php": FixtureProject(
        language="php",
        archive="psr7-2.4.5",
        before=("1", "2", "3"),
        after=("1", "2", "3", "4"),
        programs=("php", "phpunit"),
    ),
    "ruby": FixtureProject(
        language="ruby",
        archive="hashie-5.0.0",
        before=("1", "2", "mutation"),
        after=("1", "2"),
        hidden=("spec/hashie/extensions/deep_merge_spec.rb",),
        programs=("rspec",),
    ),
}
# Changes whose arms differ in other ways than from fail to pass.
SPECIAL = {
    "last hunk frees memory": FixtureProject(
        language="c",
        archive="cjson-1.7.15",
        before=("1", "2"),
        after=("1", "2", "3"),
        programs=("cmake", "ninja", "gcc"),
    ),
}
