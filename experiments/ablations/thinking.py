"""Measures the benefit and the cost of thinking in each of the three modes on held-out questions (GLM-5 3.1).

    glm5 run thinking:tiny --workdir=DIR     # or :small

Arms are the kinds of experiments/sft.py, fine-tuned from the same sparse model of a lifecycle (trained first, once for
all arms and seeds). Questions are chains of sums and products modulo ten; an answer is right or not.

- turn_level: one model, with thinking and without. It was trained on every question both ways, with the same answer.
  Reported: right answers, paired by question; thinking that is opened and closed; thinking marks while it is off;
  tokens and time.
- preserved and interleaved: both hold a conversation of three turns with their own replies. Reported by turn: right
  answers, tokens of reasoning, and the share of the previous turn (its prompt and its reply) that is a prefix of the
  next prompt, which a server's cache need not read again.

:tiny    for two CPU cores: a lifecycle of ten minutes, one for all ablations of SFT in a WORKDIR, then four minutes
         for each of three arms and three seeds
"""

import functools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from experiments import sft
from experiments.ablations.arms import AblationRuns, Arm, Trial
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Spread, Table, paired
from experiments.ablations.finetuned import Assistant, arm, chats_of, held_out
from glm5_jax.data.conversation import Conversation
from glm5_jax.evals.chats import Answer, ChatPrompt
from glm5_jax.text.thinking import request_options
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
QUESTIONS = 600
NEW = 96  # maximum tokens of a reply; right ones have at most 60
TURN_LEVEL, PRESERVED, INTERLEAVED = "turn_level", "preserved", "interleaved"


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """Returns the variant's arms by name. Raises ValueError, which lists the variants, for an unknown one."""

    def arms(size: str) -> dict[str, Arm]:
        kinds = (TURN_LEVEL, PRESERVED, INTERLEAVED)
        return {kind: arm(kind, size, sft.get_config(f"{size},{kind}")) for kind in kinds}

    return choose(
        variant,
        {"tiny": functools.partial(arms, "tiny"), "small": functools.partial(arms, "small")},
    )


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """Returns the row's values on an arm's replies."""
    if trial.arm not in (TURN_LEVEL, PRESERVED, INTERLEAVED):
        return {}
    assistant = Assistant.of(trial, folder)
    chats = held_out(chats_of(trial.stages), QUESTIONS)
    if trial.arm == TURN_LEVEL:
        return {
            name: ask_assistant(assistant, chats, think)
            for name, think in (("on", True), ("off", False))
        }
    return {"turns": _conversed(assistant, chats, trial.arm)}


def ask_assistant(assistant: Assistant, chats: Iterable[Conversation], think: bool) -> dict:
    """Returns measurements of the replies to first questions, with thinking or without."""
    options = request_options(TURN_LEVEL, think)
    answers = assistant([ChatPrompt(messages=c.messages[:1], **options) for c in chats], NEW)
    marks = [assistant.tokenizer.special_ids[name] for name in ("<think>", "</think>")]
    marks_by_answer = [[i for i in answer.ids if i in marks] for answer in answers]
    return {
        "right": [int(_right(a, c, 0)) for a, c in zip(answers, chats)],
        "closed": float(
            np.mean(
                [
                    ids == marks[1:] and a.num_reasoning > 1
                    for ids, a in zip(marks_by_answer, answers)
                ]
            )
        ),
        "marks": sum(map(len, marks_by_answer)),
        "stopped": float(np.mean([a.reply.stopped_by is not None for a in answers])),
        "tokens": float(np.mean([len(a.ids) for a in answers])),
        "seconds": float(np.median([a.seconds for a in answers])),  # the first ones compile
    }


def _conversed(assistant: Assistant, chats: Sequence[Conversation], mode: str) -> list[dict]:
    """Returns measurements by turn of conversations in which the model's own replies are the context."""
    histories = [list(c.messages[:1]) for c in chats]
    before, turns = None, []
    num_turns = sum(message["role"] == "user" for message in chats[0].messages)
    for turn in range(num_turns):
        answers = assistant(
            [ChatPrompt(messages=tuple(m), **request_options(mode)) for m in histories], NEW
        )
        shared = (
            [] if before is None else [common_prefix(a.prompt, b) for a, b in zip(answers, before)]
        )
        known = [len(b) for b in before] if before else []
        turns.append(
            {
                "right": [int(_right(a, c, turn)) for a, c in zip(answers, chats)],
                "reasoning": float(np.mean([a.num_reasoning for a in answers])),
                "prompt": float(np.mean([len(a.prompt) for a in answers])),
                "shared": float(sum(shared) / sum(known)) if known else None,
                "all_shared": float(np.mean([k == n for k, n in zip(shared, known)]))
                if known
                else None,
                "new_tokens": float(
                    np.mean([len(a.prompt) for a in answers]) - np.mean(shared or [0])
                ),
            }
        )
        before = [a.prompt + a.ids for a in answers]
        for messages, answer, chat in zip(histories, answers, chats):
            messages.append(answer.reply.message)
            messages += chat.messages[2 * turn + 2 : 2 * turn + 3]
    return turns


