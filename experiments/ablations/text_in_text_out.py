"""Compares training on sampled token ids with training on re-encoded text (GLM-5 4.1.2).

    glm5 run text_in_text_out:tiny --workdir=DIR     # or :tools

An agent exchanges messages, and a trainer that has only the messages renders the chat and encodes it again. A policy
does not always sample the tokens that an encoder would choose for its text, nor text that a chat reproduces.

- tokens: the sampled ids, with the log-probs of sampling;
- text, in place: the chat's messages, encoded again. Log-probs of a reply keep their positions. If the reply has more
  ids now, zeros follow; if it has fewer, the last ones are dropped. Public trainers have done so (rllm-org/rllm 816 and
  PrimeIntellect-ai/verifiers 2078 on GitHub);
- text, again: the same ids; log-probs are computed by the learner, since an engine's are discarded for that reason
  (rllm-org/rllm 898): no ratio shows that other tokens were sampled.

The arms differ only between sampling and training: rewards are those of the attempts, and the next turn continues the
sampled ids. Samples are as new as the weights.

Reported, for all seeds: replies and sampled tokens whose ids differ when encoded again; the distance between the
learner's log-probs and those of the record; the reward at the end.

:tiny    the policy of rl_reasoning.py:addition starts from random weights and learns to add. Its tokenizer has each
         pair of digits as one token in addition to the bytes, as large vocabularies have: 12 is one token or two, and
         both are right. With bytes only, nothing but invalid text could differ. Two CPU cores, 25 minutes
:tools   the policy of rl_reasoning.py:tools, after SFT, with the shipped tokenizer: chats of several turns with a
         calculator. WORKDIR is that of a lifecycle, which has `sft`. Few steps suffice for ids and log-probs, but not
         for rewards. Two CPU cores, 20 minutes
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import lax

from experiments import rl_general, rl_reasoning
from experiments.ablations.arms import AblationRuns, Arm, Trial, after_sft
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired, verdict
from experiments.rl_reasoning import DIGITS, TaskWeight, Verifiers, make_task_suite
from glm5_jax.data.record import TokenRecord
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.algorithm.losses import PolicyLoss
from glm5_jax.rl.config import EvaluationConfig, RlConfig
from glm5_jax.rl.trainers.async_trainer import AsyncRlConfig, AsyncRlTrainer
from glm5_jax.rl.trainers.in_process import InProcessOrchestrator
from glm5_jax.rl.trainers.sync_trainer import TaskSuite
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt, Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import NUM_BYTES, SPECIAL_TOKENS, Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.stages import Stage

SEEDS = (0, 1, 2)
TOKENS, IN_PLACE, AGAIN = "tokens", "text, in place", "text, again"
ARMS = (TOKENS, IN_PLACE, AGAIN)
STEPS = 300  # of the 700 of rl_reasoning.py: enough to distinguish the arms
TOOL_STEPS = 8  # of 40: enough for ids and log-probs; rewards take more
TAIL = 0.1
EXACT_LOGP = 1e-3  # nats; float32 rounding between engine and learner is smaller


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(AsyncRlConfig):
    """Configuration of training on token ids or on re-encoded text.

    Attributes:
      trained_on: one of `ARMS`.
      tasks: task sets to train on.
      partial_credit: see `ReasoningConfig`.
      compare_interval: steps between two comparisons of log-probs.
    """

    trained_on: str = TOKENS
    tasks: tuple[TaskWeight, ...] = (TaskWeight(),)
    partial_credit: bool = False
    compare_interval: int = 5

    def __post_init__(self):
        super().__post_init__()
        if self.trained_on not in ARMS:
            raise ValueError(
                f"trained_on is {self.trained_on!r}; use one of {'; '.join(map(repr, ARMS))}"
            )
        if self.compare_interval < 1:
            raise ValueError(f"compare_interval is {self.compare_interval}; it must be at least 1")

    @property
    def token_loss(self) -> PolicyLoss:
        return (LearnerLogpLoss if self.trained_on == AGAIN else PolicyLoss)(self.policy)

    def make_stage(
        self,
        workdir: str | os.PathLike,
        evaluator: object = None,
        previous_stage: Stage | None = None,
        **options,
    ) -> "TextTrainer":
        del evaluator
        kinds = {share.name: share.tasks_of() for share in self.tasks}
        suite = make_task_suite(self, kinds, Verifiers(VerifierConfig(), self.partial_credit))
        return TextTrainer(self, workdir, suite, previous_stage=previous_stage, **options)


@dataclasses.dataclass(frozen=True)
class LearnerLogpLoss(PolicyLoss):
    """Policy loss with the learner's log-probs in place of the engine's, as if its weights had sampled."""

    def __call__(self, logp, streams) -> tuple[dict, dict]:
        return super().__call__(logp, {**streams, "rollout_logp": lax.stop_gradient(logp)})


class ReencodingCounts(NamedTuple):
    """Counts of an attempt.

    Attributes:
      replies, other_replies: all replies, and those whose ids differ when encoded again.
      tokens, other_tokens: all sampled tokens, and those replaced by another or none when encoded again.
    """

    replies: int
    other_replies: int
    tokens: int
    other_tokens: int


class ReencodedRollouts(InProcessOrchestrator):
    """Rollouts whose chats are encoded again.

    Attributes:
      metrics: of the last attempts, the shares of replies and tokens that differ.
    """

    def __init__(self, config: TextConfig, suite: TaskSuite, tokenizer: Tokenizer):
        super().__init__(config, suite, tokenizer)
        self._config_and_tokenizer = config, tokenizer
        self.reencoding_shares: dict[str, float] = {}

    def sample_judged_groups(self, tasks: Sequence[Task], first: int) -> list[Group]:
        groups, counts = super().sample_judged_groups(tasks, first), []
        for group in groups:
            reencoded = [
                reencode(group.task, attempt, record, *self._config_and_tokenizer)
                for attempt, record in zip(group.attempts, group.records, strict=True)
            ]
            counts += [total for _, total in reencoded]
            if self._config_and_tokenizer[0].trained_on != TOKENS:
                group.records = [record for record, _ in reencoded]
        total = ReencodingCounts(*np.sum(counts, axis=0).tolist())
        self.reencoding_shares = {
            "text/replies": total.other_replies / max(total.replies, 1),
            "text/tokens": total.other_tokens / max(total.tokens, 1),
        }
        return groups


def reencode(
    task: Task, attempt: Attempt, record: TokenRecord, config: TextConfig, tokenizer: Tokenizer
) -> tuple[TokenRecord, ReencodingCounts]:
    """Returns the record that a trainer makes of an attempt's messages, and counts of its differences.

    The record ends at the end of a row. The finish reason shows whether a reply ended, and so whether the layout's marker
    follows. An attempt that the environment broke stays unchanged.
    """
    # Render and encode the messages again.
    old = _runs(record.loss_mask)
    if attempt.finish_reason == "failed" or not old:
        return record, ReencodingCounts(0, 0, 0, 0)
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
    ids, is_trained = np.array(chat.ids), np.array(chat.loss_mask)
    owner = np.full(len(ids), -1)
    for span in chat.spans:
        owner[span.first : span.last] = span.message
    owner = np.where(is_trained, owner, -1)
    message_indices = range(len(task.messages), len(messages))
    new = [
        np.flatnonzero(owner == i) for i in message_indices if messages[i]["role"] == "assistant"
    ]
    assert record.rollout_logp is not None and record.weight_version is not None, "it was sampled"
    # Move the log-probs of each reply to its new ids, and count the differences.
    logp = np.full(len(ids), np.nan, np.float32)
    version = np.full(len(ids), -1, np.int32)
    counts = np.zeros(4, int)
    for old_positions, positions in zip(old, new, strict=True):
        num_common = min(len(old_positions), len(positions))
        logp[positions], version[positions] = 0.0, record.weight_version[old_positions[0]]
        logp[positions[:num_common]] = record.rollout_logp[old_positions[:num_common]]
        num_same = int(
            (record.token_ids[old_positions[:num_common]] == ids[positions[:num_common]]).sum()
        )
        differs = num_same < max(len(old_positions), len(positions))
        counts += 1, differs, len(old_positions), len(old_positions) - num_same
    row = slice(config.length)
    new_record = dataclasses.replace(
        record,
        token_ids=ids[row],
        loss_mask=~np.isnan(logp[row]),
        rollout_logp=logp[row],
        weight_version=version[row],
    )
    return new_record, ReencodingCounts(*counts.tolist())


def _runs(mask: np.ndarray) -> list[np.ndarray]:
    """Returns the positions of sampled tokens, reply by reply; prompt tokens separate two replies."""
    positions = np.flatnonzero(mask)
    return np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(positions) else []


class TextTrainer(AsyncRlTrainer):
    """Trainer that also logs what changes in ids and log-probs between sampling and training."""

    def __init__(self, config: TextConfig, workdir, suite: TaskSuite, **options):
        self._suite, self._compare_interval = suite, config.compare_interval
        path = config.tokenizer
        tokenizer = Tokenizer.load(path) if path else Tokenizer.default()
        self._reencoded = ReencodedRollouts(config, suite, tokenizer)
        super().__init__(config, workdir, self._reencoded, self._reencoded.pusher, **options)

    def _train(self, stop) -> None:
        try:
            super()._train(stop)
        finally:
            self._suite.close()

    def _update(self, state: dict, batch: dict) -> tuple[dict, dict]:
        text_metrics = dict(self._reencoded.reencoding_shares)
        if self._batches.step % self._compare_interval == 0:
            # Before the step, which donates the weights.
            logp = np.asarray(self._step.score(state["params"], batch))
            differences = np.abs(logp - np.asarray(batch["rollout_logp"]))
            differences = differences[np.asarray(batch["loss_mask"]) == 1]
            text_metrics |= {
                "text/apart": float(differences.mean()),
                "text/apart_max": float(differences.max()),
            }
        state, metrics = super()._update(state, batch)
        return state, metrics | text_metrics


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """Returns the variant's arms by name. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": _tiny, "tools": _tools})


