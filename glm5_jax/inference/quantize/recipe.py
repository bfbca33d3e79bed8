"""Converts weights to those of a quantised engine, one layer or expert at a time, by a recipe that its folder holds.

    recipe = QuantizationRecipe.read(FOLDER)                  rotation, scales and groups of a folder of experiments/quantise.py
    converter = WeightConverter(cfg, recipe)
    converter.convert(path, weight, ...)          fold, rotate, scale and quantise one weight

The bits do not depend on how a weight is sharded, or on whether its layers and experts are converted one at a time:
norms and scales are multiplied by programs of their own, rotations add in a fixed order (hadamard.py), and a quantised
number depends on its row, group or block only. So a trainer that pushes to engines sends what experiments/quantise.py would write.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import Array
from safetensors.numpy import save_file

from glm5_jax.config import ModelConfig
from glm5_jax.inference.quantize import calibrate, rotation, table
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten

FILE = "quantization_recipe.safetensors"
_GROUP, _SEED, _SCHEME = "group", "rotation_seed", "scheme"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizationRecipe:
    """How a model's weights were quantised.

    Attributes:
      group: inputs of an expert's matrix that share a scale, or side of a block of FP8; None: nothing is quantised.
      scheme: "w4a8" or "fp8", see table.py.
      rotation_seed: seed of the rotation; None: the weights are not rotated.
      scales: scales between up- and down-projections (calibrate.py), by the path of the feed-forward.
    """

    group: int | None
    scheme: str = table.W4A8
    rotation_seed: int | None = None
    scales: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def save(self, folder: pathlib.Path) -> None:
        """Writes the recipe into the folder of the quantised model."""
        assert self.group is not None, "the folder's model is quantised"
        metadata = {_GROUP: str(self.group), _SCHEME: self.scheme}
        if self.rotation_seed is not None:
            metadata[_SEED] = str(self.rotation_seed)
        scales = {path: np.asarray(scale) for path, scale in self.scales.items()}
        save_file(scales, folder / FILE, metadata=metadata)

    @classmethod
    def read(cls, folder: str | pathlib.Path) -> "QuantizationRecipe | None":
        """Reads the recipe of a folder; None: it has none. Raises ValueError if it is invalid."""
        file = pathlib.Path(folder) / FILE
        if not file.exists():
            return None
        try:
            with safetensors.safe_open(file, framework="numpy") as stored:
                metadata = stored.metadata()
                seed = metadata.get(_SEED)
                return cls(
                    group=int(metadata[_GROUP]),
                    scheme=metadata.get(_SCHEME, table.W4A8),
                    rotation_seed=None if seed is None else int(seed),
                    scales={path: stored.get_tensor(path) for path in stored.keys()},
                )
        except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{file} is no recipe ({error}); quantise the model again") from None


class WeightConverter:
    """Converter of the weights of one model.

    Attributes:
      cfg: config of the converted model.
    """

    def __init__(self, cfg: ModelConfig, recipe: QuantizationRecipe):
        """cfg: config of the weights. Raises ValueError if its model cannot be converted by the recipe."""
        table.check_scheme(cfg, recipe.scheme)
        self._recipe, self._is_tied = recipe, cfg.tie_word_embeddings
        self._folds: dict[str, rotation.Fold] = {}
        self._bases: dict[str, rotation.Basis] = {}
        if recipe.rotation_seed is not None:
            self._folds, self._bases = (
                rotation.folds(cfg),
                rotation.bases(cfg, recipe.rotation_seed),
            )
            cfg = rotation.rotated_config(cfg)
        self._folded_norms = {fold.norm for fold in self._folds.values()}
        self.cfg = dataclasses.replace(cfg, int4_group=None)
        abstract = glm5.abstract_params(self.cfg)
        self._letters = flatten(glm5.axis_letters(self.cfg))
        self._rules = table.rules_of(abstract, recipe.scheme)
        for part, scale in recipe.scales.items():
            up = flatten(abstract).get(f"{part}/up")
            if up is None or scale.shape != (*up.shape[:-2], up.shape[-1]):
                raise ValueError(
                    f"the recipe has scales {list(scale.shape)} of {part}, not of this model"
                )

    def source(self, path: str) -> str:
        """Returns the path of the weight that a converted one is made of: of a tied head, the embedding's."""
        is_new = path == "lm_head/weight" and self._is_tied and bool(self._bases)
        return "embed/weight" if is_new else path

    def convert(
        self,
        path: str,
        w: Any,
        read_norm: Callable[[str], Array],
        layer: int | None = None,
        expert: int | None = None,
    ) -> Any:
        """Returns the converted weight of a path: plain, quantised or a `RotatedNorm`.

        Args:
          w: weight of `source(path)`, an array.
          read_norm: returns the weight of a norm by its path.
          layer: index of the layer in its stack, if w is that of one layer; None: the leaf has no stack.
          expert: index of the expert, if w is that of one expert; None: w has all, or none.
        """
        if self.source(path) != path:
            w = w.T
        letters = self.unit_letters(path, layer, expert)
        if (fold := self._folds.get(path)) is not None:
            gain = read_norm(fold.norm)
            if fold.layers is not None:
                assert layer is not None, "a weight in a stack is converted by layers"
                gain = gain[fold.layers[layer]]
            num_removed = (layer is not None) + (expert is not None)
            w = rotation.fold_weight(path, w, gain, fold.dim - num_removed)
        if path in self._folded_norms:
            w = jnp.ones_like(w)
        w = rotation.turn_weight(path, w, letters, self.cfg, self._bases)
        part, _, name = path.rpartition("/")
        if name in ("up", "down") and part in self._recipe.scales:
            scale = self._recipe.scales[part][layer]
            scale = jnp.asarray(scale if expert is None else scale[expert])
            w = (calibrate.scale_up if name == "up" else calibrate.scale_down)(w, scale)
        if self.is_plain(path):
            return w
        return table.quantised(self._rules[path], w, letters, self._recipe.group, self.cfg.dtype)

    def is_plain(self, path: str) -> bool:
        """Returns whether a weight is not quantised."""
        return self._recipe.group is None or self._rules[path] == table.KEEP

    def unit_letters(self, path: str, layer: int | None, expert: int | None = None) -> str:
        """Returns the axis letters of a weight without those of the layer and the expert that it is of."""
        removed = {"l"} if layer is not None else set()
        removed |= {"e"} if expert is not None else set()
        return " ".join(name for name in self._letters[path].split() if name not in removed)

    def undivided_dims(self, path: str, layer: int | None) -> tuple[int, ...]:
        """Returns the dimensions along which a device must have all numbers of a weight of one layer to convert it."""
        letters = self.unit_letters(path, layer)
        dims = [dim for dim, *_ in rotation.turned_dims(path, letters, self.cfg) if self._bases]
        if self._rules[path] == table.W8A8:
            dims += table.summed(letters)
        elif self._rules[path] == table.W4A8:
            dims.append(len(letters.split()) - 2)
        elif self._rules[path] == table.FP8:
            dims += table.blocked(letters)
        return tuple(sorted({*dims}))
