"""Gathering of weights inside a manual region: a device's shard becomes the full weight in the compute dtype."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, Shaped

from glm5_jax.config import ModelConfig
from glm5_jax.model import lora, quant
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.parameters import abstract_params, axis_letters
from glm5_jax.parallel import sharding
from glm5_jax.parallel.mesh import AXES, Region
from glm5_jax.parallel.tree import flatten, map_with_path, matches_any


class WeightGatherer:
    """Gathers weights by their paths.

    The router keeps its stored dtype, because its scores are computed in `accum_dtype`. Experts are
    fake-quantised to int4 if cfg says so. Adapters are added to their targets (`model.lora`).
    """

    def __init__(self, cfg: ModelConfig, region: Region, execution: ExecutionConfig):
        self._letters, self._shapes = flatten(axis_letters(cfg)), flatten(abstract_params(cfg))
        self.region, self._sizes = region, {axis: getattr(region, axis) for axis in AXES}
        self._dtype, self._int4_group = jnp.dtype(cfg.dtype), cfg.int4_group
        self._execution, self._lora = execution, cfg.lora
        self._reduce_dtype = execution.reduce_dtype and jnp.dtype(execution.reduce_dtype)

    def vocab_shard(
        self, name: str, w: Shaped[Array, "..."], dim: int, rows: int
    ) -> tuple[Shaped[Array, "..."], tuple[str, ...]] | None:
        """Returns (shard, mesh axes) of a weight that stays sharded along one dimension.

        The shard is gathered along the other dimensions. rows: rows that each device multiplies with it.
        Returns None if the dimension is not sharded, or if gathering the weight sends less.
        """
        letters, spec = sharding.weight_spec(
            w, self._letters[name], self._shapes[name].shape, self._sizes
        )
        entry = spec[dim] if self._execution.keep_vocab_sharded else None
        axes = self.region.nontrivial_axes(
            entry if isinstance(entry, tuple) else (entry,) if entry else ()
        )
        if not axes or self.region.size(axes) * rows > self._shapes[name].shape[dim]:
            return None
        rest = P(*(None if i == dim else part for i, part in enumerate(spec)))
        return sharding.gather(w, letters, rest, self.region, self._dtype), axes

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight over all devices."""
        return self._shapes[name].shape

    def __call__(self, prefix: str, tree: PyTree, sliced: bool = False) -> PyTree:
        """Returns the gathered subtree at prefix. sliced: it is one layer of a stack, without its `l`."""
        gathered = map_with_path(
            lambda path, w: self._gather(f"{prefix}/{path}" if path else prefix, w, sliced), tree
        )
        return lora.apply_adapters(gathered, self._lora.scale) if self._lora.rank else gathered

    def _gather(self, name: str, w: Any, sliced: bool):
        if matches_any(self._execution.pregathered, name):
            return w
        letters, shape = self._letters[name], self._shapes[name].shape
        if sliced:
            letters, shape = letters.removeprefix("l "), shape[1:]
        is_replicated = matches_any(self._execution.replicated_weights, name)
        letters, spec = sharding.weight_spec(w, letters, shape, self._sizes, is_replicated)
        dtype = w.dtype if "router/" in name or lora.is_adapter(name) else self._dtype
        w = quant.fake_quantize(w, name, self._int4_group)
        return sharding.gather(w, letters, spec, self.region, dtype, self._reduce_dtype)
