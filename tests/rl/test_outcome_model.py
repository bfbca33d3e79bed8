"""The outcome reward model: its formulas, a run that learns and one that cannot, and how it answers."""

import asyncio
import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import reward_model
from glm5_jax.checkpoint import models, store
from glm5_jax.data.preferences import Preference
from glm5_jax.envs.hybrid_reward import GeneralConfig, HybridReward
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.config import policy_step_config
from glm5_jax.rl.reward_model import outcome_model
from glm5_jax.rl.reward_model.outcome_model import (
    HEAD,
    SCORER,
    BatchedScorer,
    OutcomeModel,
    mean_and_std,
    score_sequences,
)
from glm5_jax.rl.reward_model.outcome_training import (
    OutcomeTrainer,
    Pair,
    PairSource,
    bradley_terry_loss,
    make_outcome_step,
    pair_margins,
    render_pairs,
    reward_model_optimizer_config,
)
from glm5_jax.rl.types import Attempt, Task, UnreadableReply
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import groups_of
from glm5_jax.training.schedule import ScheduleConfig
from tests.model.small import one_layer
from tests.oracles import preferences as oracle
from tests.rl.small_stage import train_on_one_device

CONFIG = reward_model.SyntheticPairsConfig(
    name="reward",
    model=one_layer(vocab_size=2048, max_position_embeddings=256),
    requires_checkpoint=False,
    optimizer=dataclasses.replace(reward_model_optimizer_config(), frozen=("^mtp/", "^lm_head/")),
    schedule=ScheduleConfig(kind="constant", peak=2e-2, end=0.0, warmup_steps=0, total_steps=4),
    step=dataclasses.replace(policy_step_config(), remat="none"),
    train=TrainConfig(eval_interval=2, save_interval=2),
    pairs=8,
    length=128,
    rows=8,
    held_out_fraction=0.2,
    max_eval_pairs=32,
    num_synthetic=60,
)
PAIRS = [Pair([1, 2, 3], [1, 2, 4, 5]), Pair([7, 8], [9]), Pair([1] * 6, [2] * 5)]


MADE = {}


def shared(cfg, step, optimizer, schedule, mesh, pairs):
    """Compiled once for all runs that have so many pairs, whose schedule is the same."""
    key = repr((cfg, step, optimizer, mesh, pairs))
    if key not in MADE:
        made = make_outcome_step(cfg, step, optimizer, schedule, mesh, pairs)
        MADE[key] = made._replace(train=lambda state, batch: made.train(state, batch))
    return MADE[key]


def stage(config, workdir, pairs=None):
    pairs = config.preferences() if pairs is None else pairs
    return OutcomeTrainer(config, workdir, pairs, step_maker=shared)


def weights(workdir):
    found = store.load_params(workdir, outcome_model.abstract_params(CONFIG.model))
    return jax.device_get(found)


def drawn_params(seed=0):
    cfg = CONFIG.model
    params = glm5.params_of(glm5.Glm5(cfg, rngs=nnx.Rngs(seed)))
    head = np.random.default_rng(seed).normal(size=cfg.hidden_size)
    return {**params, HEAD: {"weight": jnp.asarray(head, jnp.float32)}}


def test_the_oracle_has_its_own_slopes():
    chosen, rejected = [0.5, -2.0, 3.0], [1.5, -1.0, -3.0]
    _, up, down = oracle.loss(chosen, rejected)
    for side, slopes in ((chosen, up), (rejected, down)):
        for i, slope in enumerate(slopes):
            values = []
            for sign in (1, -1):
                side[i] += sign * 1e-5
                values.append(oracle.loss(chosen, rejected)[0])
                side[i] -= sign * 1e-5
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope, abs=1e-9)


