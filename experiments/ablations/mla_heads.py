"""Compares MLA-256 with MLA-192: wider heads, and a third fewer of them (GLM-5 2.1).

    glm5 run mla_heads:tiny --workdir=DIR     # or :small

GLM-5 widens the query and key heads from 192 to 256 and reduces their number by a third, from 96 to 64. Training is to
cost the same. Decoding, whose attention multiplies the same latent once per head, is to cost a third less. Here
`narrower` makes the 192 variant of any model. Both variants get the same training FLOPs (counted from shapes; the more
expensive one makes fewer steps), the same batches and Muon Split, each at the best of at least five learning rates.

Reported: held-out loss with all seeds and their spread, and FLOPs of one layer's attention for one decoded token,
counted from the jaxpr of the model's own attention.

:tiny    two layers for two CPU cores, about 250 steps of 1,024 tokens: 14 trainings or more of half a minute.
         Counted: 147,456 FLOPs per cached token and layer against 221,184 at GLM-5's shapes, -33.3%.
:small   12 layers, 1.2B parameters, for one accelerator: pretrain.py:small for about 2,000 steps, on the data that it
         names.
"""

import dataclasses
import pathlib

import jax

from experiments.ablations import muon_split
from experiments.ablations.arms import AblationRuns, Arm, Tuned, grid, tune, tune_without_divergence
from experiments.ablations.command import ablate
from experiments.ablations.findings import (
    Finding,
    Spread,
    Table,
    paired,
    tuned_plots,
    tuning_table,
)
from glm5_jax import presets
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.mla import Keys, Queries, mla
from glm5_jax.parallel.flops import count_flops
from glm5_jax.training.experiment import choose
from glm5_jax.training.flops import train_flops
from glm5_jax.training.pretraining import ExperimentConfig

