"""Scores replies with an outcome reward model (GLM-5 3.4): a scalar head on the policy's backbone.

    score = sum over d of hidden * head,    orm_z = (score - mean) / std

hidden is the trunk's output at the last token of a chat that ends with the reply. That token is the marker that ends
the reply, and it attends to all of it. Reasoning is left out, because users do not read it.

mean and std are those of scores of replies to training pairs, or of other replies (`mean_and_std`);
envs/hybrid_reward.py takes them. The paper describes neither the place of the head nor its training data;
rl/reward_model/outcome_training.py does the usual.
"""

import asyncio
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from glm5_jax.checkpoint import models, store
from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import Batch
from glm5_jax.data.record import TokenRecord
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.mesh import Region, check_batch
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.types import Attempt, Message, Task, UnreadableReply
from glm5_jax.runtime.files import replace_text
from glm5_jax.text.chat import render_chat
from glm5_jax.text.messages import read_messages
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.numerics import accum_dtype

HEAD = "score"  # name of the head next to the backbone's weights, as in HuggingFace
SCORER = "scorer.json"  # in the workdir: scale of the scores, layout of the chats


def axis_letters(cfg: ModelConfig) -> dict[str, Any]:
    """Returns `glm5.axis_letters`, with the head's."""
    return {**glm5.axis_letters(cfg), HEAD: {"weight": "d"}}


def abstract_params(cfg: ModelConfig) -> dict[str, Any]:
    """Returns `glm5.abstract_params`, with the head's."""
    head = jax.ShapeDtypeStruct((cfg.hidden_size,), jnp.float32)
    return {**glm5.abstract_params(cfg), HEAD: {"weight": head}}


def param_shardings(cfg: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Returns `glm5.param_shardings`, with the head's, which is replicated."""
    return {**glm5.param_shardings(cfg, mesh), HEAD: {"weight": NamedSharding(mesh, P())}}


def make_token_scorer(
    cfg: ModelConfig, execution: ExecutionConfig = ExecutionConfig(), mesh: Mesh | None = None
) -> Callable[[dict, Batch], Float[Array, "b t"]]:
    """Returns f(params, batch), which scores every token as if its chat ended there. The scores are wide."""

    def scores(params, batch):
        backbone = {name: value for name, value in params.items() if name != HEAD}
        hidden = glm5.forward(
            backbone,
            batch["token_ids"],
            cfg,
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
            mesh=mesh,
            execution=execution,
        ).hidden
        dtype = accum_dtype(hidden.dtype)
        # Not a product of matrices, because accelerators would round its factors.
        return jnp.sum(hidden.astype(dtype) * params[HEAD]["weight"].astype(dtype), axis=-1)

    return scores


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    variant: str,
    length: int,
    tools: Sequence[Mapping] = (),
) -> list[int]:
    """Returns the ids of a chat that ends with the reply to score.

    Raises ValueError if the layout cannot render it, if it does not end with a reply, or if it exceeds length.
    """
    without_reasoning = [
        {**m, "reasoning_content": ""} if m["role"] == "assistant" else m
        for m in read_messages(messages)
    ]
    chat = render_chat(
        without_reasoning, tokenizer, tools=tools or None, close=True, variant=variant
    )
    if len(chat.ids) > length:
        raise ValueError(f"a chat has {len(chat.ids)} tokens, a row {length}; raise length")
    return chat.ids


def pack_sequences(
    sequences: Sequence[Sequence[int]], length: int, rows: int
) -> tuple[Batch, list[tuple[int, int]]]:
    """Returns (batch, (row, position) of each sequence's last token); `rows` divides the number of rows."""
    records = [
        TokenRecord(token_ids=np.asarray(ids), loss_mask=np.zeros(len(ids)), rollout_id=str(number))
        for number, ids in enumerate(sequences)
    ]
    batch, packed_rows = pack_records(records, length, rows, ("token_ids",))
    last_tokens = [(0, 0)] * len(records)
    for row, row_records in enumerate(packed_rows):
        ends = np.cumsum([len(record) for record in row_records])
        for record, end in zip(row_records, ends.tolist()):
            last_tokens[int(record.rollout_id)] = row, end - 1
    return batch, last_tokens


def score_sequences(
    score: Callable[[PyTree, Batch], Array | np.ndarray],
    params: PyTree,
    sequences: Sequence[Sequence[int]],
    length: int,
    rows: int,
) -> list[float]:
    """Returns the scores of sequences, in their order. Every batch has `rows` rows, so one program serves all.

    score is a compiled function of `make_token_scorer`.
    """
    scores: list[float] = []
    while len(scores) < len(sequences):
        # At most half the tokens of the rows, which always fit, because no two rows are both half empty.
        part, num_tokens = [], 0
        for ids in sequences[len(scores) :]:
            num_tokens += len(ids)
            if part and 2 * num_tokens > rows * length:
                break
            part.append(ids)
        batch, last_tokens = pack_sequences(part, length, rows)
        token_scores = np.asarray(score(params, batch))
        scores += [float(token_scores[place]) for place in last_tokens]
    return scores


