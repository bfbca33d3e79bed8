"""Makes instances from mutations of a project, and keeps those whose tests notice them.

    maker = MutationMaker(MutationProject(name="xmltodict", archive=path, license="MIT"), builder, archive_digest)
    await maker.prepare()
    result = await maker.make(0)

A mutation is kept if the tree builds, between one test and 20% of the tests break, and gradings come out right: the original
source scores 1, the mutated one scores 0. Files of the broken tests are hidden from agents if the other tests still run
without them. The arms of gold are the runs of the project itself, so a candidate that is dropped costs one run of the tests.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Literal

import msgspec

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.arms import GOLD_RUNS, run_gold_arm
from glm5_jax.envs.swe.builder import BuildError, BuiltProject, RuleBuilder
from glm5_jax.envs.swe.dataset import InstanceSource
from glm5_jax.envs.swe.file_tree import FileTree, digest_tree, put_tree, with_changes
from glm5_jax.envs.swe.grading import VARIANTS, SweGrader
from glm5_jax.envs.swe.instance import Issue, SweInstance
from glm5_jax.envs.swe.layers import StoredLayer
from glm5_jax.envs.swe.mutations.draw import (
    DrawnMutation,
    draw_mutation,
    mutable_files,
    mutated_file,
)
from glm5_jax.envs.swe.mutations.statement import write_statement
from glm5_jax.envs.swe.parsers import RunReport
from glm5_jax.envs.swe.patches import PatchParts
from glm5_jax.envs.swe.paths import is_test_path, language_of
from glm5_jax.envs.swe.recipes import RECIPE_FOLDER, WORKDIR
from glm5_jax.envs.swe.runs import RebuildError, RunResult, rebuild, run_tests
from glm5_jax.envs.swe.sources import SourceTree, diff_trees, make_tree
from glm5_jax.envs.swe.test_files import find_test_files
from glm5_jax.envs.swe.transitions import Arms, classify, has_load_failure

MAX_BROKEN_SHARE = 0.2
_MIN_SCREEN_S, _SCREEN_FACTOR = 15.0, 6.0
# Build files of these languages list the tests, and a tree without them does not build.
_VISIBLE = ("c", "cpp")

MutationStatus = Literal[
    "kept", "duplicate", "not built", "no report", "breaks no test", "breaks too many", "invalid", "flaky"
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutationProject:
    """Project whose sources are mutated.

    Attributes:
      name: name of the project, the first part of its instances' names.
      archive: tar file of the sources.
      patches: diffs that apply to it, in order.
      license: SPDX name.
      focus: test files that must run; empty: those that the recipe chooses.
      url: where the archive can be fetched; empty if it is unknown.
    """

    name: str
    archive: pathlib.Path
    patches: tuple[str, ...] = ()
    license: str = ""
    focus: tuple[str, ...] = ()
    url: str = ""


class MutationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of trying one set of mutations.

    Attributes:
      project, language, number: project, its language, and number of the draw.
      status: whether it is kept, or why not.
      reason: details; empty if there are none.
      operators: kinds of the bugs.
      num_broken: number of tests that it breaks.
      duration_s: time that it took, in seconds.
      instance, source: instance and its source; None: it is not kept.
    """

    project: str
    language: str
    number: int
    status: MutationStatus
    reason: str = ""
    operators: tuple[str, ...] = ()
    num_broken: int = 0
    duration_s: float = 0.0
    instance: SweInstance | None = None
    source: InstanceSource | None = None


class _Dropped(Exception):
    """Raised for a candidate that is not kept, with its status, reason and number of broken tests."""

    def __init__(self, status: MutationStatus, reason: str = "", num_broken: int = 0):
        super().__init__(reason)
        self.status: MutationStatus = status
        self.reason, self.num_broken = reason, num_broken


