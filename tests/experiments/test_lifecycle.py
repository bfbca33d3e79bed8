"""The stages of the lifecycle: each starts from the stage before it, and trains as in the paper."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from experiments import dsa_warmup, lifecycle, midtrain, pretrain
from glm5_jax.checkpoint.models import check_arithmetic
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, matches_any
from glm5_jax.training.optimizer import groups_of
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import make_schedule, num_tokens, value_at

SIZES = ("tiny", "small", "glm5")
MID = ("midtrain_32k", "midtrain_128k", "midtrain_200k")


def everything(size):
    experiment = lifecycle.get_config(size)
    stages = {
        field.name: getattr(experiment, field.name) for field in dataclasses.fields(experiment)
    }
    return {name: config for name, config in stages.items() if config is not None}


def stages(size):
    """Returns the stages that train on texts."""
    return {n: c for n, c in everything(size).items() if isinstance(c, ExperimentConfig)}


@pytest.mark.parametrize("size", SIZES)
def test_texts_grow_and_last_stages_are_sparse(size):
    configs = stages(size)
    assert ("pretrain_code" in configs) == (size == "glm5")
    configs.pop("pretrain_code", None)
    assert list(configs) == ["pretrain", *MID, "dsa_warmup", "dsa_sparse", "sft"]
    lengths = [config.data.sequence_length for config in configs.values()]
    assert lengths == sorted(lengths)
    assert len(set(lengths[3:])) == 1 and lengths[3] <= configs["sft"].model.max_position_embeddings
    kinds = [config.model.attention for config in configs.values()]
    assert kinds == ["dense"] * 5 + ["sparse"] * 2
    bases = {config.model.rope_parameters.rope_theta for config in list(configs.values())[1:]}
    assert bases == {1_000_000.0}


@pytest.mark.parametrize("size", SIZES)
def test_weights_fit_from_stage_to_stage(size):
    shapes = [glm5.abstract_params(config.model) for config in everything(size).values()]
    assert all(tree == shapes[0] for tree in shapes)
    for before, after in itertools.pairwise(everything(size).values()):
        check_arithmetic(before.name, before.model, after.model, after.may_differ)


@pytest.mark.parametrize("size", SIZES)
def test_stages_after_sft_train_no_int4_or_indexers(size):
    rl_stages = {n: c for n, c in everything(size).items() if n not in stages(size)}
    assert list(rl_stages) == ["rl_reasoning", "rl_agentic", "rl_general", "distill"]
    for config in rl_stages.values():
        assert "indexer/" in config.optimizer.frozen and config.step.index_weight == 0
        assert config.model.attention == "sparse" and config.model.int4_group is None
    teachers = {teacher.checkpoint for teacher in rl_stages["distill"].teachers}
    assert teachers == {"sft", "rl_reasoning", "rl_agentic", "rl_general"}  # GLM-5 3.5


def test_distillation_may_follow_each_rl_stage():
    configs = everything("tiny,each")
    rl = ["rl_reasoning", "rl_agentic", "rl_general"]
    distillations = ["distill_reasoning", "distill_agentic", "distill"]
    assert list(configs)[-6:] == [name for pair in zip(rl, distillations) for name in pair]
    for count, name in enumerate(distillations, 1):
        config = configs[name]
        assert [t.checkpoint for t in config.teachers] == ["sft", *rl[:count]]
        origins = ("reasoning", "agentic", "general")
        assert [bool(getattr(config, o)) for o in origins] == [i < count for i in range(3)]
    assert {*everything("tiny,each")} - {*everything("tiny")} == set(distillations[:-1])
    with pytest.raises(ValueError, match="unknown variant 'tiny,never'; did you mean tiny,each"):
        lifecycle.get_config("tiny,never")


@pytest.mark.parametrize("variant, max_minutes", [("tiny", 30), ("tiny,each", 35)])
def test_tiny_lifecycle_has_time_budget(variant, max_minutes):
    planned = lifecycle.minutes(lifecycle.get_config(variant))
    assert list(planned) == list(everything(variant))
    assert (
        planned.pop("rl_agentic") <= 12 and max_minutes - 5 < sum(planned.values()) <= max_minutes
    )
    assert not lifecycle.minutes(lifecycle.get_config("small"))


@pytest.mark.parametrize("stage", ["midtrain_128k", "dsa_warmup", "dsa_sparse", "sft"])
def test_only_first_long_stage_takes_other_rotary_base(stage):
    base, later = (stages("glm5")[name] for name in ("pretrain", stage))
    message = (
        "pretrain:glm5,general is of a model with rope_parameters.rope_theta 10000.0 (here 1000000.0); set "
        "--experiment.model.rope_parameters.rope_theta=10000.0, or, if that is meant to change, "
        "--experiment.may_differ=\"('rope_parameters.rope_theta',)\""
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_arithmetic(base.name, base.model, later.model, later.may_differ)


@pytest.mark.parametrize("size", SIZES)
def test_mid_training_rate_falls_continuously(size):
    configs = stages(size)
    ends = []
    for name in MID:
        schedule = configs[name].schedule
        rate = make_schedule(schedule)
        ends.append((float(rate(0)), float(rate(schedule.total_steps - 1))))
    assert ends[0][1] == pytest.approx(ends[1][0]) and ends[1][1] == pytest.approx(ends[2][0])
    # 1T, 500B and 50B tokens
    first, second, third = (begin - end for begin, end in ends)
    assert first / second == pytest.approx(2) and second / third == pytest.approx(10, rel=1e-3)


def test_phases_of_pretraining_match_paper():
    """18T tokens of a general corpus, then 9T of code and reasoning, on one curve of the learning rate."""
    general, code = (stages("glm5")[name] for name in ("pretrain", "pretrain_code"))
    tokens = num_tokens(general.batch, general.steps), num_tokens(code.batch, code.steps)
    assert tokens == (pytest.approx(18e12, rel=1e-5), pytest.approx(9e12, rel=1e-5))
    full = pretrain.get_config("glm5")
    assert general.steps + code.steps == full.steps
    rate, first, second = (make_schedule(c.schedule) for c in (full, general, code))
    for step in (0, 2000, general.steps - 1):
        assert first(step) == rate(step)
    for step in (0, 1000, code.steps - 1):
        assert second(step) == rate(general.steps + step)
    # The second phase continues with what holds after 15T tokens (GLM-4.5 2.4).
    assert value_at(code.step.bias_update_rate, 0.0) == 0
    assert value_at(code.step.mtp_weight, 0.0) == np.float32(0.1)
    assert code.requires_checkpoint and code.requires_data and not general.requires_checkpoint
    assert code.batch.start == code.batch.end == general.batch.end


@pytest.mark.parametrize("size", SIZES)
def test_phases_divide_run_of_each_size(size):
    full = pretrain.get_config(size)
    general, code = (pretrain.get_config(f"{size},{phase}") for phase in pretrain.PHASES[1:])
    assert general.steps + code.steps == full.steps
    assert code.schedule.first_step == general.steps


def test_rates_tokens_and_steps_match_paper():
    configs = stages("glm5")
    rates = [configs[name].schedule for name in MID]
    assert (rates[0].peak, rates[2].end) == (4e-5, pytest.approx(1e-5))
    for name, tokens in zip(MID, (1e12, 500e9, 50e9)):
        config = configs[name]
        assert config.steps * config.batch.end == pytest.approx(tokens, rel=2e-3)
    warm = configs["dsa_warmup"]
    assert (warm.schedule.peak, warm.schedule.end, warm.steps) == (5e-3, 2e-4, 1000)
    sparse = configs["dsa_sparse"]
    assert (sparse.schedule.kind, sparse.schedule.peak) == ("constant", 1e-5)
    assert sparse.steps * sparse.batch.end == pytest.approx(20e9, rel=2e-3)


@pytest.mark.parametrize("size", SIZES)
def test_warm_up_trains_only_indexers(size):
    config = dsa_warmup.get_config(size)
    groups = flatten(groups_of(config.optimizer, glm5.axis_letters(config.model)))
    assert {g for path, g in groups.items() if "indexer/" in path} == {"indexer"}
    assert {g for path, g in groups.items() if "indexer/" not in path} == {"frozen"}
    # No optimiser moves router biases, but the load would.
    assert matches_any(config.optimizer.frozen, "moe_layers/router/bias")
    assert config.step.index_weight > 0


@pytest.mark.parametrize("size", SIZES)
def test_sparse_stage_trains_everything(size):
    config = stages(size)["dsa_sparse"]
    groups = flatten(groups_of(config.optimizer, glm5.axis_letters(config.model)))
    assert {path for path, g in groups.items() if g == "frozen"} == {
        path for path in groups if path.endswith("router/bias")
    }
    assert config.step.index_weight > 0


@pytest.mark.parametrize("size", SIZES)
def test_recall_is_last_and_share_of_long_texts_grows(size):
    shares = []
    for name in MID:
        data = stages(size)[name].data
        assert data.packing == "best_fit"
        assert sum(source.weight for source in data.sources) == pytest.approx(1)
        tasks = [source for source in data.sources if source.name.startswith("mrcr")]
        assert len(tasks) == (name == "midtrain_200k")
        long = [s.weight for s in data.sources if getattr(s, "min_characters", 0)]
        shares.append(sum(long))
    assert shares == sorted(shares) and shares[0] < shares[1]


def test_lists_stages_for_unknown_stage():
    with pytest.raises(
        ValueError, match="unknown variant 'tiny,64k'; did you mean tiny,32k. There are tiny,32k or"
    ):
        midtrain.get_config("tiny,64k")


def test_rows_are_balanced_where_context_is_divided():
    """GLM-5 2.4.1. A rank of the warm-up has one row, so that no order is better than another."""
    for name, config in stages("glm5").items():
        divides_context = config.mesh.context > 1
        ranks = config.mesh.fsdp * config.mesh.expert
        has_several_rows = config.batch.end > ranks * config.data.sequence_length
        assert config.step.balance_rows == (divides_context and has_several_rows), name
