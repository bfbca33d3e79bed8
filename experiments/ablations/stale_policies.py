"""Trains on samples that are 0, 4 and 16 steps old, with different masks of the importance ratio (GLM-5 4.1.2).

    glm5 run stale_policies:tiny --workdir=DIR     # or :chains

The policy of rl_reasoning.py:addition learns to add from rewards, with the trainer of the asynchronous system. Orchestrator and
engine are in the same process (rl/trainers/in_process.py), so that samples are as old as allowed and nothing depends on a clock.
All batches have this age except the first ones, before which there were no updates.

- double sided: GLM-5's f(r) A log p; tokens outside the window (Eq. 3-5) do not count;
- ppo: PPO's clip on the same ratio to the sampling policy;
- unclipped: only the ratio.

Reported, for all seeds: the share of right answers over the last tenth of the steps; the distance between the training
and the sampling policy; the share of masked tokens.

:tiny    for two CPU cores: two to three minutes for each of 3 x 3 arms and three seeds
:chains  with small steps, as after SFT: the policy and tasks of rl_reasoning.py:tiny at half its rate and with twice
         its steps, GLM-5's loss only, 0 and 4 steps old. WORKDIR is that of a lifecycle, which has `sft`. Two CPU
         cores, eight minutes for each of two arms and three seeds
"""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence

from experiments import rl_general, rl_reasoning
from experiments.ablations.arms import AblationRuns, Arm, Trial, after_sft, last_stage
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.rl_reasoning import TaskWeight, Verifiers, make_task_suite
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.trainers.async_trainer import AsyncRlConfig, AsyncRlTrainer
from glm5_jax.rl.trainers.in_process import InProcessOrchestrator
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.stages import Stage

SEEDS = (0, 1, 2)
AGES = (0, 4, 16)
LOSSES = {"double sided": "double_sided", "ppo": "ppo", "unclipped": "unclipped"}
STEPS = 400  # of the 700 of rl_reasoning.py: without delay, more than half of the reward is reached
CHAIN_STEPS, CHAIN_RATE = 80, 1e-4  # 40 and 2e-4 in rl_reasoning.py:tiny
TAIL = 0.1


