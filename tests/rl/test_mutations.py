"""Every factor of the losses and advantages broken on purpose: some test of theirs must fail."""

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

# Without its stop-gradient the default old log-prob would change nothing: where r is 1 its slope then comes from rho,
# which is as large.
LOSSES = {
    "popped tokens count": ("jnp.where(below | above, 0, _exp(off))", "_exp(off)"),
    "kept tokens count as one": (
        "jnp.where(below | above, 0, _exp(off))",
        "jnp.where(below | above, 0, 1.0)",
    ),
    "rho is left out": ("return CorrectedLoss(rho * loss,", "return CorrectedLoss(loss,"),
    "the window is open": ("math.log(config.beta) + 1e-6", "math.log(config.beta) - 1e-6"),
    "the window has no lower edge": ("off < -edge, off > edge", "off < -99, off > edge"),
    "the window has no upper edge": ("off < -edge, off > edge", "off < -edge, off > 99"),
    "rho is upside down": ("off = old_logp - rollout_logp", "off = rollout_logp - old_logp"),
    "r is upside down": ("_exp(logp - old_logp)", "_exp(old_logp - logp)"),
    "the better of both counts": ("-jnp.minimum(", "-jnp.maximum("),
    "the lower clip is the upper's": ("1 - config.clip_low, 1", "1 - config.clip_high, 1"),
    "the upper clip is the lower's": ("1 + config.clip_high\n", "1 + config.clip_low\n"),
    "nothing is clipped": ("jnp.clip(ratio, low, high) * advantage)", "ratio * advantage)"),
    "the sign of the clipped loss": ("loss = -jnp.minimum(", "loss = jnp.minimum("),
    "the clip of r is told on both signs": ("(ratio < low) & (advantage < 0)", "ratio < low"),
    "every step divides by itself": (
        'streams.get("old_logp", lax.stop_gradient(logp))',
        "lax.stop_gradient(logp)",
    ),
    "f takes a gradient": ("ratio = lax.stop_gradient(ratio)", "pass"),
    "f's window is closed below": (
        "ratio <= 1 - config.window_low",
        "ratio < 1 - config.window_low",
    ),
    "f's window is closed above": (
        "ratio >= 1 + config.window_high",
        "ratio > 1 + config.window_high",
    ),
    "f masks one side": ("weight = jnp.where(below | above", "weight = jnp.where(above"),
    "f is one inside": ("jnp.where(below | above, 0, ratio)", "jnp.where(below | above, 0, 1.0)"),
    "f is left out": ("-weight * advantage * logp", "-advantage * logp"),
    "no advantage": ("-weight * advantage * logp", "-weight * logp"),
    "no log-prob": ("-weight * advantage * logp", "-weight * advantage"),
    "the sign of the masked loss": ("-weight * advantage * logp", "weight * advantage * logp"),
    "another denominator": ("off = logp - rollout_logp\n", "off = logp - old_logp\n"),
    "unclipped without its ratio": (
        "-ratio * advantage, ratio, never",
        "-advantage + 0 * ratio, ratio, never",
    ),
    "exponentials without a bound": (
        "jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))",
        "jnp.exp(log_ratio)",
    ),
    "the teacher's advantage learns": (
        'lax.stop_gradient(streams["ref_logp"] - logp)',
        '(streams["ref_logp"] - logp)',
    ),
    "away from the teacher": ('streams["ref_logp"] - logp', 'logp - streams["ref_logp"]'),
    "the teacher alone": ('streams["ref_logp"] - logp', 'streams["ref_logp"]'),
    "the divergence without its line": ("jnp.exp(off) - 1 - off", "jnp.exp(off) - 1"),
    "a distance with a sign": ("jnp.abs(off)", "off"),
    "the entropy's sign": ('"entropy": -current', '"entropy": current'),
}
ADVANTAGES = {
    "no mean": ("scored - scored.mean()", "scored"),
    "the population's deviation": ("ddof=1", "ddof=0"),
    "no deviation": ("deviation / (scored.std(ddof=1) + 1e-6)", "deviation"),
    "no epsilon": ("scored.std(ddof=1) + 1e-6", "scored.std(ddof=1)"),
    "failures count as zeros": (
        "if r is not None], np.float64",
        "if r is not None or True], np.float64",
    ),
    "others by their number": ("len(scored) / (len(scored) - 1)", "1"),
    "equal rewards by rounding": ("scored.min() < scored.max()", "True"),
    "a single reward": ("len(scored) > 1 and ", ""),
}
STREAMS = {
    "prompts are credited": (
        "np.where(record.loss_mask, advantage, 0)",
        "np.full(len(record), advantage)",
    ),
    "failures are learnt from": ("if member[1].value is not None", "if True"),
    "nothing is left out": (
        "config.drop_zero_variance_groups and len(set(values)",
        "False and len(set(values)",
    ),
    "a failure makes a difference": ("set(values) - {None}", "set(values)"),
    "a flat group of the buffer is learnt from": (
        "config.drop_zero_variance_groups and len(set(group",
        "False and len(set(group",
    ),
    "a copy is another sample": (
        "compute_advantages(group.baseline, config.baseline)",
        "compute_advantages([member.reward.value for member in group.members], config.baseline)",
    ),
    "a copy is a piece of its rollout": ("if copy:", "if False:"),
    "a copy is of the first": (
        "copy, original = divmod(index, len(advantages))",
        "copy, original = index // len(advantages), 0",
    ),
    "long rollouts count more": ("max(lengths[record.rollout_id], 1.0)", "1.0"),
    "pieces count each for itself": (
        "lengths[record.rollout_id] += record",
        "lengths[record.rollout_id] = record",
    ),
    "tokens by their rollouts": ('config.normalisation == "token"', "False"),
    "no pull": ('if config.kl_target == "none" else', "if True else"),
    "the uniform distribution's sign": ("-np.log(vocab_size)", "np.log(vocab_size)"),
    "the uniform distribution of another size": ("-np.log(vocab_size)", "-np.log(vocab_size - 1)"),
    "no uniform distribution": ('config.kl_target == "uniform"', "False"),
    "any target is the uniform distribution": (
        'config.kl_target == "uniform"',
        'config.kl_target != "none"',
    ),
    "prompts are pulled": (
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
    "prompts are learnt": ('batch["loss_mask"] * batch["ce_weight"]', 'batch["ce_weight"]'),
    "cross-entropy without weights": (
        'batch["loss_mask"] * batch["ce_weight"]',
        'batch["loss_mask"]',
    ),
    "prompts have weights": ('batch["loss_mask"] * batch[name]', "batch[name]"),
    "streams without weights": ('batch["loss_mask"] * batch[name]', 'batch["loss_mask"]'),
    "streams of the token before": ("else ahead(batch[name], 1)", "else batch[name]"),
    "weights of the token before": (
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
    "what is told is a sum": (' / _divisor(totals.parts["tokens"])', ""),
    "what is told counts all tokens": ("(any_weight > 0)", "(any_weight >= 0)"),
    "log-probs with the losses' sign": ("_sums(token_loss, -nll[0],", "_sums(token_loss, nll[0],"),
    "no weights are a zero divisor": ("jnp.where(total == 0, 1, total)", "total"),
}
BESIDE = {
    "predictions further ahead without their coefficient": ("loss_weights.mtp * mtp", "mtp"),
    "predictions further ahead are not learnt": ("loss_weights.mtp * mtp + ", ""),
    "balance without its coefficient": ("loss_weights.balance * balance", "balance"),
    "balance is not learnt": ("loss_weights.balance * balance + ", ""),
    "normalisers without their coefficient": ("loss_weights.z * z\n", "z\n"),
    "normalisers are not learnt": (" + loss_weights.z * z\n", "\n"),
    "indexers without their coefficient": (
        "index_factor * jnp.sum(reduced.index_loss)",
        "jnp.sum(reduced.index_loss)",
    ),
    "one layer's indexer": ("jnp.sum(reduced.index_loss)", "reduced.index_loss[0]"),
    "indexers are not learnt": ("objective += index_factor *", "objective + index_factor *"),
}
PAIRS = {
    "no mean over pairs": ("-jnp.mean(jax.nn", "-jnp.sum(jax.nn"),
    "the sign of the pairs' loss": ("-jnp.mean(jax.nn", "jnp.mean(jax.nn"),
    "a margin without its logarithm": ("jax.nn.log_sigmoid", "jax.nn.sigmoid"),
    "half a margin": ("log_sigmoid(margins)", "log_sigmoid(margins / 2)"),
    "the rejected reply's score is added": ("jnp.sign(pair) * scores", "scores"),
    "the rejected reply wins": ("jnp.sign(pair) * scores", "-jnp.sign(pair) * scores"),
    "the last token of both counts for one": (".add(signed)[1:]", ".set(signed)[1:]"),
}


def mutant(module, old, new):
    """The module with one piece of its text replaced."""
    source = pathlib.Path(module.__file__).read_text("utf-8")
    assert source.count(old) == 1, (source.count(old), old)
    made = types.ModuleType(module.__name__)
    made.__file__ = module.__file__
    # What pickles and dataclasses look up by the name is the real one.
    exec(compile(source.replace(old, new), module.__file__, "exec"), made.__dict__)
    return made


def survives(places, names, made, monkeypatch, checks):
    """Whether every check passes with the mutant's names in those modules that have them."""
    for place, name in itertools.product(places, names):
        if hasattr(place, name):
            monkeypatch.setattr(place, name, getattr(made, name))
    for check in checks:
        try:
            check()
        except Exception:
            return False
    return True


def checks_of_losses():
    t = test_losses
    yield t.test_icepop_by_hand
    yield t.test_double_sided_by_hand
    yield t.test_the_window_of_icepop_is_closed_in_float32_too
    for kind, several in itertools.product(losses.CORRECTIONS, (False, True)):
        yield lambda: t.test_values_and_gradients_are_the_oracle_s(kind, several)  # noqa: B023
    for kind in losses.CORRECTIONS:
        yield lambda: t.test_a_token_that_is_out_of_all_bounds_is_finite(kind)  # noqa: B023
    yield t.test_distillation_has_the_teacher_s_log_ratio_as_advantage
    yield t.test_distilled_samples_add_up_to_the_reverse_divergence
    yield t.test_the_steps_of_one_batch_have_one_denominator
    yield t.test_what_is_told_of_the_samples


def checks_of_advantages():
    t = test_advantage
    yield t.test_by_hand
    for baseline in advantage.BASELINES:
        yield lambda: t.test_failures_of_the_environment_are_left_out(baseline)  # noqa: B023
        if baseline != "none":
            yield lambda: t.test_a_group_that_tells_nothing_is_zero(baseline)  # noqa: B023


def checks_of_streams():
    return [
        value
        for name, value in vars(test_credit).items()
        if name.startswith("test_") and "rows" not in name and "record_is" not in name
    ]


def checks_of_the_objective():
    t = test_objective
    yield functools.partial(t.test_the_parts_are_means_of_the_oracle_s_tokens, "double_sided")
    yield t.test_what_is_not_sampled_gets_no_gradient
    yield t.test_a_part_that_no_token_has_a_weight_for_adds_nothing


def checks_of_training():
    yield test_loss.test_targets_are_next_tokens_of_document
    yield from checks_of_the_objective()
    yield test_objective.test_scores_are_the_log_probs_of_each_token
    yield functools.partial(test_objective.test_micro_batches_change_nothing, test_objective.CFG, 4)


def checks_beside():
    yield test_objective.test_what_is_learnt_beside_the_losses_of_tokens_has_its_coefficient


def checks_of_pairs():
    yield test_outcome_model.test_the_loss_of_pairs_wherever_they_stand
    yield test_outcome_model.test_a_margin_of_any_size_has_a_finite_loss


@pytest.fixture(autouse=True)
def _runs_of_this_mutant():
    """One operation at a time, which are compiled once for all mutants, and no results of other ones."""

    def forget():
        test_objective.program.cache_clear()
        test_objective.values.cache_clear()
        test_objective.alone.cache_clear()

    forget()
    with jax.disable_jit():
        yield
    forget()


# Of each: modules in which names are looked up, by whom the mutant's stand; where they are from; checks, mutations.
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
    "beside": ([gradients], ("local_objective",), loss, checks_beside, BESIDE),
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
def test_what_is_not_broken_survives(part, monkeypatch):
    places, names, module, checks, _ = PARTS[part]
    assert survives(places, names, module, monkeypatch, checks())


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in PARTS for name in PARTS[part][-1]]
)
def test_what_is_broken_is_found(part, name, monkeypatch):
    places, names, module, checks, mutations = PARTS[part]
    made = mutant(module, *mutations[name])
    assert not survives(places, names, made, monkeypatch, checks())