def mean_and_std(scores: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns the mean and the standard deviation that standardise scores."""
    return float(np.mean(scores)), float(np.std(scores))


def write_scorer(workdir: str | os.PathLike, **fields: Any) -> None:
    """Writes the fields that `OutcomeModel.load` reads: step, length, variant, mean and std."""
    replace_text(pathlib.Path(workdir) / SCORER, json.dumps(fields, indent=1) + "\n")


class OutcomeModel:
    """Outcome reward model for inference.

    Attributes:
      mean, std: mean and standard deviation of the scores.
    """

    def __init__(
        self,
        params,
        cfg: ModelConfig,
        tokenizer: Tokenizer,
        *,
        length: int,
        variant: str = "glm5",
        mean: float = 0.0,
        std: float = 1.0,
        rows: int = 8,
        mesh=None,
    ):
        """Creates a reward model.

        Args:
          params: a model's parameters and those of the head, `HEAD`.
          length: tokens of a row, and maximum tokens of a chat.
          rows: rows of a batch.
        """
        if not std > 0:
            raise ValueError(f"std is {std}; the scores are all equal, so train longer")
        cfg.check_length(length)
        if mesh is not None:
            check_batch(rows, length, Region.of(mesh))
        self.mean, self.std = mean, std
        self._params, self._tokenizer = params, tokenizer
        self._variant, self._length, self._rows = variant, length, rows
        self._run = jax.jit(make_token_scorer(cfg, mesh=mesh))

    @classmethod
    def load(cls, workdir, *, rows: int = 8, mesh=None) -> "OutcomeModel":
        """Returns the model that a finished run of `rl.reward_model.outcome_training` has trained.

        Raises ValueError if the workdir holds none.
        """
        workdir = pathlib.Path(workdir)
        try:
            fields = json.loads((workdir / SCORER).read_text())
        except OSError as error:
            raise ValueError(
                f"{workdir} holds no reward model of a finished run ({error.strerror}: {SCORER}); give the "
                "workdir of experiments/reward_model.py, and let it finish"
            ) from None
        step = fields.pop("step")
        if (newest := store.latest_step(workdir)) != step:
            raise ValueError(
                f"{workdir / SCORER} is of step {step}, the newest checkpoint of {newest}; let the run finish"
            )
        cfg = models.run_config(workdir)
        abstract = abstract_params(cfg)
        if mesh is not None:
            abstract = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                abstract,
                param_shardings(cfg, mesh),
            )
        params = store.load_params(workdir, abstract)
        head = params.pop(HEAD)
        backbone = glm5.params_of(glm5.Glm5(cfg, params=params, mesh=mesh))
        tokenizer = models.load_tokenizer(workdir)
        return cls({**backbone, HEAD: head}, cfg, tokenizer, rows=rows, mesh=mesh, **fields)

    def encode(self, task: Task, attempt: Attempt) -> list[int]:
        """Returns the ids of an attempt's chat, with the task's messages and tools.

        Raises UnreadableReply if only this attempt cannot be encoded, and ValueError if no attempt at the task can be.
        """
        options = (self._tokenizer, self._variant, self._length, task.tools)
        try:
            return encode_chat((*task.messages, *attempt.messages), *options)
        except ValueError as error:
            encode_chat((*task.messages, {"role": "assistant", "content": "."}), *options)
            raise UnreadableReply(str(error)) from None

    def score(self, attempts: Sequence[tuple[Task, Attempt]]) -> list[float]:
        """Returns the score of each attempt. Raises as `encode` does."""
        return self.score_ids([self.encode(task, attempt) for task, attempt in attempts])

    def score_ids(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Returns the scores of chats that `encode` returned."""
        return score_sequences(self._run, self._params, sequences, self._length, self._rows)


class BatchedScorer:
    """Asynchronous scorer that batches requests; an outcome model for `envs.hybrid_reward.HybridReward`.

    Requests that arrive while the model computes are scored together in its next batch.

    Attributes:
      mean, std: those of the model.

    Args:
      model: the reward model.
      timeout_s: time limit of one reply, in seconds; then TimeoutError is raised.
      batch_size: maximum replies that are scored together.
    """

    def __init__(self, model: OutcomeModel, timeout_s: float = 600.0, batch_size: int = 64):
        if not (timeout_s > 0 and batch_size > 0):
            raise ValueError(
                f"timeout_s is {timeout_s} and batch_size {batch_size}; make both positive"
            )
        self.mean, self.std = model.mean, model.std
        self._model, self._timeout_s, self._batch_size = model, timeout_s, batch_size
        self._waiting: list[tuple[list[int], asyncio.Future]] = []
        self._worker: asyncio.Task | None = None

    async def __call__(self, task: Task, attempt: Attempt) -> float:
        """Returns the attempt's score, not standardised. Raises as `OutcomeModel.encode`, for this request only."""
        ids = self._model.encode(task, attempt)
        loop = asyncio.get_running_loop()
        score, worker = loop.create_future(), self._worker
        if worker is None or worker.done() or worker.get_loop() is not loop:
            # A closed loop may have left requests that no task waits for.
            self._waiting = []
            self._worker = asyncio.create_task(self._score_batches())
        self._waiting.append((ids, score))
        async with asyncio.timeout(self._timeout_s):
            return await score

    async def _score_batches(self) -> None:
        """Scores batches until no request waits."""
        while self._waiting:
            size = self._batch_size
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            batch = [(ids, score) for ids, score in batch if not score.done()]
            try:
                values = await asyncio.wait_for(
                    asyncio.to_thread(self._model.score_ids, [ids for ids, _ in batch]),
                    self._timeout_s,
                )
            except Exception as error:  # any failure is passed on to the requests
                for _, score in batch:
                    if not score.done():
                        score.set_exception(error)
                continue
            for (_, score), value in zip(batch, values, strict=True):
                if not score.done():
                    score.set_result(value)
