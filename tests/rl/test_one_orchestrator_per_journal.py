"""One orchestrator, one gateway and one trainer per workdir: a second one is refused before it reads or writes
anything."""

import dataclasses

import pytest

from experiments import rl_agentic
from glm5_jax.rl.orchestrator.server import Orchestrator
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.program import ProgramConfig
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.trainers.async_trainer import AsyncRlTrainer
from glm5_jax.runtime.folder_lock import FolderInUse, FolderLock
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.metrics import TrainingStopped
from tests.rl.fleet import orchestrator_config
from tests.rl.small_stage import TOKENIZER, shared_train_step
from tests.rl.test_async_trainer import config_of

NOBODY = "http://127.0.0.1:9"


def test_rejects_second_orchestrator_until_first_has_ended(tmp_path):
    config = orchestrator_config(NOBODY, journal=str(tmp_path))
    with Orchestrator(config).running():
        before = sorted(tmp_path.iterdir())
        with pytest.raises(FolderInUse, match="is in use by process"):
            Orchestrator(config)
        assert sorted(tmp_path.iterdir()) == before
    with Orchestrator(config).running():
        pass


def test_releases_journal_that_orchestrator_rejects(tmp_path):
    with Orchestrator(orchestrator_config(NOBODY, journal=str(tmp_path))).running():
        pass
    with pytest.raises(ValueError, match="is of group=4"):
        Orchestrator(orchestrator_config(NOBODY, group=2, journal=str(tmp_path)))
    FolderLock(tmp_path).release()


def test_rejects_second_gateway(tmp_path):
    config = GatewayConfig(port=0, journal=str(tmp_path))
    with Gateway(Tokenizer.load("bytes"), [NOBODY], config).running():
        with pytest.raises(FolderInUse, match="is in use by process"):
            Gateway(Tokenizer.load("bytes"), [NOBODY], config)


def test_rejects_second_trainer(tmp_path, one_device):
    TOKENIZER.save(tmp_path / "tokenizer")
    config = config_of(str(tmp_path / "tokenizer"))
    stage = AsyncRlTrainer(config, tmp_path, Untouched(), Untouched(), step_maker=shared_train_step)
    with FolderLock(tmp_path), pytest.raises(TrainingStopped, match="is in use by process"):
        stage.run()
    assert not (tmp_path / "checkpoints").exists()


def test_restarts_program_whose_port_is_in_use(tmp_path, monkeypatch, capsys):
    with Orchestrator(orchestrator_config(NOBODY)).running() as url:
        config = orchestrator_config(NOBODY, port=int(url.rpartition(":")[2]))
        assert code_of(lambda *_: Orchestrator(config), tmp_path, monkeypatch) == 1
    assert "address already in use" in capsys.readouterr().err


def test_does_not_restart_program_after_user_error(tmp_path, monkeypatch, capsys):
    def make(*_):
        return Orchestrator(orchestrator_config("no url"))

    assert code_of(make, tmp_path, monkeypatch) == 2
    assert "gateway is 'no url'" in capsys.readouterr().err


class Untouched:
    """Orchestrator and pusher that get no request."""


def code_of(make, workdir, monkeypatch):
    """Returns the exit code of a program."""
    monkeypatch.setattr(servers, "SERVERS", {"orchestrator": make})
    program = ProgramConfig(role="orchestrator")
    return rl_agentic.serve(dataclasses.replace(rl_agentic.tiny(), program=program), workdir)