def _tiny() -> dict[str, Arm]:
    base = rl_reasoning.addition()
    base = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab_size=digit_pair_tokenizer().vocab_size),
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
    return _arms(base, compare_interval=1)


def _arms(base: rl_reasoning.ReasoningConfig, **more) -> dict[str, Arm]:
    options = {
        "mismatch": dataclasses.replace(base.mismatch, attempts=0),
        "tasks": base.tasks,
        "partial_credit": base.partial_credit,
        "max_staleness": 0,
        "max_running": base.rollout.prompts,
        "reset_optimizer": False,
        **more,
    }
    return {
        name: Arm(
            name,
            (
                TextConfig(
                    **rl_general.shared_fields(base, RlConfig, name=f"text:{name}", **options),
                    trained_on=name,
                ),
            ),
        )
        for name in ARMS
    }


def digit_pair_tokenizer() -> Tokenizer:
    """Returns a tokenizer of bytes and of pairs of digits."""
    texts = [a + b for a in DIGITS for b in DIGITS]
    return Tokenizer.train(texts, NUM_BYTES + len(texts) + len(SPECIAL_TOKENS))


def with_weights(arm: Arm, workdir: pathlib.Path) -> Arm:
    """Returns an arm with the lifecycle's SFT weights, or with a new tokenizer if it starts from random weights.

    Raises ValueError if the workdir has no such weights.
    """
    [stage] = arm.stages
    if stage.requires_checkpoint:
        return after_sft(arm, workdir)
    digit_pair_tokenizer().save(workdir / "tokenizer")
    stage = dataclasses.replace(stage, tokenizer=str(workdir / "tokenizer"))
    return dataclasses.replace(arm, stages=(stage,))


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """Returns the row's values on an arm's run and its end."""
    del trial
    rows = read(folder)

    def all_of(name: str) -> list[float]:
        return column(rows, name)[1]

    def end(name: str) -> float:
        values = all_of(name)
        return float(np.mean(values[-max(1, round(TAIL * len(values))) :]))

    return {
        "worth": end("reward/mean"),
        "masked": float(
            np.mean(all_of("policy/clip_frac_low")) + np.mean(all_of("policy/clip_frac_high"))
        ),
        "apart": float(np.mean(all_of("text/apart"))),
        "apart_max": float(np.max(all_of("text/apart_max"))),
        **{name: float(np.mean(all_of(f"text/{name}"))) for name in ("replies", "tokens")},
        **{f"{name}_end": end(f"text/{name}") for name in ("replies", "tokens")},
    }


