"""Synthesises terminal tasks, and validates them.

    glm5 run synthesise:templates --count=100 --workdir=OUT
    glm5 run synthesise:validate --task=DIR --workdir=OUT
    glm5 run synthesise:agent --endpoint.base_url=URL --workdir=OUT

:templates  tasks of the twenty templates, seed by seed, in OUT/tasks, each validated (--checks=False only
            writes them). A task takes 40 to 60 seconds of a processor.
:validate   one task folder, or a folder of them: checks V01 to V12, and V13 and V14 with an endpoint. The exit code is 1
            if a check fails.
:agent      tasks that a model writes in rounds: of drafts that it invents for --count cells of the taxonomy, or
            of pages (--pages=DIR, a folder with a folder of HTML, Markdown or text per source). Texts in
            --seeds=DIR inspire drafts.
            --replies=FILE replays recorded replies in place of an endpoint.

OUT/reports has a report per task, OUT/summary.json the yield: accepted tasks, and tasks whose images build offline on
their first and on their last round. --references=DIR reports passages that tasks share with the texts of an
evaluation, such as Terminal-Bench's folder, in OUT/contamination.json. The same command continues a run that was stopped.
Needs root, for sandboxes with users of their own.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from experiments.evaluate import EndpointConfig
from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.writers import ChatWriter, RecordedWriter, RecordingWriter, Writer
from glm5_jax.envs.funnel import Funnel
from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.terminal import BuildConfig, TaskError, TaskLimits, find_tasks
from glm5_jax.envs.terminal.synthesis.builder import ACCEPTED, Brief, BuilderConfig, TaskBuilder
from glm5_jax.envs.terminal.synthesis.builder_prompts import draft_text, page_text, seed_of
from glm5_jax.envs.terminal.synthesis.drafts import filter_drafts, sample_cells, write_drafts
from glm5_jax.envs.terminal.synthesis.duplicates import contamination
from glm5_jax.envs.terminal.synthesis.pages import (
    MAX_COPIED_SHARE,
    Page,
    copied_share,
    page_problem,
    read_pages,
    sample_pages,
    suitability_problem,
)
from glm5_jax.envs.terminal.synthesis.reports import ValidationReport
from glm5_jax.envs.terminal.synthesis.sandbox_runs import TaskRuns
from glm5_jax.envs.terminal.synthesis.task_source import write_provenance, write_task
from glm5_jax.envs.terminal.synthesis.templates import make_tasks
from glm5_jax.envs.terminal.synthesis.validator import validate
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.terminal import make_printable, print_error
from glm5_jax.training.experiment import choose


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    """Tasks to synthesise or validate. Raises ValueError for values out of range.

    Attributes:
      source: "templates", "validate" or "agent".
      task: folder of a task or of tasks to validate; None for other sources.
      count: number of tasks of templates, or of cells or pages for a model.
      first_seed: first seed of templates, and the seed of cells and pages.
      checks: whether tasks of templates are validated.
      pages: folder of pages; None: the model invents drafts.
      seeds: folder of texts that inspire drafts, such as documentation of commands; None: the taxonomy only.
      replies: file of recorded replies that stands for an endpoint; None: the endpoint's replies are recorded in
        OUT/replies.jsonl.
      references: folder of an evaluation's tasks for the report on shared passages; None: no report.
      endpoint: server of the model.
      builder: limits of the rounds.
      images: {name of an image: root file system that stands for it, or "host"}.
      build: options of image builds; they have no network in any case.
      limits: resources of this machine that a task may request.
      concurrency: number of tasks at a time.
    """

    source: str = "templates"
    task: str | None = None
    count: int = 20
    first_seed: int = 0
    checks: bool = True
    pages: str | None = None
    seeds: str | None = None
    replies: str | None = None
    references: str | None = None
    endpoint: EndpointConfig = EndpointConfig()
    builder: BuilderConfig = BuilderConfig()
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    build: BuildConfig = BuildConfig()
    limits: TaskLimits = TaskLimits()
    concurrency: int = 2

    def __post_init__(self):
        if self.count < 1 or self.concurrency < 1:
            raise ValueError(
                f"count is {self.count} and concurrency {self.concurrency}; make both positive"
            )


def get_config(variant: str = "templates") -> SynthesisConfig:
    """Returns the configuration of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {
            "templates": functools.partial(SynthesisConfig, source="templates"),
            "validate": functools.partial(SynthesisConfig, source="validate"),
            "agent": functools.partial(SynthesisConfig, source="agent"),
        },
    )


