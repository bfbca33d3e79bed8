"""Tests of the learning rate, the batch ramp and the values that change after 15T tokens."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.training.schedule import (
    BatchRampConfig,
    ScheduleConfig,
    batch_tokens,
    bias_update_rate,
    make_schedule,
    mtp_weight,
    num_steps,
    num_tokens,
    value_at,
)


def rates(config, steps):
    return np.asarray(jax.vmap(make_schedule(config))(jnp.asarray(steps)))


def test_cosine_warms_up_and_decays():
    config = ScheduleConfig(warmup_steps=10, total_steps=111)
    got = rates(config, np.arange(130))
    warm = [2e-4 * (i + 1) / 11 for i in range(10)]
    fall = [4e-5 + (2e-4 - 4e-5) * (1 + math.cos(math.pi * i / 100)) / 2 for i in range(101)]
    np.testing.assert_allclose(got, warm + fall + [4e-5] * 19, rtol=2e-5)


def test_linear_and_constant_follow_their_formulas():
    def linear(peak, end):
        return [peak + (end - peak) * i / 50 for i in range(51)] + [end] * 9

    for kind, peak, end, want in (
        ("linear", 4e-5, 1e-5, linear(4e-5, 1e-5)),
        ("linear", 5e-3, 2e-4, linear(5e-3, 2e-4)),
        ("constant", 1e-5, 4e-5, [1e-5] * 60),
    ):
        config = ScheduleConfig(kind=kind, peak=peak, end=end, warmup_steps=0, total_steps=51)
        got = rates(config, np.arange(60))
        np.testing.assert_allclose(got, want, rtol=1e-4, err_msg=f"{kind} from {peak}")


def test_default_schedule_equals_paper():
    config = ScheduleConfig()
    assert (config.kind, config.peak, config.end) == ("cosine", 2e-4, 4e-5)
    assert config.total_steps == num_steps(BatchRampConfig(), int(27e12))
    assert 0.004 < config.warmup_steps / config.total_steps < 0.01


def test_one_step_has_peak_rate():
    one = ScheduleConfig(warmup_steps=0, total_steps=1)
    np.testing.assert_allclose(rates(one, np.arange(3)), [2e-4, 4e-5, 4e-5], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kind": "wsd"}, "kind is 'wsd'; use 'cosine', 'linear' or 'constant'"),
        ({"warmup_steps": 10, "total_steps": 10}, r"warmup_steps 10 must be in 0 .. .*\(9\)"),
        ({"warmup_steps": -1}, "warmup_steps -1"),
        ({"peak": 0.0}, "peak 0.0 must be positive"),
        ({"end": -1e-5}, "end -1e-05 not negative"),
        ({"total_steps": 9000, "first_step": 9000}, r"first_step is 9000; .* \(8999\)"),
    ],
)
def test_schedule_rejects_invalid_values(changes, match):
    with pytest.raises(ValueError, match=match):
        make_schedule(ScheduleConfig(**changes))


def test_default_batch_grows_from_16m_to_64m_tokens():
    ramp = BatchRampConfig()
    assert batch_tokens(ramp, 0) == 16 * 2**20
    assert batch_tokens(ramp, 250_000_000_000) == 32 * 2**20
    assert batch_tokens(ramp, 499_999_999_999) == 48 * 2**20
    fine = dataclasses.replace(ramp, multiple=4 * 2**20)
    assert batch_tokens(fine, 250_000_000_000) == 40 * 2**20
    assert batch_tokens(fine, 249_000_000_000) == 36 * 2**20
    assert batch_tokens(ramp, 500_000_000_000) == batch_tokens(ramp, 10**13) == 64 * 2**20


def test_num_steps_equals_simulated_ramp():
    ramp = BatchRampConfig(start=8, end=32, ramp_tokens=300, multiple=4)
    seen, sizes = 0, []
    for step in range(60):
        assert num_steps(ramp, seen) == step
        assert num_steps(ramp, seen + 1) == step + 1
        sizes.append(batch_tokens(ramp, seen))
        seen += sizes[-1]
        assert num_tokens(ramp, step + 1) == seen
    assert sizes == sorted(sizes) and set(sizes) == {8, 12, 16, 20, 24, 28, 32}


def test_later_run_continues_curve():
    full = ScheduleConfig(warmup_steps=5, total_steps=40)
    later = dataclasses.replace(full, first_step=30)
    assert (full.num_steps, later.num_steps) == (40, 10)
    rate, continued = make_schedule(full), make_schedule(later)
    assert [continued(step) for step in range(10)] == [rate(step) for step in range(30, 40)]


def test_ramp_of_no_tokens_is_constant():
    flat = BatchRampConfig(start=12, end=12, ramp_tokens=0, multiple=4)
    assert (batch_tokens(flat, 0), num_steps(flat, 60), num_steps(flat, 61)) == (12, 5, 6)


@pytest.mark.parametrize(
    ("start", "end", "match"),
    [(10, 32, "multiples of batch.multiple, 4"), (8, 4, "rise"), (0, 4, "rise")],
)
def test_ramp_rejects_invalid_sizes(start, end, match):
    with pytest.raises(ValueError, match=match):
        batch_tokens(BatchRampConfig(start=start, end=end, ramp_tokens=300, multiple=4), 0)


def test_bias_rate_and_mtp_weight_change_after_15t_tokens():
    for config, before, after in ((bias_update_rate(), 1e-3, 0.0), (mtp_weight(), 0.3, 0.1)):
        value = jax.jit(lambda tokens, config=config: value_at(config, tokens))
        for tokens, want in ((0.0, before), (14.9e12, before), (15e12, after), (27e12, after)):
            got = value(jnp.float32(tokens))
            assert got == np.float32(want) and got.dtype == jnp.float32
            assert value_at(config, int(tokens)) == got
