"""A stage of training, assembled from its parts: checked before it touches anything, then run."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.checkpoint import models, store
from glm5_jax.core import hosts
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.mesh import (
    BATCH_AXES,
    SEQUENCE_AXES,
    Region,
    check_batch,
    make_mesh,
    row_group,
)
from glm5_jax.core.metrics_log import MetricsLog, column, read
from glm5_jax.data.loader import Batch, Loader
from glm5_jax.model import glm5
from glm5_jax.model.ablations.convert import completed
from glm5_jax.model.generate import generate
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import template
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import flops, loop, report
from glm5_jax.training.experiment import ExperimentConfig, check_resume, write_config
from glm5_jax.training.metrics import Recorder, TrainingStopped
from glm5_jax.training.schedule import batch_sizes, batch_tokens, make_schedule
from glm5_jax.training.step import Step, make_step

_SAMPLES = "samples"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a stage hands to an evaluator: its config and tokenizer, and how to score a batch.

    place puts `batch_rows` rows, which every process holds, onto the devices; evaluate(params, placed
    batch) is the summed negative log-likelihood in nats and the number of targets.
    """

    config: ExperimentConfig
    tokenizer: Tokenizer
    batch_rows: int
    place: Callable[[Batch], Batch]
    evaluate: Callable


class Evaluator(Protocol):
    """Judges parameters while they train; `baselines` are computed once, for comparison, by the first
    process of a pod, whose log is the one that is shown."""

    def __call__(self, params) -> dict[str, float]: ...

    def baselines(self) -> dict[str, float]: ...


