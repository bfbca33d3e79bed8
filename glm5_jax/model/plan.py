"""How a forward is carried out; nothing here changes a result beyond rounding."""

import dataclasses

import jax

REMAT = ("none", "full", "topk", "dots")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes and memory policy of a forward.

    query_block: queries per block of dense attention and of scoring. gather_block: queries per block
    of sparse attention. token_chunk: tokens of a device that travel to the experts at a time (None:
    all). remat: what a layer keeps for its backward: "none" everything, "full" nothing, "topk" the
    selected keys only, "dots" matmul results. reduce_dtype: in which gradients are summed over
    devices (None: the compute dtype). attention_form: None, or a form of `mla` to insist on.
    """

    query_block: int = 128
    gather_block: int = 32
    token_chunk: int | None = None
    remat: str = "none"
    reduce_dtype: str | None = None
    attention_form: str | None = None

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat is {self.remat!r}; use one of {', '.join(REMAT)}")

    def checkpoint(self, function):
        """The function under this plan's rematerialisation policy."""
        policies = jax.checkpoint_policies
        if self.remat == "none":
            return function
        policy = {
            "full": policies.nothing_saveable,
            "topk": policies.save_only_these_names("topk"),
            "dots": policies.dots_with_no_batch_dims_saveable,
        }[self.remat]
        return jax.checkpoint(function, policy=policy)
