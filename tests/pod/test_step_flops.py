"""Tests of the FLOPs of a device in a train step, for small models and for the 744B model."""

import dataclasses
import functools

import pytest

from glm5_jax.data.mixture import DataConfig
from glm5_jax.parallel.flops import REST
from glm5_jax.parallel.mesh import abstract_mesh
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import BatchRampConfig
from glm5_jax.training.step_flops import PARTS, step_flops
from launch import command_line
from tests.mesh import cases

EVERYTHING = (*PARTS, REST)


@functools.cache
def small(attention: str, **axes: int):
    """Returns the FLOPs of the smallest model that divides over eight devices."""
    tokens = cases.ROWS * cases.LENGTH
    config = ExperimentConfig(
        model=cases.config(attention),
        data=DataConfig(sequence_length=cases.LENGTH),
        batch=BatchRampConfig(start=tokens, end=tokens, ramp_tokens=0, multiple=tokens),
        step=cases.STEP,
    )
    return step_flops(config, abstract_mesh({"fsdp": 1} | axes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "axes"),
    [
        ("dense", {"data": 2, "fsdp": 2, "expert": 2}),
        ("sparse", {"data": 2, "fsdp": 2, "expert": 2}),
        ("sparse", {"fsdp": 2, "expert": 2, "context": 2}),
    ],
)
def test_devices_share_flops_evenly(attention, axes):
    """All parts are divided evenly, except Newton-Schulz, which has few unsharded matrices."""
    single, shared = small(attention), small(attention, **axes)
    for part in set(EVERYTHING) - {"newton_schulz"}:
        assert single.parts[part].flops == pytest.approx(8 * shared.parts[part].flops, rel=1e-6)
    iterated = shared.parts["newton_schulz"].flops
    assert single.parts["newton_schulz"].flops / 8 <= iterated < single.parts["newton_schulz"].flops
    assert single.model == 8 * shared.model


@pytest.mark.slow
def test_context_devices_repeat_key_expansion():
    single, sharded = small("dense"), small("dense", context=8)
    assert 8 * sharded.parts["attention"].flops > 1.05 * single.parts["attention"].flops
    assert 8 * sharded.parts["experts"].flops == single.parts["experts"].flops


@pytest.mark.slow
def test_every_part_has_flops_and_kernel_bytes():
    sparse = small("sparse")
    assert min(sparse.parts[part].flops for part in PARTS) > 0
    assert all(
        sparse.parts[part].kernel_bytes for part in ("attention", "indexer", "experts", "mtp")
    )
    assert sparse.total == sum(work.flops for work in sparse.parts.values())
    assert sparse.share("experts") == sparse.parts["experts"].flops / sparse.total
    assert "experts" in sparse.describe()


class Model:
    """Multiply-adds of one token in the parts of a layer, from the model's sizes."""

    def __init__(self, cfg):
        d, n, q, c = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
        h, r, u = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.i, self.j, self.x, self.c, self.n = cfg.index_n_heads, cfg.index_head_dim, c + r, c, n
        self.projections = d * q + q * n * (h + r) + d * (c + r) + c * n * (h + u) + n * u * d
        self.query, self.value = n * (h + r), n * u
        self.index = q * self.i * self.j + d * self.j + d * self.i
        self.router = d * cfg.n_routed_experts
        self.expert = 3 * d * cfg.moe_intermediate_size
        self.routed = cfg.num_experts_per_tok * self.expert
        self.dense = 3 * d * cfg.intermediate_size
        self.eh_proj, self.head = 2 * d * d, d * cfg.vocab_size
        self.layers, self.first = cfg.num_hidden_layers, cfg.first_k_dense_replace


def expected_flops(config) -> dict[str, float]:
    """Returns the FLOPs of one device by part.

    With full remat every product runs forward, again in recomputation, and twice backward. The exceptions:

    - The last product of a feed-forward is not recomputed.
    - Attention's backward recomputes logits: 5 products instead of the forward's 2, each by its width.
    - The MTP layer norms its output, so its experts run a fifth time.
    - Index vectors have gradients of their weights only, scores have none, and the KL is computed once.
    """
    of, t = Model(config.model), config.row_length
    moe = of.layers - of.first
    attention, indexer = 4 * of.projections, 0
    if config.model.attention == "dense":
        attention += (t + 1) / 2 * (5 * of.query + 4 * of.value)
    else:
        k, x, c = config.model.index_topk, of.n * of.x, of.n * of.c
        attention += k * (5 * x + 4 * c)
        indexer = 3 * of.index + 2 * (t + 1) / 2 * of.i * of.j + k * (x + 3 * of.i * of.j)
    steps = config.step.mtp_steps
    again = of.routed + of.expert / 3
    mlp = 11 / 3 * of.expert
    each = attention + indexer + 4 * (of.router + of.routed + of.eh_proj) + mlp + again
    each_token = {
        "mtp": steps * each,
        "indexer": of.layers * indexer,
        "attention": of.layers * attention,
        "router": moe * 4 * of.router,
        "experts": moe * 4 * of.routed,
        "mlp": 11 / 3 * (moe * of.expert + of.first * of.dense),
        "head": (1 + steps) * 4 * of.head,
    }
    tokens = config.first_batch_rows * t / 1024
    return {part: 2 * tokens * work for part, work in each_token.items()}


STAGES = {
    "experiments/pretrain.py:glm5": 1.365,
    "experiments/dsa_sparse.py:glm5": 1.650,
    "experiments/sft.py:glm5,mixed": 1.650,
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", STAGES)
def test_flops_of_744b_step_equal_formula(experiment):
    config = command_line.load(experiment)[1]
    flops_report = step_flops(config, abstract_mesh(dataclasses.asdict(config.mesh)))
    print(f"{experiment}: {flops_report.describe()}")
    for part, flops in expected_flops(config).items():
        assert flops_report.parts[part].flops == pytest.approx(flops, rel=0.01), part
    assert flops_report.parts[REST].flops < 1e-4 * flops_report.total
    assert flops_report.ratio == pytest.approx(STAGES[experiment], rel=0.01)
    assert flops_report.share("newton_schulz") < 0.0085
