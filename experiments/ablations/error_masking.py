"""Measures the effect of leaving the assistant's mistakes out of the loss (GLM-5 3.1).

    glm5 run error_masking:tiny --workdir=DIR     # or :small

Two arms are fine-tuned from the same sparse model on the same conversations with tools. In half of them the first call
is a mistake (an unknown tool, a wrong argument, or arguments that are not an object), which the tool's answer names
and the next call corrects. Arm masked leaves the mistakes out of the loss, arm unmasked trains on them. The data also
has chains of sums (experiments/sft.py), from which such a small model learns to copy values of the question; on tools
only, neither arm gets a call right.

Reported, on held-out questions and calls sampled at temperature 1 and greedily:

- the share of first calls that are mistakes, by the rule that masks them in training;
- the share of right calls after a mistake in the context, which both arms train on with the same corrections.

:tiny    for two CPU cores: a lifecycle of ten minutes, one for all ablations of SFT in a WORKDIR, then four minutes
         for each of two arms and three seeds
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable

import numpy as np

from experiments import sft
from experiments.ablations.arms import AblationRuns, Arm, Trial
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Spread, Table, paired
from experiments.ablations.finetuned import Assistant, arm, chats_of, held_out
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.chat_tasks import ChatTaskConfig
from glm5_jax.data.conversation import Conversation, parse_line
from glm5_jax.evals.chats import ChatPrompt
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
QUESTIONS = 500
NEW = 64  # maximum tokens of a call; right ones have at most 40
MASKED, UNMASKED = "masked", "unmasked"
SHARE = 0.5  # of the conversations that begin with a mistake


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """Returns the variant's arms by name. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {"tiny": functools.partial(_arms, "tiny"), "small": functools.partial(_arms, "small")},
    )


def _arms(size: str) -> dict[str, Arm]:
    base = sft.get_config(f"{size},interleaved")
    tools = ChatTaskConfig(kind="tools", size=12_000, mistakes=SHARE)
    chains = ChatSourceConfig(chats=sft.CHAIN, category="reasoning", weight=0.6)
    arms = {}
    for name in (MASKED, UNMASKED):
        calls = ChatSourceConfig(
            chats=tools, category="agent", weight=0.4, mask_errors=name == MASKED
        )
        data = dataclasses.replace(base.data, sources=(calls, chains))
        config = dataclasses.replace(base, name=f"sft:{size},{name}", data=data)
        arms[name] = arm(name, size, config)
    return arms


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """Returns the row's values on an arm's calls."""
    if trial.arm not in (MASKED, UNMASKED):
        return {}
    assistant = Assistant.of(trial, folder)
    chats = held_out(chats_of(trial.stages), QUESTIONS)
    mistaken = [c for c in chats if c.mistakes]
    return {
        "drawn": judge_calls(assistant, chats, 1, temperature=1.0, seed=trial.seed),
        "greedy": judge_calls(assistant, chats, 1),
        # The question, the mistake and the tool's answer.
        "corrected": judge_calls(assistant, mistaken, 3),
    }


def judge_calls(assistant: Assistant, chats: Iterable[Conversation], first: int, **options) -> dict:
    """Returns, for replies after the `first` messages: which are mistakes, and which are the right call."""
    answers = assistant(
        [ChatPrompt(messages=c.messages[:first], tools=c.tools) for c in chats], NEW, **options
    )
    mistakes, right = [], []
    for chat, answer in zip(chats, answers):
        calls = answer.reply.message.get("tool_calls", [])
        line = {
            "messages": [*chat.messages[:1], answer.reply.message],
            "tools": list(chat.tools or ()),
        }
        broken = any(call.problem for call in answer.reply.tool_calls)
        mistakes.append(int(broken or bool(calls and parse_line(line).mistakes)))
        wanted = chat.messages[-3]["tool_calls"]
        right.append(int(not mistakes[-1] and calls == wanted))
    return {"mistakes": mistakes, "right": right}


def compare(runs: AblationRuns, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and evaluates both arms."""
    rows = {
        name: runs([trained_arm.trial(seed=seed) for seed in SEEDS])
        for name, trained_arm in arms.items()
    }
    return finding(rows, command)


def finding(rows: dict[str, list[dict]], command: str) -> Finding:
    """Returns table and verdicts from the rows {arm: by seed}."""
    fewer = paired(*(_shares(rows[name], "drawn", "mistakes") for name in (UNMASKED, MASKED)))
    clear = fewer.half is not None and fewer.mean > fewer.half
    masked, unmasked = (
        Spread.of(100 * share for share in _shares(rows[name], "drawn", "mistakes"))
        for name in (MASKED, UNMASKED)
    )
    return Finding(
        title="Mistakes in the context, trained on or not",
        command=command,
        verdicts=(
            f"of first calls {unmasked.mean:.1f}% are mistakes where they were trained on, {masked.mean:.1f}% where they "
            f"were masked; that masking keeps them out is {'met' if clear else 'not met'} beyond the spread",
            "after a mistake in the context "
            + ", ".join(
                f"{100 * np.mean(_shares(rows[name], 'corrected', 'right')):.1f}% of the calls are right ({name})"
                for name in rows
            ),
        ),
        tables=(_table(rows),),
    )


def _shares(rows: list[dict], situation: str, key: str) -> list[float]:
    return [float(np.mean(row[situation][key])) for row in rows]


def _table(rows: dict[str, list[dict]]) -> Table:
    def cell(arm_rows, situation, key):
        return f"{Spread.of(100 * share for share in _shares(arm_rows, situation, key)):.1f}"

    columns = {
        "mistakes, drawn, %": ("drawn", "mistakes"),
        "mistakes, greedy, %": ("greedy", "mistakes"),
        "right, greedy, %": ("greedy", "right"),
        "right after a mistake, %": ("corrected", "right"),
    }
    return Table(
        title=f"First calls for {QUESTIONS} held-out questions, {len(SEEDS)} seeds; {100 * SHARE:.0f}% of the conversations "
        "in training begin with a mistake",
        columns=("arm", *columns),
        rows=tuple(
            (name, *(cell(arm_rows, *keys) for keys in columns.values()))
            for name, arm_rows in rows.items()
        ),
        note="Mean ± half of Student's 95% interval (lowest .. highest seed); drawn at temperature 1.",
    )


def run(arms: dict[str, Arm], workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("error_masking", arms, workdir, command, compare, measure=measure)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
