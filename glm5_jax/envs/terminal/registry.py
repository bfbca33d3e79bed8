"""Terminal tasks of a Harbor registry, which the `harbor` package downloads.

`harbor` is no dependency of this project: it needs Python 3.12 (`pip install harbor`). What it downloads are folders in its
format, which run here like all others.
"""

import asyncio
import dataclasses
import importlib
import os
import pathlib

from glm5_jax.data.sources import is_held_out
from glm5_jax.envs.terminal.service import TerminalShare
from glm5_jax.envs.terminal.task import TerminalTask, load_task

_CACHE = pathlib.Path("~/.cache/glm5_jax/harbor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarborShare(TerminalShare):
    """Dataset of a Harbor registry and its share of the training data. Raises ValueError for values out of range.

    Attributes:
      harbor: the dataset, NAME or NAME@VERSION.
      registry: file of a registry, or its URL; None: that of Harbor.
      folder: folder of the downloads; empty: one in the home directory.
      name: name of its task service.
    """

    name: str = "harbor"
    harbor: str = ""
    registry: str | None = None

    def __post_init__(self):
        if not self.harbor:
            raise ValueError("harbor is empty; pass a dataset, NAME or NAME@VERSION")
        object.__setattr__(self, "folder", self.folder or str(_CACHE.expanduser()))
        super().__post_init__()

    def load(self) -> tuple[list[TerminalTask], list[TerminalTask]]:
        parts: tuple[list[TerminalTask], list[TerminalTask]] = [], []
        for path in sorted(self.download()):
            task = load_task(path)
            parts[is_held_out(task.instruction, self.held_out_fraction)].append(task)
        if not parts[0]:
            raise ValueError(
                f"all tasks of {self.harbor} are held out; lower held_out_fraction={self.held_out_fraction}"
            )
        return parts

    def download(self) -> list[pathlib.Path]:
        """Returns the folders of the tasks, and downloads those that are missing.

        Raises ValueError if the package is not installed, or the dataset cannot be downloaded.
        """
        try:
            factory = importlib.import_module("harbor.registry.client.factory")
        except ImportError as error:
            raise ValueError(
                f"{self.harbor!r} needs the package harbor ({error}); run pip install harbor, with Python 3.12 or newer"
            ) from error
        is_file = self.registry is not None and os.path.exists(self.registry)
        try:
            client = factory.RegistryClientFactory.create(
                registry_url=None if is_file else self.registry,
                registry_path=pathlib.Path(self.registry or "") if is_file else None,
            )
            folder = pathlib.Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            items = asyncio.run(client.download_dataset(self.harbor, output_dir=folder))
        except Exception as error:  # of its libraries, which reach a network
            raise ValueError(
                f"{self.harbor} cannot be downloaded: {type(error).__name__}: {error}"
            ) from error
        return [pathlib.Path(item.downloaded_path) for item in items]