def _right(answer: Answer, chat: Conversation, turn: int) -> bool:
    return answer.reply.content == chat.messages[2 * turn + 1]["content"]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Returns the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def compare(runs: AblationRuns, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and evaluates all arms."""
    for trained_arm in arms.values():
        # Raises an error before any training if there are too few.
        held_out(chats_of(trained_arm.stages), QUESTIONS)
    rows = {
        name: runs([trained_arm.trial(seed=seed) for seed in SEEDS])
        for name, trained_arm in arms.items()
    }
    return finding(rows, command)


def finding(rows: dict[str, list[dict]], command: str) -> Finding:
    """Returns tables and verdicts from the rows {arm: by seed}."""
    switched, turns = rows[TURN_LEVEL], {name: rows[name] for name in (PRESERVED, INTERLEAVED)}
    return Finding(
        title="Thinking in three modes",
        command=command,
        verdicts=(
            *(_gain(row) for row in switched),
            _marks(switched),
            _saved_by_off(switched),
            *_preserved(turns),
        ),
        tables=(_switch_table(switched), _turn_table(turns)),
    )


def _gain(row: dict) -> str:
    on, off = (np.array(row[name]["right"], float) for name in ("on", "off"))
    difference = on - off
    error = float(difference.std(ddof=1) / len(difference) ** 0.5)
    times = difference.mean() / error if error else np.inf if difference.any() else 0.0
    met = "met" if len(on) >= 500 and times >= 2 else "not met"
    return (
        f"seed {row['seed']}: {100 * on.mean():.1f}% right with thinking, {100 * off.mean():.1f}% without, on the "
        f"same {len(on)} held-out questions: {100 * difference.mean():+.1f} points, {times:.1f} standard "
        f"errors; at least 2: {met}"
    )


def _marks(rows: list[dict]) -> str:
    num_replies = sum(len(row["off"]["right"]) for row in rows)
    marks = sum(row["off"]["marks"] for row in rows)
    closed = min(row["on"]["closed"] for row in rows)
    return (
        f"with thinking off, {marks} marks of thinking in {num_replies:,} replies: {'not ' if marks else ''}met; with it "
        f"on, thinking is opened and closed once in at least {100 * closed:.1f}% of replies"
    )


def _saved_by_off(rows: list[dict]) -> str:
    tokens = Spread.of(1 - row["off"]["tokens"] / row["on"]["tokens"] for row in rows)
    seconds = Spread.of(1 - row["off"]["seconds"] / row["on"]["seconds"] for row in rows)
    return f"turning it off saves {100 * tokens.mean:.0f}% of the tokens and {100 * seconds.mean:.0f}% of the time"


def _preserved(turns: dict[str, list[dict]]) -> Iterable[str]:
    complete = min(t["all_shared"] for row in turns[PRESERVED] for t in row["turns"][1:])
    yield (
        f"{PRESERVED}: the next prompt begins with all of the turn before in {100 * complete:.1f}% of conversations: "
        f"{'met' if complete == 1 else 'not met'}"
    )
    saved = Spread.of(
        1 - _later(preserved, "reasoning") / _later(interleaved, "reasoning")
        for preserved, interleaved in zip(turns[PRESERVED], turns[INTERLEAVED])
    )
    right = paired(
        *([_later(row, "right") for row in turns[name]] for name in (PRESERVED, INTERLEAVED))
    )
    yield (
        f"in later turns {PRESERVED} thinks {100 * saved.mean:.0f}% fewer tokens than {INTERLEAVED}, and its answers are "
        f"{Spread(tuple(100 * v for v in right.values)):+.1f} points more often right"
    )


def _later(row: dict, what: str) -> float:
    """Returns the mean of a value over the turns after the first."""
    return float(np.mean([np.mean(turn[what]) for turn in row["turns"][1:]]))


def _switch_table(rows: list[dict]) -> Table:
    def of(name, what, scale=1.0, spec=".1f"):
        return f"{Spread.of(scale * float(np.mean(row[name][what])) for row in rows):{spec}}"

    return Table(
        title=f"One model, asked with thinking and without: {QUESTIONS} held-out questions, {len(rows)} seeds",
        columns=("thinking", "right, %", "opened and closed, %", "ended, %", "tokens", "ms"),
        rows=tuple(
            (
                name,
                of(name, "right", 100),
                of(name, "closed", 100) if name == "on" else "-",
                of(name, "stopped", 100),
                of(name, "tokens"),
                of(name, "seconds", 1e3, ".2f"),
            )
            for name in ("on", "off")
        ),
        note="Mean ± half of Student's 95% interval (lowest .. highest seed); greedy; tokens and ms of a reply, many "
        "decoded in step.",
    )


def _turn_table(turns: dict[str, list[dict]]) -> Table:
    def of(arm_rows, turn, what, scale=1.0):
        return (
            f"{Spread.of(scale * float(np.mean(row['turns'][turn][what])) for row in arm_rows):.1f}"
        )

    return Table(
        title=f"Conversations of {QUESTIONS} held-out questions with the model's own replies",
        columns=(
            "mode",
            "turn",
            "right, %",
            "tokens of reasoning",
            "of the turn before reused, %",
            "tokens read again",
        ),
        rows=tuple(
            (
                name,
                str(turn + 1),
                of(arm_rows, turn, "right", 100),
                of(arm_rows, turn, "reasoning"),
                of(arm_rows, turn, "shared", 100) if turn else "-",
                of(arm_rows, turn, "new_tokens"),
            )
            for name, arm_rows in turns.items()
            for turn in range(len(arm_rows[0]["turns"]))
        ),
        note="Reused: share of the ids of the previous prompt and its reply with which the next prompt begins.",
    )


def run(arms: dict[str, Arm], workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("thinking", arms, workdir, command, compare, measure=measure)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