SEEDS = (0, 1, 2)
WIDE, NARROW = "MLA-256", "MLA-192"
LENGTHS = (
    4096,
    131072,
)  # numbers of cached tokens for which a decoded token's attention is counted


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """Returns the experiment with wide heads. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> ExperimentConfig:
    """Uses the experiment of muon_split.py, with a quarter of each head rotated, as in GLM-5."""
    base = muon_split.tiny()
    model = dataclasses.replace(base.model, qk_nope_head_dim=24, qk_rope_head_dim=8)
    return dataclasses.replace(base, name="mla_heads:tiny", model=model)


def small() -> ExperimentConfig:
    """Uses the experiment of muon_split.py."""
    return dataclasses.replace(muon_split.small(), name="mla_heads:small")


def narrower(model: ModelConfig) -> ModelConfig:
    """Returns the model with query and key heads three quarters as wide and half as many more of them.

    The rotated part keeps its width. Value heads, whose width the paper does not give, shrink to two thirds, so that all
    heads together are as wide as before. Raises ValueError if the number or width of heads does not allow it.
    """
    n, h, r = model.num_attention_heads, model.qk_nope_head_dim, model.qk_rope_head_dim
    if n % 2 or (h + r) % 4 or 3 * (h + r) // 4 <= r:
        raise ValueError(
            f"num_attention_heads {n} and qk head width {h} + {r} have no narrower variant; use an even "
            "number, and a width that divides by 4 and is more than 4/3 of the rotated part"
        )
    return dataclasses.replace(
        model,
        num_attention_heads=3 * n // 2,
        qk_nope_head_dim=3 * (h + r) // 4 - r,
        v_head_dim=round(2 * model.v_head_dim / 3),
    )


def decode_flops(cfg: ModelConfig, length: int) -> int:
    """Returns FLOPs of one layer's attention for one token after `length` cached ones, by the model's own code.

    Counts from the queries to the output projection, over the cached latents, with dense attention.
    """
    dense = dataclasses.replace(cfg, attention="dense", index_topk=None)
    c, r = dense.kv_lora_rank, dense.qk_rope_head_dim
    stack = glm5.abstract_params(dense)[
        "dense_layers" if dense.first_k_dense_replace else "moe_layers"
    ]
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack["attn"])

    def array(t, *shape):
        return jax.ShapeDtypeStruct((1, t, *shape), dense.dtype)

    def attend(w, q, latent):
        execution = ExecutionConfig(attention_form="absorbed", kernels="xla")
        return mla(w, Queries(q, length, None), Keys(latent, None), dense, execution).y

    q = array(1, dense.num_attention_heads, dense.qk_nope_head_dim + r)
    return count_flops(attend, layer, q, array(length + 1, c + r))


def arms(config: ExperimentConfig) -> dict[str, Arm]:
    """Returns both variants; the narrow one trains for the FLOPs of the wide one."""
    arms_by_name = {}
    for name, model in ((WIDE, config.model), (NARROW, narrower(config.model))):
        share = _train_flops(config, config.model) / _train_flops(config, model)
        steps = round(config.schedule.total_steps * share)
        schedule = dataclasses.replace(config.schedule, total_steps=steps)
        stage = dataclasses.replace(
            config, name=f"{config.name} {name}", model=model, schedule=schedule
        )
        arms_by_name[name] = Arm(name, (stage,))
    return arms_by_name


def _train_flops(config: ExperimentConfig, model: ModelConfig) -> float:
    mtp_steps = config.step.mtp_steps if model.num_nextn_predict_layers else 0
    return train_flops(model, config.data.sequence_length, mtp_steps)


def compare(runs: AblationRuns, config: ExperimentConfig, command: str) -> Finding:
    """Tunes, trains and compares both variants."""
    tuned, rows = {}, {}
    for name, arm in arms(config).items():
        best = tune(runs, arm, grid(config.schedule.peak), seeds=SEEDS[:1])
        tuned[name], rows[name] = tune_without_divergence(runs, best, SEEDS)
    return finding(config, command, tuned, rows)


def finding(
    config: ExperimentConfig, command: str, tuned: dict[str, Tuned], rows: dict[str, list[dict]]
) -> Finding:
    """Returns tables, plots and verdicts from the rows of both arms by seed."""
    models = {name: t.arm.stages[0].model for name, t in tuned.items()}
    # Table of the trained arms.
    results = []
    for name, model in models.items():
        spread, steps = Spread.of(r["loss"] for r in rows[name]), rows[name][0]["steps"]
        total = steps * config.batch.end * _train_flops(config, model)
        results.append(
            (
                name,
                f"{model.num_attention_heads} x "
                f"{model.qk_nope_head_dim} + {model.qk_rope_head_dim}, {model.v_head_dim}",
                f"{model.num_parameters:,}",
                f"{steps} ({total:.4g})",
                f"{tuned[name].rate:.3g}",
                f"{spread:.4f}",
            )
        )
    table = Table(
        title=f"{config.name}: steps of {config.batch.end:,} tokens, {len(SEEDS)} seeds",
        columns=(
            "arm",
            "heads x qk, v",
            "parameters",
            "steps (training FLOPs)",
            "best rate",
            "held-out loss",
        ),
        rows=tuple(results),
        note="Loss in nats per token: mean ± half of Student's 95% interval (lowest .. highest seed).",
    )
    more = paired((r["loss"] for r in rows[WIDE]), (r["loss"] for r in rows[NARROW]))
    verdicts = [
        f"at equal training FLOPs, {WIDE}'s held-out loss minus {NARROW}'s is {more:+.4f} nats, by seed"
    ]
    # Counted FLOPs of decoding, of this model and of GLM-5.
    decode = []
    for label, wide in (("this model", config.model), ("GLM-5", presets.glm5())):
        counts = [
            (decode_flops(wide, length), decode_flops(narrower(wide), length)) for length in LENGTHS
        ]
        cells = (f"{a / 1e6:.4g} / {b / 1e6:.4g} = {a / b - 1:+.1%}" for a, b in counts)
        decode.append((label, *cells))
        each, narrow = _per_key(wide), _per_key(narrower(wide))
        verdicts.append(
            f"{label}: attention of a decoded token costs {each:,.0f} FLOPs per cached token and layer "
            f"with wide heads, {narrow:,.0f} with narrow ones: {each / narrow - 1:+.1%}"
        )
    count = Table(
        title=f"Attention of one layer for one decoded token, MFLOP: {WIDE} / {NARROW}",
        columns=("model", *(f"{length:,} cached tokens" for length in LENGTHS)),
        rows=tuple(decode),
        note="Projections from the queries' latent up to the output included.",
    )
    losses = {name: t.losses for name, t in tuned.items()}
    lines = {
        name: [_in_flops(r, config, models[name]) for r in arm_rows]
        for name, arm_rows in rows.items()
    }
    plots = tuned_plots(lines, losses, x_label="training TFLOP")
    tables = (table, count, tuning_table(losses.items()))
    return Finding(
        title="MLA-256 against MLA-192",
        command=command,
        verdicts=tuple(verdicts),
        tables=tables,
        plots=plots,
    )


def _per_key(cfg: ModelConfig) -> float:
    short, long = LENGTHS
    return (decode_flops(cfg, long) - decode_flops(cfg, short)) / (long - short)


def _in_flops(row: dict, config: ExperimentConfig, model: ModelConfig):
    """Returns the curve of a row over training TFLOP."""
    each = config.batch.end * _train_flops(config, model) / 1e12
    steps, losses = row["curve"]
    return [step * each for step in steps], losses


def run(config: ExperimentConfig, workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("mla_heads", config, workdir, command, compare)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
