"""Text in, text out against tokens in, tokens out: what is learnt if replies are encoded anew (GLM-5 4.1.2).

    python -m experiments.ablations.text_in_text_out [tiny|tools] [WORKDIR]

An agent speaks in messages, and a trainer that has only those lays the chat out and encodes it once more. A policy that
samples does not always write the tokens that an encoder would choose for its text, nor text that a chat gives back.

- tokens: the ids that were sampled, with the log-probs that they were sampled with;
- text, in place: the chat's messages, encoded anew. Log-probs of a reply stay in their places, zeros behind them where
  its ids are more now and the last ones dropped where they are fewer, as public trainers have had it (rllm-org/rllm 816
  and PrimeIntellect-ai/verifiers 2078 on GitHub);
- text, again: the same ids; log-probs are those that the learner computes itself, as an engine's are thrown away for that
  reason (rllm-org/rllm 898): no ratio shows that other tokens were sampled.

What comes between sampling and learning is all that differs: rewards are those of the attempts, and the next turn is
read behind the ids that were sampled. Samples are as new as the weights.

Reported, of all seeds: replies, and sampled tokens, in whose place other ids stand when encoded anew; how far the
learner's log-probs of what it learns are from those that came with it; what attempts are worth in the end.

:tiny    the policy of rl_reasoning.py:addition begins with random weights and learns to add. Its tokenizer has each pair
         of digits as one token beside the bytes, as large vocabularies have them: 12 is one token or two, and both are
         right. With bytes alone nothing could differ but what is no text. Two CPU cores, 25 minutes
:tools   the policy of rl_reasoning.py:tools, after SFT, with the shipped tokenizer: chats of several turns with a
         calculator. WORKDIR is that of a life, which has `sft`. Few steps, for ids and log-probs: rewards take more. Two CPU
         cores, 20 minutes
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import lax

from experiments import rl_general, rl_reasoning
from experiments.ablations.arms import Arm, Runs, Trial, after_sft
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired, verdict
from experiments.rl_reasoning import DIGITS, Share, Verifiers, world_of
from glm5_jax.core.metrics_log import column, read
from glm5_jax.data.record import TokenRecord
from glm5_jax.envs.reasoning import VerifierConfig
from glm5_jax.rl.asynchronous import Asynchronous, AsynchronousConfig
from glm5_jax.rl.experiment import EvaluationConfig
from glm5_jax.rl.in_process import InProcess
from glm5_jax.rl.losses import PolicyLoss
from glm5_jax.rl.rollout import Group
from glm5_jax.rl.stage import World
from glm5_jax.rl.types import Attempt, Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import NUM_BYTES, SPECIAL_TOKENS, Tokenizer
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
TOKENS, IN_PLACE, AGAIN = "tokens", "text, in place", "text, again"
ARMS = (TOKENS, IN_PLACE, AGAIN)
STEPS = 300  # of the 700 of rl_reasoning.py: enough to tell arms apart
TOOL_STEPS = 8  # of 40: for ids and log-probs; rewards take more
TAIL = 0.1
EXACT_LOGP = 1e-3  # nats: what rounding in float32 leaves between engine and learner is below


@dataclasses.dataclass(frozen=True)
class TextConfig(AsynchronousConfig):
    """Attributes:
    learns_from: one of `ARMS`.
    tasks: what is learnt. partly: see `ReasoningConfig`.
    compared: steps between two looks at how far log-probs are apart.
    """

    learns_from: str = TOKENS
    tasks: tuple[Share, ...] = (Share(),)
    partly: bool = False
    compared: int = 5

    def __post_init__(self):
        super().__post_init__()
        if self.learns_from not in ARMS:
            raise ValueError(
                f"learns_from is {self.learns_from!r}; use one of {'; '.join(map(repr, ARMS))}"
            )
        if self.compared < 1:
            raise ValueError(f"compared is {self.compared}; it must be at least 1")

    @property
    def token_loss(self) -> PolicyLoss:
        return (OwnLogp if self.learns_from == AGAIN else PolicyLoss)(self.policy)

    def stage(self, workdir, evaluator=None, before=None, **options) -> "Learning":
        del evaluator
        kinds = {share.name: share.tasks_of() for share in self.tasks}
        world = world_of(self, kinds, Verifiers(VerifierConfig(), self.partly))
        return Learning(self, workdir, world, before=before, **options)


@dataclasses.dataclass(frozen=True)
class OwnLogp(PolicyLoss):
    """As if the learner's weights had sampled what it learns: its log-probs stand for the engine's."""

    def __call__(self, logp, streams) -> tuple[dict, dict]:
        return super().__call__(logp, streams | {"rollout_logp": lax.stop_gradient(logp)})


class Found(NamedTuple):
    """Of an attempt: its replies, and those with other ids when encoded anew; its sampled tokens, and those of them in
    whose place another one stands then, or none."""

    replies: int
    other_replies: int
    tokens: int
    other_tokens: int


class Encoded(InProcess):
    """Attempts whose chats are encoded anew.

    Attributes:
      told: of the last ones, by name, shares of replies and tokens that are others then.
    """

    def __init__(self, config: TextConfig, world: World, tokenizer: Tokenizer):
        super().__init__(config, world, tokenizer)
        self._more = config, tokenizer
        self.told: dict[str, float] = {}

    def attempts(self, tasks: Sequence[Task], first: int) -> list[Group]:
        groups, counts = super().attempts(tasks, first), []
        for group in groups:
            again = [
                encoded_again(group.task, attempt, record, *self._more)
                for attempt, record in zip(group.attempts, group.records, strict=True)
            ]
            counts += [found for _, found in again]
            if self._more[0].learns_from != TOKENS:
                group.records = [record for record, _ in again]
        found = Found(*np.sum(counts, axis=0).tolist())
        self.told = {
            "text/replies": found.other_replies / max(found.replies, 1),
            "text/tokens": found.other_tokens / max(found.tokens, 1),
        }
        return groups


def encoded_again(
    task: Task, attempt: Attempt, record: TokenRecord, config: TextConfig, tokenizer: Tokenizer
) -> tuple[TokenRecord, Found]:
    """What a trainer makes of an attempt's messages, to the end of a row, and how much of that is other than the record.

    That a reply has come to its end it knows of its finish reason, so that the marker behind it is the layout's. An
    attempt that the environment broke stays as it is.
    """
    old = _runs(record.loss_mask)
    if attempt.finish_reason == "failed" or not old:
        return record, Found(0, 0, 0, 0)
    messages = [*task.messages, *attempt.messages]
    stopped = record.token_ids[-1] in tokenizer.eos_ids and record.loss_mask[-1] == 1
    chat = render_chat(
        messages,
        tokenizer,
        tools=task.tools or None,
        enable_thinking=config.rollout.thinking if task.thinking is None else task.thinking,
        clear_thinking=False,
        add_generation_prompt=False,
        close=bool(stopped) and messages[-1]["role"] == "assistant",
        variant=config.rollout.variant,
    )
    ids, learnt = np.array(chat.ids), np.array(chat.loss_mask)
    owner = np.full(len(ids), -1)
    for span in chat.spans:
        owner[span.first : span.last] = span.message
    owner = np.where(learnt, owner, -1)
    behind = range(len(task.messages), len(messages))
    new = [np.flatnonzero(owner == i) for i in behind if messages[i]["role"] == "assistant"]
    logp = np.full(len(ids), np.nan, np.float32)
    version = np.full(len(ids), -1, np.int32)
    counts = np.zeros(4, int)
    for before, now in zip(old, new, strict=True):
        both = min(len(before), len(now))
        logp[now], version[now] = 0.0, record.weight_version[before[0]]
        logp[now[:both]] = record.rollout_logp[before[:both]]
        same = int((record.token_ids[before[:both]] == ids[now[:both]]).sum())
        others = same < max(len(before), len(now))
        counts += 1, others, len(before), len(before) - same
    row = slice(config.length)
    again = dataclasses.replace(
        record,
        token_ids=ids[row],
        loss_mask=~np.isnan(logp[row]),
        rollout_logp=logp[row],
        weight_version=version[row],
    )
    return again, Found(*counts.tolist())


def _runs(mask: np.ndarray) -> list[np.ndarray]:
    """Places of what was sampled, reply by reply: something is read between two of them."""
    places = np.flatnonzero(mask)
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []


class Learning(Asynchronous):
    """Tells, beside what the trainer does, what becomes of ids and log-probs between sampling and learning."""

    def __init__(self, config: TextConfig, workdir, world: World, **options):
        self._world = world
        path = config.tokenizer
        tokenizer = Tokenizer.load(path) if path else Tokenizer.default()
        self._encoded = Encoded(config, world, tokenizer)
        super().__init__(config, workdir, self._encoded, self._encoded.pusher, **options)

    def _train(self, stop) -> None:
        try:
            super()._train(stop)
        finally:
            self._world.close()

    def _update(self, state: dict, batch: dict) -> tuple[dict, dict]:
        told = dict(self._encoded.told)
        if self._batches.step % self.config.compared == 0:
            # Before the step, which takes the weights.
            logp = np.asarray(self._step.score(state["params"], batch))
            apart = np.abs(logp - np.asarray(batch["rollout_logp"]))
            apart = apart[np.asarray(batch["loss_mask"]) == 1]
            told |= {"text/apart": float(apart.mean()), "text/apart_max": float(apart.max())}
        state, metrics = super()._update(state, batch)
        return state, metrics | told


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """The variant's arms by name; ValueError lists the variants."""
    return choose(variant, {"tiny": _tiny, "tools": _tools})


