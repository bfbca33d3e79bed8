"""Measures RL after SFT: from a dense and a sparse model, with and without KL, and recovery by distillation.

    glm5 run reinforcement:tiny --workdir=DIR     # or :small

Source: GLM-5 3.2, 3.5. All arms train one skill by rewards: chains of three values, shorter than those of SFT. Chains
of five, which the SFT model solves, are the old skill; no RL task has them.

- sparse: as experiments/rl_reasoning.py, without KL (GLM-5 3.2), from the sparse model;
- pulled: the same with a KL penalty to the SFT model, with GRPO's coefficient (DeepSeekMath, arXiv 2402.03300) and with
  a tenth of it;
- dense: from a dense model that was fine-tuned like the sparse one, on the same conversations;
- distilled: the sparse arm, and then cross-stage distillation: the SFT model teaches the old skill, the final model of
  the sparse arm the new one.

Reported, for all seeds: both skills, greedy, on tasks that no stage trains on, after each stage; the share of the lost
skill that is restored.

:tiny    for two CPU cores: a lifecycle of ten minutes, one for all ablations of SFT in a WORKDIR, then for each of
         three seeds four minutes of SFT for each of two models, and four or five for each of five arms
"""

import dataclasses
import functools
import pathlib

from experiments import distill, rl_general, rl_reasoning
from experiments.ablations import sft_attention
from experiments.ablations.arms import AblationRuns, Arm, Trial, last_stage
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.ablations.sft_attention import DENSE, SPARSE
from experiments.rl_reasoning import TaskWeight
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.config import EvaluationConfig, RlConfig, Teacher
from glm5_jax.rl.trainers.skill_matrix import evaluate_skills
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
QUESTIONS = 300
LONGER = 1.5  # multiple of the steps of rl_reasoning.py: the 40 of :tiny left half of the old skill
KL_COEFFICIENTS = {"pulled": 0.04, "pulled a little": 0.004}  # the KL divergence's coefficients
FALLEN = 0.5  # share of the old skill that must be lost for the target to apply
RESTORED = 0.8  # share of the loss that distillation must restore
OLD, NEW = "sft.chain5-seed0", "reasoning.chain3-seed0"
DISTILLED = "distilled"


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """Returns the variant's arms by name. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {"tiny": functools.partial(_arms, "tiny"), "small": functools.partial(_arms, "small")},
    )


def _arms(size: str) -> dict[str, Arm]:
    tuned = sft_attention.get_config(size)
    [start, dense_start] = (tuned[name].stages[-1].name for name in (SPARSE, DENSE))
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
            credit=dataclasses.replace(learning.credit, kl_target="reference"),
            policy=dataclasses.replace(learning.policy, ref_kl=coefficient),
            teachers=(Teacher(checkpoint=start),),
        )
        for name, coefficient in KL_COEFFICIENTS.items()
    }
    distillation = _distillation(
        distill.get_config(size), f"distill:{size},old", start, learning.name
    )
    stages_by_arm = {
        SPARSE: (tuned[SPARSE], learning),
        **{name: (tuned[SPARSE], stage) for name, stage in pulled.items()},
        DENSE: (tuned[DENSE], sft_attention.dense(learning)),
        DISTILLED: (tuned[SPARSE], learning, distillation),
    }
    return {
        name: Arm(name, (*sft_arm.stages, *stages), sft_arm.num_fixed)
        for name, (sft_arm, *stages) in stages_by_arm.items()
    }


def _chain(steps: int) -> TaskWeight:
    return TaskWeight(TaskConfig(kind="chain", size=20_000, steps=steps))


def _distillation(base: RlConfig, name: str, old: str, new: str) -> distill.DistillConfig:
    """Returns a distillation of both skills from the stages of these names; other fields are those of `base`."""
    teachers = Teacher(checkpoint=old, origin="sft"), Teacher(checkpoint=new, origin="reasoning")
    credit = dataclasses.replace(base.credit, kl_target="none")
    changes = {"name": name, "objective": "teachers", "teachers": teachers, "credit": credit}
    shared = rl_general.shared_fields(base, **changes)
    return distill.DistillConfig(**shared, sft=(_chain(5),), reasoning=(_chain(3),))


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """Returns the row's values on both skills, after SFT and after each later stage."""
    first = next(i for i, stage in enumerate(trial.stages) if isinstance(stage, RlConfig)) - 1
    folders = AblationRuns(folder.parent.parent).folders(trial)[first:]
    stages: dict[str, str] = dict(zip(("sft", "rl", "distill"), map(str, folders)))
    evaluation = EvaluationConfig(tasks=QUESTIONS, temperature=0.0)
    last = dataclasses.replace(last_stage(trial.stages, RlConfig), evaluation=evaluation)
    config = _distillation(last, "skills", "sft", "rl")
    suite = config.make_suite()
    try:
        return {"skills": evaluate_skills(config, suite, stages).rewards}
    finally:
        suite.close()


def compare(runs: AblationRuns, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares all arms."""
    rows, rewards = {}, {}
    for name, arm in arms.items():
        trials = [arm.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        if name != DISTILLED:
            rewards[name] = [
                column(read(runs.folders(t)[-1]), "held_out/chain3-seed0") for t in trials
            ]
    return finding(rows, rewards, command)


def finding(rows: dict[str, list[dict]], rewards: dict[str, list], command: str) -> Finding:
    """Returns table, plot and verdicts from rows {arm: by seed} and held-out rewards {arm: (steps, rewards) by seed}."""
    return Finding(
        title="Reinforcement learning after SFT",
        command=command,
        verdicts=(
            _restored(rows[DISTILLED]),
            *(_pull(rows, name) for name in KL_COEFFICIENTS),
            _attention(rows),
        ),
        tables=(_table(rows),),
        plots=(
            Plot(
                curves(rewards, y_label="Held-out reward of the new skill"),
                "Mean of the seeds; shadow: lowest to highest.",
            ),
        ),
    )


def _of(rows: list[dict], skill: str, stage: str) -> list[float]:
    """Returns the reward of a skill after a stage, in percent, by seed."""
    return [100 * row["skills"][skill][stage] for row in rows]


def _restored(rows: list[dict]) -> str:
    """Returns the sentence on how much of both skills there is after distillation."""
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
        f"{name} ({KL_COEFFICIENTS[name]}) minus not, in points: the new skill {new:+.1f}, {_effect(new)}; the old one {old:+.1f}, "
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

    def cell(arm_rows, skill, stage):
        if stage not in arm_rows[0]["skills"][skill]:
            return "-"
        return f"{Spread.of(_of(arm_rows, skill, stage)):.1f}"

    skills = {
        "old": OLD,
        "new": NEW,
        "form with thinking": "form with thinking",
        "form without": "form without",
    }
    return Table(
        title=f"Right answers of {QUESTIONS} held-out questions of each skill, %, {len(SEEDS)} seeds",
        columns=("arm", "skill", *(f"after {stage}" for stage in stages)),
        rows=tuple(
            (arm, name, *(cell(arm_rows, skill, stage) for stage in stages))
            for arm, arm_rows in rows.items()
            for name, skill in skills.items()
        ),
        note="Mean ± half of Student's 95% interval (lowest .. highest seed); greedy. Form: replies to questions of the old "
        "skill that end by themselves, with reasoning in its place, or without any where none was asked for.",
    )


def run(arms: dict[str, Arm], workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("reinforcement", arms, workdir, command, compare, measure=measure, keep=True)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
