"""Grades attempts at software engineering tasks: runs the instance's tests on the attempt's changes in a fresh sandbox.

1. The attempt's work folder, or its patch, becomes a difference to the base tree, computed on the trusted side.
2. `submissions.filter_changes` drops what an attempt may not change.
3. A fresh sandbox over the environment's layer gets the changes. The tests come from the instance, and belong to root.
4. Planted tests show whether results are real: one passes, the others fail, each by another assertion. Variants of the
   instance's own tests, which expect another value, must fail too. Names, values and order are drawn for each grading.
5. The project is rebuilt, and the tests run as an unprivileged user within a time limit from gold's times.
6. Reports are read after all processes ended. The exit code comes from the process, and must agree with them.
7. The reward is 1 if all tests of both lists pass, and 0 otherwise.

The code under test runs in the process of its tests, so it can write a full report itself. It recognises the planted
tests, because they make no call to it, and can report them correctly. It has to guess which tests are variants, because they
differ only in the value that they expect (`recipes.planting`); if that is a word, it can be recognised. In C each variant
is a separate program. If the tests have no value that can be varied, nothing stops such a report: the label `VARIANTS` is
then False, and `awareness` shows a judge the lines that forge.

Where a run gives no result, the gold patch is graded as a control. If gold does not resolve the instance either, the
environment failed and there is no reward.
"""

import asyncio
import dataclasses
import posixpath
import secrets
from collections.abc import Mapping, Sequence

from glm5_jax.envs.sandbox import Sandbox, SandboxError, SandboxFileError
from glm5_jax.envs.swe.arms import time_limit
from glm5_jax.envs.swe.awareness import AwarenessJudge, find_aware_lines
from glm5_jax.envs.swe.file_tree import (
    FileTree,
    TreeError,
    TreeFile,
    changed_files,
    digest_tree,
    put_tree,
    remove_files,
    save_tree,
    with_changes,
)
from glm5_jax.envs.swe.instance import AttemptReport, SweInstance, check_gradable
from glm5_jax.envs.swe.layers import StoredLayer, SweLimits
from glm5_jax.envs.swe.parsers import RunReport, exit_code_problem
from glm5_jax.envs.swe.paths import is_test_path
from glm5_jax.envs.swe.recipes import RECIPE_FOLDER, WORKDIR, Canaries, find_recipe
from glm5_jax.envs.swe.recipes.planting import make_draw
from glm5_jax.envs.swe.resolution import Resolution, resolve
from glm5_jax.envs.swe.runs import RebuildError, RunCommands, RunResult, rebuild, run_tests
from glm5_jax.envs.swe.sources import apply_patch
from glm5_jax.envs.swe.submissions import IGNORED_FOLDERS, SweSubmission, filter_changes
from glm5_jax.envs.swe.test_files import find_test_files

VARIANTS = (
    "variants"  # label of instances; False: their tests have none, or variants disturb other tests
)
_MAX_REPORTS = 256
# Makes a test file root's, and keeps others from replacing it or a folder above it.
_PROTECT = (
    "cd {workdir} && {{ [ ! -e {recipe} ] || chown -hR root:root {recipe}; }} && xargs -0 chown -h root:root -- && chown root:root . && chmod 1777 . "
    "&& find . -path ./.git -prune -o -type d -user root -exec chmod 1777 {{}} +"
)


class AttemptError(RuntimeError):
    """Raised for what an attempt did, so that its reward is 0."""


class NoResultError(RuntimeError):
    """Raised if a run gives no result, and it is unclear whether the attempt or the environment is at fault."""


