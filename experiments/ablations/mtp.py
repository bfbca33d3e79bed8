"""Compares shared multi-token prediction with a single step and with none (GLM-5 2.1, Table 2).

    glm5 run mtp:tiny --workdir=DIR     # or :small

Three arms train the same model on the same batches, with the MTP layer run three times with shared weights, once, or
left out. Each then continues pieces of held-out text, drafting four tokens at a time, greedily and by sampling at
temperature 1. Reported, with all seeds and their spread: tokens per verification step (evals/acceptance.py; without
MTP it is 1), the share of steps in which each draft was accepted, and the trunk's held-out loss. Paper: 2.76 for
shared-3 against 2.55, a ratio of 1.08; the 2.55 are another model's.

The text is Python's character tables (encodings/*.py of the running Python): templates in which several tokens can be
predicted, and which two layers learn within minutes (0.50 bits per byte; held-out files share lines with the others).
On the library's code, at 1.74 bits per byte after 600 steps, the arms did not differ beyond the spread over prompts
(docs/results/ablations.md).

:tiny    two layers for two CPU cores, 300 steps of 1,024 tokens: nine trainings of a minute or two, drafts included.
:small   pretrain.py:small for 2,000 steps, on one accelerator; needs your text and tokenizer there.
"""

import dataclasses
import pathlib
import sysconfig

from experiments import pretrain
from experiments.ablations.arms import AblationRuns, Arm, Trial, last_stage
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, paired, verdict
from glm5_jax import presets
from glm5_jax.checkpoint import store
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.evals.acceptance import AcceptanceConfig, accepted_length, held_out_prompts
from glm5_jax.metrics import charts
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step_config import StepConfig

SEEDS = (0, 1, 2)
STEPS = {"shared-3": 3, "single": 1, "none": 0}
DRAFTING = {"greedy": AcceptanceConfig(), "sampled": AcceptanceConfig(temperature=1.0)}
TARGET = 1.08
TABLES = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "encodings" / "*.py"


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """Returns the configuration shared by all arms. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> ExperimentConfig:
    """Trains 1.2 million parameters on 0.3 of the 0.8 million tokens of the text."""
    model = dataclasses.replace(
        presets.tiny(), num_hidden_layers=2, n_routed_experts=4, index_topk=None, attention="dense"
    )
    return ExperimentConfig(
        name="mtp:tiny",
        model=model,
        data=DataConfig(
            sources=(SourceConfig(kind="text", path=str(TABLES)),),
            sequence_length=128,
            held_out_fraction=0.1,
        ),
        batch=BatchRampConfig(start=1024, end=1024, ramp_tokens=0, multiple=1024),
        optimizer=OptimizerConfig(
            ns_dtype="float32", lm_head="adamw"
        ),  # bfloat16 products are emulated on CPU
        schedule=ScheduleConfig(peak=5e-3, end=1e-4, warmup_steps=20, total_steps=300),
        step=StepConfig(remat="none"),
        train=TrainConfig(eval_interval=0, sample_interval=0, save_interval=100, keep=1),
    )


def small() -> ExperimentConfig:
    """Uses the model and the batches of pretrain.py:small."""
    return dataclasses.replace(
        pretrain.get_config("small"),
        name="mtp:small",
        schedule=ScheduleConfig(peak=5e-3, end=2.5e-4, warmup_steps=200, total_steps=2000),
        train=TrainConfig(log_interval=10, eval_interval=0, sample_interval=0, save_interval=200),
        sample=SampleConfig(),
    )


def arms(config: ExperimentConfig) -> dict[str, Arm]:
    """Returns the arms of `STEPS`, which differ only in the number of the MTP layer's runs."""
    arms_by_name = {}
    for name, steps in STEPS.items():
        stage = dataclasses.replace(
            config,
            name=f"{config.name} {name}",
            model=dataclasses.replace(config.model, num_nextn_predict_layers=min(steps, 1)),
            step=dataclasses.replace(config.step, mtp_steps=steps),
        )
        arms_by_name[name] = Arm(name, (stage,))
    return arms_by_name


