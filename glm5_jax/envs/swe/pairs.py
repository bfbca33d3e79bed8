"""Makes instances from real changes: patches of a distribution, releases of a package, commits of a repository.

Each pair is two trees of sources with a description. The results are in a journal, so that a run that was killed continues.

    FOLDER/pairs.jsonl                       results, each appended when it is known
    FOLDER/archives/                         archives of the sources
    FOLDER/{instances,sources}.jsonl         valid instances, written at the end
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from glm5_jax.envs.concurrency import run_workers
from glm5_jax.envs.swe.builder import RuleBuilder
from glm5_jax.envs.swe.dataset import InstanceSource, add_archive, write_dataset
from glm5_jax.envs.swe.file_tree import TreeError
from glm5_jax.envs.swe.instance import Issue, SweInstance, TaskType
from glm5_jax.envs.swe.journal import ResultJournal, open_journal
from glm5_jax.envs.swe.patches import PatchError, parse_patch
from glm5_jax.envs.swe.sources import SourceTree, make_change
from glm5_jax.envs.swe.statements import task_type_by_rule
from glm5_jax.envs.swe.validation import make_instance

PairKind = Literal["real", "release"]
_JOURNAL = "pairs.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcePair:
    """Change of a project: its sources before and after.

    Attributes:
      name: name of the instance.
      project: name of the project.
      language: language of the project; empty: by its files.
      kind: "real" for one fix, "release" for all changes of a release.
      before, after: sources.
      issue: description of the problem.
      license: SPDX name.
      version: version of the project.
      url: where the archive can be fetched; empty if it is unknown.
      folders: the only folders whose changes count; empty: all.
    """

    name: str
    project: str
    language: str = ""
    kind: PairKind = "real"
    before: SourceTree
    after: SourceTree
    issue: Issue
    license: str = ""
    version: str = ""
    url: str = ""
    folders: tuple[str, ...] = ()


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of making an instance of a pair.

    Attributes:
      name, language, kind: those of the pair.
      invalid_reason: why it is no instance; None: it is one.
      counts: number of tests by class.
      rewards: reward by control: gold, empty and last_hunk.
      duration_s: time that it took, in seconds.
      instance, source: instance and its source; None: it is invalid.
    """

    name: str
    language: str
    kind: PairKind
    invalid_reason: str | None = None
    counts: dict[str, int] = {}
    rewards: dict[str, float | None] = {}
    duration_s: float = 0.0
    instance: SweInstance | None = None
    source: InstanceSource | None = None


async def make_pairs(
    pairs: Sequence[SourcePair],
    builder: RuleBuilder,
    folder: pathlib.Path,
    *,
    concurrency: int = 1,
    on_result: Callable[[PairResult], None] = lambda result: None,
) -> list[PairResult]:
    """Makes the instances of all pairs without a result, and writes the dataset. Raises JournalBusyError, SandboxError."""
    with open_journal(folder / _JOURNAL, PairResult) as journal:
        results = {result.name: result for result in journal.records}
        waiting = iter([pair for pair in pairs if pair.name not in results])
        await _work(waiting, builder, folder, journal, results, concurrency, on_result)
        ordered = [results[pair.name] for pair in pairs]
        valid = [result for result in ordered if result.instance is not None]
        write_dataset(
            folder,
            [result.instance for result in valid if result.instance],
            [result.source for result in valid if result.source],
        )
        return ordered


async def _work(
    waiting: Iterator[SourcePair],
    builder: RuleBuilder,
    folder: pathlib.Path,
    journal: ResultJournal[PairResult],
    results: dict[str, PairResult],
    concurrency: int,
    on_result: Callable[[PairResult], None],
) -> None:
    async def work() -> None:
        for pair in waiting:
            result = await make_pair(pair, builder, folder)
            results[pair.name] = result
            journal.append(result)
            on_result(result)

    await run_workers(work, concurrency)


async def make_pair(pair: SourcePair, builder: RuleBuilder, folder: pathlib.Path) -> PairResult:
    """Makes the instance of a pair, and copies its archive into the folder. Raises SandboxError."""
    start = time.monotonic()
    fields: dict = {"name": pair.name, "language": pair.language, "kind": pair.kind}
    try:
        change = await make_change(pair.before, pair.after, pair.folders)
    except (TreeError, PatchError) as error:
        return PairResult(**fields, invalid_reason=str(error))
    draft = SweInstance(
        instance_id=pair.name,
        repo=pair.project,
        base_commit=change.base_commit,
        language=pair.language,
        source=f"{pair.kind}:{pair.before.archive.name}",
        version=pair.version,
        license=pair.license,
        issue=pair.issue,
        problem_statement=f"{pair.issue.title}\n\n{pair.issue.body}".strip() or pair.name,
        task_type=_task_type(pair.issue),
        patch=change.parts.code,
        test_patch=change.parts.test,
        aux_patch=change.parts.aux,
    )
    result = await make_instance(draft, change, builder)
    if result.classes is not None:
        classes: Mapping[str, str] = result.classes.classes
        fields["counts"] = {
            kind: list(classes.values()).count(kind) for kind in sorted(set(classes.values()))
        }
    fields["rewards"] = {name: report.reward for name, report in result.gradings.items()}
    if result.built is not None:
        fields["language"] = result.built.record.language
    seconds = round(time.monotonic() - start, 1)
    if result.invalid_reason is not None or result.instance is None:
        return PairResult(**fields, invalid_reason=result.invalid_reason, duration_s=seconds)
    digest = add_archive(folder, pair.before.archive)
    instance = msgspec.structs.replace(
        result.instance, language=fields["language"], sha256={"source": digest}
    )
    source = InstanceSource(
        instance_id=pair.name,
        archive=digest,
        name=pair.before.archive.name,
        url=pair.url,
        patches=pair.before.patches,
        removed=pair.before.removed,
        focus=tuple(file.path for file in parse_patch(instance.test_patch) if file.new_path),
    )
    return PairResult(**fields, duration_s=seconds, instance=instance, source=source)


def _task_type(issue: Issue) -> TaskType:
    return task_type_by_rule(issue.title, issue.body) or "other"