def _tiny() -> dict[str, Arm]:
    base = rl_reasoning.addition()
    base = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab_size=pairs().vocab_size),
        schedule=dataclasses.replace(base.schedule, total_steps=STEPS),
    )
    return _arms(base)


def _tools() -> dict[str, Arm]:
    base = rl_reasoning.tools()
    base = dataclasses.replace(
        base,
        schedule=dataclasses.replace(base.schedule, total_steps=TOOL_STEPS),
        evaluation=EvaluationConfig(tasks=0),
    )
    return _arms(base, compared=1)


def _arms(base: rl_reasoning.ReasoningConfig, **more) -> dict[str, Arm]:
    options = {
        "agreement": dataclasses.replace(base.agreement, attempts=0),
        "tasks": base.tasks,
        "partly": base.partly,
        "max_staleness": 0,
        "max_running": base.rollout.prompts,
        "new_moments": False,
        **more,
    }
    return {
        name: Arm(
            name,
            (
                TextConfig(
                    **rl_general.shared(base, name=f"text:{name}", **options), learns_from=name
                ),
            ),
        )
        for name in ARMS
    }


def pairs() -> Tokenizer:
    """Of bytes and of pairs of digits."""
    texts = [a + b for a in DIGITS for b in DIGITS]
    return Tokenizer.train(texts, NUM_BYTES + len(texts) + len(SPECIAL_TOKENS))


