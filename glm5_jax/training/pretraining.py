"""Pre-training and other training on rows of text: mid-training, DSA's stages, SFT."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from glm5_jax.data.loader import Batch, Loader
from glm5_jax.data.mixture import DataConfig
from glm5_jax.model.generate import generate
from glm5_jax.parallel.mesh import BATCH_AXES, Region
from glm5_jax.runtime.files import replace_text
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import report
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.schedule import BatchRampConfig, batch_tokens
from glm5_jax.training.stages import SAMPLES, Evaluator, Stage
from glm5_jax.training.step import Step, make_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Sample texts that a run writes at intervals, for people to read.

    Attributes:
      prompts: texts to continue; empty: no samples.
      tokens: maximum tokens of a sample.
      temperature: sampling temperature; 0: always the likeliest token.
      chat: whether prompts are user messages, each answered with thinking and without.
    """

    prompts: tuple[str, ...] = ()
    tokens: int = 100
    temperature: float = 0.8
    chat: bool = False

    def __post_init__(self):
        if not all(self.prompts):
            raise ValueError(f"prompts is {self.prompts!r}; a prompt must not be empty")
        if self.tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"tokens is {self.tokens} and temperature {self.temperature}; tokens must be positive "
                "and temperature not negative"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(StageConfig):
    """Options of a run that trains on rows of text.

    Attributes:
      data: mixture of texts and its rows.
      batch: tokens per batch.
      sample: sample texts.
    """

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    batch: BatchRampConfig = dataclasses.field(default_factory=BatchRampConfig)
    sample: SampleConfig = SampleConfig()

    @property
    def row_length(self) -> int:
        return self.data.sequence_length

    @property
    def row_length_field(self) -> str:
        return "data.sequence_length"

    @property
    def first_batch_rows(self) -> int:
        return self.batch.start // self.row_length

    def check_rows(self, region: Region) -> None:
        length, shards = self.row_length, region.size(BATCH_AXES)
        for name in ("start", "end", "multiple"):
            tokens = getattr(self.batch, name)
            if tokens % (length * shards) or tokens < length * shards:
                raise ValueError(
                    f"batch.{name} is {tokens} tokens; it must be a multiple of {length * shards} "
                    f"(sequence length {length} * {shards} devices with different rows)"
                )
            if self.data.num_shards and tokens // length % self.data.num_shards:
                raise ValueError(
                    f"batch.{name} is {tokens // length} rows, which cannot be divided among data.num_shards "
                    f"{self.data.num_shards}; use a divisor of the rows"
                )
        super().check_rows(region)

    @property
    def chat_variant(self) -> str | None:
        return self.data.chat_variant

    @property
    def data_example(self) -> str:
        if self.data.has_user_files:
            return ""
        texts, chats = "{'kind': 'jsonl', 'path': 'texts/*.jsonl'}", "{'chats': 'chats/*.jsonl'}"
        return f'data.sources="[{chats if self.chat_variant else texts}]"'

    def make_stage(self, workdir, evaluator=None, previous_stage=None, **options):
        return Pretraining(self, workdir, evaluator, previous_stage=previous_stage, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Inputs of an evaluator: the stage's config and tokenizer, and how to score a batch.

    Attributes:
      batch_rows: rows of an evaluation batch.
      place: puts `batch_rows` rows, which every process holds, onto the devices.
      evaluate: evaluate(params, placed batch) -> (summed negative log-likelihood in nats, number of targets).
    """

    config: ExperimentConfig
    tokenizer: Tokenizer
    batch_rows: int
    place: Callable[[Batch], Batch]
    evaluate: Callable


class Pretraining(Stage[ExperimentConfig]):
    """Next-token training of a model on a mixture of texts.

    evaluator: evaluator(setting) returns the evaluator that runs at intervals. The other arguments are those of
    `Stage`.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        workdir,
        evaluator: Callable[[Setting], Evaluator] | None = None,
        step_maker: Callable[..., Step] = make_step,
        previous_stage: Stage | None = None,
    ):
        self._make_evaluator = evaluator
        super().__init__(config, workdir, step_maker, previous_stage)

    def _open(self) -> Loader:
        config = self.config
        loader = Loader(
            config.data,
            self.tokenizer,
            process_index=self._group,
            process_count=self._num_groups,
        )
        if self._make_evaluator is not None and config.data.held_out_fraction:
            rows = self._rows(0) * self._num_groups
            setting = Setting(
                config=config,
                tokenizer=self.tokenizer,
                batch_rows=rows,
                place=self._place_replicated,
                evaluate=self._step.evaluate,
            )
            self._evaluator = self._make_evaluator(setting)
        return loader

    def _sampler(self) -> Callable[[dict, int], str] | None:
        # Decoding reads its tokens back to the host, which works in a single process only.
        return self._sample if self.config.sample.prompts and jax.process_count() == 1 else None

    def _describe_step(self) -> str:
        return f"{batch_tokens(self.config.batch, 0):,} tokens per step"

    def _check(self) -> None:
        config = self.config
        for prompt, ids in self._prompts():
            needed = len(ids) + config.sample.tokens
            if needed > config.model.max_position_embeddings:
                raise ValueError(
                    f"sample.tokens {config.sample.tokens} after the prompt {prompt!r} needs {needed} "
                    f"positions, the model has {config.model.max_position_embeddings}"
                )

    def _rows(self, tokens_seen: int) -> int:
        """Returns the rows of this process's batch after tokens_seen."""
        tokens = batch_tokens(self.config.batch, tokens_seen)
        return tokens // self.config.data.sequence_length // self._num_groups

    def _place_replicated(self, batch: Batch) -> Batch:
        """Puts a batch, of which every process holds all rows, onto the devices."""
        rows = {k: np.split(v, self._num_groups)[self._group] for k, v in batch.items()}
        return self._place(rows)

    def _sample(self, state: dict, step: int) -> str:
        """Continues the prompts, writes the texts to samples/STEP.txt and returns them."""
        model, sample, tokenizer = self.config.model, self.config.sample, self.tokenizer
        shown, prompts = zip(*self._prompts())
        longest = max(map(len, prompts))
        pad = model.pad_token_id or 0
        tokens = np.array([[pad] * (longest - len(p)) + p for p in prompts], np.int32)
        mask = np.array([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], np.int32)
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        new = generate(
            state["params"],
            tokens,
            model,
            sample.tokens,
            mask=mask,
            temperature=sample.temperature,
            key=key,
        )[:, longest:]
        ends = {*model.eos_token_id}
        texts = []
        for prompt, ids in zip(shown, new.tolist()):
            end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
            texts.append(prompt + tokenizer.decode(ids[:end], errors="replace"))
        text = "\n\n".join(texts)
        folder = self.workdir / SAMPLES
        folder.mkdir(exist_ok=True)
        replace_text(folder / f"{step}.txt", text)
        return f"--- sample at step {step} ---\n{text}\n---"

    def _prompts(self) -> list[tuple[str, list[int]]]:
        """Returns (text, ids) of the prompts that samples continue."""
        sample, tokenizer = self.config.sample, self.tokenizer
        if not sample.chat:
            return [(text, tokenizer.encode(text)) for text in sample.prompts]
        rendered = [
            render_chat(
                [{"role": "user", "content": text}],
                tokenizer,
                enable_thinking=think,
                variant=self.config.data.chat_variant or "glm5",
            )
            for text in sample.prompts
            for think in (True, False)
        ]
        return [(chat.text, chat.ids) for chat in rendered]


def train(
    config: ExperimentConfig,
    workdir,
    evaluator: Callable[[Setting], Evaluator] | None = None,
) -> report.Summary:
    """Pre-trains in workdir as config says, or resumes the run in it; see `Pretraining`."""
    return Pretraining(config, workdir, evaluator).run()