class MutationMaker:
    """Maker of instances of one project.

    Args:
      project: sources.
      builder: builder of environments.
      archive: sha256 of the archive.
      seed: seed of the draws.
    """

    def __init__(self, project: MutationProject, builder: RuleBuilder, archive: str, seed: int = 0):
        self.project, self._builder, self._archive, self._seed = project, builder, archive, seed
        self._digests: list[str | None] = []
        self._tree: FileTree = {}
        self._paths: list[str] = []
        self._gold: list[RunReport] = []
        self._seconds: dict[str, float] = {}
        self._built: BuiltProject | None = None
        self.language = ""

    async def prepare(self) -> None:
        """Builds the project and runs its tests six times. Raises RecipeError, BuildError, TreeError, PatchError."""
        source = SourceTree(archive=self.project.archive, patches=self.project.patches)
        self._tree = await make_tree(source)
        limits = self._builder.store.limits
        built = await self._builder.build(self._tree, self.project.focus, self.project.name)
        runs = await run_gold_arm(built, PatchParts(code="", test="", aux=""), limits)
        self.language = built.record.language
        self._gold = [run.report for run in runs if run.report is not None]
        times = [run.seconds for run in runs[:GOLD_RUNS]]
        self._seconds = {"gold_median": round(statistics.median(times), 3)}
        listed = built.plan.files.get(f"{RECIPE_FOLDER}/tests.txt")
        tests = listed.content.decode().split("\n")[:-1] if listed else list(self._tree)
        tests = [path for path in tests if path in self._tree and _is_test_source(path)]
        self._paths = mutable_files(self._tree, self.language, tests)
        self._built = built

    async def make(self, number: int) -> MutationResult:
        """Tries the draw with this number. Raises SandboxError if sandboxes fail, which says nothing about it."""
        start = time.monotonic()
        fields = {"project": self.project.name, "language": self.language, "number": number}
        drawn = self._draw(number)
        if drawn is None:
            return MutationResult(**fields, status="duplicate")
        fields["operators"] = drawn.operators
        try:
            instance, source, num_broken = await self._make(drawn)
        except _Dropped as drop:
            reason, num_broken = drop.reason[:500], drop.num_broken
            fields |= {"status": drop.status, "reason": reason, "num_broken": num_broken}
        else:
            fields |= {"status": "kept", "num_broken": num_broken}
            fields |= {"instance": instance, "source": source}
        return MutationResult(**fields, duration_s=round(time.monotonic() - start, 3))

    def _draw(self, number: int) -> DrawnMutation | None:
        """Returns the mutations of a draw; None if it has none, or an earlier one is the same."""
        drawn = None
        for other in range(len(self._digests), number + 1):
            seed = f"{self._seed}/{self.project.name}/{other}"
            drawn = draw_mutation(self._tree, self._paths, self.language, seed)
            self._digests.append(drawn and drawn.digest)
        digest = self._digests[number]
        if digest is None or digest in self._digests[:number]:
            return None
        seed = f"{self._seed}/{self.project.name}/{number}"
        return drawn or draw_mutation(self._tree, self._paths, self.language, seed)

    async def _make(self, drawn: DrawnMutation) -> tuple[SweInstance, InstanceSource, int]:
        broken, run = await self._screen(drawn)
        base = with_changes(self._tree, {drawn.path: mutated_file(self._tree, drawn)})
        hidden, layer, base_report = await self._hide(base, broken, run)
        base = {path: file for path, file in base.items() if path not in hidden}
        instance, source = await self._describe(drawn, base, hidden, broken, run)
        assert run.report is not None
        arms = Arms(base=base_report, test=run.report, gold=self._gold, test_log=run.log)
        instance = self._classify(instance, arms, layer, hidden)
        return await self._grade(instance, layer), source, len(broken)

    async def _screen(self, drawn: DrawnMutation) -> tuple[list[str], RunResult]:
        """Returns the tests that the mutations break, and their run."""
        built, limits = self._project(), self._builder.store.limits
        timeout_s = max(_MIN_SCREEN_S, _SCREEN_FACTOR * self._seconds["gold_median"])
        async with Sandbox(limits.sandbox(built.layer.layer)) as box:
            await put_tree(box, WORKDIR, {drawn.path: mutated_file(self._tree, drawn)})
            try:
                await rebuild(box, built.commands, limits.build_timeout_s)
            except RebuildError as error:
                raise _Dropped("not built", str(error)[-300:]) from None
            run = await run_tests(box, built.commands, timeout_s)
        if run.exit_code is None:
            raise _Dropped("no report", f"the tests had no end within {timeout_s:.0f} s")
        if run.report is None:
            raise _Dropped("no report", run.problem or "")
        if not run.report.has_tests:
            status = "not built" if has_load_failure(run.report, run.log) else "no report"
            raise _Dropped(status, f"no test was found: {run.log[-300:]}")
        statuses = run.report.statuses
        passing = [name for name in self._gold[0].statuses if self._passes(name)]
        broken = [name for name in passing if statuses.get(name) != "pass"]
        if not broken:
            raise _Dropped("breaks no test")
        if len(broken) > MAX_BROKEN_SHARE * len(passing):
            raise _Dropped("breaks too many", num_broken=len(broken))
        return broken, run

    def _passes(self, name: str) -> bool:
        return all(report.statuses.get(name) == "pass" for report in self._gold)

    def _project(self) -> BuiltProject:
        if self._built is None:
            raise ValueError("the project is not prepared; await prepare() first")
        return self._built

    async def _hide(
        self, base: FileTree, broken: list[str], run: RunResult
    ) -> tuple[list[str], StoredLayer, RunReport]:
        """Returns the test files to hide, the environment without them, and the report on it."""
        built, limits = self._project(), self._builder.store.limits
        hidden = find_test_files(base, broken) if self.language not in _VISIBLE else []
        if hidden:
            remaining = {path: file for path, file in base.items() if path not in hidden}
            try:
                layer = await self._builder.set_up(remaining, built.plan, self.language)
                async with Sandbox(limits.sandbox(layer.layer)) as box:
                    base_run = await run_tests(box, built.commands, limits.test_timeout_s)
            except BuildError:
                base_run = None
            if base_run and base_run.report and base_run.report.has_tests:
                return hidden, layer, base_run.report
        assert run.report is not None
        return [], await self._builder.set_up(base, built.plan, self.language), run.report

    async def _describe(
        self,
        drawn: DrawnMutation,
        base: FileTree,
        hidden: list[str],
        broken: list[str],
        run: RunResult,
    ) -> tuple[SweInstance, InstanceSource]:
        """Returns the instance without lists of tests, and its source."""
        project, original = self.project, self._tree[drawn.path]
        mutated = {drawn.path: mutated_file(self._tree, drawn)}
        gold = await diff_trees(mutated, {drawn.path: original})
        bug = await diff_trees({drawn.path: original}, mutated)
        tests = {path: self._tree[path] for path in hidden}
        test_patch = await diff_trees({}, tests) if tests else ""
        name = f"{project.name}__mutation-{drawn.digest}"
        instance = SweInstance(
            instance_id=name,
            repo=project.name,
            base_commit=digest_tree(base),
            language=self.language,
            source=f"mutation:{project.archive.name}",
            license=project.license,
            issue=Issue(kind="mutation", title=f"{len(broken)} tests of {project.name} fail"),
            problem_statement=write_statement(project.name, broken, run.log),
            task_type="bug_fix",
            patch=gold,
            test_patch=test_patch,
            labels={"mutation": list(drawn.operators), "hides_tests": bool(hidden)},
            sha256={"source": self._archive},
        )
        source = InstanceSource(
            instance_id=name,
            archive=self._archive,
            name=project.archive.name,
            url=project.url,
            patches=(*project.patches, bug),
            removed=tuple(hidden),
            focus=project.focus,
        )
        return instance, source

    def _classify(
        self, instance: SweInstance, arms: Arms, layer: StoredLayer, hidden: list[str]
    ) -> SweInstance:
        """Returns the instance with its environment and lists of tests."""
        built = self._project()
        classes = classify(arms)
        if classes.invalid_reason:
            raise _Dropped("invalid", classes.invalid_reason)
        environment = msgspec.structs.replace(built.environment, layer=layer.digest)
        return msgspec.structs.replace(
            instance,
            environment=environment,
            rebuild_cmds=built.plan.rebuild_cmds,
            test_cmds=built.plan.test_cmds,
            log_parser=built.plan.log_parser,
            per_test_cmd=built.plan.per_test_cmd,
            FAIL_TO_PASS=tuple(classes.fail_to_pass),
            PASS_TO_PASS=tuple(classes.pass_to_pass),
            NEW_TO_PASS=tuple(classes.tests("N2P")),
            LOST=tuple(classes.tests("LOST")),
            MAY_SKIP=tuple(sorted(classes.may_skip)),
            runs={"base": 1, "test": 1, "gold": len(arms.gold)},
            seconds=self._seconds,
        )

    async def _grade(self, instance: SweInstance, layer: StoredLayer) -> SweInstance:
        """Grades the original and the mutated source, and returns the instance with its labels.

        Raises _Dropped if a reward is wrong.
        """
        grader = SweGrader(instance, layer, self._builder.store.limits)
        gold = await grader.grade_patch(instance.patch)
        if gold.reward != 1.0:  # a variant can disturb other tests, or not compile
            grader.drop_variants()
            gold = await grader.grade_patch(instance.patch)
        if gold.reward != 1.0:
            failing = gold.F2P.failure + gold.P2P.failure
            why = gold.error or gold.infra_reason or ", ".join(failing)
            raise _Dropped("flaky" if failing else "invalid", f"gold scores {gold.reward}: {why}")
        empty = await grader.grade_patch("")
        if empty.reward != 0.0:
            raise _Dropped("invalid", f"no change scores {empty.reward}: {empty.error}")
        if empty.F2P.success:  # the second run of the mutated tree differs from the first one
            raise _Dropped("flaky", f"{empty.F2P.success[0]} fails in one of two runs")
        labels = {**instance.labels, **({} if grader.has_variants else {VARIANTS: False})}
        return msgspec.structs.replace(instance, labels=labels)


def _is_test_source(path: str) -> bool:
    return is_test_path(path) and language_of(path) is not None
