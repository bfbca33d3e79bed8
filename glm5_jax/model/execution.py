"""Options of how a forward is executed; none changes a result beyond rounding.

`ExecutionConfig` is passed from a step or an engine through `model.glm5.forward` down to the kernels.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.backends import Implementation

REMAT = ("none", "full", "topk", "dots", "offload")
REDUCE = (None, "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Block sizes, memory policy and kernels of a forward.

    Attributes:
      query_block: queries per block of dense attention and of index scores.
      gather_block: queries per block of sparse attention.
      token_chunk: maximum tokens of a device that are sent to the experts at a time; None: all.
      vocab_block: vocabulary entries whose embedding rows or head columns a device gathers at a time
        (`model.vocabulary`); None: all.
      expert_slices: number of slices of the mesh axis `expert` that are connected by a slow network.
        A token crosses to each slice once (`routed_experts`).
      remat: what a layer stores for its backward pass besides its input (GLM-5 2.4):
        - "none": everything.
        - "full": nothing.
        - "topk": the selected keys only.
        - "dots": matmul results.
        - "offload": the selected keys; these and the input lie in the host's pinned memory. A CPU has
          no second memory, so nothing moves there.
        All of them store the gradients of indexers that are trained, because these would cost another
        pass over all keys.
      reduce_dtype: dtype of gradient sums over the devices that shard a weight; None: the compute
        dtype. Sums over devices that hold copies use the weight's dtype.
      keep_vocab_sharded: leave embedding and head sharded over the vocabulary where that sends less,
        because all devices together have fewer tokens than the vocabulary. Inference only.
      pregathered: patterns of weights that arrive gathered and in the compute dtype
        (`training.accumulation`).
      replicated_weights: patterns of weights that every device stores in full. Dimensions that stay
        sharded in the computation are excepted (`parallel.sharding.weight_spec`).
      attention_form: form of `mla` to use; None: the cheapest.
      kernels: implementations to run, "auto" or a name (`pallas_kernels.backends.select_backend`).
    """

    query_block: int = 128
    gather_block: int = 32
    token_chunk: int | None = None
    vocab_block: int | None = None
    expert_slices: int = 1
    remat: str = "none"
    reduce_dtype: str | None = None
    keep_vocab_sharded: bool = False
    pregathered: tuple[str, ...] = ()
    replicated_weights: tuple[str, ...] = ()
    attention_form: str | None = None
    kernels: str | Implementation = "auto"

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat is {self.remat!r}; use one of {', '.join(REMAT)}")
        for name in ("query_block", "gather_block", "token_chunk", "vocab_block", "expert_slices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.reduce_dtype not in REDUCE:
            choice = ", ".join(map(repr, REDUCE))
            raise ValueError(f"reduce_dtype is {self.reduce_dtype!r}; use one of {choice}")

    def checkpoint(self, layer: Callable) -> Callable:
        """Returns layer(carry, xs), the body of a scan, under this config's rematerialisation policy."""
        policies = jax.checkpoint_policies
        if self.remat == "none":
            return layer
        names = ("index_gradients", "topk") if self.remat == "topk" else ("index_gradients",)
        policy = policies.save_only_these_names(*names)
        if self.remat == "dots":
            dots = policies.dots_with_no_batch_dims_saveable
            policy = policies.save_from_both_policies(dots, policy)
        if self.remat != "offload":
            return jax.checkpoint(layer, policy=policy)
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=names,
            names_which_can_be_offloaded=("carry", "topk"),
            offload_src="device",
            offload_dst="pinned_host",
        )

        def named(carry, xs):
            return layer(jax.tree.map(lambda x: checkpoint_name(x, "carry"), carry), xs)

        return jax.checkpoint(named, policy=policy)
