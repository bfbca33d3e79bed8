"""The outcome reward model: its formulas, runs with and without a signal, and its scores."""

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


STEPS = {}


def shared_outcome_step(cfg, step, optimizer, schedule, mesh, pairs):
    """Returns a step that is compiled once for all runs with equal arguments and the same schedule."""
    key = repr((cfg, step, optimizer, mesh, pairs))
    if key not in STEPS:
        compiled_step = make_outcome_step(cfg, step, optimizer, schedule, mesh, pairs)
        STEPS[key] = compiled_step._replace(
            train=lambda state, batch: compiled_step.train(state, batch)
        )
    return STEPS[key]


def stage(config, workdir, pairs=None):
    """Returns the trainer of a config."""
    pairs = config.preferences() if pairs is None else pairs
    return OutcomeTrainer(config, workdir, pairs, step_maker=shared_outcome_step)


def final_params(workdir):
    """Returns the final parameters of a run."""
    params = store.load_params(workdir, outcome_model.abstract_params(CONFIG.model))
    return jax.device_get(params)


def random_params(seed=0):
    """Returns random parameters with a random head."""
    cfg = CONFIG.model
    params = glm5.params_of(glm5.Glm5(cfg, rngs=nnx.Rngs(seed)))
    head = np.random.default_rng(seed).normal(size=cfg.hidden_size)
    return {**params, HEAD: {"weight": jnp.asarray(head, jnp.float32)}}


def test_oracle_gradient_equals_finite_difference():
    chosen, rejected = [0.5, -2.0, 3.0], [1.5, -1.0, -3.0]
    _, chosen_slopes, rejected_slopes = oracle.loss(chosen, rejected)
    for side, slopes in ((chosen, chosen_slopes), (rejected, rejected_slopes)):
        for i, slope in enumerate(slopes):
            values = []
            for sign in (1, -1):
                side[i] += sign * 1e-5
                values.append(oracle.loss(chosen, rejected)[0])
                side[i] -= sign * 1e-5
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope, abs=1e-9)


def test_loss_of_pairs_in_any_position_equals_oracle():
    """Value and gradient, with replies of a pair in different rows and in both orders."""
    scores = np.random.default_rng(0).normal(size=(3, 5)) * 3
    pair = np.zeros((3, 5), np.int32)
    chosen, rejected = [(0, 1), (2, 4), (1, 0)], [(2, 2), (0, 0), (1, 3)]
    for number, (better, worse) in enumerate(zip(chosen, rejected), 1):
        pair[better], pair[worse] = number, -number
    loss, slopes = jax.value_and_grad(lambda x: bradley_terry_loss(pair_margins(x, pair, 3)))(
        jnp.asarray(scores, jnp.float32)
    )
    value, chosen_slopes, rejected_slopes = oracle.loss(
        *([scores[index] for index in side] for side in (chosen, rejected))
    )
    expected = np.zeros_like(scores)
    for side, values in ((chosen, chosen_slopes), (rejected, rejected_slopes)):
        for index, slope in zip(side, values):
            expected[index] = slope
    assert float(loss) == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(slopes, expected, atol=1e-6)


def test_loss_of_any_margin_is_finite():
    value, slopes = jax.value_and_grad(bradley_terry_loss)(jnp.array([300.0, -300.0]))
    assert float(value) == 150 and slopes.tolist() == [0, -0.5]


@jax.jit
def forward(params, row):
    return glm5.forward(params, row, CONFIG.model).hidden[0]


