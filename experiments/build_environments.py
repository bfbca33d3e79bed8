"""Builds software engineering environments from repositories and archives, as tasks for agents.

    glm5 run build_environments:mutations --sources="('DIR_OR_ARCHIVE',)" --count=20 --workdir=OUT
    glm5 run build_environments:commits --sources="('REPOSITORY',)" --count=200 --workdir=OUT
    glm5 run build_environments:pairs --manifest=FILE.jsonl --workdir=OUT

:mutations  bugs that are made on purpose: --count instances over all sources, which are folders, repositories of git or
            archives. A bug is kept if the project builds and it breaks between one test and 20% of the tests.
:commits    changes of the last --count commits of each repository that change code and tests together.
:pairs      patches of Debian packages that a manifest names, fetched with apt (glm5_jax/envs/swe/manifests.py).
:fetch      only fetches the archives of a manifest into OUT/archives, and reports those that are missing.

Rules build the environments. With --endpoint.base_url=URL a model does, by RepoLaunch's stages: it prepares a project in
a shell, finds its test command, and submits commands and a parser, which count only after they have been run.

OUT is a data set: instances.jsonl in SWE-bench's field names, sources.jsonl, and the archives. `evaluate:swe` and
rl_agentic attempt its tasks. Nothing but :pairs and :fetch uses the network, and sources run in sandboxes only. The same command continues a run that was stopped. Needs root, for sandboxes with users of their own, and
Debian's packages of the languages, which an error names. Projects of JavaScript and TypeScript need --node_modules=DIR, in
which npm installed mocha or jest or vitest.

docs/own_environments.md is the guide.
"""

import asyncio
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.evaluate import EndpointConfig, load_endpoint_tokenizer
from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import TokenCounter
from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.swe.agent_builder import AgentBuilder, AgentLimits
from glm5_jax.envs.swe.attempts import check_root
from glm5_jax.envs.swe.builder import RuleBuilder
from glm5_jax.envs.swe.fetch import fetch_sources
from glm5_jax.envs.swe.journal import JournalBusyError
from glm5_jax.envs.swe.layers import LayerStore, SweLimits
from glm5_jax.envs.swe.manifests import ManifestEntry, files_of, pairs_of, read_manifest
from glm5_jax.envs.swe.mutations.campaign import MutationCampaign
from glm5_jax.envs.swe.mutations.maker import MutationProject, MutationResult
from glm5_jax.envs.swe.pairs import PairResult, SourcePair, make_pairs
from glm5_jax.envs.swe.registries import download
from glm5_jax.envs.swe.repositories import archive_of, commit_pairs, project_name
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.terminal import make_printable, print_error
from glm5_jax.training.experiment import choose

_REPLY_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildEnvironmentsConfig:
    """Sources of environments, and limits of building. Raises ValueError for values out of range.

    Attributes:
      kind: "mutations", "commits", "pairs" or "fetch".
      sources: folders, repositories of git, or archives.
      manifest: file that names patches of Debian packages; None: not set.
      count: number of instances of mutations, or of commits to look at in each repository.
      seed: seed of mutations.
      license: SPDX name of the licence of the sources; empty: unknown.
      store: folder of built environments; None: OUT/layers.
      node_modules: folder in which npm installed test runners; None: projects of JavaScript are left out.
      endpoint: server of a model that builds the environments; without base_url rules build them.
      agent: limits of that model.
      limits: limits of sandboxes.
      concurrency: number of candidates at a time.
    """

    kind: str = "mutations"
    sources: tuple[str, ...] = ()
    manifest: str | None = None
    count: int = 20
    seed: int = 0
    license: str = ""
    store: str | None = None
    node_modules: str | None = None
    endpoint: EndpointConfig = EndpointConfig()
    agent: AgentLimits = AgentLimits()
    limits: SweLimits = SweLimits()
    concurrency: int = 2

    def __post_init__(self):
        if self.count < 1 or self.concurrency < 1:
            raise ValueError(
                f"count is {self.count} and concurrency {self.concurrency}; make both positive"
            )


