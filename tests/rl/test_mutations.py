"""Mutations of every factor of losses and advantages: at least one of their tests must fail for each."""

import functools
import itertools
import pathlib
import types

import jax
import pytest

from glm5_jax.rl.algorithm import advantage, credit, losses
from glm5_jax.rl.reward_model import outcome_training
from glm5_jax.training import gradients, loss, step
from tests.rl import test_advantage, test_credit, test_losses, test_objective, test_outcome_model
from tests.training import test_loss

pytestmark = pytest.mark.slow

# Each mutation replaces one text of the source by another. There is none that removes the stop-gradient of the default
# old log-prob, because it would change nothing: where r is 1, its slope then comes from rho, which is equally large.
LOSSES = {
    "masked tokens count": ("jnp.where(below | above, 0, _exp(off))", "_exp(off)"),
    "rho is 1 inside the window": (
        "jnp.where(below | above, 0, _exp(off))",
        "jnp.where(below | above, 0, 1.0)",
    ),
    "rho is omitted": ("return CorrectedLoss(rho * loss,", "return CorrectedLoss(loss,"),
    "the window is open": ("math.log(config.beta) + 1e-6", "math.log(config.beta) - 1e-6"),
    "the window has no lower edge": ("off < -edge, off > edge", "off < -99, off > edge"),
    "the window has no upper edge": ("off < -edge, off > edge", "off < -edge, off > 99"),
    "rho is inverted": ("off = old_logp - rollout_logp", "off = rollout_logp - old_logp"),
    "r is inverted": ("_exp(logp - old_logp)", "_exp(old_logp - logp)"),
    "the larger surrogate counts": ("-jnp.minimum(", "-jnp.maximum("),
    "the lower clip has the upper limit": ("1 - config.clip_low, 1", "1 - config.clip_high, 1"),
    "the upper clip has the lower limit": ("1 + config.clip_high\n", "1 + config.clip_low\n"),
    "nothing is clipped": ("jnp.clip(ratio, low, high) * advantage)", "ratio * advantage)"),
    "the clipped loss has the other sign": ("loss = -jnp.minimum(", "loss = jnp.minimum("),
    "the clip of r is reported for both signs": ("(ratio < low) & (advantage < 0)", "ratio < low"),
    "every step is its own old policy": (
        'streams.get("old_logp", lax.stop_gradient(logp))',
        "lax.stop_gradient(logp)",
    ),
    "f has a gradient": ("ratio = lax.stop_gradient(ratio)", "pass"),
    "f's window is closed below": (
        "ratio <= 1 - config.window_low",
        "ratio < 1 - config.window_low",
    ),
    "f's window is closed above": (
        "ratio >= 1 + config.window_high",
        "ratio > 1 + config.window_high",
    ),
    "f masks one side": ("weight = jnp.where(below | above", "weight = jnp.where(above"),
    "f is 1 inside the window": (
        "jnp.where(below | above, 0, ratio)",
        "jnp.where(below | above, 0, 1.0)",
    ),
    "f is omitted": ("-weight * advantage * logp", "-advantage * logp"),
    "no advantage": ("-weight * advantage * logp", "-weight * logp"),
    "no log-prob": ("-weight * advantage * logp", "-weight * advantage"),
    "the masked loss has the other sign": (
        "-weight * advantage * logp",
        "weight * advantage * logp",
    ),
    "another denominator": ("off = logp - rollout_logp\n", "off = logp - old_logp\n"),
    "unclipped without its ratio": (
        "-ratio * advantage, ratio, never",
        "-advantage + 0 * ratio, ratio, never",
    ),
    "exponentials without a bound": (
        "jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))",
        "jnp.exp(log_ratio)",
    ),
    "the teacher's advantage has a gradient": (
        'lax.stop_gradient(streams["ref_logp"] - logp)',
        '(streams["ref_logp"] - logp)',
    ),
    "away from the teacher": ('streams["ref_logp"] - logp', 'logp - streams["ref_logp"]'),
    "the advantage is the teacher's log-prob": (
        'streams["ref_logp"] - logp',
        'streams["ref_logp"]',
    ),
    "the divergence without its linear term": ("jnp.exp(off) - 1 - off", "jnp.exp(off) - 1"),
    "the distance has a sign": ("jnp.abs(off)", "off"),
    "the entropy has the other sign": ('"entropy": -current', '"entropy": current'),
}
ADVANTAGES = {
    "no mean": ("scored - scored.mean()", "scored"),
    "the deviation of a population": ("ddof=1", "ddof=0"),
    "no deviation": ("deviation / (scored.std(ddof=1) + 1e-6)", "deviation"),
    "no epsilon": ("scored.std(ddof=1) + 1e-6", "scored.std(ddof=1)"),
    "failures count as zeros": (
        "if r is not None], np.float64",
        "if r is not None or True], np.float64",
    ),
    "leave-one-out without its factor": ("len(scored) / (len(scored) - 1)", "1"),
    "equal rewards differ by rounding": ("scored.min() < scored.max()", "True"),
    "a single reward": ("len(scored) > 1 and ", ""),
}
STREAMS = {
    "prompts are credited": (
        "np.where(record.loss_mask, advantage, 0)",
        "np.full(len(record), advantage)",
    ),
    "failures are trained on": ("if member[1].value is not None", "if True"),
    "no group is dropped": (
        "config.drop_zero_variance_groups and len(set(values)",
        "False and len(set(values)",
    ),
    "a failure counts as variance": ("set(values) - {None}", "set(values)"),
    "a zero-variance group of the buffer is trained on": (
        "config.drop_zero_variance_groups and len(set(group",
        "False and len(set(group",
    ),
    "a copy counts in the baseline": (
        "compute_advantages(group.baseline, config.baseline)",
        "compute_advantages([member.reward.value for member in group.members], config.baseline)",
    ),
    "a copy shares the weight of its rollout": ("if copy:", "if False:"),
    "every copy is of the first member": (
        "copy, original = divmod(index, len(group.baseline))",
        "copy, original = index // len(group.baseline), 0",
    ),
    "long rollouts count more": ("max(lengths[record.rollout_id], 1.0)", "1.0"),
    "records of a rollout count separately": (
        "lengths[record.rollout_id] += record",
        "lengths[record.rollout_id] = record",
    ),
    "token normalisation is ignored": ('config.normalisation == "token"', "False"),
    "no target of the KL": ('if config.kl_target == "none" else', "if True else"),
    "the uniform distribution has the other sign": ("-np.log(vocab_size)", "np.log(vocab_size)"),
    "the uniform distribution of another size": ("-np.log(vocab_size)", "-np.log(vocab_size - 1)"),
    "no uniform distribution": ('config.kl_target == "uniform"', "False"),
    "any target is the uniform distribution": (
        'config.kl_target == "uniform"',
        'config.kl_target != "none"',
    ),
    "prompts have a KL target": (
        "np.where(record.loss_mask, -np.log(vocab_size), np.nan)",
        "np.full(len(record), -np.log(vocab_size))",
    ),
}
POLICY = {
    "the temperature is 1": ("return self.config.temperature", "return 1.0"),
    "the coefficient of cross-entropy is 1": ("self.config.ce,", "1.0,"),
    "the coefficient of rewards is 1": ("self.config.rl,", "1.0,"),
    "the coefficient of a teacher is 1": ("self.config.ref_kl}", "1.0}"),
    "a teacher has the rewards' coefficient": ("self.config.ref_kl}", "self.config.rl}"),
}
OBJECTIVE = {
    "prompts are trained on": ('batch["loss_mask"] * batch["ce_weight"]', 'batch["ce_weight"]'),
    "cross-entropy without weights": (
        'batch["loss_mask"] * batch["ce_weight"]',
        'batch["loss_mask"]',
    ),
    "prompts have weights": ('batch["loss_mask"] * batch[name]', "batch[name]"),
    "streams without weights": ('batch["loss_mask"] * batch[name]', 'batch["loss_mask"]'),
    "streams of the previous token": ("else ahead(batch[name], 1)", "else batch[name]"),
    "weights of the previous token": (
        'counted(batch["loss_mask"] * batch[name], 1)',
        'counted(batch["loss_mask"] * batch[name], 0)',
    ),
    "targets of another document": ("(ahead(segments, j) == segments) & ", ""),
    "targets of padding": (" & (segments != 0)", ""),
    "the main head's weights for all": ("counted(weight, j) for j", "counted(weight, 1) for j"),
    "every target is the next token": ("ahead(tokens, j) for j", "ahead(tokens, 1) for j"),
    "logits without a temperature": ("hiddens / token_loss.temperature", "hiddens"),
    "scores without a temperature": ("hidden.shape[-1]) / temperature", "hidden.shape[-1])"),
    "scores are losses": ("return -nll.reshape", "return nll.reshape"),
    "cross-entropy without weights of tokens": ("jnp.sum(nll * share,", "jnp.sum(nll,"),
    "cross-entropy is a sum": (" / _divisor(totals.heads)[:, None, None]", ""),
    "microbatches divide by their own weights": (
        "_divisor(totals.heads)[",
        "_divisor(shifted.weights.sum((1, 2)))[",
    ),
    "the coefficient of cross-entropy is left out": ("factor * ce", "ce"),
    "the coefficients of parts are left out": ("token_loss.coefficients[name] * value", "value"),
    "parts are not added": (
        "for name, value in token_parts.items()\n        )",
        "for name, value in ()\n        )",
    ),
    "losses of tokens without their weights": ("jnp.sum(loss * weights[name])", "jnp.sum(loss)"),
    "parts are sums": (" / _divisor(totals.parts[name])", ""),
    "microbatches divide parts by their own weights": (
        "_divisor(totals.parts[name])",
        "_divisor(weights[name].sum())",
    ),
    "statistics are sums": (' / _divisor(totals.parts["tokens"])', ""),
    "statistics count all tokens": ("(any_weight > 0)", "(any_weight >= 0)"),
    "log-probs have the sign of losses": (
        "_sums(token_loss, -nll[0],",
        "_sums(token_loss, nll[0],",
    ),
    "missing weights divide by zero": ("jnp.where(total == 0, 1, total)", "total"),
}
AUXILIARY = {
    "MTP without its coefficient": ("loss_weights.mtp * mtp", "mtp"),
    "MTP is not trained": ("loss_weights.mtp * mtp + ", ""),
    "balance without its coefficient": ("loss_weights.balance * balance", "balance"),
    "balance is not trained": ("loss_weights.balance * balance + ", ""),
    "z-loss without its coefficient": ("loss_weights.z * z\n", "z\n"),
    "z-loss is not trained": (" + loss_weights.z * z\n", "\n"),
    "indexers without their coefficient": (
        "index_factor * jnp.sum(reduced.index_loss)",
        "jnp.sum(reduced.index_loss)",
    ),
    "only one layer's indexer": ("jnp.sum(reduced.index_loss)", "reduced.index_loss[0]"),
    "indexers are not trained": ("objective += index_factor *", "objective + index_factor *"),
}
PAIRS = {
    "no mean over pairs": ("-jnp.mean(jax.nn", "-jnp.sum(jax.nn"),
    "the pairs' loss has the other sign": ("-jnp.mean(jax.nn", "jnp.mean(jax.nn"),
    "a margin without its logarithm": ("jax.nn.log_sigmoid", "jax.nn.sigmoid"),
    "half a margin": ("log_sigmoid(margins)", "log_sigmoid(margins / 2)"),
    "the rejected reply's score is added": ("jnp.sign(pair) * scores", "scores"),
    "the rejected reply wins": ("jnp.sign(pair) * scores", "-jnp.sign(pair) * scores"),
    "the last scores overwrite each other": (".add(signed)[1:]", ".set(signed)[1:]"),
}