def measure_drafts(trial: Trial, folder: pathlib.Path) -> dict:
    """Returns accepted lengths of a trained arm, for its row of the results.

    {way: length}, and with the suffixes `_interval` and `_kept` the other figures of `Acceptance`.
    """
    config = last_stage(trial.stages, ExperimentConfig)
    tokenizer, source = Tokenizer.load(folder / "tokenizer"), config.data.sources[0]
    assert isinstance(source, SourceConfig), f"source {source.name!r} has no documents"
    model = dataclasses.replace(
        config.model, eos_token_id=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id
    )
    params, row = store.load_params(folder, glm5.abstract_params(model)), {}
    for way, drafting in DRAFTING.items():
        prompts = held_out_prompts(config.data, source, tokenizer, drafting)
        acceptance = accepted_length(params, model, prompts, drafting)
        row[way] = acceptance.length
        row[f"{way}_interval"] = [acceptance.low, acceptance.high]
        row[f"{way}_kept"] = list(acceptance.accept_rates)
    return row


def compare(runs: AblationRuns, config: ExperimentConfig, command: str) -> Finding:
    """Trains all arms at all seeds, drafts with them and compares them; `runs` calls `measure_drafts`."""
    rows = {
        name: runs([arm.trial(seed=seed) for seed in SEEDS]) for name, arm in arms(config).items()
    }
    return finding(rows, command)


def finding(rows: dict[str, list[dict]], command: str) -> Finding:
    """Returns tables, chart and verdicts of the rows of every arm, one row per seed in the same order."""
    # Accepted lengths of every arm.
    lengths = {
        arm: {way: [row[way] for row in arm_rows] for way in DRAFTING}
        for arm, arm_rows in rows.items()
    }
    table = Table(
        title="Tokens per verification step, 4 drafts",
        columns=("arm", *DRAFTING, "held-out loss", "loss minus none's"),
        rows=tuple(
            (
                arm,
                *(f"{Spread.of(lengths[arm][way])}" for way in DRAFTING),
                f"{Spread.of(row['loss'] for row in arm_rows):.4f}",
                f"{paired(*([row['loss'] for row in x] for x in (arm_rows, rows['none']))):+.4f}",
            )
            for arm, arm_rows in rows.items()
        ),
        note="mean ± half of the 95% interval over seeds (lowest .. highest); greedy and sampled text differ "
        "in their content: short loops are easy to predict",
    )
    # Acceptance by the draft's number.
    draft_numbers = range(1, max(x.num_speculative_tokens for x in DRAFTING.values()) + 1)
    accept_rates = {
        (arm, way): [
            Spread.of(row[f"{way}_kept"][k - 1] for row in rows[arm]) for k in draft_numbers
        ]
        for arm in ("shared-3", "single")
        for way in DRAFTING
    }
    by_draft = Table(
        title="Share of the verification steps in which a draft was accepted",
        columns=("arm", *(f"draft {k}" for k in draft_numbers)),
        rows=tuple(
            (f"{arm}, {way}", *map(format, spreads)) for (arm, way), spreads in accept_rates.items()
        ),
    )
    # Compare shared with single, and draw the acceptance.
    verdicts = []
    for way in DRAFTING:
        shared, single = lengths["shared-3"][way], lengths["single"][way]
        ratio = Spread.of(a / b for a, b in zip(shared, single, strict=True))
        met = verdict(Spread.of(value - TARGET for value in ratio.values))
        verdicts.append(
            f"{way}: accepted length of shared-3 over single, by seed: {ratio}; at least {TARGET}: {met}"
        )
    chart = charts.line_chart(
        [
            (f"{arm}, {way}", list(draft_numbers), [s.mean for s in x])
            for (arm, way), x in accept_rates.items()
        ],
        x_label="draft",
        y_label="share of steps that accepted it",
    )
    title = "Shared multi-token prediction"
    return Finding(
        title=title,
        command=command,
        verdicts=tuple(verdicts),
        tables=(table, by_draft),
        plots=(Plot(chart, "Mean over the seeds."),),
    )


def run(config: ExperimentConfig, workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("mtp", config, workdir, command, compare, measure=measure_drafts, keep=True)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
