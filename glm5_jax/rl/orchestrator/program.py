"""Says which program of a run a process is, where it listens and which addresses it needs."""

import dataclasses
import pathlib
from typing import Any

from glm5_jax.rl.orchestrator.run_key import KEY_FILE, ensure_key_file
from glm5_jax.runtime.http_server import ListenConfig, read_key
from glm5_jax.runtime.utilization import FOLDER


@dataclasses.dataclass(frozen=True)
class PlaceConfig:
    """The place of a program in a run, which a launcher fills in.

    Attributes:
      role: name of the program; empty: the whole run.
      number: number of the replica, or of the service among the tasks.
      engines: URLs of all engines, separated by commas.
      gateway: URL of the gateway.
      hub: URL of the orchestrator.
      url: URL by which the orchestrator reaches this program.
      listen: how it listens. A relative api_key_file is in the workdir, and holds the key of the run.
    """

    role: str = ""
    number: int = 0
    engines: str = ""
    gateway: str = ""
    hub: str = ""
    url: str = ""
    listen: ListenConfig = ListenConfig(api_key_file=KEY_FILE)

    @property
    def addresses(self) -> tuple[str, ...]:
        """URLs of the engines."""
        return tuple(self.engines.split(","))

    def key(self, workdir: pathlib.Path) -> str | None:
        """Returns the key of the run, which is created if it is missing; None: the run has no key file."""
        file = self._key_file(workdir)
        return self.listen.api_key if file is None else read_key(file)

    def listening(self, workdir: pathlib.Path, name: str) -> dict[str, Any]:
        """Returns the fields of a `ListenConfig` for the program of this name in the report."""
        listen = dataclasses.replace(
            self.listen,
            utilization_file=str(workdir / FOLDER / f"{name}.jsonl"),
            api_key_file=self._key_file(workdir),
        )
        return {field.name: getattr(listen, field.name) for field in dataclasses.fields(listen)}

    def _key_file(self, workdir: pathlib.Path) -> str | None:
        file = self.listen.api_key_file
        return None if file is None else str(ensure_key_file(workdir / file))