def compare(runs: AblationRuns, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and compares all arms."""
    rows, rewards, others = {}, {}, {}
    for name, arm in arms.items():
        trials = [with_weights(arm, runs.workdir).trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        logs = [read(runs.folders(trial)[-1]) for trial in trials]
        rewards[name] = [column(log, "reward/mean") for log in logs]
        others[name] = [column(log, "text/replies") for log in logs]
    return finding(rows, rewards, others, command)


def finding(
    rows: dict[str, list[dict]], rewards: dict[str, list], others: dict[str, list], command: str
) -> Finding:
    """Returns table, plots and verdicts of the arms.

    Args:
      rows: {arm: rows by seed}.
      rewards: {arm: (steps, rewards) by seed}.
      others: {arm: (steps, share of replies with other ids) by seed}.
      command: command line of the run.
    """
    note = "Mean of the seeds; shadow: lowest to highest."
    return Finding(
        title="Text in, text out against tokens in, tokens out",
        command=command,
        verdicts=(
            _ids(rows),
            _log_probs(rows),
            *(_reward(rows, name) for name in (IN_PLACE, AGAIN)),
        ),
        tables=(_table(rows),),
        plots=(
            Plot(curves(rewards, y_label="Reward"), note),
            Plot(curves(others, y_label="Replies with other ids when encoded again"), note),
        ),
    )


def _of(rows: dict[str, list[dict]], arm: str, name: str) -> list[float]:
    """Returns a value of an arm's rows in percent, by seed."""
    return [100 * row[name] for row in rows[arm]]


def _ids(rows: dict[str, list[dict]]) -> str:
    spreads = {name: Spread.of(_of(rows, TOKENS, name)) for name in ("replies", "tokens")}
    end = {name: Spread.of(_of(rows, TOKENS, f"{name}_end")) for name in ("replies", "tokens")}
    return (
        f"of the samples of a policy that trains on its tokens, {spreads['replies']:.1f}% of the replies and "
        f"{spreads['tokens']:.1f}% of the tokens differ when encoded again; {end['replies']:.1f}% and "
        f"{end['tokens']:.1f}% in the end"
    )


def _log_probs(rows: dict[str, list[dict]]) -> str:
    def distances(arm: str) -> str:
        mean = np.mean([row["apart"] for row in rows[arm]])
        return f"{mean:.1e} nats on average and {max(row['apart_max'] for row in rows[arm]):.1e} at most"

    exact = max(row["apart_max"] for row in rows[TOKENS]) <= EXACT_LOGP
    return (
        f"log-probs of the learner are those of the engine, to {EXACT_LOGP:g} nats, with tokens: "
        f"{'met' if exact else 'not met'}, {distances(TOKENS)}; with text in place {distances(IN_PLACE)}"
    )


def _reward(rows: dict[str, list[dict]], arm: str) -> str:
    def comparison(name: str) -> str:
        margin = paired(*([row[name] for row in rows[arm_name]] for arm_name in (TOKENS, arm)))
        return f"{verdict(margin)} ({margin:+.3f})"

    greedy = f"; greedy, held out: {comparison('reward')}" if _held_out(rows) else ""
    return (
        f"reward in the end with tokens is at least that with {arm}: {comparison('worth')}{greedy}"
    )


def _held_out(rows: dict[str, list[dict]]) -> bool:
    return all(row["reward"] is not None for arm_rows in rows.values() for row in arm_rows)


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
        title=f"All steps, and the last tenth of them, {len(SEEDS)} seeds",
        columns=(
            "trained on",
            "other replies, %",
            "other tokens, %",
            "nats apart",
            "at most",
            "masked, %",
            "reward in the end",
            "greedy, held out",
        ),
        rows=tuple(map(cells, rows)),
        note="Others: ids that differ when encoded again, of all steps and of the last tenth. Apart: distance between the learner's "
        "log-prob of a trained token and the recorded one, which arm 'text, again' does not use. "
        "Mean ± half of Student's 95% interval (lowest .. highest seed); reward: of attempts at training tasks, "
        "sampled at temperature 1, and of held-out ones, greedy.",
    )


def run(arms: dict[str, Arm], workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("text_in_text_out", arms, workdir, command, compare, measure=measure)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
