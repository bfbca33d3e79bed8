"""Bodies of requests to the orchestrator, to the gateway and to task services."""

from typing import Annotated

from msgspec import Meta

from glm5_jax.inference.request_bodies import Temperature, TopP, Version
from glm5_jax.runtime.json_body import MAX_VALUES
from glm5_jax.runtime.json_structs import Count, JsonStruct, PositiveInteger, Seconds


class BeginTrainer(JsonStruct, kw_only=True, frozen=True):
    """Position of a trainer that starts or resumes."""

    step: Version
    version: Version
    checksum: str | None = None


class TakeGroups(JsonStruct, kw_only=True, frozen=True):
    """Request for the batch that a trainer trains on after `step` updates."""

    lease: Count
    step: Version
    timeout_s: Seconds


class MarkTrained(JsonStruct, kw_only=True, frozen=True):
    """Report that the batch of `step` has been trained on."""

    lease: Count
    step: Version


class MarkLost(JsonStruct, kw_only=True, frozen=True):
    """Report that the gateway has lost the token records of rollouts."""

    lease: Count
    rollout_ids: Annotated[list[str], Meta(max_length=MAX_VALUES)]


class SetWeights(JsonStruct, kw_only=True, frozen=True):
    """Weights that engines must sample with, as `WeightVersion`."""

    lease: Count
    version: Version
    checksum: str | None = None


class EvaluateTasks(JsonStruct, kw_only=True, frozen=True):
    """Request for attempts at up to `count` held-out tasks of every task service.

    Attributes:
      group: attempts at each task.
      temperature, top_p: as of `BeginSession`.
    """

    count: PositiveInteger
    timeout_s: Seconds
    group: PositiveInteger = 1
    temperature: Temperature | None = None
    top_p: TopP | None = None


class CancelGroup(JsonStruct, kw_only=True, frozen=True):
    """Request to cancel a running group."""

    group_id: str
    should_resample: bool = False


class ServiceHeartbeat(JsonStruct, kw_only=True, frozen=True):
    """Heartbeat of a task service's process."""

    instance: str = ""


class BeginSession(JsonStruct, kw_only=True, frozen=True):
    """Request for a session at the gateway.

    Attributes:
      id: id of the session; None: the gateway chooses one.
      seed: seed of its samples; None: a random one.
      weights: weights that engines must sample with; None: as required before.
      temperature: temperature of its samples; None: that of the gateway, which the learner knows. Samples with another
        one or with top_p must not be trained on.
      top_p: probability mass of the tokens that are sampled; None: 1.
    """

    id: str | None = None
    seed: Count | None = None
    weights: SetWeights | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None


class CancelRollout(JsonStruct, kw_only=True, frozen=True):
    """Request to cancel a running rollout of a task service."""

    rollout_id: Annotated[str, Meta(min_length=1)]
