"""Arrays of an engine's step: the state on the device, the batches that a step reads and the tokens that it draws.

Axis x is the data-parallel ranks, y the slots of each, b the rows of a batch.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int32

from glm5_jax.inference.constraints import TokenRules
from glm5_jax.inference.sampling import AnyArray, SampledTokens, SamplingParamsRow
from glm5_jax.model.cache import LayerCache


class PendingDraftInputs(NamedTuple):
    """Inputs that the MTP layer has not processed yet, k being num_speculative_tokens.

    Attributes:
      hidden: hidden states of the trunk at consecutive positions that end just before the newest token.
      tokens: the token after each of these positions.
      count: number of valid positions.
    """

    hidden: Float[Array, "x y k+1 d"]
    tokens: Int32[Array, "x y k+1"]
    count: Int32[Array, "x y"]


class SlotState(NamedTuple):
    """State of running sequences on the device, one slot each. The last of y slots is never in use.

    Attributes:
      newest: token drawn last.
      length: number of tokens in the pages.
      rows: `SamplingParamsRow` [x y ...], whose `position` is not kept up to date.
      pending: inputs of the MTP layer; None without drafts.
    """

    newest: Int32[Array, "x y"]
    length: Int32[Array, "x y"]
    rows: SamplingParamsRow
    pending: PendingDraftInputs | None


class DeviceState(NamedTuple):
    """Arrays that a step changes.

    Attributes:
      layers: pages [x*p z ...] of the layers.
      mtp: pages of the MTP layer; None without drafts.
      slots: state of the running sequences.
    """

    layers: tuple[LayerCache, ...]
    mtp: LayerCache | None
    slots: SlotState


class PrefillBatch(NamedTuple):
    """Inputs of a prefill of b sequences on each data-parallel rank.

    Attributes:
      tokens: ids, padded to t.
      start: position of the first token.
      count: number of real tokens.
      next_token: id after them; -1: it is drawn.
      tables: pages of each sequence.
      slot: slot of each sequence.
      rows: `SamplingParamsRow` [x b ...].
      rules: rules of the drawn tokens; None: none, which is another program.
    """

    tokens: Int32[AnyArray, "x b t"]
    start: Int32[AnyArray, "x b"]
    count: Int32[AnyArray, "x b"]
    next_token: Int32[AnyArray, "x b"]
    tables: Int32[AnyArray, "x b n"]
    slot: Int32[AnyArray, "x b"]
    rows: SamplingParamsRow
    rules: TokenRules | None = None


class DecodeBatch(NamedTuple):
    """Inputs of a decode of b sequences on each data-parallel rank.

    Attributes:
      tables: pages of each sequence.
      slot: slot of each sequence.
      forced_token: id to read; -1: the newest of the slot.
      limit: maximum tokens of a sequence; 0: the row is padding.
      rules: rules of the drawn tokens; None: none, which is another program.
    """

    tables: Int32[AnyArray, "x b n"]
    slot: Int32[AnyArray, "x b"]
    forced_token: Int32[AnyArray, "x b"]
    limit: Int32[AnyArray, "x b"]
    rules: TokenRules | None = None


class StepOutput(NamedTuple):
    """Tokens that a step has drawn.

    Attributes:
      sampled: tokens of each row [b k ...], in order.
      count: number of them that belong to the reply.
      prompt: log-probs [b t ...] of the token after each position of a prefill; None: they were not computed.
    """

    sampled: SampledTokens
    count: Int32[Array, " b"]
    prompt: SampledTokens | None = None


class SamplingVariant(NamedTuple):
    """Options of sampling that change the program.

    Attributes:
      truncate, num_top: see `sampling.draw`.
      scores_prompt: whether a prefill computes log-probs of the prompt.
    """

    truncate: bool = False
    num_top: int = 0
    scores_prompt: bool = False
