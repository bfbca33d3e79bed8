"""Teachers score the tokens of their origin: by the learner's forward, from weights in turn, or by a server."""

import functools
import math

import jax
import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.algorithm.losses import PolicyConfig
from glm5_jax.rl.config import RlConfig, Teacher, policy_step_config
from glm5_jax.rl.trainers.teacher_client import TeacherClient
from glm5_jax.rl.trainers.teachers import TeacherScorer
from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response
from glm5_jax.training.gradients import score_function
from tests.rl.pushing import DENSE, make_engine, params, serving

LENGTH, ROWS = 48, 2


def record(group, length, seed=0, **options):
    """Returns a record whose second half is sampled."""
    mask = np.arange(length) >= length // 2
    fields = {
        "token_ids": np.random.default_rng(seed).integers(0, DENSE.vocab_size, length),
        "loss_mask": mask,
        "rollout_logp": np.where(mask, -1.0, np.nan),
        "weight_version": np.where(mask, 0, -1),
        "ref_kl_weight": mask / mask.sum(),
        "group_id": group,
        "rollout_id": f"{group}-{seed}",
    }
    return TokenRecord(**fields | options)


class Loads:
    """Teachers whose weights are the log-prob that they give to every token.

    Attributes:
      loaded: origins in the order in which their weights were loaded.
    """

    def __init__(self, **values):
        self.loaded = []
        self.teachers = {o: functools.partial(self.load, o, value) for o, value in values.items()}

    def load(self, origin, value):
        self.loaded.append(origin)
        return value

    def scorer(self, max_loaded):
        return TeacherScorer(
            self.teachers,
            lambda value, batch: np.full(batch["token_ids"].shape, value, np.float32),
            length=LENGTH,
            max_loaded=max_loaded,
        )


ORIGINS = {"0": "math", "1": "code", "2": "math", "3": "other"}


@pytest.mark.parametrize(
    ("max_loaded", "loaded"),
    [
        (3, ["math", "code", ""]),
        # The last teachers of a step are the first ones of the next.
        (2, ["math", "code", "", "math"]),
        (1, ["math", "code", "", "math", "code"]),
    ],
)
def test_loads_teachers_in_turn(max_loaded, loaded):
    loads = Loads(math=-1.0, code=-2.0, **{"": -3.0})
    scorer = loads.scorer(max_loaded)
    records = [record(group, 20, seed) for seed, group in enumerate(ORIGINS)]
    unsampled = dict.fromkeys(("ref_kl_weight", "rollout_logp", "weight_version"))
    text = record("0", 10, loss_mask=np.zeros(10), **unsampled)
    for _ in range(2):
        *scored, same = scorer.add_logprobs([*records, text], ORIGINS, ROWS)
        assert same is text
        for one, value in zip(scored, (-1.0, -2.0, -1.0, -3.0), strict=True):
            assert (one.ref_logp[one.loss_mask == 1] == value).all()
            assert np.isnan(one.ref_logp[one.loss_mask == 0]).all()
    assert loads.loaded == loaded


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rejects_teacher_whose_logprobs_are_not_finite(value):
    """A batch would take NaN for the log-prob 0, so the learner would imitate its own sample."""
    scorer = Loads(**{"": value}).scorer(1)
    with pytest.raises(ValueError, match="the teacher gives a token the log-prob (-?inf|nan)"):
        scorer.add_logprobs([record("0", 20)], ORIGINS, ROWS)


def test_rejects_server_that_leaves_out_a_logprob():
    logprobs = [None, *[-1.0] * 17, None, -1.0]
    with Completions({"token_logprobs": logprobs}).running() as url:
        scorer = TeacherScorer(
            {"math": TeacherClient(url)}, lambda *_: np.zeros(0), length=LENGTH, max_loaded=1
        )
        with pytest.raises(
            ValueError, match="the teacher of 'math' gives a token the log-prob nan"
        ):
            scorer.add_logprobs([record("0", 20)], {"0": "math"}, ROWS)


def test_server_scores_as_learner_forward():
    """The log-probs of an engine and of the learner differ by float32 rounding only."""
    weights = params(1, DENSE)
    records = [record("0", length, seed) for seed, length in enumerate((40, 23, 31))]
    learner = jax.jit(score_function(DENSE, policy_step_config()))
    scored = {}
    with serving(DENSE, engine=make_engine(DENSE, weights)) as server:
        for name, teacher in (("forward", lambda: weights), ("server", TeacherClient(server.url))):
            scorer = TeacherScorer(
                {"": teacher}, lambda *args: np.asarray(learner(*args)), length=LENGTH, max_loaded=1
            )
            scored[name] = scorer.add_logprobs(records, {"0": "math"}, ROWS)
    for forward, served in zip(scored["forward"], scored["server"], strict=True):
        mask = forward.loss_mask == 1
        assert np.isfinite(forward.ref_logp[mask]).all() and np.ptp(forward.ref_logp[mask]) > 0.1
        np.testing.assert_allclose(forward.ref_logp[mask], served.ref_logp[mask], atol=1e-4)


class Completions(HttpServer):
    """Server that answers /v1/completions with these log-probs."""

    def __init__(self, logprobs):
        super().__init__(ListenConfig(port=0))
        self._logprobs = logprobs

    def routes(self):
        return {"POST": {"/v1/completions": self._complete}}

    async def _complete(self, request):
        return json_response({"choices": [{"logprobs": self._logprobs}]})


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        (None, "has sent no log-probs of the prompt"),
        ({"token_logprobs": [None, -1.0]}, "has sent 2 log-probs of 20 tokens"),
        ({"token_logprobs": [None, *[0.5] * 19]}, "has sent 0.5 as a log-prob, which is above 0"),
    ],
)
def test_rejects_server_without_logprobs_of_prompt(logprobs, words):
    with Completions(logprobs).running() as url, pytest.raises(ValueError, match=words):
        TeacherClient(url).score([record("0", 20)])


def test_reports_server_that_does_not_answer():
    with Completions(None).running() as url:
        pass
    with pytest.raises(ValueError, match=f"the teacher at {url}: no server answers"):
        TeacherClient(url).score([record("0", 20)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Teacher(origin="sft"),
            "the teacher of 'sft' has the checkpoint '' and the url None",
        ),
        (lambda: Teacher(checkpoint="x", url="http://a:1"), "give one of them"),
        (
            lambda: RlConfig(
                objective="teachers",
                teachers=(Teacher(url="http://a:1"),),
                policy=PolicyConfig(temperature=0.8),
            ),
            "policy.temperature is 0.8, and servers score tokens at temperature 1",
        ),
        (lambda: RlConfig(max_loaded_teachers=0), "max_loaded_teachers is 0; use at least 1"),
    ],
)
def test_rejects_invalid_teacher(make, words):
    with pytest.raises(ValueError, match=words):
        make()
