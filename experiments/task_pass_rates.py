"""Measures how often a policy solves the tasks of Reasoning RL, to select tasks of useful difficulty (GLM-5 3.2).

    glm5 run task_pass_rates:tiny --checkpoint=WORKDIR --workdir=DIR

Attempts every task of rl_reasoning.py:tiny as that experiment would, --rollout.group times, and appends the
number of passes to DIR/verdicts.jsonl, one line a task. The same command resumes a run that was stopped or killed. Run
it for the policy that is to train and for a stronger one, which may be any model with OpenAI's chat API:

    glm5 run task_pass_rates:tiny --endpoint.base_url=URL --workdir=OTHER

A policy that needs several hosts is such a server too: start it with serve.py. rl_reasoning.py reads both files,

    --verdicts=DIR/verdicts.jsonl --stronger_verdicts=OTHER/verdicts.jsonl

with the same variant and --tasks.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence

from experiments import rl_reasoning
from experiments.evaluate import EndpointConfig
from experiments.rl_reasoning import ReasoningConfig, Verifiers, make_task_suite
from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import TokenCounter
from glm5_jax.agents.rollouts import ChatRollouts
from glm5_jax.agents.tools import Toolbox
from glm5_jax.checkpoint import models
from glm5_jax.envs.reasoning.difficulty import read_verdicts
from glm5_jax.envs.service import make_loop_config
from glm5_jax.inference.engine import Engine
from glm5_jax.metrics.jsonl import append_lines, read_complete_lines
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.rollouts.rollout import Rollouts, Tools, check_task
from glm5_jax.rl.trainers.sync_trainer import judge
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Task
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import print_error
from glm5_jax.text.layouts import template
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import check_resume, choose, write_config

FILE = "verdicts.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassRateConfig(ReasoningConfig):
    """Configuration of a measurement of pass rates.

    Attributes:
      endpoint: server of the policy; without a base_url the policy is `checkpoint`, sampled in this process.
      concurrency: maximum number of attempts that run at once at the server.
    """

    endpoint: EndpointConfig = EndpointConfig(temperature=1.0)  # that of training
    concurrency: int = 64

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        changeable = ("endpoint.base_url", "endpoint.api_key_file", "concurrency")
        return *super().changeable_on_resume, *changeable


def get_config(variant: str = "tiny") -> PassRateConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {
            "addition": lambda: _measured(rl_reasoning.addition()),
            "tiny": lambda: _measured(rl_reasoning.tiny()),
            "tools": lambda: _measured(rl_reasoning.tools()),
            "small": lambda: _measured(rl_reasoning.small()),
            "flash": lambda: _measured(rl_reasoning.flash()),
            "glm5": lambda: _measured(rl_reasoning.glm5()),
        },
    )


def _measured(config: ReasoningConfig) -> PassRateConfig:
    """Returns the configuration that measures the tasks of an experiment."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(ReasoningConfig)}
    return PassRateConfig(**fields)


def run(config: PassRateConfig, workdir: pathlib.Path) -> int:
    """Attempts all tasks without a verdict. Returns the exit code."""
    try:
        # Ending at once is safe: a batch's verdicts are on disk before the next batch.
        with PreemptionGuard(ends=True):
            _run(config, workdir)
    except (ValueError, OSError) as error:
        print_error(error)
        return 2
    return 0