def mutant(module, old, new):
    """Returns the module with one piece of its text replaced."""
    source = pathlib.Path(module.__file__).read_text("utf-8")
    assert source.count(old) == 1, (source.count(old), old)
    module_copy = types.ModuleType(module.__name__)
    module_copy.__file__ = module.__file__
    # Pickles and dataclasses look up the original module by this name.
    exec(compile(source.replace(old, new), module.__file__, "exec"), module_copy.__dict__)
    return module_copy


def survives(modules, names, mutated, monkeypatch, checks):
    """Returns whether every check passes after the mutant's names replaced those of the modules."""
    for module, name in itertools.product(modules, names):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(mutated, name))
    for check in checks:
        try:
            check()
        except Exception:
            return False
    return True


def checks_of_losses():
    t = test_losses
    yield t.test_icepop_equals_values_by_hand
    yield t.test_double_sided_equals_values_by_hand
    yield t.test_icepop_window_is_closed_in_float32
    for kind, has_several_steps in itertools.product(losses.CORRECTIONS, (False, True)):
        yield lambda: t.test_values_and_gradients_equal_oracle(kind, has_several_steps)  # noqa: B023
    for kind in losses.CORRECTIONS:
        yield lambda: t.test_loss_of_extreme_log_probs_is_finite(kind)  # noqa: B023
    yield t.test_distillation_uses_log_ratio_of_teacher_as_advantage
    yield t.test_expected_distillation_loss_is_reverse_kl
    yield t.test_steps_of_batch_share_old_log_probs
    yield t.test_reports_statistics_of_samples