@dataclasses.dataclass(kw_only=True, frozen=True)
class StaleConfig(AsyncRlConfig):
    """Configuration of training on old samples.

    Attributes:
      tasks: task sets to train on.
      partial_credit: see `ReasoningConfig`.
    """

    tasks: tuple[TaskWeight, ...] = (TaskWeight(),)
    partial_credit: bool = False

    @property
    def right_metric(self) -> str:
        """Name of the metric of right answers."""
        return "reward_part/exact" if self.partial_credit else "reward/mean"

    def make_stage(
        self,
        workdir: str | os.PathLike,
        evaluator: object = None,
        previous_stage: Stage | None = None,
        **options,
    ) -> AsyncRlTrainer:
        del evaluator
        kinds = {share.name: share.tasks_of() for share in self.tasks}
        suite = make_task_suite(self, kinds, Verifiers(VerifierConfig(), self.partial_credit))
        path = self.tokenizer
        orchestrator = InProcessOrchestrator(
            self, suite, Tokenizer.load(path) if path else Tokenizer.default()
        )
        return AsyncRlTrainer(
            self,
            workdir,
            orchestrator,
            orchestrator.pusher,
            previous_stage=previous_stage,
            **options,
        )


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """Returns the variant's arms by name. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": _tiny, "chains": _chains})


def arm_name(loss: str, age: int) -> str:
    """Returns the name of the arm with this loss and age of samples."""
    return f"{loss}, {age}"


def _tiny() -> dict[str, Arm]:
    base = rl_reasoning.addition()
    schedule = dataclasses.replace(base.schedule, total_steps=STEPS)
    return _arms(dataclasses.replace(base, schedule=schedule), LOSSES, AGES)


def _chains() -> dict[str, Arm]:
    base = rl_reasoning.tiny()
    schedule = dataclasses.replace(
        base.schedule, peak=CHAIN_RATE, end=CHAIN_RATE / 10, total_steps=CHAIN_STEPS
    )
    train = dataclasses.replace(base.train, eval_interval=CHAIN_STEPS)
    return _arms(
        dataclasses.replace(base, schedule=schedule, train=train), ["double sided"], [0, 4]
    )


def _arms(
    base: rl_reasoning.ReasoningConfig, losses: Iterable[str], ages: Iterable[int]
) -> dict[str, Arm]:
    arms_by_name = {}
    for loss, age in itertools.product(losses, ages):
        name = arm_name(loss, age)
        stage = StaleConfig(
            **rl_general.shared_fields(
                base,
                RlConfig,
                name=f"stale:{name}",
                policy=dataclasses.replace(base.policy, correction=LOSSES[loss]),
                mismatch=dataclasses.replace(base.mismatch, attempts=0),
            ),
            tasks=tuple(share for share in base.tasks if isinstance(share, TaskWeight)),
            partial_credit=base.partial_credit,
            max_staleness=age,
            max_running=(age + 1) * base.rollout.prompts,
            # One optimiser state in all arms, because resets of the moments would hide the effect of age.
            reset_optimizer=False,
        )
        arms_by_name[name] = Arm(name, (stage,))
    return arms_by_name


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """Returns the row's values on the end of an arm's run."""
    rows = read(folder)

    def end(name: str) -> float:
        values = column(rows, name)[1]
        last_values = values[-max(1, round(TAIL * len(values))) :]
        return sum(last_values) / len(last_values)

    return {
        "right": end(last_stage(trial.stages, StaleConfig).right_metric),
        "apart": end("policy/abs_logratio"),
        "masked": end("policy/clip_frac_low") + end("policy/clip_frac_high"),
        "age": end("policy/staleness_mean"),
    }


def compare(runs: AblationRuns, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares all arms."""
    rows, right = {}, {}
    for name, arm in arms.items():
        arm = after_sft(arm, runs.workdir) if arm.stages[0].requires_checkpoint else arm
        trials = [arm.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        metric = last_stage(arm.stages, StaleConfig).right_metric
        right[name] = [column(read(runs.folders(trial)[-1]), metric) for trial in trials]
    return finding(rows, right, command)


def finding(rows: dict[str, list[dict]], right: dict[str, list], command: str) -> Finding:
    """Returns table, plots and verdicts from rows {arm: by seed} and right answers {arm: (steps, shares) by seed}."""
    losses = [loss for loss in LOSSES if any(arm_name(loss, age) in rows for age in AGES)]
    ages = [age for age in AGES if arm_name(losses[0], age) in rows]
    return Finding(
        title="Training on old samples",
        command=command,
        verdicts=tuple(_verdict(rows, losses, age) for age in ages),
        tables=(_table(rows, losses, ages),),
        plots=tuple(
            Plot(
                curves(
                    {arm_name(loss, age): right[arm_name(loss, age)] for loss in losses},
                    y_label=f"Right, samples {age} steps old",
                ),
                "Mean of the seeds; shadow: lowest to highest.",
            )
            for age in ages
        ),
    )


def _of(rows: dict[str, list[dict]], loss: str, age: int, name: str = "right") -> list[float]:
    return [100 * row[name] for row in rows[arm_name(loss, age)]]


def _verdict(rows: dict[str, list[dict]], losses: Sequence[str], age: int) -> str:
    first, *others = losses
    first_right = _of(rows, first, age)
    parts = [f"samples {age} steps old: {first} {Spread.of(first_right):.1f}% right"]
    if age:
        parts.append(f"{paired(first_right, _of(rows, first, 0)):+.1f} points from none old")
    parts += [f"{paired(first_right, _of(rows, loss, age)):+.1f} from {loss}" for loss in others]
    return ", ".join(parts)


def _table(rows: dict[str, list[dict]], losses: Sequence[str], ages: Sequence[int]) -> Table:
    return Table(
        title=f"The last tenth of the steps, {len(SEEDS)} seeds",
        columns=("loss", "may be old", "are old", "right, %", "nats apart", "masked, %"),
        rows=tuple(
            (
                loss,
                str(age),
                f"{Spread.of(_of(rows, loss, age, 'age')).mean / 100:.1f}",
                f"{Spread.of(_of(rows, loss, age)):.1f}",
                f"{Spread.of(_of(rows, loss, age, 'apart')).mean / 100:.3f}",
                f"{Spread.of(_of(rows, loss, age, 'masked')).mean:.2f}",
            )
            for loss in losses
            for age in ages
        ),
        note="Mean ± half of Student's 95% interval (lowest .. highest seed); of attempts at training tasks, sampled "
        "at temperature 1; sums must be exact. Apart: mean |log p - log p_rollout| of sampled tokens.",
    )


def run(arms: dict[str, Arm], workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("stale_policies", arms, workdir, command, compare, measure=measure)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