def test_the_loss_of_pairs_wherever_they_stand():
    """Value and gradient, with replies of a pair in different rows and in either order."""
    scores = np.random.default_rng(0).normal(size=(3, 5)) * 3
    pair = np.zeros((3, 5), np.int32)
    chosen, rejected = [(0, 1), (2, 4), (1, 0)], [(2, 2), (0, 0), (1, 3)]
    for number, (better, worse) in enumerate(zip(chosen, rejected), 1):
        pair[better], pair[worse] = number, -number
    found, slopes = jax.value_and_grad(lambda x: bradley_terry_loss(pair_margins(x, pair, 3)))(
        jnp.asarray(scores, jnp.float32)
    )
    value, up, down = oracle.loss(*([scores[at] for at in side] for side in (chosen, rejected)))
    want = np.zeros_like(scores)
    for side, own in ((chosen, up), (rejected, down)):
        for at, slope in zip(side, own):
            want[at] = slope
    assert float(found) == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(slopes, want, atol=1e-6)


def test_a_margin_of_any_size_has_a_finite_loss():
    value, slopes = jax.value_and_grad(bradley_terry_loss)(jnp.array([300.0, -300.0]))
    assert float(value) == 150 and slopes.tolist() == [0, -0.5]


@jax.jit
def forward(params, row):
    return glm5.forward(params, row, CONFIG.model).hidden[0]


