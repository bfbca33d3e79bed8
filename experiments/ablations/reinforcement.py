"""Reinforcement learning after SFT: from a dense and from a sparse model, pulled back or not, and what distillation
restores of what it forgets (GLM-5 3.2, 3.5).

    python -m experiments.ablations.reinforcement [tiny|small] [WORKDIR]

All arms learn one skill from rewards, chains of three values, which the model of SFT has never seen end so early; the
chains of five that it knows are the old skill, of which nothing is attempted meanwhile.

- sparse: as experiments/rl_reasoning.py, without KL (GLM-5 3.2), from the sparse model;
- pulled: the same, each token also paying for leaving the model of SFT (its KL divergence), by GRPO's coefficient
  (DeepSeekMath, arXiv 2402.03300) and by a tenth of it;
- dense: from a dense model that was fine-tuned as the sparse one, on the same conversations;
- distilled: the sparse arm, and after it cross-stage distillation: taught the old skill by the model of SFT, the new
  one by the model that the sparse arm ended with.

Reported, of all seeds: both skills, greedy, on tasks that no stage trains on, after each stage; how much of what was
lost comes back.

:tiny    for two CPU cores: a life of ten minutes, one for all ablations of SFT in a WORKDIR, then for each of three
         seeds four minutes of SFT for each of two models, and four or five for each of five arms
"""

import dataclasses
import functools
import pathlib
import sys

from experiments import distill, rl_general, rl_reasoning
from experiments.ablations import sft_attention
from experiments.ablations.arms import Arm, Runs, Trial
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.ablations.sft_attention import DENSE, SPARSE
from experiments.rl_reasoning import Share
from glm5_jax.core.metrics_log import column, read
from glm5_jax.envs.reasoning_tasks import TaskConfig
from glm5_jax.rl.experiment import EvaluationConfig, RlConfig, Teacher
from glm5_jax.rl.skills import skill_matrix
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
QUESTIONS = 300
LONGER = 1.5  # times the steps of rl_reasoning.py: of :tiny, 40 left half of the old skill
PULLS = {"pulled": 0.04, "pulled a little": 0.004}  # the KL divergence's coefficients
FALLEN = 0.5  # share of the old skill that is to be lost
RESTORED = 0.8  # share of what was lost that is to come back
OLD, NEW = "sft:chain5-seed0", "reasoning:chain3-seed0"
DISTILLED = "distilled"


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """The variant's arms by name; ValueError lists the variants."""
    return choose(variant, {size: functools.partial(_arms, size) for size in ("tiny", "small")})


def _arms(size: str) -> dict[str, Arm]:
    tuned = sft_attention.get_config(size)
    [start, plain] = (tuned[name].stages[-1].name for name in (SPARSE, DENSE))
    base = rl_reasoning.get_config(size)
    steps = round(LONGER * base.schedule.total_steps)
    learning = dataclasses.replace(
        base,
        name=f"rl:{size}",
        tasks=(_chain(3),),
        schedule=dataclasses.replace(base.schedule, total_steps=steps),
    )
    pulled = {
        name: dataclasses.replace(
            learning,
            name=f"rl:{size},{name}",
            credit=dataclasses.replace(learning.credit, pull="reference"),
            policy=dataclasses.replace(learning.policy, ref_kl=coefficient),
            teachers=(Teacher(start),),
        )
        for name, coefficient in PULLS.items()
    }
    taught = _distilled(distill.get_config(size), f"distill:{size},old", start, learning.name)
    behind = {
        SPARSE: (tuned[SPARSE], learning),
        **{name: (tuned[SPARSE], stage) for name, stage in pulled.items()},
        DENSE: (tuned[DENSE], sft_attention.dense(learning)),
        DISTILLED: (tuned[SPARSE], learning, taught),
    }
    return {
        name: Arm(name, (*own.stages, *stages), own.given)
        for name, (own, *stages) in behind.items()
    }


def _chain(steps: int) -> Share:
    return Share(TaskConfig("chain", size=20_000, steps=steps))


def _distilled(base: RlConfig, name: str, old: str, new: str) -> distill.DistillConfig:
    """With the rest of a stage, taught both skills by the stages of these names."""
    teachers = Teacher(old, "sft"), Teacher(new, "reasoning")
    credit = dataclasses.replace(base.credit, pull="none")
    more = {"name": name, "learns": "teachers", "teachers": teachers, "credit": credit}
    shared = rl_general.shared(base, **more)
    return distill.DistillConfig(**shared, sft=(_chain(5),), reasoning=(_chain(3),))


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """What an arm's row says of both skills, after SFT and after each stage behind it."""
    first = next(i for i, stage in enumerate(trial.stages) if isinstance(stage, RlConfig)) - 1
    own = Runs(folder.parent.parent).folders(trial)[first:]
    stages = dict(zip(("sft", "rl", "distill"), map(str, own)))
    evaluation = EvaluationConfig(QUESTIONS, temperature=0.0)
    last = dataclasses.replace(trial.stages[-1], evaluation=evaluation)
    config = _distilled(last, "skills", "sft", "rl")
    world = config.world()
    try:
        return {"skills": skill_matrix(config, world, stages).rewards}
    finally:
        world.close()