def _run(config: PassRateConfig, workdir: pathlib.Path) -> None:
    if (config.checkpoint is None) == (config.endpoint.base_url is None):
        raise ValueError(
            f"checkpoint is {config.checkpoint} and endpoint.base_url {config.endpoint.base_url}; give one policy: "
            "--experiment.checkpoint=PATH, a workdir, one of its checkpoints/STEP or an HF folder, or the URL of a server"
        )
    if config.verdicts is not None:
        raise ValueError(
            f"verdicts is {config.verdicts}; all tasks are attempted here, so leave it to rl_reasoning.py"
        )
    # Read the verdicts of an earlier run.
    check_resume(workdir, config)
    file = workdir / FILE
    known = set()
    if file.exists():
        read_complete_lines(file)  # a run that was killed may have left a part of a line
        known = set(read_verdicts(file))
    # Attempt and judge the other tasks, batch by batch.
    kinds = {share.name: share.tasks_of() for share in config.tasks}
    tasks = list(itertools.chain(*kinds.values()))
    suite = make_task_suite(config, kinds, Verifiers(config.verifier, False))
    try:
        sample = _sampler(config, suite.tools, tasks)
        write_config(workdir, config)
        with ProgressBar(len(tasks), len(known), "task") as bar:
            for first in range(0, len(tasks), config.rollout.prompts):
                part = tasks[first : first + config.rollout.prompts]
                if not (left := [task for task in part if task.id not in known]):
                    continue
                groups = sample(left, first)
                run_sync(judge(groups, suite, config.reward_concurrency))
                if not (rows := _rows(groups)):
                    raise ValueError(f"no attempt could be judged: {groups[0].rewards[0].error}")
                append_lines(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
                known |= {row["task"] for row in rows}
                rate = sum(row["passes"] for row in rows) / sum(row["tries"] for row in rows)
                bar.update(len(known), f"passes {rate:.2f}")
    finally:
        suite.close()
    _show(file, kinds, len(tasks) - len(known))


def _sampler(
    config: PassRateConfig, tools: Tools | None, tasks: Sequence[Task]
) -> Callable[[Sequence[Task], int], list[Group]]:
    """Returns a function that samples groups of attempts at tasks, after `first` earlier ones.

    Raises ValueError for an unsuitable policy or unsuitable tasks.
    """
    if config.endpoint.base_url is not None:
        rollouts = _served_rollouts(config, config.endpoint.base_url, tools)
        return lambda tasks, first: rollouts.sample(tasks)
    local = _rollouts(config, tools, tasks)
    return lambda tasks, first: local.sample(tasks, config.seed, first=first)


def _served_rollouts(config: PassRateConfig, url: str, tools: Tools | None) -> ChatRollouts:
    """Returns rollouts of the server's model."""
    endpoint, path = config.endpoint, config.endpoint.tokenizer
    tokenizer = Tokenizer.load(path) if path else Tokenizer.default()
    client = ChatClient(
        url,
        endpoint.model,
        api_key=endpoint.key,
        timeout_s=config.agent_timeout_s,
        concurrency=config.concurrency,
    )
    thinking = config.rollout.thinking
    fields = {} if thinking else {"chat_template_kwargs": {"enable_thinking": False}}
    return ChatRollouts(
        client,
        tools or Toolbox({}),
        TokenCounter(tokenizer, config.rollout.variant, thinking),
        make_loop_config(config, config.max_attempt_tokens),
        group=config.rollout.group,
        fields=endpoint.sampling | fields,
    )


def _rollouts(config: PassRateConfig, tools: Tools | None, tasks: Sequence[Task]) -> Rollouts:
    """Returns the checkpoint's rollouts at the temperature of training. Raises ValueError for unsuitable tasks."""
    assert config.checkpoint is not None, "a run has checked it"
    tokenizer = models.load_tokenizer(config.checkpoint)
    tokenizer = tokenizer.with_chat_template(template(config.chat_variant))
    max_length = config.engine.max_length or config.length
    engine_config = dataclasses.replace(config.engine, max_length=max_length)
    for task in tasks:
        check_task(task, tokenizer, config.rollout, max_length, tools)
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    model = models.load_model(config.checkpoint, mesh if mesh.size > 1 else None)
    engine = Engine(model, tokenizer, engine_config, version=0)
    return Rollouts(engine, tokenizer, config.rollout, config.policy.temperature, tools)


def _rows(groups: Iterable[Group]) -> list[dict]:
    """Returns a row for each task with a judged attempt. Failures of the environment do not count as tries."""
    rows = []
    for group in groups:
        values = [reward.value for reward in group.rewards if reward.value is not None]
        if values:
            passes = sum(value == 1 for value in values)
            rows.append({"task": group.task.id, "passes": passes, "tries": len(values)})
    return rows


def _show(file: pathlib.Path, kinds, left: int) -> None:
    verdicts = read_verdicts(file)
    for name, tasks in kinds.items():
        rates = [verdicts[task.id].rate for task in tasks if task.id in verdicts]
        never = sum(rate == 0 for rate in rates)
        print(
            f"{name:20}{sum(rates) / len(rates):.3f} of the attempts at {len(rates):,} tasks passed, none at {never:,}"
            if rates
            else f"{name:20}no attempt could be judged"
        )
    if left:
        print(f"{left:,} tasks could not be judged: the same command attempts them again")
    print(f"verdicts            {file}")


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
