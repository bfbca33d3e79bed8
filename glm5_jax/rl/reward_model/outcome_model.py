"""An outcome reward model (GLM-5 3.4): what a reply is worth, as one number from a head on the policy's backbone.

    score = sum over d of hidden * head,    orm_z = (score - mean) / std

hidden is the trunk's output at the last token of a chat that ends with the reply: the marker by which it stops, which
has seen all of it. Reasoning is left out, as judged is what a user reads. mean and std are those of scores of replies to
pairs that it was trained on, or of others (`scale_of`); envs/hybrid_reward.py takes them. The paper says neither how the
head is placed nor what it is trained on; rl/reward_model/outcome_training.py does it as is usual.
"""

import asyncio
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.checkpoint import models, store
from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import Batch
from glm5_jax.data.record import TokenRecord
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.mesh import Region, check_batch
from glm5_jax.rl.algorithm.batch import lay_out
from glm5_jax.rl.types import Attempt, Message, Task, Unreadable
from glm5_jax.text.chat import render_chat
from glm5_jax.text.messages import read_messages
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.numerics import accum_dtype

HEAD = "score"  # beside the backbone's weights, as HuggingFace calls it
SCORER = "scorer.json"  # in the workdir: what scores mean, and how chats are read


def letters(cfg: ModelConfig) -> dict:
    """As `glm5.axis_letters`, with the head's."""
    return {**glm5.axis_letters(cfg), HEAD: {"weight": "d"}}


def abstract(cfg: ModelConfig) -> dict:
    """As `glm5.abstract_params`, with the head's."""
    head = jax.ShapeDtypeStruct((cfg.hidden_size,), jnp.float32)
    return {**glm5.abstract_params(cfg), HEAD: {"weight": head}}


def shardings(cfg: ModelConfig, mesh) -> dict:
    """As `glm5.param_shardings`, with the head's, which every device has."""
    return {**glm5.param_shardings(cfg, mesh), HEAD: {"weight": NamedSharding(mesh, P())}}


def token_scores(
    cfg: ModelConfig, execution: ExecutionConfig = ExecutionConfig(), mesh=None
) -> Callable:
    """`f(params, batch) -> wide [b t]`: of each token, the score of a chat that ended with it."""

    def scores(params, batch):
        body = {name: own for name, own in params.items() if name != HEAD}
        hidden = glm5.forward(
            body,
            batch["token_ids"],
            cfg,
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
            mesh=mesh,
            execution=execution,
        ).hidden
        dtype = accum_dtype(hidden.dtype)
        # Not a product of matrices: accelerators would round its factors.
        return jnp.sum(hidden.astype(dtype) * params[HEAD]["weight"].astype(dtype), axis=-1)

    return scores


def read(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    variant: str,
    length: int,
    tools: Sequence[Mapping] = (),
) -> list[int]:
    """The ids of a chat that ends with the reply to be scored. ValueError if no chat can hold it, if it ends with
    something else, or if it has more than length."""
    shown = [
        {**m, "reasoning_content": ""} if m["role"] == "assistant" else m
        for m in read_messages(messages)
    ]
    ids = render_chat(shown, tokenizer, tools=tools or None, close=True, variant=variant).ids
    if len(ids) > length:
        raise ValueError(f"a chat has {len(ids)} tokens, a row {length}; raise length")
    return ids


def lay_side_by_side(
    sequences: Sequence[Sequence[int]], length: int, rows: int
) -> tuple[Batch, list[tuple[int, int]]]:
    """A batch whose rows are a multiple of rows, as `lay_out`, and (row, position) of each sequence's last token."""
    records = [
        TokenRecord(token_ids=ids, loss_mask=np.zeros(len(ids)), rollout_id=str(number))
        for number, ids in enumerate(sequences)
    ]
    batch, laid = lay_out(records, length, rows, ("token_ids",))
    ends = [(0, 0)] * len(records)
    for row, own in enumerate(laid):
        behind = np.cumsum([len(record) for record in own])
        for record, end in zip(own, behind.tolist()):
            ends[int(record.rollout_id)] = row, end - 1
    return batch, ends


def score_all(
    run: Callable, params, sequences: Sequence[Sequence[int]], length: int, rows: int
) -> list[float]:
    """Scores of sequences in their order; run is `token_scores`, compiled. Every batch has so many rows."""
    found: list[float] = []
    while len(found) < len(sequences):
        # In half the tokens of the rows: so many always find room, as no two rows are both half empty.
        part, tokens = [], 0
        for ids in sequences[len(found) :]:
            tokens += len(ids)
            if part and 2 * tokens > rows * length:
                break
            part.append(ids)
        batch, ends = lay_side_by_side(part, length, rows)
        scores = np.asarray(run(params, batch))
        found += [float(scores[end]) for end in ends]
    return found


def scale_of(scores: Sequence[float]) -> tuple[float, float]:
    """(mean, std) that make scores comparable."""
    return float(np.mean(scores)), float(np.std(scores))


