"""What leaving mistakes out of the loss is good for (GLM-5 3.1).

    python -m experiments.ablations.error_masking [tiny|small] [WORKDIR]

Two arms are fine-tuned from the same sparse model on the same conversations with tools, in half of which the first
call is a mistake (a tool that is not there, a wrong argument, arguments that are no object) that the tool's
answer names and the next call corrects: masked leaves the mistakes out of the loss, unmasked learns them. Beside
them stand chains of sums (experiments/sft.py), from which so small a model learns to copy what it was asked about;
on tools alone neither arm gets a call right.

Reported, on questions that were held out and calls that are drawn at temperature 1 and greedily: how many first
calls are mistakes, by the rule that masks them in training; and how many calls are right after a mistake that
stands in the context, which both arms learn from the same corrections.

:tiny    for two CPU cores: a life of ten minutes, one for all ablations of SFT in a WORKDIR, then four minutes
         for each of two arms and three seeds
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterable

import numpy as np

from experiments import sft
from experiments.ablations.arms import Arm, Runs, Trial
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Spread, Table, paired
from experiments.ablations.finetuned import Assistant, arm, held_out
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.chat_tasks import ChatTaskConfig
from glm5_jax.data.conversation import Conversation, parse
from glm5_jax.evals.chats import Request
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
QUESTIONS = 500
NEW = 64  # tokens of a call at most; none that is right has more than 40
MASKED, UNMASKED = "masked", "unmasked"
SHARE = 0.5  # of the conversations begin with a mistake
ASKED = ("drawn", "greedy", "corrected")


def get_config(variant: str = "tiny") -> dict[str, Arm]:
    """The variant's arms by name; ValueError lists the variants."""
    return choose(variant, {size: functools.partial(_arms, size) for size in ("tiny", "small")})


def _arms(size: str) -> dict[str, Arm]:
    base = sft.get_config(f"{size},interleaved")
    tools = ChatTaskConfig("tools", size=12_000, mistakes=SHARE)
    chains = ChatSourceConfig(sft.CHAIN, "reasoning", weight=0.6)
    arms = {}
    for name in (MASKED, UNMASKED):
        calls = ChatSourceConfig(tools, "agent", weight=0.4, mask_errors=name == MASKED)
        data = dataclasses.replace(base.data, sources=(calls, chains))
        config = dataclasses.replace(base, name=f"sft:{size},{name}", data=data)
        arms[name] = arm(name, size, config)
    return arms


def measure(trial: Trial, folder: pathlib.Path) -> dict:
    """What an arm's row says of its calls, beside its training."""
    if trial.arm not in (MASKED, UNMASKED):
        return {}
    assistant = Assistant.of(trial, folder)
    chats = held_out(trial.stages[-1].data.sources[0], QUESTIONS)
    mistaken = [c for c in chats if c.mistakes]
    return {
        "drawn": judge_calls(assistant, chats, 1, temperature=1.0, seed=trial.seed),
        "greedy": judge_calls(assistant, chats, 1),
        # The question, the mistake and what the tool said to it.
        "corrected": judge_calls(assistant, mistaken, 3),
    }


def judge_calls(assistant: Assistant, chats: Iterable[Conversation], first: int, **options) -> dict:
    """Replies after so many messages: how many are mistakes, and how many the call that is right."""
    answers = assistant([Request(c.messages[:first], tools=c.tools) for c in chats], NEW, **options)
    mistakes, right = [], []
    for chat, answer in zip(chats, answers):
        calls = answer.reply.message.get("tool_calls", [])
        line = {"messages": [*chat.messages[:1], answer.reply.message], "tools": list(chat.tools)}
        broken = any(call.problem for call in answer.reply.tool_calls)
        mistakes.append(int(broken or bool(calls and parse(line).mistakes)))
        wanted = chat.messages[-3]["tool_calls"]
        right.append(int(not mistakes[-1] and calls == wanted))
    return {"mistakes": mistakes, "right": right}


def run(runs: Runs, arms: dict[str, Arm], command: str) -> Finding:
    """Trains and asks both arms."""
    rows = {name: runs([own.trial(seed=seed) for seed in SEEDS]) for name, own in arms.items()}
    return finding(rows, command)


def finding(rows: dict[str, list[dict]], command: str) -> Finding:
    """Table and verdicts from the rows {arm: by seed}."""
    fewer = paired(*(_shares(rows[name], "drawn", "mistakes") for name in (UNMASKED, MASKED)))
    clear = fewer.half is not None and fewer.mean > fewer.half
    masked, unmasked = (
        Spread.of(100 * share for share in _shares(rows[name], "drawn", "mistakes"))
        for name in (MASKED, UNMASKED)
    )
    return Finding(
        "Mistakes in the context, learnt or not",
        command,
        (
            f"of first calls {unmasked.mean:.1f}% are mistakes where they were learnt, {masked.mean:.1f}% where they "
            f"were masked; that masking keeps them out is {'met' if clear else 'not met'} beyond the spread",
            "after a mistake in the context "
            + ", ".join(
                f"{100 * np.mean(_shares(rows[name], 'corrected', 'right')):.1f}% of the calls are right ({name})"
                for name in rows
            ),
        ),
        (_table(rows),),
    )


def _shares(rows: list[dict], asked: str, what: str) -> list[float]:
    return [float(np.mean(row[asked][what])) for row in rows]


def _table(rows: dict[str, list[dict]]) -> Table:
    def cell(found, asked, what):
        return f"{Spread.of(100 * share for share in _shares(found, asked, what)):.1f}"

    columns = {
        "mistakes, drawn, %": ("drawn", "mistakes"),
        "mistakes, greedy, %": ("greedy", "mistakes"),
        "right, greedy, %": ("greedy", "right"),
        "right after a mistake, %": ("corrected", "right"),
    }
    return Table(
        f"First calls for {QUESTIONS} held-out questions, {len(SEEDS)} seeds; {100 * SHARE:.0f}% of the conversations "
        "in training begin with a mistake",
        ("arm", *columns),
        tuple(
            (name, *(cell(found, *of) for of in columns.values())) for name, found in rows.items()
        ),
        "Mean ± half of Student's 95% interval (lowest .. highest seed); drawn at temperature 1.",
    )


if __name__ == "__main__":
    sys.exit(ablate("error_masking", sys.argv[1:], get_config, run, measure=measure))