def run(config: SynthesisConfig, workdir: pathlib.Path) -> int:
    """Synthesises or validates. Returns the exit code."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        return asyncio.run(_SOURCES[config.source](config, workdir))
    except (ValueError, TaskError, OSError) as error:
        print_error(error)
        return 2
    except SandboxError as error:
        print_error(error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 1


# -- sources --------------------------------------------------------------------------------------------


async def _from_templates(config: SynthesisConfig, workdir: pathlib.Path) -> int:
    folders = []
    for source in make_tasks(config.count, config.first_seed):
        folder = write_task(workdir / "tasks" / source.name, source.folder_files())
        template, _, seed = source.name.rpartition("-")
        write_provenance(
            folder, {"origin": {"kind": "template", "ref": template, "seed": int(seed)}}
        )
        folders.append(folder)
    code = await _validate_all(config, workdir, folders, None) if config.checks else 0
    _report_contamination(config, workdir, folders)
    print(f"{len(folders)} tasks in {workdir / 'tasks'}")
    return code


async def _validate(config: SynthesisConfig, workdir: pathlib.Path) -> int:
    if config.task is None:
        raise ValueError("no task; give --experiment.task=DIR, a task folder or a folder of them")
    folders = find_tasks(config.task)
    has_model = config.replies is not None or config.endpoint.base_url is not None
    async with _writer(config, workdir) if has_model else contextlib.nullcontext() as writer:
        code = await _validate_all(config, workdir, folders, writer)
    _report_contamination(config, workdir, folders)
    return code


async def _with_agent(config: SynthesisConfig, workdir: pathlib.Path) -> int:
    funnel = Funnel()
    async with _writer(config, workdir) as writer, _runs(config) as runs:
        briefs = await _briefs(config, workdir, writer, funnel)

        async def check(folder: pathlib.Path, attacks: Mapping[str, str]) -> ValidationReport:
            return await validate(folder, runs, writer=writer, attacks=attacks)

        builder = TaskBuilder(writer, check, workdir, config.builder)
        results = await _each(config, briefs, builder.build)
    accepted = [result for result in results if result.status == ACCEPTED]
    funnel.add(
        "builder",
        len(results),
        len(accepted),
        {"given up": len(results) - len(accepted)} if len(results) > len(accepted) else {},
    )
    (workdir / "funnel.jsonl").unlink(missing_ok=True)
    funnel.write(workdir / "funnel.jsonl")
    reached = [result for result in results if result.built_last is not None]
    _summarise(
        workdir,
        {
            "briefs": len(results),
            "accepted": len(accepted),
            "rounds": [result.rounds for result in results],
            "build_accuracy_first": _share(result.built_first for result in reached),
            "build_accuracy_last": _share(result.built_last for result in reached),
            "attacks_won": sum(result.attacks_won for result in results),
        },
    )
    folders = [workdir / "tasks" / result.name for result in accepted]
    _report_contamination(config, workdir, folders)
    return 0


_SOURCES: dict[str, Callable[[SynthesisConfig, pathlib.Path], Coroutine[Any, Any, int]]] = {
    "templates": _from_templates,
    "validate": _validate,
    "agent": _with_agent,
}


async def _briefs(
    config: SynthesisConfig, workdir: pathlib.Path, writer: Writer, funnel: Funnel
) -> list[Brief]:
    """Returns what tasks are to be made of: pages, or drafts of the writer."""
    if config.pages is None:
        cells = sample_cells(config.count, config.first_seed)
        texts = read_pages(config.seeds) if config.seeds is not None else []
        seeds = [dataclasses.replace(seed_of(page), kind="seed") for page in texts]
        drafts = await write_drafts(writer, cells, workdir / "drafts.jsonl", seeds)
        return [
            Brief(name=draft["draft_id"], text=draft_text(draft), origin=draft["origin"])
            for draft in filter_drafts(drafts, funnel)
        ]
    pages = funnel.run("page_rules", read_pages(config.pages), page_problem)
    reasons = {page.ref: await suitability_problem(writer, page) for page in pages}
    pages = funnel.run("page_suitability", pages, lambda page: reasons[page.ref])
    chosen = sample_pages(pages, config.count, config.first_seed)
    left = len(pages) - len(chosen)
    funnel.add("page_sample", len(pages), len(chosen), {"not drawn": left} if left else {})
    return [_brief_of_page(page, number) for number, page in enumerate(chosen)]


def _brief_of_page(page: Page, number: int) -> Brief:
    def review(files: Mapping[str, bytes]) -> str | None:
        share = copied_share(page, files.get("solution/solve.sh", b"").decode(errors="replace"))
        if share <= MAX_COPIED_SHARE:
            return None
        return f"{share:.0%} of the solution's commands are copied from the page; at most {MAX_COPIED_SHARE:.0%} may be"

    return Brief(
        name=f"p-{number:05}", text=page_text(page), origin=seed_of(page).origin, review=review
    )


# -- validation and reports -----------------------------------------------------------------------------


async def _validate_all(
    config: SynthesisConfig,
    workdir: pathlib.Path,
    folders: list[pathlib.Path],
    writer: Writer | None,
) -> int:
    """Validates tasks without a report, prints the problems, and returns the exit code."""
    reports = workdir / "reports"
    reports.mkdir(exist_ok=True)

    async def check(folder: pathlib.Path) -> dict:
        file = reports / f"{folder.name}.json"
        if file.is_file():
            return json.loads(file.read_text())
        report = await validate(folder, runs, writer=writer)
        file.write_text(report.as_text() + "\n")
        for problem in report.problems:
            print(make_printable(f"{folder.name}: {problem}"))
        return report.as_dict()

    async with _runs(config) as runs:
        results = await _each(config, folders, check)
    built = [result["checks"]["V02_builds"]["ok"] for result in results if "V02_builds" in result["checks"]]  # fmt: skip
    green = sum(result["ok"] for result in results)
    failed: dict[str, int] = {}
    for result in results:
        for name, row in result["checks"].items():
            failed[name] = failed.get(name, 0) + (row["ok"] is False)
    content = {"tasks": len(results), "green": green, "build_accuracy": _share(built)}
    _summarise(workdir, {**content, "failures": {k: n for k, n in failed.items() if n}})
    return 0 if green == len(results) else 1


async def _each(config: SynthesisConfig, items: Iterable, work: Callable[..., Awaitable]) -> list:
    """Returns the results of items in order, `concurrency` at a time."""
    items, done = list(items), 0
    slots = asyncio.Semaphore(config.concurrency)
    with ProgressBar(len(items), 0, "task") as bar:

        async def one(item):
            nonlocal done
            async with slots:
                result = await work(item)
            done += 1
            bar.update(done, getattr(item, "name", ""))
            return result

        return await asyncio.gather(*map(one, items))


def _report_contamination(
    config: SynthesisConfig, workdir: pathlib.Path, folders: list[pathlib.Path]
) -> None:
    if config.references is None:
        return
    texts = {folder.name: (folder / "instruction.md").read_text() for folder in folders}
    shared = [dataclasses.asdict(item) for item in contamination(texts, config.references)]
    (workdir / "contamination.json").write_text(json.dumps(shared, indent=1) + "\n")
    print(f"{len(shared)} passages of tasks are also in {config.references}")


def _summarise(workdir: pathlib.Path, content: Mapping) -> None:
    (workdir / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content))


def _share(values: Iterable[bool | None]) -> float | None:
    values = list(values)
    return round(sum(map(bool, values)) / len(values), 4) if values else None


def _runs(config: SynthesisConfig) -> TaskRuns:
    return TaskRuns(dict(config.images), config.build, config.limits)


@contextlib.asynccontextmanager
async def _writer(config: SynthesisConfig, workdir: pathlib.Path) -> AsyncIterator[Writer]:
    """Provides the model at the endpoint, or its recorded replies. Raises ValueError if there is neither."""
    endpoint = config.endpoint
    if config.replies is not None:
        yield RecordedWriter(config.replies)
        return
    if endpoint.base_url is None:
        raise ValueError(
            "no model; give --experiment.endpoint.base_url=URL, or --experiment.replies=FILE with recorded replies"
        )
    fields = {"temperature": endpoint.temperature, "top_p": endpoint.top_p, "max_tokens": 16_384}
    fields = {name: value for name, value in fields.items() if value is not None}
    async with ChatClient(
        endpoint.base_url, endpoint.model, api_key=endpoint.key, timeout_s=600.0
    ) as client:
        yield RecordingWriter(ChatWriter(client=client, fields=fields), workdir / "replies.jsonl")


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
