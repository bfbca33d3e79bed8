"""Lets a model build the environment of a project, with RepoLaunch's stages and limits.

    built = await AgentBuilder(store, connect, counter).build(base_tree, focus=test_files)

1. Set-up: the model prepares the project with the tool `bash`, without a network. The commands that succeeded are run again in
   a fresh sandbox, whose files are the layer.
2. Verification: the model finds a test command with the tool `try_tests`. Its complaint goes back to the set-up.
3. Organisation: `submit` accepts commands and a parser only after it has run them: the rebuild succeeds, at least one test
   runs, less than 15% fail, two runs agree, and planted tests have their results.

What a model says is never trusted; a project is built if a submission was accepted.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from glm5_jax.agents.client import ChatBackend
from glm5_jax.agents.context import Counter
from glm5_jax.agents.loop import ChatAgent, LoopConfig, Trace
from glm5_jax.agents.tools import Tool, Toolbox
from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.builder import BuildError, BuiltProject, RuleBuilder
from glm5_jax.envs.swe.file_tree import FileTree, digest_tree, put_tree
from glm5_jax.envs.swe.instance import LaunchRecord
from glm5_jax.envs.swe.layers import LayerStore, StoredLayer, tools_layer
from glm5_jax.envs.swe.recipes import WORKDIR, ProjectPlan, ProjectRecipe, detect_recipe
from glm5_jax.envs.swe.recipes.agent import AGENT_PREFIX
from glm5_jax.envs.swe.runs import ENVIRONMENT
from glm5_jax.envs.swe.submitted_plans import Submit, TryTests
from glm5_jax.envs.terminal.bash import Bash, BashConfig
from glm5_jax.envs.terminal.policy import run_episode
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.rl.types import Task

_WINDOW_TOKENS = 131_072
_SETUP = (
    f"You prepare the project in {WORKDIR} so that its tests can run. You have a shell on a Linux machine without a network: "
    "nothing can be downloaded, so use the programs and libraries that are installed. Read the files that say how the project "
    "is built and tested. Build it, and create what its tests need. Each command that ends with exit code 0 will be run "
    f"again, in this order and from {WORKDIR}, in a fresh copy. Reply without a call when the tests can run."
)
_VERIFY = (
    f"The project in {WORKDIR} was prepared by the commands below. Find a command that runs its tests with a result for each "
    "test, and try it with try_tests. You may look around with bash, but not repair the project. When a try has results, reply "
    "None. If it cannot work, reply with what the preparation lacks."
)
_ORGANISE = (
    "Submit commands with submit: rebuild_cmds are the shortest commands that rebuild the project after a change of a source, "
    "none for interpreted languages; test_cmds run all tests and write reports into /results where the runner can. log_parser "
    "is the name of a built-in parser, or generated with a Python program in log_parser_source, which reads the log on "
    "standard input and prints a JSON object of test names to pass, fail or skip. Correct what is refused."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """Limits of building, those of RepoLaunch. Raises ValueError for values out of range.

    Attributes:
      setup_steps, verify_steps, organise_steps: maximum number of replies of each stage.
      trials: maximum number of set-ups.
      bash: limits of commands.
    """

    setup_steps: int = 60
    verify_steps: int = 20
    organise_steps: int = 40
    trials: int = 2
    bash: BashConfig = BashConfig(timeout_s=600.0, max_timeout_s=1800.0)

    def __post_init__(self):
        for name in ("setup_steps", "verify_steps", "organise_steps", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; make it at least 1")


class AgentBuilder(RuleBuilder):
    """Builder whose commands come from a model.

    Args:
      store: where layers are kept.
      connect: function that opens a client of the model's server.
      counter: token counter of that server.
      limits: limits.
      fields: fields of every request, such as the temperature.
      on_trace: function that receives the stage and the trace of each conversation.
    """

    def __init__(
        self,
        store: LayerStore,
        connect: Callable[[], AbstractAsyncContextManager[ChatBackend]],
        counter: Counter,
        limits: AgentLimits = AgentLimits(),
        fields: Mapping[str, Any] | None = None,
        on_trace: Callable[[str, Trace], None] = lambda stage, trace: None,
        **options: Any,
    ):
        super().__init__(store, **options)
        self._connect, self._counter, self._agent_limits = connect, counter, limits
        self._fields, self._on_trace = dict(fields or {}), on_trace

    async def build(
        self, tree: FileTree, focus: Sequence[str] = (), name: str = ""
    ) -> BuiltProject:
        """Builds the environment of a tree. Raises RecipeError, BuildError, ServerError."""
        start, recipe = time.monotonic(), detect_recipe(tree)
        complaint = ""
        for trial in range(1, self._agent_limits.trials + 1):
            commands = await self._set_up_by_model(tree, recipe, complaint)
            plan = ProjectPlan(
                recipe=f"{AGENT_PREFIX}{recipe.name}",
                log_parser="",
                test_cmds=(),
                shuffled_cmds=(),
                setup_cmds=tuple(commands),
            )
            try:
                layer = await self.set_up(tree, plan, recipe.language)
            except BuildError as error:  # a command depended on one that failed
                complaint = str(error)
                continue
            complaint = await self._verify_by_model(layer, commands)
            if not complaint:
                built = await self._organise(tree, recipe, focus, plan, layer)
                record = self._record(built, recipe, name, start, trial)
                return dataclasses.replace(built, record=record)
        raise BuildError(f"verify: the model gave up after {trial} trials: {complaint}")

    async def _set_up_by_model(
        self, tree: FileTree, recipe: ProjectRecipe, complaint: str
    ) -> list[str]:
        """Returns the commands of the model that succeeded."""
        tools = await tools_layer(self.store, recipe.language, self._node_modules)
        text = f"The project is written in {recipe.language}. Test runners that are not installed are in /tools."
        if complaint:
            text += f"\n\nAn earlier preparation failed: {complaint}"
        async with Sandbox(self.store.limits.sandbox(tools.layer)) as box:
            await box.exec("mkdir -p -m 1777 /tmp/home", user="root", cwd="/")
            await put_tree(box, WORKDIR, tree)
            bash = _RecordingBash(self._shell(box), self._agent_limits.bash)
            steps = self._agent_limits.setup_steps
            await self._converse("setup", _SETUP, text, {"bash": bash}, (), steps)
        return bash.succeeded

    async def _verify_by_model(self, layer: StoredLayer, commands: Sequence[str]) -> str:
        """Returns what the set-up lacks; empty if tests have results."""
        listed = "\n".join(commands) or "(none)"
        async with Sandbox(self.store.limits.sandbox(layer.layer)) as box:
            attempts = TryTests(box, self.store.limits)
            tools = {"bash": Bash(self._shell(box), self._agent_limits.bash), "try_tests": attempts}
            text, steps = f"Commands:\n{listed}", self._agent_limits.verify_steps
            answer = await self._converse("verify", _VERIFY, text, tools, (TryTests.tool(),), steps)
        if attempts.has_results:
            return ""
        return answer or "no test command had results"

    async def _organise(
        self,
        tree: FileTree,
        recipe: ProjectRecipe,
        focus: Sequence[str],
        plan: ProjectPlan,
        layer: StoredLayer,
    ) -> BuiltProject:
        """Returns the project with the commands that were accepted. Raises BuildError if none were."""
        submit = Submit(self.store.limits, layer, plan, recipe, tree, focus)
        async with Sandbox(self.store.limits.sandbox(layer.layer)) as box:
            tools = {"bash": Bash(self._shell(box), self._agent_limits.bash), "submit": submit}
            steps = self._agent_limits.organise_steps
            await self._converse(
                "organise", _ORGANISE, "The tests can run.", tools, (Submit.tool(),), steps
            )
        if submit.accepted is None:
            raise BuildError(f"organise: no submission was accepted: {submit.refusal}")
        accepted, runs = submit.accepted
        # `record` is completed by the caller.
        return BuiltProject(tree=tree, plan=accepted, layer=layer, runs=runs, record=_EMPTY_RECORD)

    def _record(
        self, built: BuiltProject, recipe: ProjectRecipe, name: str, start: float, trials: int
    ) -> LaunchRecord:
        report, plan = built.runs[0].report, built.plan
        assert report is not None, "accepted runs have reports"
        return LaunchRecord(
            instance_id=name or built.layer.digest[7:19],
            repo=name,
            base_commit=digest_tree(built.tree),
            language=recipe.language,
            base_layer=built.layer.record["tools"],
            setup_layer=plan.setup_cmds,
            organize_layer=plan.rebuild_cmds,
            rebuild_cmds=plan.rebuild_cmds,
            test_cmds=plan.test_cmds,
            log_parser=plan.log_parser,
            test_status=dict(report.statuses),
            per_test_cmd=plan.per_test_cmd,
            duration_min=(time.monotonic() - start) / 60,
            completed=True,
            organize_completed=True,
            trials=trials,
        )

    def _shell(self, box: Sandbox) -> Shell:
        timeout_s = self._agent_limits.bash.max_timeout_s
        return Shell(box, "agent", WORKDIR, timeout_s, ENVIRONMENT)

    async def _converse(
        self,
        stage: str,
        system: str,
        text: str,
        tools: Mapping[str, Tool],
        offered: Sequence[Mapping[str, Any]],
        steps: int,
    ) -> str:
        """Runs the conversation of one stage and returns the model's last text. Raises ServerError, SandboxError."""
        task = Task(
            id=f"build-{stage}",
            kind="build",
            messages=(
                {"role": "system", "content": system},
                {"role": "user", "content": text},
            ),
            tools=(self._agent_limits.bash.tool(), *offered),
        )
        loop = LoopConfig(
            max_turns=steps,
            max_tokens=_WINDOW_TOKENS,
            tool_timeout_s=2 * self.store.limits.build_timeout_s,
            timeout_s=steps * self._agent_limits.bash.max_timeout_s,
            ends_on_broken_call=False,
        )
        async with self._connect() as client:
            agent = ChatAgent(
                client=client,
                tools=Toolbox(tools),
                counter=self._counter,
                config=loop,
                fields=self._fields,
            )
            trace = await run_episode(agent, task, lambda trace: self._on_trace(stage, trace))
        return str(trace.messages[-1].get("content") or "") if trace.messages else ""


class _RecordingBash(Bash):
    """Tool `bash` that records the commands that end with exit code 0.

    Attributes:
      succeeded: these commands, in order.
    """

    def __init__(self, shell: Shell, config: BashConfig):
        super().__init__(shell, config)
        self.succeeded: list[str] = []
        self._order = asyncio.Lock()

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        async with self._order:
            answer = await super().__call__(task, arguments)
            if answer.endswith("[exit code 0]"):
                self.succeeded.append(str(arguments["command"]))
        return answer


_EMPTY_RECORD = LaunchRecord(instance_id="", repo="", base_commit="", language="")