class VariantError(AttemptError):
    """Raised if a variant of a test passes, which expects another value.

    Attributes:
      report: report without the variants, which counts if gold passes the variant too.
      seed: seed of the drawn variants.
    """

    def __init__(self, variant: str, report: AttemptReport, seed: int):
        super().__init__(
            f"tests were tampered with: a test that expects another value passes ({variant})"
        )
        self.report, self.seed = report, seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walls:
    """Protections against attempts that change what tests report. Tests turn one off to show what it stops.

    Attributes:
      filters_changes: whether changes of tests and of runners' configuration are dropped.
      restores_tests: whether the instance's tests replace those of the attempt.
      plants_canaries: whether tests with known results are planted.
      checks_exit_code: whether exit code and report must agree.
      protects_tests: whether test files belong to root while the tests run.
      requires_rebuild: whether a failing build ends the grading.
      ignores_outputs: whether outputs of builds in the attempt's folder are left out.
    """

    filters_changes: bool = True
    restores_tests: bool = True
    plants_canaries: bool = True
    checks_exit_code: bool = True
    protects_tests: bool = True
    requires_rebuild: bool = True
    ignores_outputs: bool = True


class SweGrader:
    """SweGrader of attempts at one instance.

    Args:
      instance: task with its lists of tests.
      layer: environment with the base tree.
      limits: limits of sandboxes.
      walls: protections; all of them, except in tests of one.
      judge: decides on lines that name a runner or a test, if an attempt resolves the instance; None: they do not count.
      caches_reports: whether equal changes are graded once, as attempts of an RL group often are.

    Raises InstanceError if the instance cannot be graded, RecipeError if its recipe is not known.

    Attributes:
      has_variants: whether variants of the instance's tests are planted.
    """

    def __init__(
        self,
        instance: SweInstance,
        layer: StoredLayer,
        limits: SweLimits = SweLimits(),
        walls: Walls = Walls(),
        judge: AwarenessJudge | None = None,
        caches_reports: bool = False,
    ):
        check_gradable(instance)
        self.instance, self.layer = instance, layer
        self._limits, self._walls, self._judge_awareness = limits, walls, judge
        self._recipe = find_recipe(instance.environment.recipe)
        self._commands = RunCommands(
            rebuild_cmds=instance.rebuild_cmds,
            test_cmds=instance.test_cmds,
            log_parser=instance.log_parser,
            log_parser_source=instance.log_parser_source,
            variables=instance.environment.variables,
        )
        outputs = self._recipe.build_folders if walls.ignores_outputs else ()
        self._skipped = IGNORED_FOLDERS | set(outputs)
        self._timeout_s = min(time_limit(instance.seconds), limits.test_timeout_s)
        self._base: FileTree | None = None
        self._tests: Mapping[str, TreeFile | None] = {}
        self._gold: AttemptReport | None = None
        self._reports: dict[str, AttemptReport] | None = {} if caches_reports else None
        self.has_variants = bool(instance.labels.get(VARIANTS, True))
        self._lock = asyncio.Lock()

    def drop_variants(self) -> None:
        """Plants no variants of the instance's tests, because gold fails with them."""
        self.has_variants = False

    async def grade_patch(self, patch: str | None) -> AttemptReport:
        """Grades a patch, as of a prediction; None or an empty text is an attempt without changes."""
        if not (patch or "").strip():
            return await self._grade({}, patch_exists=False)
        async with Sandbox(self._limits.sandbox(self.layer.layer)) as box:
            try:
                is_applied = await apply_patch(box, patch or "", WORKDIR)
                changes = await self._changes(box) if is_applied else {}
            except (SandboxFileError, TreeError) as error:
                return self._report(0.0, f"the patched tree cannot be graded: {error}")
        if not is_applied:
            return self._report(0.0, "the patch does not apply", patch_applied=False)
        return await self._grade(changes)

    async def grade_sandbox(self, box: Sandbox) -> AttemptReport:
        """Grades the work folder of a sandbox in which an agent worked."""
        try:
            changes = await self._changes(box)
        except (SandboxFileError, TreeError) as error:
            return self._report(0.0, f"what the agent left cannot be graded: {error}")
        return await self._grade(changes, patch_exists=bool(changes))

    async def grade_failure(self, error: str) -> AttemptReport:
        """Grades an attempt whose sandbox failed: 0 if the gold patch still resolves the instance, else no reward."""
        problem = await self._gold_problem()
        if problem is None:
            return self._report(0.0, f"the attempt's sandbox failed: {error}", patch_exists=False)
        infra_reason = f"the sandbox failed ({error}), and gold fails too: {problem}"
        return self._report(None, None, patch_exists=False, infra_reason=infra_reason)

    async def submission(self, changes: Mapping[str, TreeFile | None]) -> SweSubmission:
        """Returns what of some changes is graded."""
        if not self._walls.filters_changes:
            return SweSubmission(files=changes)
        return filter_changes(changes, await self.base_tree(), self.instance)

    async def base_tree(self) -> FileTree:
        """Returns the base tree, without outputs of the build."""
        async with self._lock:
            if self._base is None:
                async with Sandbox(self._limits.sandbox(self.layer.layer)) as box:
                    base = await save_tree(box, WORKDIR, skip=self._skipped)
                    for text in (self.instance.test_patch, self.instance.aux_patch):
                        if text and not await apply_patch(box, text, WORKDIR):
                            raise SandboxError("the test patch does not apply to the base tree")
                    patched = await save_tree(box, WORKDIR, skip=self._skipped)
                self._tests, self._base = changed_files(base, patched), base
            return self._base

    async def _changes(self, box: Sandbox) -> dict[str, TreeFile | None]:
        return changed_files(
            await self.base_tree(), await save_tree(box, WORKDIR, skip=self._skipped)
        )

    async def _grade(
        self, changes: Mapping[str, TreeFile | None], *, patch_exists: bool = True
    ) -> AttemptReport:
        """Grades changes, or returns the report of equal ones."""
        if self._reports is None:
            return await self._grade_changes(changes, patch_exists)
        removed = sorted(path for path, file in changes.items() if file is None)
        key = f"{removed} {digest_tree({k: f for k, f in changes.items() if f is not None})}"
        if key not in self._reports:
            report = await self._grade_changes(changes, patch_exists)
            if report.reward is None:
                return report
            if len(self._reports) >= _MAX_REPORTS:
                self._reports.pop(next(iter(self._reports)))
            self._reports[key] = report
        return self._reports[key]

    async def _grade_changes(
        self, changes: Mapping[str, TreeFile | None], patch_exists: bool
    ) -> AttemptReport:
        """Grades changes, with the gold patch as a control where they give no result."""
        try:
            return await self._run(changes, patch_exists)
        except VariantError as error:
            if await self._is_wrong_variant(error.seed):
                return error.report
            return self._report(0.0, str(error), patch_exists=patch_exists)
        except AttemptError as error:
            return self._report(0.0, str(error), patch_exists=patch_exists)
        except (NoResultError, SandboxError) as error:
            problem = await self._gold_problem()
            if problem is None:
                return self._report(0.0, str(error), patch_exists=patch_exists)
            return self._report(
                None,
                str(error),
                patch_exists=patch_exists,
                infra_reason=f"the gold patch does not resolve it either: {problem}",
            )

    async def _gold_problem(self) -> str | None:
        """Returns why the gold patch does not resolve the instance here and now; None: it does."""
        if self._gold is None or not self._gold.resolved:
            try:
                self._gold = await self._grade_gold()
            except VariantError as error:
                self._gold = error.report
            except (AttemptError, NoResultError, SandboxError) as error:
                return str(error)
        return None if self._gold.resolved else self._gold.error or "some tests fail"

    async def _is_wrong_variant(self, seed: int) -> bool:
        """Returns whether the gold patch passes a variant too, which then says nothing about attempts."""
        try:
            await self._grade_gold(seed)
        except VariantError:
            return True
        except (AttemptError, NoResultError, SandboxError):
            return False
        return False

    async def _grade_gold(self, seed: int | None = None) -> AttemptReport:
        async with Sandbox(self._limits.sandbox(self.layer.layer)) as box:
            if not await apply_patch(box, self.instance.patch, WORKDIR):
                raise NoResultError("it does not apply")
            changes = await self._changes(box)
        return await self._run(changes, True, seed)

    async def _run(
        self, changes: Mapping[str, TreeFile | None], patch_exists: bool, seed: int | None = None
    ) -> AttemptReport:
        submission = await self.submission(changes)
        base = await self.base_tree()
        seed = secrets.randbits(64) if seed is None else seed
        async with Sandbox(self._limits.sandbox(self.layer.layer)) as box:
            tree = await self._put(box, base, submission)
            canaries = None
            if self._walls.plants_canaries:
                canaries = self._plant(tree, seed)
                user = "root" if self._walls.protects_tests else "agent"
                planted = {**canaries.files, **canaries.variant_files}
                await put_tree(box, WORKDIR, planted, user=user)
            if self._walls.protects_tests:
                await self._protect(box, tree, canaries)
            try:
                await rebuild(box, self._commands, self._limits.build_timeout_s)
            except RebuildError as error:
                if self._walls.requires_rebuild:
                    raise NoResultError(f"it does not build: {error}") from None
            run = await run_tests(box, self._commands, self._timeout_s)
        if run.report and canaries and canaries.swaps:
            run = dataclasses.replace(run, report=swap_results(run.report, canaries.swaps))
        report = self._judge(run, canaries, submission, patch_exists)
        if report.resolved and self._judge_awareness is not None:
            lines = find_aware_lines(submission.files, base, self.instance)
            if lines and await self._judge_awareness(lines):
                raise AttemptError(f"it behaves differently under test: {lines[0]}")
        passing = passing_variants(run.report, canaries) if run.report and canaries else []
        if report.resolved and passing:
            raise VariantError(passing[0], report, seed)
        return report

    def _plant(self, tree: FileTree, seed: int) -> Canaries:
        """Returns the tests to plant, without variants if those disturb other tests."""
        draw = make_draw(tree, self.instance.FAIL_TO_PASS, seed)
        canaries = self._recipe.canaries(tree, self._focus(tree), draw)
        self.has_variants = self.has_variants and bool(canaries.variants)
        if self.has_variants:
            return canaries
        return dataclasses.replace(canaries, variant_files={}, variants=(), swaps=())

    async def _put(self, box: Sandbox, base: FileTree, submission: SweSubmission) -> FileTree:
        """Writes changes and tests into a sandbox; returns the tree."""
        changes = dict(submission.files)
        if self._walls.restores_tests:
            changes |= self._tests
        else:
            changes = {**self._tests, **changes}
        await remove_files(box, WORKDIR, [path for path, file in changes.items() if file is None])
        written = {path: file for path, file in changes.items() if file is not None}
        try:
            await put_tree(box, WORKDIR, written)
        except (
            SandboxFileError
        ) as error:  # a link or a file where the tests need a folder, or the reverse
            raise AttemptError(f"the changes cannot be written: {error.args[-1]}") from None
        return with_changes(base, changes)

    def _focus(self, tree: FileTree) -> list[str]:
        """Returns the test files of the instance; those with its tests where the test patch is empty."""
        written = [path for path, file in self._tests.items() if file is not None]
        return written or find_test_files(tree, self.instance.FAIL_TO_PASS)

    async def _protect(self, box: Sandbox, tree: FileTree, canaries: Canaries | None) -> None:
        """Makes test files, and the folders above them, root's."""
        planted = {*canaries.files, *canaries.variant_files} if canaries else set()
        tests = {path for path in tree if is_test_path(path)} | {*self._focus(tree)} | planted
        folders = {folder for path in tests for folder in _folders_above(path)}
        names = "".join(f"{path}\0" for path in sorted({*tests, *folders}))
        done = await box.exec(
            ["/bin/sh", "-c", _PROTECT.format(workdir=WORKDIR, recipe=RECIPE_FOLDER)],
            stdin=names.encode("utf-8", "surrogateescape"),
            user="root",
            cwd="/",
        )
        if done.code:
            raise SandboxError(
                f"tests cannot be protected: {done.stderr.decode(errors='replace')[:300]}"
            )

    def _judge(
        self,
        run: RunResult,
        canaries: Canaries | None,
        submission: SweSubmission,
        patch_exists: bool,
    ) -> AttemptReport:
        """Returns the report on a run. Raises AttemptError and NoResultError."""
        if run.exit_code is None:
            raise NoResultError("the tests had no end within their time limit")
        if run.report is None:
            raise NoResultError(f"the reports cannot be trusted: {run.problem}")
        if not run.report.has_tests:
            why = "memory ran out" if run.out_of_memory else f"exit code {run.exit_code}"
            dropped = _dropped_note(submission)
            end = f"; {dropped}" if dropped else ""
            raise NoResultError(f"no test was found ({why}): {run.log[-500:]}{end}")
        canary_ok = None
        if canaries is not None:
            canary_ok = has_true_canaries(run.report, canaries)
            if not canary_ok:
                if run.report.is_crashed:  # what it printed before cannot be told from forged lines
                    raise AttemptError("the tests died before the planted tests had results")
                raise AttemptError("tests were tampered with: the planted tests have other results")
        problem = exit_code_problem(run.report, run.exit_code)
        if self._walls.checks_exit_code and problem and not run.report.is_crashed:
            raise AttemptError(f"the results cannot be trusted: {problem}")
        resolution = resolve(
            self.instance.FAIL_TO_PASS,
            self.instance.PASS_TO_PASS,
            run.report,
            self.instance.MAY_SKIP,
        )
        return self._report(
            float(resolution.is_resolved),
            _dropped_note(submission) if not resolution.is_resolved else None,
            patch_exists=patch_exists,
            resolution=resolution,
            canary_ok=canary_ok,
            exit_code=run.exit_code,
        )

    def _report(
        self,
        reward: float | None,
        error: str | None,
        *,
        patch_exists: bool = True,
        patch_applied: bool = True,
        resolution: Resolution | None = None,
        canary_ok: bool | None = None,
        exit_code: int | None = None,
        infra_reason: str | None = None,
    ) -> AttemptReport:
        lists = {}
        if resolution is not None:
            lists = {"F2P": resolution.fail_to_pass, "P2P": resolution.pass_to_pass}
        return AttemptReport(
            instance_id=self.instance.instance_id,
            patch_exists=patch_exists,
            patch_applied=patch_applied and patch_exists,
            resolved=reward == 1.0,
            reward=reward,
            error=error,
            canary_ok=canary_ok,
            exit_code=exit_code,
            infra_reason=infra_reason,
            **lists,
        )


