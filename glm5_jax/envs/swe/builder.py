"""Builds the environment of a project by rules: detect, plan, set up, verify, organise.

    built = await RuleBuilder(LayerStore(folder)).build(base_tree, focus=test_files)

- detect: language and recipe, by the files of the project (`recipes`).
- plan: commands, packages and variables (`ProjectPlan`).
- set up: the tree and its build in a layer, without a network. What is not installed is an error that names the packages.
- verify: two runs of the tests on the tree without patches, which must agree, with less than 15% failing.
- organise: the launch record, with commands and parser.

Layers are stored by the digest of tree, tools and commands, so equal trees are set up once.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.file_tree import FileTree, digest_tree, put_tree, with_changes
from glm5_jax.envs.swe.instance import Environment, LaunchRecord
from glm5_jax.envs.swe.layers import (
    NODE_MODULES,
    LayerStore,
    StoredLayer,
    installed_versions,
    npm_versions,
    tools_layer,
)
from glm5_jax.envs.swe.parsers import RunReport
from glm5_jax.envs.swe.recipes import WORKDIR, ProjectPlan, RecipeError, detect_recipe
from glm5_jax.envs.swe.runs import ENVIRONMENT, RunCommands, RunResult, run_tests
from glm5_jax.envs.swe.sources import commit_once

MAX_FAILING_SHARE = 0.15  # RepoLaunch's
_VERIFY_RUNS = 2
_LOG_END = 2000  # characters of a log in an error


class BuildError(RuntimeError):
    """Raised if the environment of a project cannot be built; the text says which step failed, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltProject:
    """Project with its environment.

    Attributes:
      tree: files without patches, those of the recipe included.
      plan: commands.
      layer: environment with the tree at `/testbed`.
      runs: runs of the tests on the tree.
      record: launch record.
    """

    tree: FileTree
    plan: ProjectPlan
    layer: StoredLayer
    runs: Sequence[RunResult]
    record: LaunchRecord

    @property
    def commands(self) -> RunCommands:
        """Returns the commands to rebuild and test the project."""
        return commands_of(self.plan)

    @property
    def environment(self) -> Environment:
        """Returns the environment in the form of an instance."""
        node = self.layer.layer.folders[-1] / NODE_MODULES.lstrip("/") if self.plan.npm else None
        npm = npm_versions(node) if node else {}
        return Environment(
            recipe=self.plan.recipe,
            layer=self.layer.digest,
            apt=tuple(f"{k}={v}" for k, v in sorted(installed_versions(self.plan.apt).items())),
            npm=tuple(f"{name}={npm.get(name, '')}" for name in self.plan.npm),
            workdir=WORKDIR,
            setup_cmds=self.plan.setup_cmds,
            variables=dict(self.plan.variables),
        )


