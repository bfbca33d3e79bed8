"""Shared multi-token prediction against a single step and against none (GLM-5 2.1, Table 2).

    python -m experiments.ablations.mtp [tiny|small] [WORKDIR]

Three arms that train the same model on the same batches, with the MTP layer run three times with
shared weights, once, or left out. Each then continues pieces of held-out text, drafting four tokens at
a time, greedily and by sampling at temperature 1. Reported, with all seeds and their spread: tokens per
verification step (evals/acceptance.py; without MTP it is 1), in which share of the steps each draft was
kept, and the trunk's held-out loss. Paper: 2.76 for shared-3 against 2.55, a ratio of 1.08; the 2.55
are another model's.

The text is Python's character tables (encodings/*.py of the running Python): templates in which several
tokens can be foreseen, and of which two layers know most within minutes (0.50 bits per byte; files that
are held out share lines with the others). On the library's code, at 1.74 bits per byte after 600 steps,
the arms did not differ beyond the spread over prompts (LOG.md).

:tiny    two layers for two CPU cores, 300 steps of 1,024 tokens: nine trainings of a minute or two, drafts
         included.
:small   pretrain.py:small for 2,000 steps, on one accelerator; needs text and a tokenizer of your own
         there.
"""

import dataclasses
import pathlib
import sys
import sysconfig

from experiments import pretrain
from experiments.ablations.arms import Arm, Runs, Trial
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, paired, verdict
from glm5_jax import presets
from glm5_jax.checkpoint import store
from glm5_jax.core import charts
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.evals.acceptance import AcceptanceConfig, accepted_length, held_out_prompts
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import ExperimentConfig, SampleConfig, choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step import StepConfig

SEEDS = (0, 1, 2)
STEPS = {"shared-3": 3, "single": 1, "none": 0}
DRAFTING = {"greedy": AcceptanceConfig(), "sampled": AcceptanceConfig(temperature=1.0)}
TARGET = 1.08
TABLES = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "encodings" / "*.py"


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """What all arms have in common; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> ExperimentConfig:
    """1.2 million parameters; 0.3 of the 0.8 million tokens there are."""
    model = dataclasses.replace(
        presets.tiny(), num_hidden_layers=2, n_routed_experts=4, index_topk=None, attention="dense"
    )
    return ExperimentConfig(
        name="mtp:tiny",
        model=model,
        data=DataConfig(
            sources=(SourceConfig("text", str(TABLES)),), sequence_length=128, held_out_fraction=0.1
        ),
        batch=BatchRampConfig(start=1024, end=1024, ramp_tokens=0, multiple=1024),
        optimizer=OptimizerConfig(ns_dtype="float32"),  # bfloat16 products are emulated on CPU
        schedule=ScheduleConfig(peak=5e-3, end=1e-4, warmup_steps=20, total_steps=300),
        step=StepConfig(remat="none"),
        train=TrainConfig(eval_interval=0, sample_interval=0, save_interval=100, keep=1),
    )


def small() -> ExperimentConfig:
    """The model and the batches of pretrain.py:small."""
    return dataclasses.replace(
        pretrain.get_config("small"),
        name="mtp:small",
        schedule=ScheduleConfig(peak=5e-3, end=2.5e-4, warmup_steps=200, total_steps=2000),
        train=TrainConfig(log_interval=10, eval_interval=0, sample_interval=0, save_interval=200),
        sample=SampleConfig(),
    )


def arms(config: ExperimentConfig) -> dict[str, Arm]:
    """The arms of `STEPS`, which differ in nothing but the MTP layer's runs."""
    found = {}
    for name, steps in STEPS.items():
        stage = dataclasses.replace(
            config,
            name=f"{config.name} {name}",
            model=dataclasses.replace(config.model, num_nextn_predict_layers=min(steps, 1)),
            step=dataclasses.replace(config.step, mtp_steps=steps),
        )
        found[name] = Arm(name, (stage,))
    return found


def drafted(trial: Trial, folder: pathlib.Path) -> dict:
    """Accepted lengths of a trained arm, for its row of the results: {way: length}, and with
    `_interval` and `_kept` behind the way's name the other figures of `Acceptance`."""
    config, tokenizer = trial.stages[-1], Tokenizer.load(folder / "tokenizer")
    model = dataclasses.replace(
        config.model, eos_token_id=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id
    )
    params, row = store.load_params(folder, glm5.abstract(model)), {}
    for way, drafting in DRAFTING.items():
        prompts = held_out_prompts(config.data, config.data.sources[0], tokenizer, drafting)
        found = accepted_length(params, model, prompts, drafting)
        row[way] = found.length
        row[f"{way}_interval"] = [found.low, found.high]
        row[f"{way}_kept"] = list(found.kept)
    return row


def run(runs: Runs, config: ExperimentConfig, command: str) -> Finding:
    """Trains all arms at all seeds, drafts with them and compares; `runs` measures `drafted`."""
    rows = {
        name: runs([arm.trial(seed=seed) for seed in SEEDS]) for name, arm in arms(config).items()
    }
    return finding(rows, command)


def finding(rows: dict[str, list[dict]], command: str) -> Finding:
    """Tables, chart and verdict of the rows of every arm, one row per seed in the same order."""
    lengths = {
        arm: {way: [row[way] for row in found] for way in DRAFTING} for arm, found in rows.items()
    }
    table = Table(
        "Tokens per verification step, 4 drafts",
        ("arm", *DRAFTING, "held-out loss", "loss minus none's"),
        tuple(
            (
                arm,
                *(f"{Spread.of(lengths[arm][way])}" for way in DRAFTING),
                f"{Spread.of(row['loss'] for row in found):.4f}",
                f"{paired(*([row['loss'] for row in x] for x in (found, rows['none']))):+.4f}",
            )
            for arm, found in rows.items()
        ),
        "mean ± half of the 95% interval over seeds (lowest .. highest); greedy and sampled text differ "
        "in what they lead to: short loops are foreseen well",
    )
    places = range(1, max(x.num_draft for x in DRAFTING.values()) + 1)
    kept = {
        (arm, way): [Spread.of(row[f"{way}_kept"][k - 1] for row in rows[arm]) for k in places]
        for arm in ("shared-3", "single")
        for way in DRAFTING
    }
    by_place = Table(
        "Share of the verification steps in which a draft was kept",
        ("arm", *(f"draft {k}" for k in places)),
        tuple((f"{arm}, {way}", *map(format, spreads)) for (arm, way), spreads in kept.items()),
    )
    verdicts = []
    for way in DRAFTING:
        shared, single = lengths["shared-3"][way], lengths["single"][way]
        ratio = Spread.of(a / b for a, b in zip(shared, single, strict=True))
        met = verdict(Spread.of(value - TARGET for value in ratio.values))
        verdicts.append(
            f"{way}: accepted length of shared-3 over single, by seed: {ratio}; at least {TARGET}: {met}"
        )
    chart = charts.line_chart(
        [(f"{arm}, {way}", list(places), [s.mean for s in x]) for (arm, way), x in kept.items()],
        x_label="draft",
        y_label="share of steps that kept it",
    )
    title = "Shared multi-token prediction"
    return Finding(
        title, command, tuple(verdicts), (table, by_place), (Plot(chart, "Mean over the seeds."),)
    )


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments, [VARIANT [WORKDIR]]."""
    return ablate("mtp", arguments, get_config, run, measure=drafted, keep=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