def placed(arm: Arm, workdir: pathlib.Path) -> Arm:
    """An arm with what lies in a workdir: the life's weights after SFT, or, where the policy begins with none, its
    tokenizer, which is made. ValueError if the weights are not there."""
    [stage] = arm.stages
    if stage.goes_on:
        return after_sft(arm, workdir)
    pairs().save(workdir / "tokenizer")
    stage = dataclasses.replace(stage, tokenizer=str(workdir / "tokenizer"))
    return dataclasses.replace(arm, stages=(stage,))


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """What an arm's row says of its run, and of its end."""
    del trial
    rows = read(folder)

    def all_of(name: str) -> list[float]:
        return column(rows, name)[1]

    def end(name: str) -> float:
        values = all_of(name)
        return float(np.mean(values[-max(1, round(TAIL * len(values))) :]))

    return {
        "worth": end("reward/mean"),
        "masked": float(np.mean(all_of("policy/below")) + np.mean(all_of("policy/above"))),
        "apart": float(np.mean(all_of("text/apart"))),
        "apart_max": float(np.max(all_of("text/apart_max"))),
        **{name: float(np.mean(all_of(f"text/{name}"))) for name in ("replies", "tokens")},
        **{f"{name}_end": end(f"text/{name}") for name in ("replies", "tokens")},
    }


