"""Provides the base models, the held-out questions and the trained models of the SFT ablations.

In one WORKDIR these ablations train the lifecycle's first stages once for all of them.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from experiments import lifecycle
from experiments.ablations.arms import Arm, Trial, last_stage
from glm5_jax.checkpoint import store
from glm5_jax.config import ModelConfig
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.conversation import Conversation
from glm5_jax.evals.chats import Answer, ChatPrompt, generate_answers
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig

HELD_OUT = 0.05
SFT = "sft"  # the lifecycle's stage, which an arm replaces


def arm(name: str, size: str, config: ExperimentConfig) -> Arm:
    """Returns an arm that fine-tunes the lifecycle's sparse model with a config; earlier stages keep their seed."""
    stages_config = lifecycle.get_config(size)
    names = [field.name for field in dataclasses.fields(stages_config)]
    before = [getattr(stages_config, name) for name in names[: names.index(SFT)]]
    before = [stage for stage in before if stage is not None]  # a size may lack a stage
    config = dataclasses.replace(
        config,
        sample=SampleConfig(),
        data=dataclasses.replace(config.data, held_out_fraction=HELD_OUT),
    )
    return Arm(name, (*map(_quiet, before), config), num_fixed=len(before))


def _quiet(stage: ExperimentConfig) -> ExperimentConfig:
    return dataclasses.replace(stage, sample=SampleConfig())


def chats_of(stages: Sequence[StageConfig]) -> ChatSourceConfig:
    """Returns the chats that the last of an arm's or a trial's stages trains on."""
    source = last_stage(stages, ExperimentConfig).data.sources[0]
    assert isinstance(source, ChatSourceConfig), f"source {source.name!r} has no chats"
    return source


@functools.cache
def held_out(source: ChatSourceConfig, count: int) -> tuple[Conversation, ...]:
    """Returns `count` conversations that no arm trains on, each with a different first question.

    Raises ValueError if there are fewer.
    """
    by_question, chats = {}, source.open(Tokenizer.default(), HELD_OUT, training=False)
    for i in range(len(chats)):
        conversation = chats.conversation(i)
        by_question.setdefault(conversation.messages[0]["content"], conversation)
        if len(by_question) == count:
            return tuple(by_question.values())
    raise ValueError(
        f"{source.name} has {len(by_question)} held-out questions, not {count}; make more"
    )


class Assistant(NamedTuple):
    """A fine-tuned model that replies to requests."""

    params: dict
    cfg: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def of(cls, trial: Trial, folder: pathlib.Path) -> "Assistant":
        """Returns the model of a finished trial."""
        cfg = trial.stages[-1].model
        params = store.load_params(folder, glm5.abstract_params(cfg, "float32"))
        return cls(params, cfg, Tokenizer.load(folder / "tokenizer"))

    def __call__(self, requests: list[ChatPrompt], num_new: int, **options) -> list[Answer]:
        """Returns the answers of `evals.chats.generate_answers`."""
        return generate_answers(self.params, self.cfg, self.tokenizer, requests, num_new, **options)