def hidden(params, ids):
    """[t d] behind all of ids, at 128 tokens for one program."""
    body = {name: own for name, own in params.items() if name != HEAD}
    row = np.zeros((1, CONFIG.length), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(forward(body, row), np.float64)[: len(ids)]


def test_a_step_learns_what_the_oracle_says():
    """The loss of packed rows is that of each chat by itself, and its gradient reaches the head."""
    source = PairSource(PAIRS, dataclasses.replace(CONFIG, pairs=3, length=16, seed=1))
    batch, params = source.next(2), drawn_params()
    step = make_outcome_step(
        CONFIG.model, CONFIG.step, CONFIG.optimizer, lambda step: 1e-2, pairs=3
    )
    head = np.asarray(params[HEAD]["weight"], np.float64)
    ends = [[hidden(params, ids) for ids in side] for side in zip(*PAIRS)]
    scores = [[oracle.score(own, head) for own in side] for side in ends]
    value, up, down = oracle.loss(*scores)
    loss, count = step.evaluate(params, batch)
    assert int(count) == 3 and float(loss) / 3 == pytest.approx(value, rel=1e-4)
    want = sum(
        slope * own[-1]
        for side, slopes in zip(ends, (up, down))
        for own, slope in zip(side, slopes)
    )

    def objective(head):
        found = step.evaluate({**params, HEAD: {"weight": head}}, batch)[0]
        return found / 3

    got = jax.grad(objective)(params[HEAD]["weight"])
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_scores_do_not_depend_on_what_they_are_packed_with():
    params = drawn_params()
    score, traced = outcome_model.make_token_scorer(CONFIG.model), []
    run = jax.jit(lambda *args: traced.append(args) or score(*args))
    sequences = [[1 + i % 9, *range(2, 3 + i % 5)] for i in range(40)]
    found = score_sequences(run, params, sequences, 16, 2)
    alone = [oracle.score(hidden(params, ids), params[HEAD]["weight"]) for ids in sequences]
    np.testing.assert_allclose(found, alone, atol=1e-4)
    assert len(traced) == 1


def pairs_of(batch):
    """The pairs that a batch holds, in their order."""
    found = {}
    for tokens, segments, pair in zip(batch["token_ids"], batch["segment_ids"], batch["pair"]):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            found[pair[here][-1]] = tokens[here].tolist()
    return [Pair(found[number], found[-number]) for number in range(1, len(found) // 2 + 1)]


def test_pairs_come_in_epochs_and_go_on_where_they_were():
    config = dataclasses.replace(CONFIG, pairs=2, length=8)
    source = PairSource(PAIRS, config)
    seen = [pair for _ in range(12) for pair in pairs_of(source.next(4))]
    epochs = [seen[i : i + 3] for i in range(0, 24, 3)]
    assert all(sorted(epoch) == sorted(PAIRS) for epoch in epochs)
    assert any(epoch != epochs[0] for epoch in epochs)
    source.next(4)
    state = json.loads(json.dumps(source.state()))
    other = PairSource(PAIRS, config)
    other.restore(state)
    a, b = source.next(4), other.next(4)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert np.sort(a["pair"][a["pair"] != 0]).tolist() == [-2, -1, 1, 2]
    with pytest.raises(ValueError, match="the run was on other pairs"):
        PairSource(PAIRS[:2], config).check(state)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps in one go."""
    workdir = tmp_path_factory.mktemp("reward") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        train_on_one_device(patch)
        stage(CONFIG, workdir).run()
    return workdir


def check_run_and_one_that_was_stopped(whole, tmp_path):
    """That a run learns, and that one that was stopped in the middle does the same, bit by bit."""
    rows = read(whole)
    assert column(rows, "loss/preference")[1][0] == pytest.approx(np.log(2), rel=1e-6)
    assert column(rows, "held_out/accuracy")[0] == [2, 4]
    half = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=2))
    stage(half, tmp_path).run()
    before = weights(tmp_path)
    stage(CONFIG, tmp_path).run()
    after = weights(tmp_path)
    assert same(after, weights(whole))
    assert (tmp_path / SCORER).read_text() == (whole / SCORER).read_text()
    assert not np.array_equal(before[HEAD]["weight"], after[HEAD]["weight"])
    assert not np.array_equal(before["embed"]["weight"], after["embed"]["weight"])
    assert np.array_equal(before["lm_head"]["weight"], after["lm_head"]["weight"])


@pytest.mark.slow
def test_resumes_run_that_was_stopped(trained, one_device, tmp_path):
    check_run_and_one_that_was_stopped(trained, tmp_path)


@pytest.mark.slow
def test_resumes_run_that_was_stopped_on_all_devices(tmp_path):
    stage(CONFIG, tmp_path / "whole").run()
    assert (tmp_path / "whole/report/index.html").exists()
    check_run_and_one_that_was_stopped(tmp_path / "whole", tmp_path / "parted")


def test_the_backbone_is_there_for_others(trained):
    """Without the head it is a model like all others."""
    load = models.open_weights(trained, CONFIG.model, may_differ=("^score/",))
    assert HEAD not in load()
    with pytest.raises(ValueError, match="score/weight"):
        models.load_model(trained)


def two_steps(params, frozen):
    """(weights before, weights after, metrics of the second step)"""
    batch = PairSource(PAIRS, dataclasses.replace(CONFIG, pairs=3, length=16)).next(2)
    optimizer = dataclasses.replace(CONFIG.optimizer, frozen=frozen)
    step = make_outcome_step(CONFIG.model, CONFIG.step, optimizer, lambda step: 1e-2, pairs=3)
    state = step.initialise(jax.random.key(0), params)
    before = jax.device_get(state["params"])
    for _ in range(2):
        state, metrics = step.train(state, batch)
    assert int(state["step"]) == 2
    return before, jax.device_get(state["params"]), metrics


def same(a, b):
    return all(np.array_equal(*both, equal_nan=True) for both in zip(*map(jax.tree.leaves, (a, b))))


def test_the_head_alone_may_learn():
    before, after, metrics = two_steps(None, ("^(?!score/)",))
    assert not before.pop(HEAD)["weight"].any()
    assert np.abs(after.pop(HEAD)["weight"]).max() > 1e-3
    assert same(before, after)
    assert metrics["loss"]["total"] < np.log(2) and metrics["margin"] > 0
    assert not metrics["skipped"]


def test_a_step_that_is_not_finite_changes_nothing():
    params = drawn_params()
    params["final_norm"] = params["final_norm"] * np.nan
    before, after, metrics = two_steps(params, CONFIG.optimizer.frozen)
    assert same(before, after) and metrics["skipped"]


def attempts(config=CONFIG):
    """Each chosen reply, then the rejected one."""
    return [
        (Task(id=f"{i}", kind="general", messages=one.messages), Attempt(messages=(reply,)))
        for i, one in enumerate(config.preferences())
        for reply in (one.chosen, one.rejected)
    ]


def test_a_trained_model_scores_as_it_did_in_training(trained):
    model, params = OutcomeModel.load(trained, rows=2), weights(trained)
    asked = attempts()[:6]
    ids = [model.encode(*one) for one in asked]
    want = [oracle.score(hidden(params, own), params[HEAD]["weight"]) for own in ids]
    np.testing.assert_allclose(model.score(asked), want, atol=1e-5)
    learnt, _ = render_pairs(CONFIG.preferences(), Tokenizer.load(trained / "tokenizer"), CONFIG)
    found = model.score_ids([ids for pair in learnt[: CONFIG.max_eval_pairs] for ids in pair])
    assert (model.mean, model.std) == pytest.approx((np.mean(found), np.std(found)), rel=1e-3)
    assert mean_and_std([1.0, 3.0]) == (2.0, 1.0)


@pytest.mark.slow
def test_scores_do_not_depend_on_the_mesh(trained):
    one, cut = (
        OutcomeModel.load(trained, rows=4, mesh=mesh)
        for mesh in (None, make_mesh(fsdp=4, context=2))
    )
    asked = attempts()[:6]
    np.testing.assert_allclose(cut.score(asked), one.score(asked), atol=1e-5)


def test_reasoning_is_not_judged(trained):
    model = OutcomeModel.load(trained)
    task = attempts()[0][0]
    said = {"role": "assistant", "content": "Yes."}
    plain = model.encode(task, Attempt(messages=(said,)))
    for more in ({"reasoning_content": "Hm."}, {"content": "<think>Hm.</think>Yes."}):
        assert model.encode(task, Attempt(messages=({**said, **more},))) == plain
    assert model.encode(task, Attempt(messages=({**said, "content": "No."},))) != plain


def test_what_is_asked_together_is_scored_together(trained):
    model, sizes = OutcomeModel.load(trained), []
    asked, compute = attempts()[:10], model.score_ids
    want = model.score(asked)
    model.score_ids = lambda ids: sizes.append(len(ids)) or compute(ids)
    outcome = BatchedScorer(model, batch_size=4)

    async def all_of_them():
        return await asyncio.gather(*(outcome(*one) for one in asked))

    for _ in range(2):  # each time in a loop of its own
        assert asyncio.run(all_of_them()) == pytest.approx(want, abs=1e-5)
    assert sizes == [4, 4, 2] * 2
    config = GeneralConfig(
        orm=1.0,
        grm=0.0,
        squash=False,
        repetition=None,
        mixing=None,
    )
    reward = asyncio.run(HybridReward(config=config, orm=outcome)(*asked[0]))
    assert reward.value == pytest.approx((want[0] - model.mean) / model.std, abs=1e-3)


def test_who_asks_is_told_what_went_wrong(trained):
    model, let_go = OutcomeModel.load(trained), threading.Event()
    good, (task, _) = attempts()[0], attempts()[1]
    long = task, Attempt(messages=({"role": "assistant", "content": "word " * 200},))
    unanswered = task, Attempt(messages=())

    async def together(outcome, *asked):
        return await asyncio.gather(*(outcome(*one) for one in asked), return_exceptions=True)

    found = asyncio.run(together(BatchedScorer(model), good, long, unanswered))
    assert isinstance(found[0], float)
    assert "tokens, a row 128; raise length" in str(found[1])
    assert "only a chat that ends with an assistant's message" in str(found[2])
    assert isinstance(found[1], UnreadableReply) and isinstance(found[2], UnreadableReply)
    endless = (
        Task(id="t", kind="general", messages=({"role": "user", "content": "word " * 200},)),
        good[1],
    )
    [error] = asyncio.run(together(BatchedScorer(model), endless))
    assert isinstance(error, ValueError) and not isinstance(error, UnreadableReply)

    def broken(ids):
        raise RuntimeError("no memory")

    model.score_ids = broken
    assert "no memory" in str(asyncio.run(together(BatchedScorer(model), good))[0])
    model.score_ids = lambda ids: let_go.wait(30) and []

    async def impatient():
        try:
            return await together(BatchedScorer(model, timeout_s=0.05), good)
        finally:
            let_go.set()

    assert isinstance(asyncio.run(impatient())[0], TimeoutError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pairs": 0}, "pairs is 0; it must be positive"),
        ({"held_out_fraction": 1.0}, "held_out_fraction is 1.0; it must be between 0 and 1"),
        (
            {"step": dataclasses.replace(CONFIG.step, rows_per_device=2)},
            "rows_per_device is 2; a pair may stand in two rows",
        ),
    ],
)
def test_contradictions_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **changes)


def test_what_cannot_run_is_refused_before_it_starts(tmp_path, monkeypatch):
    pairs = CONFIG.preferences()
    [asked] = pairs[0].messages
    reply = {"role": "assistant", "content": "Yes."}
    alike = Preference(
        messages=(asked,), chosen={**reply, "reasoning_content": "Hm."}, rejected=reply
    )
    cases = [
        (CONFIG, [*pairs[:2], alike], "pair 3: both replies read alike"),
        (dataclasses.replace(CONFIG, length=8), pairs, "pair 1: a chat has .* tokens, a row 8"),
        (CONFIG, [], "of 0 pairs none is left for training"),
        (dataclasses.replace(CONFIG, held_out_fraction=1e-9), pairs, "none is left for evaluation"),
        (
            dataclasses.replace(CONFIG, requires_checkpoint=True),
            pairs,
            "starts from trained weights",
        ),
    ]
    for config, given, words in cases:
        with pytest.raises(ValueError, match=words):
            stage(config, tmp_path, given)
    with pytest.raises(ValueError, match="there are no files"):
        reward_model.get_config("small").make_stage(tmp_path)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="in one process and this pod has 2"):
        stage(CONFIG, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_of_a_model_the_new_head_learns_and_the_old_one_rests(variant):
    config = reward_model.get_config(variant)
    groups = groups_of(config.optimizer, outcome_model.axis_letters(config.model))
    assert groups[HEAD]["weight"] == groups["embed"]["weight"] == "adamw"
    assert groups["lm_head"]["weight"] == "frozen"


def test_what_cannot_be_loaded_is_refused(trained, tmp_path):
    with pytest.raises(ValueError, match="no reward model of a finished run"):
        OutcomeModel.load(tmp_path)
    fields = json.loads((trained / SCORER).read_text())
    for name in ("config.json", "tokenizer", "checkpoints"):
        (tmp_path / name).symlink_to(trained / name)
    (tmp_path / SCORER).write_text(json.dumps({**fields, "step": 2}))
    with pytest.raises(ValueError, match="is of step 2, the newest checkpoint of 4"):
        OutcomeModel.load(tmp_path)
    (tmp_path / SCORER).write_text(json.dumps({**fields, "std": 0.0}))
    with pytest.raises(ValueError, match="std is 0.0; the scores are all equal"):
        OutcomeModel.load(tmp_path)
    for numbers in ({"timeout_s": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="make both positive"):
            BatchedScorer(OutcomeModel.load(trained), **numbers)


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_held_out_pairs_are_ranked_right_unless_labels_are_chance(shuffled, tmp_path):
    """Of other conversations; where who is preferred was drawn by lot, there is nothing to learn."""
    config = dataclasses.replace(
        CONFIG,
        schedule=ScheduleConfig(kind="linear", peak=2e-2, end=1e-3, warmup_steps=3, total_steps=40),
        train=TrainConfig(eval_interval=0),
        pairs=16,
        num_synthetic=400,
        max_eval_pairs=100,
    )
    pairs, lots = config.preferences(), np.random.default_rng(0)
    if shuffled:
        pairs = [
            dataclasses.replace(one, chosen=one.rejected, rejected=one.chosen)
            if lots.integers(2)
            else one
            for one in pairs
        ]
    training = stage(config, tmp_path, pairs)
    training.run()
    [accuracy] = column(read(tmp_path), "held_out/accuracy")[1]
    assert 0.3 < accuracy < 0.7 if shuffled else accuracy >= 0.9
