"""Holds the weights of an engine on its devices, and replaces them a part at a time.

New weights are quantised and sharded like those that they replace, then converted to the form for computing.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.inference.quantize import table
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.quant import with_int4_experts
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel.tree import flatten, is_compound, map_with_path, materialize, unflatten
from pallas_kernels.numerics import accum_dtype

MAX_LOAD_BYTES = 2**28  # of new weights that exist at once next to the old ones; our choice


class WeightsLost(Exception):
    """Raised if loading weights fails after some of the old ones were freed: the engine cannot run any more."""


class EngineWeights:
    """Weights of an engine.

    Attributes:
      params: weights in the form for computing, one entry per layer; None while they are replaced.
      shardings: sharding of each parameter of the model, by path.
      abstract: shape, dtype and sharding of each parameter of the model, by path.
    """

    def __init__(self, model: glm5.Glm5, execution: ExecutionConfig):
        self._cfg, self._mesh, self._replicated = (
            model.cfg,
            model.mesh,
            execution.replicated_weights,
        )
        params = glm5.params_of(model)
        self._kinds = {path: _kind_of(leaf) for path, leaf in flatten(params).items()}
        shardings = _shardings_of(params, model, execution)
        self.shardings = flatten(shardings)
        self.abstract = flatten(jax.tree.map(_abstract, params, shardings))
        self.params: PyTree = None
        self.load(params)

    def check(self, params: PyTree) -> None:
        """Raises ValueError unless these weights can replace the engine's."""
        check_params(params, self._cfg)
        for path, leaf in flatten(params).items():
            kind, engine_kind = type(leaf) if is_compound(leaf) else None, self._kinds[path][0]
            if engine_kind is RotatedNorm and kind is None:
                raise ValueError(
                    f"the engine's weights are rotated, the new ones are not ({path}); push with the recipe of the "
                    "engine's folder (served_checkpoint), or serve one that was quantised with --plain"
                )
            if kind not in (None, engine_kind):
                raise ValueError(f"the weights are quantised otherwise than the engine's: {path}")

    def load(self, params: PyTree) -> None:
        """Replaces the weights for all later work, a part at a time.

        Each part frees the weights that it replaces before the next one is created. Leaves may be `Lazy`. Plain leaves
        are quantised like those that they replace. Raises ValueError for weights of another model or kind, and
        WeightsLost if loading fails after some were replaced.
        """
        self.check(params)
        flat, parts = flatten(params), []
        old = flatten(self.params)
        for paths in _split_by_size(flat, jnp.dtype(self._cfg.dtype).itemsize):
            try:
                new = unflatten(
                    {path: self._convert(path, materialize(flat.pop(path))) for path in paths}
                )
                new = jax.block_until_ready(self._to_compute_form(new))
            except Exception as error:
                if not parts:
                    raise
                raise WeightsLost(
                    f"loading broke off at {', '.join(paths)[:200]}: {type(error).__name__} {error}"
                ) from error
            parts.append(new)
            self.params = None
            for path in flatten(new):
                old.pop(path, None)
        self.params = _merge_trees(parts)

    def plain_sharding(self, path: str) -> Sharding:
        """Returns the sharding of the plain weight that a quantised one is made of."""
        if self._mesh is not None:
            return flatten(glm5.param_shardings(self._cfg, self._mesh))[path]
        return jax.tree.leaves(self.shardings[path])[0]

    @property
    def replicated_sharding(self) -> Sharding:
        """The sharding of an array that every device holds."""
        if self._mesh is not None:
            return NamedSharding(self._mesh, PartitionSpec())
        return jax.tree.leaves(self.shardings)[0]

    def _to_compute_form(self, params):
        """Runs `to_compute_form` as one program, with the weights' shardings."""
        shardings = None
        if self._mesh is not None:
            shapes = jax.eval_shape(functools.partial(to_compute_form, cfg=self._cfg), params)
            shardings = glm5.param_shardings(self._cfg, self._mesh, shapes, self._replicated)
        return jax.jit(to_compute_form, static_argnames="cfg", out_shardings=shardings)(
            params, cfg=self._cfg
        )

    def _convert(self, path: str, leaf):
        """Returns a leaf quantised and placed like the one that it replaces."""
        kind, group = self._kinds[path]
        if kind in table.RULE_OF_KIND and not is_compound(leaf):
            letters = flatten(glm5.axis_letters(self._cfg))[path]
            rule = table.RULE_OF_KIND[kind]
            leaf = table.quantised(rule, leaf, letters, group, self._cfg.dtype)
        return jax.tree.map(jax.device_put, leaf, self.shardings[path])


def check_params(params: PyTree, cfg: ModelConfig) -> None:
    """Raises ValueError if params are not those of a model of this config."""
    flat, expected = flatten(params), flatten(glm5.abstract_params(cfg))
    if odd := sorted(flat.keys() ^ expected.keys()):
        state = "missing" if odd[0] in expected else "unknown"
        raise ValueError(f"the weights are of another model: {odd[0]} is {state}")
    for name, weight in flat.items():
        if weight.shape != expected[name].shape:
            raise ValueError(
                f"the weights are of another model: {name} is {weight.shape}, not {expected[name].shape}"
            )


def _abstract(x, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _kind_of(leaf) -> tuple[type | None, int | None]:
    """Returns the class of a leaf, None if it is plain, and its number of rows that share a scale."""
    return type(leaf) if is_compound(leaf) else None, getattr(leaf, "group", None)


def _shardings_of(params, model: glm5.Glm5, execution: ExecutionConfig):
    """Returns the sharding of each parameter of a model."""
    if model.mesh is not None:
        return glm5.param_shardings(model.cfg, model.mesh, params, execution.replicated_weights)
    devices = {d for x in jax.tree.leaves(params) if isinstance(x, jax.Array) for d in x.devices()}
    device = min(devices or jax.devices(), key=lambda device: device.id)
    return jax.tree.map(lambda _: SingleDeviceSharding(device), params)


def _split_by_size(flat: dict, itemsize: int) -> list[list[str]]:
    """Splits the paths of leaves, in order, into parts of at most MAX_LOAD_BYTES or one leaf."""
    parts, num_bytes = [[]], 0
    for path, leaf in flat.items():
        size = math.prod(leaf.shape) * itemsize
        if parts[-1] and num_bytes + size > MAX_LOAD_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(path)
        num_bytes += size
    return parts


def _merge_trees(parts: list):
    """Merges trees that hold different leaves of one tree."""
    if isinstance(parts[0], dict):
        names = dict.fromkeys(name for part in parts for name in part)
        return {
            name: _merge_trees([part[name] for part in parts if name in part]) for name in names
        }
    return (
        [_merge_trees(list(items)) for items in zip(*parts)]
        if isinstance(parts[0], list)
        else parts[0]
    )


def to_compute_form(params: PyTree, cfg: ModelConfig) -> PyTree:
    """Returns weights, or some of them, in the form for computing.

    Layers are unstacked. Weights have the compute dtype, except the router's, which are wide. Experts are int4 if cfg
    has int4_group.
    """
    dtype = jnp.dtype(cfg.dtype)
    params = map_with_path(
        # A router in another dtype than before would need other programs, so it is always wide.
        lambda path, w: w.astype(accum_dtype(w.dtype) if "router/" in path else dtype),
        with_int4_experts(params, cfg),
    )
    return glm5.unstack(params, cfg)