def get_config(variant: str = "mutations") -> BuildEnvironmentsConfig:
    """Returns the configuration of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {
            "mutations": functools.partial(BuildEnvironmentsConfig, kind="mutations"),
            "commits": functools.partial(BuildEnvironmentsConfig, kind="commits", count=200),
            "pairs": functools.partial(BuildEnvironmentsConfig, kind="pairs"),
            "fetch": functools.partial(BuildEnvironmentsConfig, kind="fetch"),
        },
    )


def run(config: BuildEnvironmentsConfig, workdir: pathlib.Path) -> int:
    """Builds the environments. Returns the exit code."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        return asyncio.run(_KINDS[config.kind](config, workdir))
    except (ValueError, OSError, JournalBusyError) as error:
        print_error(error)
        return 2
    except SandboxError as error:
        print_error(error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 1


async def _mutations(config: BuildEnvironmentsConfig, workdir: pathlib.Path) -> int:
    projects = [
        MutationProject(
            name=project_name(path),
            archive=archive_of(path, workdir / "packed"),
            license=config.license,
        )
        for path in _sources(config)
    ]
    with ProgressBar(config.count, 0, "instance") as bar:

        def show(count: int, candidate: MutationResult) -> None:
            bar.update(count, f"{candidate.project} {candidate.number}: {candidate.status}")

        campaign = MutationCampaign(
            projects,
            _builder(config, workdir),
            workdir,
            count=config.count,
            seed=config.seed,
            concurrency=config.concurrency,
            on_progress=show,
        )
        summary = await campaign.run()
    for name, reason in summary["failures"].items():
        print(make_printable(f"{name} is left out: {reason}"))
    _show_yield(summary["languages"])
    print(f"{summary['instances']} of {config.count} instances in {workdir}")
    return 0 if summary["instances"] == config.count else 1


async def _commits(config: BuildEnvironmentsConfig, workdir: pathlib.Path) -> int:
    pairs = [
        pair
        for path in _sources(config)
        for pair in commit_pairs(
            path, workdir / "packed", count=config.count, license=config.license
        )
    ]
    return await _make_pairs(config, workdir, pairs)


async def _pairs(config: BuildEnvironmentsConfig, workdir: pathlib.Path) -> int:
    entries = fetch_entries(config, workdir)
    return await _make_pairs(config, workdir, pairs_of(entries, workdir / "archives"))


async def _fetch(config: BuildEnvironmentsConfig, workdir: pathlib.Path) -> int:
    entries = fetch_entries(config, workdir)
    pairs = pairs_of(entries, workdir / "archives")
    print(f"{len(pairs)} of {len(entries)} pairs have their files in {workdir / 'archives'}")
    return 0 if pairs else 1


def fetch_entries(config: BuildEnvironmentsConfig, workdir: pathlib.Path) -> list[ManifestEntry]:
    """Fetches the archives of a manifest, prints those that are missing, and returns its entries."""
    if config.manifest is None:
        raise ValueError("no manifest; give --experiment.manifest=FILE.jsonl")
    entries = read_manifest(config.manifest)
    report = fetch_sources(files_of(entries), workdir / "archives", download)
    for digest, reason in sorted(report.missing.items()):
        print(make_printable(f"missing {digest[:12]}: {reason}"))
    return entries


_KINDS: dict[str, Callable[[BuildEnvironmentsConfig, pathlib.Path], Coroutine[Any, Any, int]]] = {
    "mutations": _mutations,
    "commits": _commits,
    "pairs": _pairs,
    "fetch": _fetch,
}


def _sources(config: BuildEnvironmentsConfig) -> list[pathlib.Path]:
    if not config.sources:
        raise ValueError("no sources; give --experiment.sources=\"('FOLDER_OR_ARCHIVE',)\"")
    return [pathlib.Path(source) for source in config.sources]


def _builder(config: BuildEnvironmentsConfig, workdir: pathlib.Path) -> RuleBuilder:
    check_root()
    store = LayerStore(config.store or workdir / "layers", config.limits)
    modules = pathlib.Path(config.node_modules) if config.node_modules else None
    endpoint, url = config.endpoint, config.endpoint.base_url
    if url is None:
        return RuleBuilder(store, modules)
    return AgentBuilder(
        store,
        lambda: ChatClient(url, endpoint.model, api_key=endpoint.key, timeout_s=_REPLY_TIMEOUT_S),
        TokenCounter(load_endpoint_tokenizer(endpoint)),
        config.agent,
        endpoint.sampling,
        node_modules=modules,
    )


async def _make_pairs(
    config: BuildEnvironmentsConfig, workdir: pathlib.Path, pairs: list[SourcePair]
) -> int:
    done = 0
    with ProgressBar(len(pairs), 0, "pair") as bar:

        def show(result: PairResult) -> None:
            nonlocal done
            done += 1
            bar.update(done, f"{result.name}: {result.invalid_reason or 'valid'}")

        results = await make_pairs(
            pairs,
            _builder(config, workdir),
            workdir,
            concurrency=config.concurrency,
            on_result=show,
        )
    table = Table("pair", "language", "classes", "result")
    for result in results:
        counts = " ".join(f"{kind} {count}" for kind, count in result.counts.items())
        reason = make_printable((result.invalid_reason or "valid").split("\n")[0][:80])
        table.add_row(result.name, result.language, counts, reason)
    Console().print(table)
    num_valid = sum(result.instance is not None for result in results)
    print(f"{num_valid} of {len(results)} pairs are valid instances in {workdir}")
    return 0 if num_valid else 1


def _show_yield(languages: dict[str, dict[str, float]]) -> None:
    names = ("candidates", "instances", "built", "valid", "flaky", "minutes_per_instance")
    table = Table("language", *(name.replace("_", " ") for name in names))
    for language, row in languages.items():
        table.add_row(language, *(json.dumps(row[name]) for name in names))
    Console().print(table)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