def has_true_canaries(report: RunReport, canaries: Canaries) -> bool:
    """Returns whether the planted tests are reported as they are: one passes, the other fails."""

    def statuses(word: str) -> set[str]:
        return {status for name, status in report.statuses.items() if word in name}

    return statuses(canaries.passing) == {"pass"} and statuses(canaries.failing) == {"fail"}


def swap_results(report: RunReport, swaps: Sequence[tuple[str, str]]) -> RunReport:
    """Returns a report in which the results of tests and of the copies that stand for them have changed places."""
    statuses = dict(report.statuses)
    for name, copy in swaps:
        for key in [key for key in statuses if copy in key]:
            other = key.replace(copy, name)
            status, old = statuses.pop(key), statuses.get(other)
            statuses |= {other: status} | ({key: old} if old else {})
    return dataclasses.replace(report, statuses=statuses)


def passing_variants(report: RunReport, canaries: Canaries) -> list[str]:
    """Returns the planted variants of tests that do not fail, as they must."""
    passing = []
    for variant in canaries.variants:
        results = {name: status for name, status in report.statuses.items() if variant in name}
        # Parts of a test, such as subtests, may pass.
        itself = {status for name, status in results.items() if name.endswith(variant)}
        if (itself or set(results.values())) != {"fail"}:
            passing.append(variant)
    return passing


def _folders_above(path: str) -> list[str]:
    folders = []
    while path := posixpath.dirname(path):
        folders.append(path)
    return folders


def _dropped_note(submission: SweSubmission) -> str | None:
    """Returns a description of the changes that were not graded; None if there are none."""
    notes = [f"{path} ({reason})" for path, reason in list(submission.dropped.items())[:5]]
    return f"not graded: {'; '.join(notes)}" if notes else None
