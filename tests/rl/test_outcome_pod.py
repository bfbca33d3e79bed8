"""Several processes train the reward model that one process trains."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.parallel import multihost
from glm5_jax.rl.reward_model.outcome_model import OutcomeModel
from glm5_jax.training import report
from glm5_jax.training.experiment import MeshConfig
from tests.rl.test_async_trainer_pod import DEVICES, run_processes
from tests.rl.test_outcome_model import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(workdir):
    """Runs the training in each process."""
    report.write_page = lambda workdir: None
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=DEVICES))
    config.make_stage(workdir).run()
    multihost.any_process(False)


def test_two_processes_train_like_one(tmp_path):
    for count in (1, 2):
        workdir = str(tmp_path / str(count))
        code = f"from tests.rl.test_outcome_pod import train\ntrain({workdir!r})"
        run_processes(count, code)
    for name in ("loss/preference", "margin", "held_out/preference"):
        one, two = (column(read(tmp_path / str(count)), name) for count in (1, 2))
        assert one[0] == two[0] and one[0][-1] == CONFIG.steps
        np.testing.assert_allclose(two[1], one[1], rtol=1e-4, atol=1e-6)
    models = [OutcomeModel.load(tmp_path / str(count)) for count in (1, 2)]
    scores = [model.score_ids([[5, 6, 7], [8, 9]]) for model in models]
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-3, atol=1e-5)
    assert models[0].std > 0 and models[1].std == pytest.approx(models[0].std, rel=1e-3)
