"""Schemas of the bodies of requests to the hub and to the gateway."""

from glm5_jax.data.record import MAX_VERSION
from glm5_jax.runtime.json_schema import object_schema

_COUNT, _POSITIVE = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1}
_SECONDS = {"type": "number", "minimum": 0}
_TEXT = {"type": "string"}
_STEP = _COUNT | {"maximum": MAX_VERSION}
BEGIN = object_schema(("step", "version"), step=_STEP, version=_STEP, checksum=_TEXT)
TAKE = object_schema(("lease", "step", "seconds"), lease=_COUNT, step=_STEP, seconds=_SECONDS)
TRAINED = object_schema(("lease", "step"), lease=_COUNT, step=_STEP)
VERSION = object_schema(("lease", "version"), lease=_COUNT, version=_STEP, checksum=_TEXT)
EVALUATE = object_schema(("count", "seconds"), count=_POSITIVE, seconds=_SECONDS)
CANCEL = object_schema(("group_id",), group_id=_TEXT, again={"type": "boolean"})
BEAT = object_schema(instance=_TEXT)
WEIGHTS = object_schema(("lease", "version"), lease=_COUNT, version=_STEP, checksum=_TEXT)
BEGIN_SESSION = object_schema(id=_TEXT, seed=_COUNT, weights=WEIGHTS)