class Pretraining:
    """Next-token training of a model on a mixture of texts.

    Construction checks everything a user can get wrong and raises ValueError, with nothing trained
    or overwritten yet; `run` trains. evaluator(setting) makes what judges the model at intervals.
    step_maker is called as `make_step`, for runs that share what they compile. before: the stage whose
    workdir is the checkpoint; until it has run, its shapes stand for its weights, and this stage can be
    checked but not run.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        workdir,
        evaluator: Callable[[Setting], Evaluator] | None = None,
        step_maker: Callable[..., Step] = make_step,
        before: "Pretraining | None" = None,
    ):
        self.workdir = pathlib.Path(workdir)
        if self.workdir.exists() and not self.workdir.is_dir():
            raise ValueError(f"workdir {workdir} is a file; give a folder, or a path that is free")
        self._tokenizer = (
            Tokenizer.load(config.tokenizer) if config.tokenizer else Tokenizer.default()
        )
        self.config = config = _ending_like(self._tokenizer, config)
        if config.data.chat_variant:
            learnt = template(config.data.chat_variant)
            self._tokenizer = self._tokenizer.with_chat_template(learnt)
        if store.latest_step(workdir) is not None:
            check_resume(workdir, config)
        mesh = make_mesh(dataclasses.asdict(config.mesh))
        self._mesh = mesh if mesh.size > 1 else None
        self._region = Region.of(mesh)
        self._group, self._num_groups = row_group(mesh)
        if self.finished:
            return
        saved = store.latest_step(workdir)
        if saved is None and config.checkpoint is None and config.goes_on:
            raise ValueError(
                f"{config.name} goes on from trained weights; give --experiment.checkpoint=PATH, "
                "a workdir, one of its checkpoints/STEP or an HF folder (or --experiment.goes_on=false for random ones)"
            )
        self._check_sizes()
        if self._tokenizer.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"the tokenizer has {self._tokenizer.vocab_size} ids, model.vocab_size is "
                f"{config.model.vocab_size}; use another tokenizer or a larger vocabulary"
            )
        self._step = step_maker(
            config.model, config.step, config.optimizer, make_schedule(config.schedule), self._mesh
        )
        store.check_space(workdir, self._step.abstract, config.train.keep)
        self._given = None
        if saved is None and config.checkpoint is not None:
            self._given = self._open_checkpoint(pathlib.Path(config.checkpoint), before)
        self._loader = Loader(
            config.data,
            self._tokenizer,
            process_index=self._group,
            process_count=self._num_groups,
        )
        if saved is not None:
            self._loader.check(store.load_data(workdir, saved))
        self._evaluator = None
        if evaluator is not None and config.data.held_out_fraction:
            rows = self._rows(0) * self._num_groups
            self._evaluator = evaluator(
                Setting(config, self._tokenizer, rows, self._place_whole, self._step.evaluate)
            )

    def close(self) -> None:
        """Stops what reads data, of a stage that is not run."""
        if not self.finished:
            self._loader.close()

    @property
    def finished(self) -> bool:
        """Whether the workdir's newest checkpoint is the last step."""
        return (store.latest_step(self.workdir) or 0) >= self.config.steps

    def run(self) -> report.Summary:
        """Trains to the end, or to a signal (SIGTERM, Ctrl-C), and writes the report.

        A finished run only returns its summary. TrainingStopped and SaveError as `loop.train`.
        """
        finished = self.finished
        if not finished:
            with loop.StopSignal() as stop:
                self._train(stop)
        if jax.process_index() == 0 and not (finished and (self.workdir / report.PAGE).exists()):
            report.write_page(self.workdir)
        return report.summarise(self.workdir)

    def _train(self, stop: loop.StopSignal) -> None:
        config, first = self.config, jax.process_index() == 0
        own = self.workdir if first else self.workdir / "hosts" / str(jax.process_index())
        with contextlib.ExitStack() as stack:
            stack.callback(self._loader.close)
            screen = None if first else stack.enter_context(open(os.devnull, "w"))
            checkpoints = stack.enter_context(store.Store(self.workdir, config.train.keep))
            state, counters = loop.resume(
                checkpoints, self._step.abstract, self._initialise, self._loader
            )
            done = int(state["step"])

            def describe():
                write_config(self.workdir, config)
                self._tokenizer.save(self.workdir / "tokenizer")
                if not done:
                    shutil.rmtree(self.workdir / _SAMPLES, ignore_errors=True)

            hosts.first_does(describe)
            log = stack.enter_context(MetricsLog(own, done))
            progress = stack.enter_context(ProgressBar(config.steps, done, stream=screen))
            progress.print(self._headline(done))

            def count():
                if not column(read(own), "baseline/unigram")[0]:
                    progress.print("counting the training text for the baselines ...")
                    found = self._evaluator.baselines()
                    log.write({"step": 0, **{f"baseline/{name}": x for name, x in found.items()}})

            if self._evaluator is not None:
                try:
                    hosts.first_does(count)
                except ValueError as error:
                    raise TrainingStopped(f"baselines: {error}; {checkpoints.last_good}") from error
            progress.print("compiling the train step ...")
            recorder = Recorder(
                log,
                progress,
                counters,
                log_interval=config.train.log_interval,
                max_skipped=config.train.max_skipped,
                max_skipped_in_a_row=config.train.max_skipped_in_a_row,
                flops_per_token=flops.train_flops(
                    config.model,
                    config.data.sequence_length,
                    config.step.mtp_steps if config.model.num_nextn_predict_layers else 0,
                    trunk=self._step.trains_trunk,
                    indexers=config.step.index_weight > 0,
                ),
                peak=_peak(),
            )
            loop.train(
                config.train,
                config.steps,
                step=self._step.train,
                state=state,
                loader=self._loader,
                place=self._place,
                batch_size=self._rows,
                store=checkpoints,
                recorder=recorder,
                evaluate=self._evaluator and (lambda state, _: self._evaluator(state["params"])),
                # What a stage makes of its weights shows beside what it was given.
                evaluate_first=not done and self._given is not None,
                # Decoding reads its tokens back, which only one process can.
                sample=self._sample if config.sample.prompts and jax.process_count() == 1 else None,
                stop=stop,
            )

    def _check_sizes(self) -> None:
        config, length = self.config, self.config.data.sequence_length
        config.model.check_length(length)
        shards = self._region.size(BATCH_AXES)
        whole = length * shards * config.step.microbatches
        for name in ("start", "end", "multiple"):
            tokens = getattr(config.batch, name)
            if tokens % whole or tokens < whole:
                raise ValueError(
                    f"batch.{name} is {tokens} tokens; it must be a multiple of {whole} (sequence "
                    f"length {length} * {shards} batch shards * {config.step.microbatches} "
                    "microbatches)"
                )
        if self._mesh is not None:
            check_batch(config.batch.start // length, length, self._mesh)
        chunk = config.step.token_chunk
        for tokens in batch_sizes(config.batch) if chunk else ():
            rows = tokens // (shards * self._region.context * config.step.microbatches)
            if rows > chunk and rows % chunk:
                raise ValueError(
                    f"step.token_chunk {chunk} does not divide the {rows} tokens that a device has of "
                    f"a batch of {tokens}; choose a divisor, or at least {rows}"
                )
        for prompt, ids in self._prompts():
            needed = len(ids) + config.sample.tokens
            if needed > config.model.max_position_embeddings:
                raise ValueError(
                    f"sample.tokens {config.sample.tokens} after the prompt {prompt!r} needs {needed} "
                    f"positions, the model has {config.model.max_position_embeddings}"
                )

    def _rows(self, tokens_seen: int) -> int:
        """Rows of this process's batch after so many tokens."""
        tokens = batch_tokens(self.config.batch, tokens_seen)
        return tokens // self.config.data.sequence_length // self._num_groups

    def _place_whole(self, batch: Batch) -> Batch:
        """Places a batch of which every process holds all rows."""
        own = {k: np.split(v, self._num_groups)[self._group] for k, v in batch.items()}
        return self._place(own)

    def _place(self, batch: Batch) -> Batch:
        """Places a batch of which this process holds its own rows."""
        if self._mesh is None:
            return jax.device_put(batch)
        where = NamedSharding(self._mesh, P(BATCH_AXES, SEQUENCE_AXES))
        rows = len(batch["token_ids"]) * self._num_groups
        return {
            k: jax.make_array_from_process_local_data(where, v, (rows, *v.shape[1:]))
            for k, v in batch.items()
        }

    def _initialise(self) -> dict:
        key, params = jax.random.key(self.config.seed), self._given and self._given()
        if params is not None:
            params = completed(params, self.config.model, key, mesh=self._mesh)
        return self._step.initialise(key, params)

    def _open_checkpoint(self, path: pathlib.Path, before) -> Callable[[], dict] | None:
        """What loads the initial weights from a workdir, one of its checkpoints or an HF folder; nothing
        if the stage before has still to make them. ValueError if they are not there, broken, or of
        another model."""
        model, unshared = self.config.model, self.config.unshared
        if before is not None and not before.finished:
            wanted, found = ({"model": glm5.abstract(c)} for c in (model, before.config.model))
            name = f"what {before.config.name} trains"
            store.check_shapes(wanted, found, name, unshared)
            models.check_arithmetic(name, before.config.model, model, unshared)
            return None
        return models.open_weights(path, model, mesh=self._mesh, unshared=unshared)

    def _sample(self, state: dict, step: int) -> str:
        """Continues the prompts; the texts go to samples/STEP.txt and are returned."""
        model, sample, tokenizer = self.config.model, self.config.sample, self._tokenizer
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
            cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
            texts.append(prompt + tokenizer.decode(ids[:cut], errors="replace"))
        text = "\n\n".join(texts)
        folder = self.workdir / _SAMPLES
        folder.mkdir(exist_ok=True)
        (folder / f"{step}.txt").write_text(text)
        return f"--- sample at step {step} ---\n{text}\n---"

    def _prompts(self) -> list[tuple[str, list[int]]]:
        """(text, ids) of what samples go on from."""
        sample, tokenizer = self.config.sample, self._tokenizer
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
        return [(found.text, found.ids) for found in rendered]

    def _headline(self, done: int) -> str:
        model, device = self.config.model, jax.devices()[0]
        start = f"going on from step {done}" if done else "starting"
        return (
            f"{self.config.name}: {_short(model.num_stored_parameters)} parameters, "
            f"{_short(model.num_active_parameters)} active, on {jax.device_count()} "
            f"{device.device_kind} device(s), {batch_tokens(self.config.batch, 0):,} tokens per "
            f"step; {start} in {self.workdir}"
        )


def train(
    config: ExperimentConfig,
    workdir,
    evaluator: Callable[[Setting], Evaluator] | None = None,
) -> report.Summary:
    """Pre-trains as config says, in workdir, or goes on with what is there; see `Pretraining`."""
    return Pretraining(config, workdir, evaluator).run()


def _ending_like(tokenizer: Tokenizer, config: ExperimentConfig) -> ExperimentConfig:
    """The config with the ids that end and pad a text in this tokenizer."""
    ids = {"eos_token_id": tokenizer.eos_ids, "pad_token_id": tokenizer.pad_id}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **ids))


def _peak() -> float | None:
    """bfloat16 FLOP/s of all devices together."""
    one = flops.peak_flops(jax.devices()[0].device_kind)
    return one and one * jax.device_count()


def _short(count: int) -> str:
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            return f"{count / limit:.3g}{suffix}"
    return str(count)
