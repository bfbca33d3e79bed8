"""What ablations of SFT share: the base models of a life, questions that were held out, and a trained arm's model.

In one WORKDIR they train that life once for all of them.
"""

import dataclasses
import functools
import pathlib
from typing import NamedTuple

from experiments import lifecycle
from experiments.ablations.arms import Arm, Trial
from glm5_jax.checkpoint import store
from glm5_jax.config import ModelConfig
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.conversation import Conversation
from glm5_jax.evals.chats import Answer, Request, ask
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import ExperimentConfig, SampleConfig

HELD_OUT = 0.05
SFT = "sft"  # the lifecycle's stage, which an arm replaces


def arm(name: str, size: str, config: ExperimentConfig) -> Arm:
    """An arm that fine-tunes the life's sparse model as config says, each seed the same one."""
    life = lifecycle.get_config(size)
    names = [field.name for field in dataclasses.fields(life)]
    before = tuple(getattr(life, name) for name in names[: names.index(SFT)])
    config = dataclasses.replace(
        config,
        sample=SampleConfig(),
        data=dataclasses.replace(config.data, held_out_fraction=HELD_OUT),
    )
    return Arm(name, (*map(_quiet, before), config), given=len(before))


def _quiet(stage: ExperimentConfig) -> ExperimentConfig:
    return dataclasses.replace(stage, sample=SampleConfig())


@functools.cache
def held_out(source: ChatSourceConfig, count: int) -> tuple[Conversation, ...]:
    """So many conversations that no arm trains on, each with another first question.

    ValueError if there are fewer.
    """
    found, chats = {}, source.open(Tokenizer.default(), HELD_OUT, training=False)
    for i in range(len(chats)):
        conversation = chats.conversation(i)
        found.setdefault(conversation.messages[0]["content"], conversation)
        if len(found) == count:
            return tuple(found.values())
    raise ValueError(f"{source.name} has {len(found)} held-out questions, not {count}; make more")


class Assistant(NamedTuple):
    """A fine-tuned model that can be asked."""

    params: dict
    cfg: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def of(cls, trial: Trial, folder: pathlib.Path) -> "Assistant":
        """What a finished trial trained."""
        cfg = trial.stages[-1].model
        params = store.load_params(folder, glm5.abstract(cfg, "float32"))
        return cls(params, cfg, Tokenizer.load(folder / "tokenizer"))

    def __call__(self, requests: list[Request], num_new: int, **options) -> list[Answer]:
        """The answers, as `evals.chats.ask`."""
        return ask(self.params, self.cfg, self.tokenizer, requests, num_new, **options)
