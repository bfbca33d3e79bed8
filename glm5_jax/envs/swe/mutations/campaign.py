"""Makes instances from mutations of several projects, and continues where a run was stopped.

    FOLDER/candidates.jsonl     results of all candidates, each appended when it is known
    FOLDER/archives/            archives of the sources
    FOLDER/{instances,sources}.jsonl, summary.json, funnel.jsonl    written at the end

Candidates are numbered, and each follows from the seed, the project and its number. So the instances of a campaign that was
killed and continued are those of one that was not, as long as their tests give the same results.
"""

import collections
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from glm5_jax.envs.concurrency import run_workers
from glm5_jax.envs.funnel import Funnel
from glm5_jax.envs.swe.builder import BuildError, RuleBuilder
from glm5_jax.envs.swe.dataset import add_archive, write_dataset
from glm5_jax.envs.swe.file_tree import TreeError
from glm5_jax.envs.swe.journal import ResultJournal, open_journal
from glm5_jax.envs.swe.mutations.maker import MutationMaker, MutationProject, MutationResult
from glm5_jax.envs.swe.patches import PatchError
from glm5_jax.envs.swe.recipes import RecipeError

_TRIES_PER_INSTANCE, _MIN_TRIES = 30, 20
_JOURNAL = "candidates.jsonl"
# Stages of the funnel, each with the statuses that it drops.
_STAGES = {
    "draw": ("duplicate",),
    "build": ("not built",),
    "tests": ("no report", "breaks no test", "breaks too many"),
    "classes": ("invalid",),
    "gradings": ("flaky",),
}


class CandidateMaker(Protocol):
    """Maker of candidates of one project, such as `maker.MutationMaker`."""

    async def prepare(self) -> None:
        """Builds the project."""
        ...

    async def make(self, number: int) -> MutationResult:
        """Tries the draw with this number."""
        ...


class MutationCampaign:
    """Campaign in a folder.

    Args:
      projects: projects to mutate.
      builder: builder of environments.
      folder: folder of the results.
      count: number of instances, over all projects.
      seed: seed of the draws.
      concurrency: number of candidates at a time.
      on_progress: function that receives the number of instances and the last candidate.
      make_maker: function that returns the maker of a project.
    """

    def __init__(
        self,
        projects: Sequence[MutationProject],
        builder: RuleBuilder,
        folder: pathlib.Path,
        *,
        count: int,
        seed: int = 0,
        concurrency: int = 2,
        on_progress: Callable[[int, MutationResult], None] = lambda count, candidate: None,
        make_maker: Callable[..., CandidateMaker] = MutationMaker,
    ):
        names = [project.name for project in projects]
        if len(names) > len(set(names)) or not names:
            raise ValueError(f"the projects are {names}; give at least one, each with its own name")
        if count < 1 or concurrency < 1:
            raise ValueError(f"count is {count} and concurrency {concurrency}; make both positive")
        self._projects, self._builder, self._folder = tuple(projects), builder, folder
        self._count, self._seed, self._concurrency = count, seed, concurrency
        self._on_progress, self._make_maker = on_progress, make_maker
        self._done: dict[str, dict[int, MutationResult]] = collections.defaultdict(dict)
        self.failures: dict[str, str] = {}

    async def run(self) -> dict[str, Any]:
        """Makes the instances, writes all files, and returns the summary. Raises JournalBusyError, SandboxError."""
        with open_journal(self._folder / _JOURNAL, MutationResult) as journal:
            for candidate in journal.records:
                self._done[candidate.project][candidate.number] = candidate
            makers = await self._prepare()
            targets = _shares(self._count, list(makers))
            await self._try_all(makers, targets, journal)
            return self._finish(targets)

    async def _prepare(self) -> dict[str, CandidateMaker]:
        """Returns the makers of the projects that can be built; the others are in `failures`."""
        makers = {}
        for project in self._projects:
            digest = add_archive(self._folder, project.archive)
            maker = self._make_maker(project, self._builder, digest, self._seed)
            try:
                await maker.prepare()
            except (RecipeError, BuildError, TreeError, PatchError) as error:
                self.failures[project.name] = str(error)
            else:
                makers[project.name] = maker
        return makers

    async def _try_all(
        self,
        makers: Mapping[str, CandidateMaker],
        targets: Mapping[str, int],
        journal: ResultJournal[MutationResult],
    ) -> None:
        numbers = {
            name: iter([n for n in range(_max_tries(target)) if n not in self._done[name]])
            for name, target in targets.items()
        }

        async def work() -> None:
            while True:
                open_names = [name for name in targets if self._num_kept(name) < targets[name]]
                open_names.sort(key=lambda name: len(self._done[name]))
                for name in open_names:
                    number = next(numbers[name], None)
                    if number is not None:
                        break
                else:
                    return
                candidate = await makers[name].make(number)
                self._done[name][number] = candidate
                journal.append(candidate)
                self._on_progress(sum(map(self._num_kept, targets)), candidate)

        await run_workers(work, self._concurrency)

    def _num_kept(self, name: str) -> int:
        return sum(candidate.status == "kept" for candidate in self._done[name].values())

    def _finish(self, targets: Mapping[str, int]) -> dict[str, Any]:
        instances, sources = [], []
        for name, target in targets.items():
            valid = [c for _, c in sorted(self._done[name].items()) if c.status == "kept"][:target]
            instances += [c.instance for c in valid]
            sources += [c.source for c in valid]
        write_dataset(self._folder, instances, sources)
        candidates = [c for done in self._done.values() for c in done.values()]
        (self._folder / "funnel.jsonl").unlink(missing_ok=True)
        count_candidates(candidates).write(self._folder / "funnel.jsonl")
        summary = {
            "instances": len(instances),
            "requested": self._count,
            "languages": summarise(candidates),
            "failures": self.failures,
        }
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def count_candidates(candidates: Sequence[MutationResult]) -> Funnel:
    """Returns what each stage dropped."""
    funnel, remaining = Funnel(), list(candidates)
    for stage, statuses in _STAGES.items():
        remaining = funnel.run(
            stage, remaining, lambda c, dropped=statuses: c.status if c.status in dropped else None
        )
    return funnel


def summarise(candidates: Sequence[MutationResult]) -> dict[str, dict[str, float]]:
    """Returns the yield of each language: shares of candidates that build, are valid and are flaky, and minutes each."""
    rows = {}
    ordered = sorted(candidates, key=lambda c: c.language)
    for language, group in itertools.groupby(ordered, key=lambda c: c.language):
        tried = [c for c in group if c.status != "duplicate"]
        valid = [c for c in tried if c.status == "kept"]
        built = [c for c in tried if c.status != "not built"]
        flaky = sum(c.status == "flaky" for c in tried)
        rows[language] = {
            "candidates": len(tried),
            "instances": len(valid),
            "built": _share(len(built), len(tried)),
            "valid": _share(len(valid), len(tried)),
            "flaky": _share(flaky, flaky + len(valid)),
            "minutes_per_instance": round(
                sum(c.duration_s for c in tried) / 60 / max(1, len(valid)), 3
            ),
        }
    return rows


def _share(part: int, total: int) -> float:
    return round(part / total, 3) if total else 0.0


def _shares(count: int, names: Sequence[str]) -> dict[str, int]:
    """Returns the number of instances of each project."""
    return {
        name: (count + len(names) - 1 - index) // len(names) for index, name in enumerate(names)
    }


def _max_tries(target: int) -> int:
    return _MIN_TRIES + _TRIES_PER_INSTANCE * target
