"""Opens the sources of an engine's weights (`runner.WeightSource`) in one of its processes.

Every process of an engine opens a source by itself and reads the shards of its own devices:

    {"path": FOLDER}    a checkpoint, or a folder that a trainer pushed
    {"pull": NAME}      a push that the process has pulled into host memory (shards/receiver.py)
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from glm5_jax.checkpoint import hf_import
from glm5_jax.checkpoint.hf_files import open_tensors
from glm5_jax.checkpoint.manifest import FILE
from glm5_jax.config import ModelConfig
from glm5_jax.inference.shards.receiver import ShardReceiver
from glm5_jax.model import glm5


class WeightSources:
    """Sources of the weights of one model.

    load: reads the weights of a checkpoint, see `checkpoint.models.make_weight_loader`.

    Attributes:
      shards: receiver of the pushes to this process; None: it takes no pushes.
    """

    def __init__(self, cfg: ModelConfig, mesh: Mesh | None, load: Callable[[str], PyTree]):
        self.shards: ShardReceiver | None = None
        self._cfg, self._load = cfg, load
        self._shardings = None if mesh is None else glm5.param_shardings(cfg, mesh)

    def open(self, source: Mapping[str, Any]) -> PyTree:
        """Returns the weights of a source; leaves may be lazy. Raises ValueError or OSError if it cannot be read."""
        if "pull" in source:
            if self.shards is None:
                raise ValueError("this process of the engine takes no pushes")
            return self.shards.take(source["pull"])
        path = source["path"]
        if (pathlib.Path(path) / FILE).exists():
            return hf_import.from_tensors(open_tensors(path), self._cfg, self._shardings)
        return self._load(path)
