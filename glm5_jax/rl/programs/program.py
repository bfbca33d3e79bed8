"""Describes a process as one program of a run: its role, its address, and the addresses that it needs."""

import dataclasses
import pathlib
from typing import Any

from glm5_jax.inference.shards.hosts import PRIVATE_NETWORKS
from glm5_jax.rl.programs.run_key import KEY_FILE, ensure_key_file
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.http_server import ListenConfig
from glm5_jax.runtime.utilization import FOLDER


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """Role and addresses of one program of a run, filled in by a launcher.

    Attributes:
      role: role of the program; empty: the process starts the full run.
      number: number of the replica, or of the service among the tasks.
      engines: URLs of all engines, separated by commas.
      gateway: URL of the gateway.
      orchestrator: URL of the orchestrator.
      url: URL by which the orchestrator reaches this program.
      pull_hosts: names, addresses and networks of the trainer's and the engines' processes, which engines pull weights
        from. The trainer sends addresses.
      listen: options of its server. A relative api_key_file is in the workdir, and holds the key of the run.
    """

    role: str = ""
    number: int = 0
    engines: str = ""
    gateway: str = ""
    orchestrator: str = ""
    url: str = ""
    pull_hosts: tuple[str, ...] = PRIVATE_NETWORKS
    listen: ListenConfig = ListenConfig(api_key_file=KEY_FILE)

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Returns the URLs of the engines."""
        return tuple(self.engines.split(","))

    def run_key(self, workdir: pathlib.Path) -> str | None:
        """Returns the key of the run, and creates its file if it is missing; None: the run has no key."""
        file = self._key_file(workdir)
        return self.listen.api_key if file is None else read_key(file)

    def listen_options(self, workdir: pathlib.Path, name: str) -> dict[str, Any]:
        """Returns the fields of a `ListenConfig`. name: name of the program in the report of the run."""
        listen = dataclasses.replace(
            self.listen,
            utilization_file=str(workdir / FOLDER / f"{name}.jsonl"),
            api_key_file=self._key_file(workdir),
        )
        return {field.name: getattr(listen, field.name) for field in dataclasses.fields(listen)}

    def _key_file(self, workdir: pathlib.Path) -> str | None:
        file = self.listen.api_key_file
        return None if file is None else str(ensure_key_file(workdir / file))