def run(runs: Runs, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares all arms."""
    rows, rewards = {}, {}
    for name, own in arms.items():
        trials = [own.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        if name != DISTILLED:
            rewards[name] = [
                column(read(runs.folders(t)[-1]), "held_out/chain3-seed0") for t in trials
            ]
    return finding(rows, rewards, command)


def finding(rows: dict[str, list[dict]], rewards: dict[str, list], command: str) -> Finding:
    """Table, plot and verdicts from rows {arm: by seed} and held-out rewards {arm: (steps, rewards) by seed}."""
    return Finding(
        "Reinforcement learning after SFT",
        command,
        (
            _restored(rows[DISTILLED]),
            *(_pull(rows, name) for name in PULLS),
            _attention(rows),
        ),
        (_table(rows),),
        (
            Plot(
                curves(rewards, y_label="Held-out reward of the new skill"),
                "Mean of the seeds; shadow: lowest to highest.",
            ),
        ),
    )


def _of(rows: list[dict], skill: str, stage: str) -> list[float]:
    """In percent, by seed."""
    return [100 * row["skills"][skill][stage] for row in rows]


def _restored(rows: list[dict]) -> str:
    """What distillation gives back of the old skill, and leaves of the new one."""
    before, after, end = (_of(rows, OLD, stage) for stage in ("sft", "rl", "distill"))
    lost = Spread.of(1 - b / a for a, b in zip(before, after))
    back = Spread.of((c - b) / (a - b) for a, b, c in zip(before, after, end))
    new = paired(_of(rows, NEW, "distill"), _of(rows, NEW, "rl"))
    fallen = [b for a, b in zip(lost.values, back.values) if a >= FALLEN]
    met = sum(b >= RESTORED for b in fallen)
    return (
        f"the old skill falls by {_percent(lost)}% of what it was, and distillation gives {_percent(back)}% of that "
        f"back (it fell by at least {100 * FALLEN:.0f}% in {len(fallen)} of {len(lost.values)} seeds, of which {met} got "
        f"at least {100 * RESTORED:.0f}% of that back); the new skill changes by {new:+.1f} points"
    )


def _pull(rows: dict[str, list[dict]], name: str) -> str:
    new, old = (
        paired(*(_of(rows[arm], skill, "rl") for arm in (name, SPARSE))) for skill in (NEW, OLD)
    )
    return (
        f"{name} ({PULLS[name]}) minus not, in points: the new skill {new:+.1f}, {_effect(new)}; the old one {old:+.1f}, "
        f"{_effect(old)}"
    )


def _attention(rows: dict[str, list[dict]]) -> str:
    gained = {
        name: [b - a for a, b in zip(*(_of(rows[name], NEW, stage) for stage in ("sft", "rl")))]
        for name in (SPARSE, DENSE)
    }
    end = paired(*(_of(rows[name], NEW, "rl") for name in (SPARSE, DENSE)))
    return (
        f"of the new skill the sparse model gains {Spread.of(gained[SPARSE]):.1f} points, the dense one "
        f"{Spread.of(gained[DENSE]):.1f}; sparse minus dense at the end: {end:+.1f}, {_effect(end)}"
    )


def _effect(difference: Spread) -> str:
    sure = difference.half is not None and abs(difference.mean) > difference.half
    return "beyond the spread of the seeds" if sure else "within the spread of the seeds"


def _percent(spread: Spread) -> str:
    return f"{Spread(tuple(100 * value for value in spread.values)):.0f}"


def _table(rows: dict[str, list[dict]]) -> Table:
    stages = ("sft", "rl", "distill")

    def cell(found, skill, stage):
        if stage not in found[0]["skills"][skill]:
            return "-"
        return f"{Spread.of(_of(found, skill, stage)):.1f}"

    skills = {
        "old": OLD,
        "new": NEW,
        "form with thinking": "form with thinking",
        "form without": "form without",
    }
    return Table(
        f"Right answers of {QUESTIONS} held-out questions of each skill, %, {len(SEEDS)} seeds",
        ("arm", "skill", *(f"after {stage}" for stage in stages)),
        tuple(
            (arm, name, *(cell(found, skill, stage) for stage in stages))
            for arm, found in rows.items()
            for name, skill in skills.items()
        ),
        "Mean ± half of Student's 95% interval (lowest .. highest seed); greedy. Form: replies to questions of the old "
        "skill that end by themselves, with reasoning in its place, or without any where none was asked for.",
    )


if __name__ == "__main__":
    sys.exit(ablate("reinforcement", sys.argv[1:], get_config, run, measure=measure, keep=True))