def checks_of_advantages():
    t = test_advantage
    yield t.test_advantages_equal_values_by_hand
    for baseline in advantage.BASELINES:
        yield lambda: t.test_leaves_out_failures_of_environment(baseline)  # noqa: B023
        if baseline != "none":
            yield lambda: t.test_advantages_of_equal_rewards_are_zero(baseline)  # noqa: B023


def checks_of_streams():
    """Returns the tests of test_credit that do not pack rows."""
    return [
        value
        for name, value in vars(test_credit).items()
        if name.startswith("test_") and "row" not in name
    ]


def checks_of_the_objective():
    t = test_objective
    yield functools.partial(t.test_parts_equal_means_of_oracle, "double_sided")
    yield t.test_unsampled_tokens_get_no_gradient
    yield t.test_part_without_weights_adds_nothing


def checks_of_training():
    yield test_loss.test_targets_are_next_tokens_of_document
    yield from checks_of_the_objective()
    yield test_objective.test_scores_equal_log_probs_of_tokens
    yield functools.partial(test_objective.test_micro_batches_keep_result, test_objective.CFG, 4)


def checks_of_auxiliary_losses():
    yield test_objective.test_auxiliary_losses_have_their_coefficients


def checks_of_pairs():
    yield test_outcome_model.test_loss_of_pairs_in_any_position_equals_oracle
    yield test_outcome_model.test_loss_of_any_margin_is_finite


