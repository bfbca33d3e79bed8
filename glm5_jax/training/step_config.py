"""Options of a train step, as typed data."""

import dataclasses

from glm5_jax.config import ModelConfig
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.training.accumulation import PREGATHERED
from glm5_jax.training.schedule import TwoPhaseConfig, bias_update_rate, mtp_weight

INDEX_TARGETS = ("own_layer", "shared_layers")


@dataclasses.dataclass(kw_only=True)
class StepConfig:
    """Options of a train step. Sources: GLM-4.5 2.4, which GLM-5 inherits.

    Attributes:
      mtp_steps: runs of the MTP layer, all with the same weights (GLM-5 2.1); 0: no loss of multi-token prediction.
      mtp_weight: weight of the multi-token-prediction loss by tokens seen.
      bias_update_rate: step size of the router's balancing bias by tokens seen.
      balance_weight: weight of the sequence-level balance loss.
      z_weight: weight of the z-loss, which the paper does not have; 0: none.
      index_weight: weight of the indexers' loss; 0: indexers are not trained. Not disclosed. It matters only for
        clipping and Adam's epsilon, because no other loss reaches the indexers.
      index_target: attention that an indexer of IndexShare is trained on: that of its layer ("own_layer"), or the mean
        of all layers that use its keys ("shared_layers"; IndexCache, arXiv 2603.12201).
      rows_per_device: maximum rows of a microbatch per device; None: no microbatches.
      accumulate: weights that stay gathered over all microbatches, with one gradient reduction per step: none
        ("sharded"), routed experts ("experts"), or all ("local"); see training/accumulation.py.
      loss_chunk: rows of logits that are computed at a time.
      query_block: queries per block of dense attention and of index scores, where XLA computes them.
      gather_block: queries per block of sparse attention, where XLA computes it.
      token_chunk: maximum tokens of a device that are sent to the experts at a time; None: all.
      vocab_block: vocabulary entries that a device gathers at a time; None: all.
      expert_slices: slices of the mesh axis `expert` that are connected by a slow network, such as slices of a pod, or
        hosts. A token crosses to each once (`parallel.mesh.device_grid`, `model.expert_dispatch`).
      balance_rows: whether rows are assigned to devices and microbatches by cost (training/row_balancing.py). Rows of
        short documents cost about the same.
      remat: activations that are computed again in the backward pass: none, full, topk, dots or offload.
      reduce_dtype: dtype of gradient sums over devices (`ExecutionConfig`); None: the compute dtype.
    """

    mtp_steps: int = 3
    mtp_weight: TwoPhaseConfig = dataclasses.field(default_factory=mtp_weight)
    bias_update_rate: TwoPhaseConfig = dataclasses.field(default_factory=bias_update_rate)
    balance_weight: float = 1e-4
    z_weight: float = 0.0
    index_weight: float = 0.0
    index_target: str = "own_layer"
    rows_per_device: int | None = None
    accumulate: str = "sharded"
    loss_chunk: int = 1024
    query_block: int = 128
    gather_block: int = 32
    token_chunk: int | None = None
    vocab_block: int | None = None
    expert_slices: int = 1
    balance_rows: bool = False
    remat: str = "full"
    reduce_dtype: str | None = None

    def __post_init__(self):
        for name in ("rows_per_device", "loss_chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive")
        for name in ("mtp_steps", "balance_weight", "z_weight", "index_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.accumulate not in PREGATHERED:
            raise ValueError(
                f"accumulate is {self.accumulate!r}; use one of {', '.join(PREGATHERED)}"
            )
        if self.index_target not in INDEX_TARGETS:
            targets = " or ".join(map(repr, INDEX_TARGETS))
            raise ValueError(f"index_target is {self.index_target!r}; use {targets}")
        self.execution()

    def mtp_runs(self, cfg: ModelConfig) -> int:
        """Returns how many times the model's MTP layer runs in a step."""
        return self.mtp_steps if cfg.num_nextn_predict_layers else 0

    def microbatches(self, rows: int, devices: int = 1) -> int:
        """Returns the number of equal microbatches of a batch.

        It is the smallest number that leaves at most rows_per_device rows on a device, or on the devices that share a
        row.
        """
        device_rows = rows // devices
        max_rows = device_rows if self.rows_per_device is None else self.rows_per_device
        return next(
            n
            for n in range(1, device_rows + 1)
            if device_rows % n == 0 and device_rows // n <= max_rows
        )

    def execution(self) -> ExecutionConfig:
        """Returns the options of the step's forward."""
        return ExecutionConfig(
            query_block=self.query_block,
            gather_block=self.gather_block,
            token_chunk=self.token_chunk,
            vocab_block=self.vocab_block,
            expert_slices=self.expert_slices,
            remat=self.remat,
            reduce_dtype=self.reduce_dtype,
        )
