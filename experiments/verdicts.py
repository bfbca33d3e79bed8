"""What a policy makes of the tasks of Reasoning RL, by which those are chosen that are worth learning from (GLM-5 3.2).

    python -m launch.run --experiment=experiments/verdicts.py:tiny --experiment.checkpoint=WORKDIR --workdir=DIR

attempts every task of rl_reasoning.py:tiny as that would, --experiment.rollout.group times, and writes how often it
passed to DIR/verdicts.jsonl, line by line; the same command goes on with a run that was stopped or killed. Once for the
policy that is to learn and once for a stronger one, which may be another model, and rl_reasoning.py takes both,

    --experiment.verdicts=DIR/verdicts.jsonl --experiment.stronger_verdicts=OTHER/verdicts.jsonl

with the same variant and --experiment.tasks.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable

from experiments import rl_reasoning
from experiments.rl_reasoning import ReasoningConfig, Verifiers, world_of
from glm5_jax.checkpoint import models
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.coroutines import wait_for
from glm5_jax.core.lines import append, read_whole
from glm5_jax.core.mesh import make_mesh
from glm5_jax.core.stopping import StopSignal
from glm5_jax.envs.difficulty import read_verdicts
from glm5_jax.inference.engine import Engine
from glm5_jax.rl.rollout import Group, Rollouts, check_task
from glm5_jax.rl.stage import judge
from glm5_jax.text.layouts import template
from glm5_jax.training.experiment import check_resume, write_config

get_config = rl_reasoning.get_config
FILE = "verdicts.jsonl"


def run(config: ReasoningConfig, workdir: pathlib.Path) -> int:
    """Attempts what has no verdict yet; the exit code."""
    try:
        # Ended at once: a batch's verdicts are on disk before the next begins.
        with StopSignal(ends=True):
            _run(config, workdir)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def _run(config: ReasoningConfig, workdir: pathlib.Path) -> None:
    if config.checkpoint is None:
        raise ValueError(
            "nobody attempts the tasks; give --experiment.checkpoint=PATH, a workdir, one of its checkpoints/STEP or an "
            "HF folder"
        )
    if config.verdicts is not None:
        raise ValueError(
            f"verdicts is {config.verdicts}; all tasks are attempted here, so leave it to rl_reasoning.py"
        )
    check_resume(workdir, config)
    file = workdir / FILE
    known = set()
    if file.exists():
        read_whole(file)  # a run that was killed may have left a part of a line
        known = set(read_verdicts(file))
    kinds = {share.name: share.tasks_of() for share in config.tasks}
    tasks = list(itertools.chain(*kinds.values()))
    world = world_of(config, kinds, Verifiers(config.verifier, False))
    try:
        rollouts = _rollouts(config, world.tools, tasks)
        write_config(workdir, config)
        with ProgressBar(len(tasks), len(known), "task") as bar:
            for first in range(0, len(tasks), config.rollout.prompts):
                part = tasks[first : first + config.rollout.prompts]
                if not (left := [task for task in part if task.id not in known]):
                    continue
                groups = rollouts.sample(left, config.seed, first=first)
                wait_for(judge(groups, world, config.judged_at_once))
                if not (rows := _rows(groups)):
                    raise ValueError(f"no attempt could be judged: {groups[0].rewards[0].error}")
                append(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
                known |= {row["task"] for row in rows}
                rate = sum(row["passes"] for row in rows) / sum(row["tries"] for row in rows)
                bar.update(len(known), f"passes {rate:.2f}")
    finally:
        world.close()
    _show(file, kinds, len(tasks) - len(known))


def _rollouts(config: ReasoningConfig, tools, tasks) -> Rollouts:
    """Attempts by the checkpoint, at the temperature of training. ValueError for tasks that cannot be attempted."""
    tokenizer = models.load_tokenizer(config.checkpoint)
    tokenizer = tokenizer.with_chat_template(template(config.chat_variant))
    options = dataclasses.asdict(config.engine)
    options["max_length"] = options["max_length"] or config.length
    for task in tasks:
        check_task(task, tokenizer, config.rollout, options["max_length"], tools)
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    model = models.load_model(config.checkpoint, mesh if mesh.size > 1 else None)
    engine = Engine(model, tokenizer, version=0, **options)
    return Rollouts(engine, tokenizer, config.rollout, config.policy.temperature, tools)


def _rows(groups: Iterable[Group]) -> list[dict]:
    """Of each task that an attempt at was judged; what the environment failed is no try."""
    found = []
    for group in groups:
        values = [reward.value for reward in group.rewards if reward.value is not None]
        if values:
            passes = sum(value == 1 for value in values)
            found.append({"task": group.task.id, "passes": passes, "tries": len(values)})
    return found


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
    print(__doc__.split("\n\n")[1].strip())