@pytest.fixture(autouse=True)
def _clear_caches_of_mutant():
    """Runs operations one at a time, because these are compiled once for all mutants, and clears cached results."""

    def clear_caches():
        test_objective.program.cache_clear()
        test_objective.values.cache_clear()
        test_objective.evaluate_alone.cache_clear()

    clear_caches()
    with jax.disable_jit():
        yield
    clear_caches()


# Each part: modules whose names are replaced, the names, the mutated module, checks, and mutations.
PARTS = {
    "losses": (
        [test_losses],
        ("compute_corrected_loss", "PolicyLoss"),
        losses,
        checks_of_losses,
        LOSSES,
    ),
    "policy": ([test_objective], ("PolicyLoss",), losses, checks_of_the_objective, POLICY),
    "objective": (
        [gradients, step, test_loss],
        ("Shifted", "Totals", "shift", "totals_of", "local_objective", "local_logp"),
        loss,
        checks_of_training,
        OBJECTIVE,
    ),
    "auxiliary": ([gradients], ("local_objective",), loss, checks_of_auxiliary_losses, AUXILIARY),
    "pairs": (
        [test_outcome_model],
        ("bradley_terry_loss", "pair_margins"),
        outcome_training,
        checks_of_pairs,
        PAIRS,
    ),
    "advantage": (
        [test_advantage],
        ("compute_advantages",),
        advantage,
        checks_of_advantages,
        ADVANTAGES,
    ),
    "streams": (
        [test_credit],
        ("assign_credit", "assign_batch_credit", "make_distillation_records"),
        credit,
        checks_of_streams,
        STREAMS,
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_checks_pass_without_mutation(part, monkeypatch):
    modules, names, module, checks, _ = PARTS[part]
    assert survives(modules, names, module, monkeypatch, checks())


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in PARTS for name in PARTS[part][-1]]
)
def test_checks_detect_mutation(part, name, monkeypatch):
    modules, names, module, checks, mutations = PARTS[part]
    mutated = mutant(module, *mutations[name])
    assert not survives(modules, names, mutated, monkeypatch, checks())
