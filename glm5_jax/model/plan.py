"""How a forward is carried out; nothing here changes a result beyond rounding."""

import dataclasses

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import Implementation

REMAT = ("none", "full", "topk", "dots", "offload")
REDUCE = (None, "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes and memory policy of a forward.

    query_block: queries per block of dense attention and of scoring. gather_block: queries per block
    of sparse attention. token_chunk: tokens of a device that travel to the experts at a time, at most (None:
    all). vocab_block: tokens of the vocabulary whose rows of the embedding, or columns of the head, a device
    brings together at a time (None: all; `model.vocabulary`). expert_slices: of the mesh axis `expert`, far
    from each other, to each of which a token travels once (`routed_experts`). remat: what a layer keeps for its
    backward beside its input: "none" everything, "full" nothing, "topk" the selected keys only, "dots" matmul
    results, "offload" the selected keys, and these and its input in the host's pinned memory (GLM-5 2.4); a CPU
    has no other memory, and nothing moves there. Where indexers learn, all keep their gradients, which cost
    another pass over all keys. reduce_dtype: in which gradients are summed over the devices that a weight is
    cut over (None: the compute dtype); over those that hold copies they are in the weight's own. few_tokens: that
    embedding and head may stay cut over the vocabulary where that is less to send, as all devices' tokens are fewer than
    it (decoding; nothing is learnt). gathered:
    patterns of weights that come whole and in the compute dtype (`training.accumulation`). replicated: of those
    that every device has whole to begin with, but for what stays cut while it is used (`core.sharding.cut_of`).
    attention_form: None, or a form of `mla` to insist on. kernels: which implementations to run, "auto" or a
    name (`pallas_kernels.dispatch.choose`).
    """

    query_block: int = 128
    gather_block: int = 32
    token_chunk: int | None = None
    vocab_block: int | None = None
    expert_slices: int = 1
    remat: str = "none"
    reduce_dtype: str | None = None
    few_tokens: bool = False
    gathered: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
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

    def checkpoint(self, layer):
        """layer(carry, xs), the body of a scan, under this plan's rematerialisation policy."""
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