class RuleBuilder:
    """Builder that needs no model.

    Args:
      store: where layers are kept.
      node_modules: folder of this machine with installed Node packages; None: projects of JavaScript are refused.
    """

    def __init__(self, store: LayerStore, node_modules: pathlib.Path | None = None):
        self.store = store
        self._node_modules = node_modules

    async def build(
        self, tree: FileTree, focus: Sequence[str] = (), name: str = ""
    ) -> BuiltProject:
        """Builds the environment of a tree.

        Raises RecipeError if no recipe fits or packages are missing, BuildError if set-up or verification fails.

        Args:
          tree: sources of the project.
          focus: test files that must run.
          name: name of the project in the launch record.
        """
        start = time.monotonic()
        recipe = detect_recipe(tree)
        plan = recipe.plan(tree, focus)
        layer = await self.set_up(tree, plan, recipe.language)
        tree = with_changes(tree, plan.files)
        runs = await self._verify(layer, plan)
        record = LaunchRecord(
            instance_id=name or layer.digest[7:19],
            repo=name,
            base_commit=digest_tree(tree),
            language=recipe.language,
            base_layer=layer.record["tools"],
            setup_layer=plan.setup_cmds,
            rebuild_cmds=plan.rebuild_cmds,
            test_cmds=plan.test_cmds,
            log_parser=plan.log_parser,
            test_status=dict(_report(runs[0]).statuses),
            per_test_cmd=plan.per_test_cmd,
            duration_min=(time.monotonic() - start) / 60,
            completed=True,
            organize_completed=True,
            trials=1,
        )
        return BuiltProject(tree=tree, plan=plan, layer=layer, runs=runs, record=record)

    async def set_up(self, tree: FileTree, plan: ProjectPlan, language: str) -> StoredLayer:
        """Returns the layer of a tree with the recipe's files. Raises RecipeError for missing packages, and BuildError."""
        check_packages(plan)
        layer = await self._layer(with_changes(tree, plan.files), plan, language)
        failed = [step for step in layer.record["commands"] if step["code"]]
        if failed:
            raise BuildError(
                f"set-up: {failed[0]['command']!r} ended with {failed[0]['code']}: {failed[0]['log']}"
            )
        return layer

    async def _layer(self, tree: FileTree, plan: ProjectPlan, language: str) -> StoredLayer:
        """Returns the layer of a tree after the commands that set it up."""
        tools = await tools_layer(self.store, language, self._node_modules)

        async def fill(box: Sandbox) -> dict[str, Any]:
            await put_tree(box, WORKDIR, tree)
            await commit_once(box, WORKDIR)
            return {"tools": tools.digest, "commands": await _set_up(box, plan, self.store.limits.build_timeout_s)}  # fmt: skip

        inputs = [digest_tree(tree), plan.setup_cmds, dict(plan.variables)]
        return await self.store.layer(tools, [*inputs, installed_versions(plan.apt)], fill)

    async def _verify(self, layer: StoredLayer, plan: ProjectPlan) -> list[RunResult]:
        """Returns the runs on the tree without patches. Raises BuildError unless they agree and mostly pass."""
        limits, runs = self.store.limits, []
        async with Sandbox(limits.sandbox(layer.layer)) as box:
            for _ in range(_VERIFY_RUNS):
                runs.append(await run_tests(box, commands_of(plan), limits.test_timeout_s))
        report = _report(runs[0])
        failing = report.names("fail")
        if not report.has_tests:
            raise BuildError(
                f"verify: no test was found; the log ends with {runs[0].log[-_LOG_END:]}"
            )
        if len(failing) >= MAX_FAILING_SHARE * len(report.statuses):
            raise BuildError(
                f"verify: {len(failing)} of {len(report.statuses)} tests fail, such as {failing[0]}; the environment "
                f"lacks something. The log ends with {runs[0].log[-_LOG_END:]}"
            )
        names = [set(_report(run).statuses) for run in runs]
        if len(names[0] ^ names[1]) > MAX_FAILING_SHARE * len(names[0]):
            raise BuildError("verify: two runs list different tests; the test command is wrong")
        return runs


def commands_of(plan: ProjectPlan, *, shuffled: bool = False) -> RunCommands:
    """Returns the commands of a plan, in another order of tests if `shuffled`."""
    return RunCommands(
        rebuild_cmds=plan.rebuild_cmds,
        test_cmds=plan.shuffled_cmds if shuffled else plan.test_cmds,
        log_parser=plan.log_parser,
        log_parser_source=plan.log_parser_source,
        variables=plan.variables,
    )


def check_packages(plan: ProjectPlan) -> None:
    """Raises RecipeError that names the Debian packages of a plan that this machine lacks."""
    missing = sorted(set(plan.apt) - set(installed_versions(plan.apt)))
    if missing:
        raise RecipeError(
            f"packages are missing: run apt-get install --no-install-recommends {' '.join(missing)}"
        )


def _report(run: RunResult) -> RunReport:
    if run.report is None:
        raise BuildError(f"verify: {run.problem}")
    return run.report


async def _set_up(box: Sandbox, plan: ProjectPlan, timeout_s: float) -> list[dict[str, Any]]:
    """Runs the commands that set a project up; returns each with its exit code, seconds and end of the log."""
    await box.exec("mkdir -p -m 1777 /tmp/home", user="root", cwd="/")
    steps = []
    for command in plan.setup_cmds:
        start = time.monotonic()
        done = await box.exec(
            ["/bin/sh", "-c", f"exec 2>&1; {command}"],
            cwd=WORKDIR,
            env={**ENVIRONMENT, **plan.variables},
            timeout_s=timeout_s,
        )
        steps.append(
            {
                "command": command,
                "code": done.code,
                "seconds": round(time.monotonic() - start, 3),
                "log": done.stdout.decode("utf-8", "replace")[-_LOG_END:],
            }
        )
    return steps