def run(runs: Runs, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares all arms."""
    rows, rewards, others = {}, {}, {}
    for name, own in arms.items():
        trials = [placed(own, runs.workdir).trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        logs = [read(runs.folders(trial)[-1]) for trial in trials]
        rewards[name] = [column(log, "reward/mean") for log in logs]
        others[name] = [column(log, "text/replies") for log in logs]
    return finding(rows, rewards, others, command)


def finding(
    rows: dict[str, list[dict]], rewards: dict[str, list], others: dict[str, list], command: str
) -> Finding:
    """Table, plots and verdicts from rows {arm: by seed}, and from rewards and the share of replies with other ids, both
    {arm: (steps, shares) by seed}."""
    note = "Mean of the seeds; shadow: lowest to highest."
    return Finding(
        "Text in, text out against tokens in, tokens out",
        command,
        (_ids(rows), _log_probs(rows), *(_reward(rows, name) for name in (IN_PLACE, AGAIN))),
        (_table(rows),),
        (
            Plot(curves(rewards, y_label="Reward"), note),
            Plot(curves(others, y_label="Replies with other ids when encoded anew"), note),
        ),
    )


def _of(rows: dict[str, list[dict]], arm: str, name: str) -> list[float]:
    """In percent, by seed."""
    return [100 * row[name] for row in rows[arm]]


def _ids(rows: dict[str, list[dict]]) -> str:
    told = {name: Spread.of(_of(rows, TOKENS, name)) for name in ("replies", "tokens")}
    end = {name: Spread.of(_of(rows, TOKENS, f"{name}_end")) for name in ("replies", "tokens")}
    return (
        f"of what a policy samples that learns from its tokens, {told['replies']:.1f}% of the replies and "
        f"{told['tokens']:.1f}% of the tokens are others when encoded anew; {end['replies']:.1f}% and "
        f"{end['tokens']:.1f}% in the end"
    )


def _log_probs(rows: dict[str, list[dict]]) -> str:
    def told(arm: str) -> str:
        mean = np.mean([row["apart"] for row in rows[arm]])
        return f"{mean:.1e} nats on average and {max(row['apart_max'] for row in rows[arm]):.1e} at most"

    exact = max(row["apart_max"] for row in rows[TOKENS]) <= EXACT_LOGP
    return (
        f"log-probs of the learner are those of the engine, to {EXACT_LOGP:g} nats, with tokens: "
        f"{'met' if exact else 'not met'}, {told(TOKENS)}; with text in place {told(IN_PLACE)}"
    )


def _reward(rows: dict[str, list[dict]], arm: str) -> str:
    def told(name: str) -> str:
        margin = paired(*([row[name] for row in rows[which]] for which in (TOKENS, arm)))
        return f"{verdict(margin)} ({margin:+.3f})"

    greedy = f"; greedy, held out: {told('reward')}" if _held_out(rows) else ""
    return f"reward in the end with tokens is at least that with {arm}: {told('worth')}{greedy}"


def _held_out(rows: dict[str, list[dict]]) -> bool:
    return all(row["reward"] is not None for own in rows.values() for row in own)


def _table(rows: dict[str, list[dict]]) -> Table:
    def cells(arm: str) -> tuple[str, ...]:
        def mean(name: str) -> float:
            return Spread.of(_of(rows, arm, name)).mean

        return (
            arm,
            f"{mean('replies'):.1f}, {mean('replies_end'):.1f}",
            f"{mean('tokens'):.1f}, {mean('tokens_end'):.1f}",
            f"{mean('apart') / 100:.1e}",
            f"{max(row['apart_max'] for row in rows[arm]):.1e}",
            f"{mean('masked'):.1f}",
            f"{Spread.of(row['worth'] for row in rows[arm]):.3f}",
            f"{Spread.of(row['reward'] for row in rows[arm]):.3f}" if _held_out(rows) else "-",
        )

    return Table(
        f"All steps, and the last tenth of them, {len(SEEDS)} seeds",
        (
            "learns from",
            "other replies, %",
            "other tokens, %",
            "nats apart",
            "at most",
            "masked, %",
            "reward in the end",
            "greedy, held out",
        ),
        tuple(map(cells, rows)),
        "Others: in whose place other ids stand when encoded anew, of all steps and of the last tenth. Apart: the log-prob "
        "of what is learnt, by the learner, from the one that came with it; text, again does not use the latter. "
        "Mean ± half of Student's 95% interval (lowest .. highest seed); reward: of attempts at tasks that are learnt from, "
        "sampled at temperature 1, and of held-out ones, greedy.",
    )


if __name__ == "__main__":
    sys.exit(ablate("text_in_text_out", sys.argv[1:], get_config, run, measure=measure))
