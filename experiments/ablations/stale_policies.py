"""Learning from samples that are old: what masks of the ratio do when they are 0, 4 and 16 steps behind (GLM-5 4.1.2).

    python -m experiments.ablations.stale_policies [tiny|chains] [WORKDIR]

The policy of rl_reasoning.py:addition learns to add from rewards, as the asynchronous system would have it learn: with a
hub and an engine in the same process (rl/in_process.py), so that samples are as old as they may be, and no clock decides.
Their age is that of all batches but the first, which nobody has learnt before.

- double sided: GLM-5's f(r) A log p, tokens out of the window (Eq. 3-5) do not count;
- ppo: the clip of PPO on the same ratio to what sampled;
- unclipped: the ratio alone.

Reported, of all seeds: what is right, over the last tenth of the steps; how far what learns is from what sampled; the
share of tokens that the window takes.

:tiny    for two CPU cores: two to three minutes for each of 3 x 3 arms and three seeds
:chains  as steps are after SFT, small: the policy and tasks of rl_reasoning.py:tiny at half its rate and with twice its
         steps, GLM-5's loss alone, 0 and 4 steps behind. WORKDIR is that of a life, which has `sft`. Two CPU cores, eight
         minutes for each of two arms and three seeds
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterable, Sequence

from experiments import rl_general, rl_reasoning
from experiments.ablations.arms import Arm, Runs, Trial, after_sft
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.rl_reasoning import Share, Verifiers, world_of
from glm5_jax.core.metrics_log import column, read
from glm5_jax.envs.reasoning import VerifierConfig
from glm5_jax.rl.asynchronous import Asynchronous, AsynchronousConfig
from glm5_jax.rl.in_process import InProcess
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
AGES = (0, 4, 16)
LOSSES = {"double sided": "double_sided", "ppo": "ppo", "unclipped": "unclipped"}
STEPS = 400  # of the 700 of rl_reasoning.py: without delay it is past half of what it learns
CHAIN_STEPS, CHAIN_RATE = 80, 1e-4  # 40 and 2e-4 in rl_reasoning.py:tiny
TAIL = 0.1


@dataclasses.dataclass(frozen=True)
class StaleConfig(AsynchronousConfig):
    """Attributes:
    tasks: what is learnt. partly: see `ReasoningConfig`.
    """

    tasks: tuple[Share, ...] = (Share(),)
    partly: bool = False

    @property
    def right(self) -> str:
        """The metric that tells how much is."""
        return "reward_part/exact" if self.partly else "reward/mean"

    def stage(self, workdir, evaluator=None, before=None, **options) -> Asynchronous:
        del evaluator
        kinds = {share.name: share.tasks_of() for share in self.tasks}
        world = world_of(self, kinds, Verifiers(VerifierConfig(), self.partly))
        path = self.tokenizer
        hub = InProcess(self, world, Tokenizer.load(path) if path else Tokenizer.default())
        return Asynchronous(self, workdir, hub, hub.pusher, before=before, **options)


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """The variant's arms by name; ValueError lists the variants."""
    return choose(variant, {"tiny": _tiny, "chains": _chains})


def arm_name(loss: str, age: int) -> str:
    """Of the arm with this loss and samples as old."""
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
    found = {}
    for loss, age in itertools.product(losses, ages):
        name = arm_name(loss, age)
        stage = StaleConfig(
            **rl_general.shared(
                base,
                name=f"stale:{name}",
                policy=dataclasses.replace(base.policy, correction=LOSSES[loss]),
                agreement=dataclasses.replace(base.agreement, attempts=0),
            ),
            tasks=base.tasks,
            partly=base.partly,
            max_staleness=age,
            max_running=(age + 1) * base.rollout.prompts,
            # One optimiser in all arms: what moments that begin anew do would hide what age does.
            new_moments=False,
        )
        found[name] = Arm(name, (stage,))
    return found


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """What an arm's row says of the end of its run."""
    rows = read(folder)

    def end(name: str) -> float:
        values = column(rows, name)[1]
        own = values[-max(1, round(TAIL * len(values))) :]
        return sum(own) / len(own)

    return {
        "right": end(trial.stages[-1].right),
        "apart": end("policy/mismatch"),
        "masked": end("policy/below") + end("policy/above"),
        "age": end("policy/staleness_mean"),
    }


def run(runs: Runs, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares all arms."""
    rows, right = {}, {}
    for name, own in arms.items():
        own = after_sft(own, runs.workdir) if own.stages[0].goes_on else own
        trials = [own.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        right[name] = [column(read(runs.folders(one)[-1]), one.stages[-1].right) for one in trials]
    return finding(rows, right, command)


def finding(rows: dict[str, list[dict]], right: dict[str, list], command: str) -> Finding:
    """Table, plots and verdicts from rows {arm: by seed} and what is right {arm: (steps, shares) by seed}."""
    losses = [loss for loss in LOSSES if any(arm_name(loss, age) in rows for age in AGES)]
    ages = [age for age in AGES if arm_name(losses[0], age) in rows]
    return Finding(
        "Learning from old samples",
        command,
        tuple(_verdict(rows, losses, age) for age in ages),
        (_table(rows, losses, ages),),
        tuple(
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
    own = _of(rows, first, age)
    told = [f"samples {age} steps old: {first} {Spread.of(own):.1f}% right"]
    if age:
        told.append(f"{paired(own, _of(rows, first, 0)):+.1f} points from none old")
    told += [f"{paired(own, _of(rows, loss, age)):+.1f} from {loss}" for loss in others]
    return ", ".join(told)


def _table(rows: dict[str, list[dict]], losses: Sequence[str], ages: Sequence[int]) -> Table:
    return Table(
        f"The last tenth of the steps, {len(SEEDS)} seeds",
        ("loss", "may be old", "are old", "right, %", "nats apart", "masked, %"),
        tuple(
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
        "Mean ± half of Student's 95% interval (lowest .. highest seed); of attempts at tasks that are learnt from, sampled "
        "at temperature 1; sums must be exact. Apart: mean |log p - log p_rollout| of sampled tokens.",
    )


if __name__ == "__main__":
    sys.exit(ablate("stale_policies", sys.argv[1:], get_config, run, measure=measure))