def write_scorer(workdir, **fields) -> None:
    """Writes what `OutcomeModel.load` reads beside the weights: step, length, variant, mean and std."""
    (pathlib.Path(workdir) / SCORER).write_text(json.dumps(fields, indent=1) + "\n")


class OutcomeModel:
    """Scores replies.

    Attributes:
      mean, std: of scores, by which they become comparable.
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
        """params: a model's with `HEAD`; length: of a row, and at most of a chat; rows: of a batch."""
        if not std > 0:
            raise ValueError(f"std is {std}; scores that are all alike tell nothing, train longer")
        cfg.check_length(length)
        if mesh is not None:
            check_batch(rows, length, Region.of(mesh))
        self.mean, self.std = mean, std
        self._params, self._tokenizer = params, tokenizer
        self._variant, self._length, self._rows = variant, length, rows
        self._run = jax.jit(token_scores(cfg, mesh=mesh))

    @classmethod
    def load(cls, workdir, *, rows: int = 8, mesh=None) -> "OutcomeModel":
        """What a run that has ended has trained (`rl.reward_model.outcome_training`); ValueError if there is none."""
        workdir = pathlib.Path(workdir)
        try:
            fields = json.loads((workdir / SCORER).read_text())
        except OSError as error:
            raise ValueError(
                f"{workdir} holds no reward model that is trained to its end ({error.strerror}: {SCORER}); give the "
                "workdir of experiments/reward_model.py, and let it finish"
            ) from None
        step = fields.pop("step")
        if (newest := store.latest_step(workdir)) != step:
            raise ValueError(
                f"{workdir / SCORER} is of step {step}, the newest checkpoint of {newest}; let the run finish"
            )
        cfg = models.run_config(workdir)
        wanted = abstract(cfg)
        if mesh is not None:
            wanted = jax.tree.map(
                lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
                wanted,
                shardings(cfg, mesh),
            )
        params = store.load_params(workdir, wanted)
        head = params.pop(HEAD)
        backbone = glm5.params_of(glm5.Glm5(cfg, params=params, mesh=mesh))
        tokenizer = models.load_tokenizer(workdir)
        return cls({**backbone, HEAD: head}, cfg, tokenizer, rows=rows, mesh=mesh, **fields)

    def read(self, task: Task, attempt: Attempt) -> list[int]:
        """The ids that an attempt is scored by; ValueError as `read`, `Unreadable` if another attempt at the task
        has none."""
        layout = (self._tokenizer, self._variant, self._length, task.tools)
        try:
            return read((*task.messages, *attempt.messages), *layout)
        except ValueError as error:
            read((*task.messages, {"role": "assistant", "content": "."}), *layout)
            raise Unreadable(str(error)) from None

    def score(self, asked: Sequence[tuple[Task, Attempt]]) -> list[float]:
        """Of each attempt; ValueError as `read`."""
        return self.score_ids([self.read(*one) for one in asked])

    def score_ids(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Of each chat that `read` gave."""
        return score_all(self._run, self._params, sequences, self._length, self._rows)


class Asked:
    """An `OutcomeModel` for `envs.hybrid_reward.HybridReward`: what is asked while it computes is scored together next.

    seconds: that an answer may take (TimeoutError); at_once: replies that are scored together; mean, std: the model's.
    """

    def __init__(self, model: OutcomeModel, seconds: float = 600.0, at_once: int = 64):
        if not (seconds > 0 and at_once > 0):
            raise ValueError(f"seconds is {seconds} and at_once {at_once}; make both positive")
        self.mean, self.std = model.mean, model.std
        self._model, self._seconds, self._at_once = model, seconds, at_once
        self._waiting: list[tuple[list[int], asyncio.Future]] = []
        self._worker: asyncio.Task | None = None

    async def __call__(self, task: Task, attempt: Attempt) -> float:
        """The attempt's score, before it is standardised; ValueError as `read`, for whoever asked alone."""
        ids = self._model.read(task, attempt)
        loop = asyncio.get_running_loop()
        answer, worker = loop.create_future(), self._worker
        if worker is None or worker.done() or worker.get_loop() is not loop:
            # A loop that was closed may have left questions that nobody waits for.
            self._waiting = []
            self._worker = asyncio.create_task(self._work())
        self._waiting.append((ids, answer))
        async with asyncio.timeout(self._seconds):
            return await answer

    async def _work(self) -> None:
        while self._waiting:
            part, self._waiting = self._waiting[: self._at_once], self._waiting[self._at_once :]
            part = [(ids, answer) for ids, answer in part if not answer.done()]
            try:
                scores = await asyncio.wait_for(
                    asyncio.to_thread(self._model.score_ids, [ids for ids, _ in part]),
                    self._seconds,
                )
            except Exception as error:  # whatever went wrong, who asked is to know
                for _, answer in part:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), score in zip(part, scores, strict=True):
                if not answer.done():
                    answer.set_result(score)