def hidden(params, ids):
    """Returns the hidden states [t d] of ids; all calls use 128 tokens, so that one program serves them."""
    body = {name: leaf for name, leaf in params.items() if name != HEAD}
    row = np.zeros((1, CONFIG.length), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(forward(body, row), np.float64)[: len(ids)]


def test_step_equals_oracle():
    """The loss of packed rows is that of separate chats, and its gradient reaches the head."""
    source = PairSource(PAIRS, dataclasses.replace(CONFIG, pairs=3, length=16, seed=1))
    batch, params = source.next(2), random_params()
    step = make_outcome_step(
        CONFIG.model, CONFIG.step, CONFIG.optimizer, lambda step: 1e-2, pairs=3
    )
    head = np.asarray(params[HEAD]["weight"], np.float64)
    ends = [[hidden(params, ids) for ids in side] for side in zip(*PAIRS)]
    scores = [[oracle.score(states, head) for states in side] for side in ends]
    value, chosen_slopes, rejected_slopes = oracle.loss(*scores)
    loss, count = step.evaluate(params, batch)
    assert int(count) == 3 and float(loss) / 3 == pytest.approx(value, rel=1e-4)
    expected = sum(
        slope * states[-1]
        for side, slopes in zip(ends, (chosen_slopes, rejected_slopes))
        for states, slope in zip(side, slopes)
    )

    def objective(head):
        loss = step.evaluate({**params, HEAD: {"weight": head}}, batch)[0]
        return loss / 3

    gradient = jax.grad(objective)(params[HEAD]["weight"])
    np.testing.assert_allclose(gradient, expected, atol=1e-4)


def test_scores_do_not_depend_on_packing():
    params = random_params()
    score, traced = outcome_model.make_token_scorer(CONFIG.model), []
    run = jax.jit(lambda *args: traced.append(args) or score(*args))
    sequences = [[1 + i % 9, *range(2, 3 + i % 5)] for i in range(40)]
    packed = score_sequences(run, params, sequences, 16, 2)
    separate = [oracle.score(hidden(params, ids), params[HEAD]["weight"]) for ids in sequences]
    np.testing.assert_allclose(packed, separate, atol=1e-4)
    assert len(traced) == 1


def pairs_of(batch):
    """Returns the pairs of a batch, in their order."""
    ids_by_number = {}
    for tokens, segments, pair in zip(batch["token_ids"], batch["segment_ids"], batch["pair"]):
        for segment in range(1, segments.max() + 1):
            in_segment = segments == segment
            ids_by_number[pair[in_segment][-1]] = tokens[in_segment].tolist()
    return [
        Pair(ids_by_number[number], ids_by_number[-number])
        for number in range(1, len(ids_by_number) // 2 + 1)
    ]


def test_pair_source_runs_in_epochs_and_resumes():
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
    batch, resumed_batch = source.next(4), other.next(4)
    assert all(np.array_equal(batch[name], resumed_batch[name]) for name in batch)
    assert np.sort(batch["pair"][batch["pair"] != 0]).tolist() == [-2, -1, 1, 2]
    with pytest.raises(ValueError, match="the run was on other pairs"):
        PairSource(PAIRS[:2], config).check(state)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Returns the workdir of an uninterrupted run of four steps."""
    workdir = tmp_path_factory.mktemp("reward") / "uninterrupted"
    with pytest.MonkeyPatch.context() as patcher:
        train_on_one_device(patcher)
        stage(CONFIG, workdir).run()
    return workdir


def check_resumed_run(uninterrupted, tmp_path):
    """Checks that a run trains, and that a stopped and resumed run equals it bit by bit."""
    rows = read(uninterrupted)
    assert column(rows, "loss/preference")[1][0] == pytest.approx(np.log(2), rel=1e-6)
    assert column(rows, "held_out/accuracy")[0] == [2, 4]
    half = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=2))
    stage(half, tmp_path).run()
    before = final_params(tmp_path)
    stage(CONFIG, tmp_path).run()
    after = final_params(tmp_path)
    assert all_equal(after, final_params(uninterrupted))
    assert (tmp_path / SCORER).read_text() == (uninterrupted / SCORER).read_text()
    assert not np.array_equal(before[HEAD]["weight"], after[HEAD]["weight"])
    assert not np.array_equal(before["embed"]["weight"], after["embed"]["weight"])
    assert np.array_equal(before["lm_head"]["weight"], after["lm_head"]["weight"])


@pytest.mark.slow
def test_stopped_run_resumes_to_equal_weights(finished_run, one_device, tmp_path):
    check_resumed_run(finished_run, tmp_path)


@pytest.mark.slow
def test_stopped_run_resumes_to_equal_weights_on_all_devices(tmp_path):
    stage(CONFIG, tmp_path / "uninterrupted").run()
    assert (tmp_path / "uninterrupted/report/index.html").exists()
    check_resumed_run(tmp_path / "uninterrupted", tmp_path / "resumed")


def test_loads_backbone_without_head(finished_run):
    """Without the head it is a model like any other."""
    load = models.open_weights(finished_run, CONFIG.model, may_differ=("^score/",))
    assert HEAD not in load()
    with pytest.raises(ValueError, match="score/weight"):
        models.load_model(finished_run)


def two_steps(params, frozen):
    """Returns (weights before, weights after, metrics of the second step)."""
    batch = PairSource(PAIRS, dataclasses.replace(CONFIG, pairs=3, length=16)).next(2)
    optimizer = dataclasses.replace(CONFIG.optimizer, frozen=frozen)
    step = make_outcome_step(CONFIG.model, CONFIG.step, optimizer, lambda step: 1e-2, pairs=3)
    state = step.initialise(jax.random.key(0), params)
    before = jax.device_get(state["params"])
    for _ in range(2):
        state, metrics = step.train(state, batch)
    assert int(state["step"]) == 2
    return before, jax.device_get(state["params"]), metrics


def all_equal(a, b):
    """Returns whether two trees are equal bit by bit."""
    return all(np.array_equal(*both, equal_nan=True) for both in zip(*map(jax.tree.leaves, (a, b))))


def test_trains_only_head_if_rest_is_frozen():
    before, after, metrics = two_steps(None, ("^(?!score/)",))
    assert not before.pop(HEAD)["weight"].any()
    assert np.abs(after.pop(HEAD)["weight"]).max() > 1e-3
    assert all_equal(before, after)
    assert metrics["loss"]["total"] < np.log(2) and metrics["margin"] > 0
    assert not metrics["skipped"]


def test_skips_step_with_nan_loss():
    params = random_params()
    params["final_norm"] = params["final_norm"] * np.nan
    before, after, metrics = two_steps(params, CONFIG.optimizer.frozen)
    assert all_equal(before, after) and metrics["skipped"]


def attempts(config=CONFIG):
    """Returns all replies: of each pair the chosen one, then the rejected one."""
    return [
        (Task(id=f"{i}", kind="general", messages=preference.messages), Attempt(messages=(reply,)))
        for i, preference in enumerate(config.preferences())
        for reply in (preference.chosen, preference.rejected)
    ]


def test_loaded_model_scores_as_in_training(finished_run):
    model, params = OutcomeModel.load(finished_run, rows=2), final_params(finished_run)
    samples = attempts()[:6]
    ids = [model.encode(*sample) for sample in samples]
    expected = [
        oracle.score(hidden(params, sample_ids), params[HEAD]["weight"]) for sample_ids in ids
    ]
    np.testing.assert_allclose(model.score(samples), expected, atol=1e-5)
    pairs, _ = render_pairs(
        CONFIG.preferences(), Tokenizer.load(finished_run / "tokenizer"), CONFIG
    )
    scores = model.score_ids([ids for pair in pairs[: CONFIG.max_eval_pairs] for ids in pair])
    assert (model.mean, model.std) == pytest.approx((np.mean(scores), np.std(scores)), rel=1e-3)
    assert mean_and_std([1.0, 3.0]) == (2.0, 1.0)


@pytest.mark.slow
def test_scores_do_not_depend_on_mesh(finished_run):
    single, sharded = (
        OutcomeModel.load(finished_run, rows=4, mesh=mesh)
        for mesh in (None, make_mesh(fsdp=4, context=2))
    )
    samples = attempts()[:6]
    np.testing.assert_allclose(sharded.score(samples), single.score(samples), atol=1e-5)


def test_ignores_reasoning(finished_run):
    model = OutcomeModel.load(finished_run)
    task = attempts()[0][0]
    message = {"role": "assistant", "content": "Yes."}
    plain = model.encode(task, Attempt(messages=(message,)))
    for change in ({"reasoning_content": "Hm."}, {"content": "<think>Hm.</think>Yes."}):
        assert model.encode(task, Attempt(messages=({**message, **change},))) == plain
    assert model.encode(task, Attempt(messages=({**message, "content": "No."},))) != plain


def test_batches_concurrent_requests(finished_run):
    model, sizes = OutcomeModel.load(finished_run), []
    samples, compute = attempts()[:10], model.score_ids
    expected = model.score(samples)
    model.score_ids = lambda ids: sizes.append(len(ids)) or compute(ids)
    scorer = BatchedScorer(model, batch_size=4)

    async def score_all():
        return await asyncio.gather(*(scorer(*sample) for sample in samples))

    for _ in range(2):  # each time in a new event loop
        assert asyncio.run(score_all()) == pytest.approx(expected, abs=1e-5)
    assert sizes == [4, 4, 2] * 2
    config = GeneralConfig(
        orm=1.0,
        grm=0.0,
        squash=False,
        repetition=None,
        mixing=None,
    )
    reward = asyncio.run(HybridReward(config=config, orm=scorer)(*samples[0]))
    assert reward.value == pytest.approx((expected[0] - model.mean) / model.std, abs=1e-3)


def test_reports_error_to_each_request(finished_run):
    model, may_continue = OutcomeModel.load(finished_run), threading.Event()
    good, (task, _) = attempts()[0], attempts()[1]
    long = task, Attempt(messages=({"role": "assistant", "content": "word " * 200},))
    unanswered = task, Attempt(messages=())

    async def score_all(scorer, *samples):
        return await asyncio.gather(
            *(scorer(*sample) for sample in samples), return_exceptions=True
        )

    results = asyncio.run(score_all(BatchedScorer(model), good, long, unanswered))
    assert isinstance(results[0], float)
    assert "tokens, a row 128; raise length" in str(results[1])
    assert "only a chat that ends with an assistant's message" in str(results[2])
    assert isinstance(results[1], UnreadableReply) and isinstance(results[2], UnreadableReply)
    long_prompt = (
        Task(id="t", kind="general", messages=({"role": "user", "content": "word " * 200},)),
        good[1],
    )
    [error] = asyncio.run(score_all(BatchedScorer(model), long_prompt))
    assert isinstance(error, ValueError) and not isinstance(error, UnreadableReply)

    def fail(ids):
        raise RuntimeError("no memory")

    model.score_ids = fail
    assert "no memory" in str(asyncio.run(score_all(BatchedScorer(model), good))[0])
    model.score_ids = lambda ids: may_continue.wait(30) and []

    async def time_out():
        try:
            return await score_all(BatchedScorer(model, timeout_s=0.05), good)
        finally:
            may_continue.set()

    assert isinstance(asyncio.run(time_out())[0], TimeoutError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 0}, "pairs is 0; it must be positive"),
        ({"held_out_fraction": 1.0}, "held_out_fraction is 1.0; it must be between 0 and 1"),
        (
            {"step": dataclasses.replace(CONFIG.step, rows_per_device=2)},
            "rows_per_device is 2; a pair may stand in two rows",
        ),
    ],
)
def test_rejects_contradicting_options(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_rejects_invalid_run_before_start(tmp_path):
    pairs = CONFIG.preferences()
    [question] = pairs[0].messages
    reply = {"role": "assistant", "content": "Yes."}
    equal_replies = Preference(
        messages=(question,), chosen={**reply, "reasoning_content": "Hm."}, rejected=reply
    )
    cases = [
        (CONFIG, [*pairs[:2], equal_replies], "pair 3: both replies read alike"),
        (dataclasses.replace(CONFIG, length=8), pairs, "pair 1: a chat has .* tokens, a row 8"),
        (CONFIG, [], "of 0 pairs none is left for training"),
        (dataclasses.replace(CONFIG, held_out_fraction=1e-9), pairs, "none is left for evaluation"),
        (
            dataclasses.replace(CONFIG, requires_checkpoint=True),
            pairs,
            "starts from trained weights",
        ),
    ]
    for config, preferences, message in cases:
        with pytest.raises(ValueError, match=message):
            stage(config, tmp_path, preferences)
    with pytest.raises(ValueError, match="there are no files"):
        reward_model.get_config("small").make_stage(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_trains_new_head_and_freezes_old_one(variant):
    config = reward_model.get_config(variant)
    groups = groups_of(config.optimizer, outcome_model.axis_letters(config.model))
    assert groups[HEAD]["weight"] == groups["embed"]["weight"] == "adamw"
    assert groups["lm_head"]["weight"] == "frozen"


def test_rejects_unfinished_or_changed_run(finished_run, tmp_path):
    with pytest.raises(ValueError, match="no reward model of a finished run"):
        OutcomeModel.load(tmp_path)
    fields = json.loads((finished_run / SCORER).read_text())
    for name in ("config.json", "tokenizer", "checkpoints"):
        (tmp_path / name).symlink_to(finished_run / name)
    (tmp_path / SCORER).write_text(json.dumps({**fields, "step": 2}))
    with pytest.raises(ValueError, match="is of step 2, the newest checkpoint of 4"):
        OutcomeModel.load(tmp_path)
    (tmp_path / SCORER).write_text(json.dumps({**fields, "std": 0.0}))
    with pytest.raises(ValueError, match="std is 0.0; the scores are all equal"):
        OutcomeModel.load(tmp_path)
    for numbers in ({"timeout_s": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="make both positive"):
            BatchedScorer(OutcomeModel.load(finished_run), **numbers)


@pytest.mark.slow
@pytest.mark.parametrize("has_random_labels", [False, True])
def test_ranks_held_out_pairs_unless_labels_are_random(has_random_labels, tmp_path):
    """Held-out conversations. With random labels there is no signal to train on."""
    config = dataclasses.replace(
        CONFIG,
        schedule=ScheduleConfig(kind="linear", peak=2e-2, end=1e-3, warmup_steps=3, total_steps=40),
        train=TrainConfig(eval_interval=0),
        pairs=16,
        num_synthetic=400,
        max_eval_pairs=100,
    )
    pairs, rng = config.preferences(), np.random.default_rng(0)
    if has_random_labels:
        pairs = [
            dataclasses.replace(pair, chosen=pair.rejected, rejected=pair.chosen)
            if rng.integers(2)
            else pair
            for pair in pairs
        ]
    training = stage(config, tmp_path, pairs)
    training.run()
    [accuracy] = column(read(tmp_path), "held_out/accuracy")[1]
    assert 0.3 < accuracy < 0.7 if has_random_labels else accuracy >= 0.9
