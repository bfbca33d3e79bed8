"""Makes instances from changes, and keeps those that grade as they must.

    result = await make_instance(draft, change, builder)

An instance is kept if its arms classify as valid, the layer does not hold the fix already, and gradings in fresh sandboxes
come out right: gold scores 1, no change scores 0. The label `checks_last_hunk` says whether gold without its last hunk scores
0; real fixes may end with a hunk that tests do not see, such as one that frees memory.
"""

import dataclasses
import posixpath
from collections.abc import Mapping

import msgspec

from glm5_jax.envs.sandbox import Sandbox, SandboxFileError
from glm5_jax.envs.swe.arms import ArmRuns, fill_instance, run_arms
from glm5_jax.envs.swe.builder import BuildError, BuiltProject, RuleBuilder
from glm5_jax.envs.swe.grading import VARIANTS, SweGrader
from glm5_jax.envs.swe.instance import AttemptReport, SweInstance
from glm5_jax.envs.swe.layers import StoredLayer, SweLimits
from glm5_jax.envs.swe.patch_edits import drop_last_hunk
from glm5_jax.envs.swe.patches import PatchError, parse_patch
from glm5_jax.envs.swe.recipes import RecipeError
from glm5_jax.envs.swe.sources import Change
from glm5_jax.envs.swe.transitions import Classification

_MAX_COPY_BYTES = 4 << 20
_PLACES = ("/usr", "/tools", "/opt", "/etc", "/var", "/srv", "/home", "/root", "/tmp")
_MIN_LINE = 12  # characters of an added line that is unlikely to occur elsewhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeInstance:
    """Result of making an instance.

    Attributes:
      instance: instance with its lists of tests; None: its arms did not run.
      invalid_reason: why it is left out; None: it is valid.
      classes: classes of its tests; None: its arms did not run.
      gradings: reports on gold, on no change ("empty") and on gold without its last hunk ("last_hunk").
      built: its environment; None: it could not be built.
    """

    instance: SweInstance | None = None
    invalid_reason: str | None = None
    classes: Classification | None = None
    gradings: Mapping[str, AttemptReport] = dataclasses.field(default_factory=dict)
    built: BuiltProject | None = None


async def make_instance(draft: SweInstance, change: Change, builder: RuleBuilder) -> MadeInstance:
    """Builds, runs and grades an instance. Raises SandboxError if sandboxes fail, which says nothing about it.

    draft: instance with its texts; patches and `base_commit` come from the change.
    """
    for name, part in (("code", change.parts.code), ("test", change.parts.test)):
        if not part:
            return MadeInstance(invalid_reason=f"the change has no {name}")
    focus = [file.path for file in parse_patch(change.parts.test) if file.new_path]
    limits = builder.store.limits
    try:
        built = await builder.build(change.base, focus, draft.repo)
        runs: ArmRuns = await run_arms(built, change.parts, limits)
    except (RecipeError, BuildError, PatchError) as error:
        return MadeInstance(invalid_reason=str(error))
    instance, classes = fill_instance(draft, built, runs)
    result = MadeInstance(instance=instance, classes=classes, built=built)
    reason = classes.invalid_reason or await leak_of(instance, built.layer, limits)
    if reason is None:
        grader = SweGrader(instance, built.layer, limits)
        gradings = await grade_controls(grader, instance.patch)
        labels = {**instance.labels, "checks_last_hunk": gradings["last_hunk"].reward == 0.0}
        labels |= {} if grader.has_variants else {VARIANTS: False}
        instance = msgspec.structs.replace(instance, labels=labels)
        result = dataclasses.replace(result, gradings=gradings, instance=instance)
        reason = _grading_problem(gradings)
    return dataclasses.replace(result, invalid_reason=reason)


async def grade_controls(grader: SweGrader, gold: str) -> dict[str, AttemptReport]:
    """Returns the reports on the gold patch, on no change, and on gold without its last hunk."""
    reports = {"gold": await grader.grade_patch(gold)}
    if reports["gold"].reward != 1.0:  # a variant can disturb other tests, or not compile
        grader.drop_variants()
        reports["gold"] = await grader.grade_patch(gold)
    for name, patch in (("empty", ""), ("last_hunk", drop_last_hunk(gold))):
        reports[name] = await grader.grade_patch(patch)
    return reports


def _grading_problem(gradings: Mapping[str, AttemptReport]) -> str | None:
    for name, expected in (("gold", 1.0), ("empty", 0.0)):
        report = gradings[name]
        if report.reward != expected:
            why = (
                report.error
                or report.infra_reason
                or ", ".join(report.F2P.failure + report.P2P.failure)
            )
            return f"the attempt {name!r} scores {report.reward}, and {expected:g} is right: {why[:300]}"
    return None


async def leak_of(instance: SweInstance, layer: StoredLayer, limits: SweLimits) -> str | None:
    """Returns which file of the environment holds the fix already, as a newer version of a package would; None: none.

    A file of the same name that has all longer lines that the gold patch adds to it holds the fix.
    """
    async with Sandbox(limits.sandbox(layer.layer)) as box:
        for file in parse_patch(instance.patch):
            added = {
                line[1:].strip()
                for hunk in file.hunks
                for line in hunk.lines
                if line.startswith("+") and len(line.strip()) > _MIN_LINE
            }
            if not added:
                continue
            name, line = posixpath.basename(file.path), max(sorted(added), key=len)
            for path in await _files_with(box, name, line):
                try:
                    content = (await box.get(path, _MAX_COPY_BYTES)).decode("utf-8", "replace")
                except SandboxFileError:
                    continue
                if added <= {line.strip() for line in content.split("\n")}:
                    return f"the environment holds the fix: {path} has the lines that the gold patch adds to {file.path}"
    return None


async def _files_with(box: Sandbox, name: str, line: str) -> list[str]:
    """Returns the paths of files with a name and a line, without those of the work folder."""
    grep = ["-exec", "grep", "-lZF", "-e", line, "--", "{}", "+"]
    find = ["find", *_PLACES, "-name", name, "-type", "f", *grep]
    done = await box.exec(find, user="root", cwd="/")
    return done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
