"""What has been said in sessions, and which weights were wanted, on disk for the gateway after this one."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping

from glm5_jax.rl.sessions import Turn
from glm5_jax.rl.types import Weights

_WANTED = "weights.json"  # no session's file, whose names end otherwise


class SessionJournal:
    """A file for each open session: its first line tells the seed, each further one a turn and the rank that has it. One
    more tells the weights that engines must have.

    folder: made if it is not there; one gateway at a time writes it.
    """

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> Iterator[tuple[str, int, list[Turn], str | None]]:
        """(id, seed, turns, rank of the last turn or None) of each session. A last line that was cut off was never
        answered."""
        for path in sorted(self._folder.glob("*.jsonl")):
            lines = path.read_bytes().split(b"\n")
            if whole := lines[:-1]:
                first, *turns = map(json.loads, whole)
                if lines[-1]:
                    path.write_bytes(b"\n".join(whole) + b"\n")
                ranks = [turn.pop("rank", None) for turn in turns]
                yield path.stem, first["seed"], list(map(_turn, turns)), (ranks or [None])[-1]
            else:
                path.unlink()

    def wanted(self) -> Weights | None:
        """That were last wanted."""
        path = self._folder / _WANTED
        return Weights(**json.loads(path.read_bytes())) if path.exists() else None

    def want(self, weights: Weights) -> None:
        """These are from now on."""
        new = self._folder / f"{_WANTED}.new"
        new.write_bytes(json.dumps(weights._asdict()).encode())
        new.replace(self._folder / _WANTED)

    def begin(self, name: str, seed: int) -> None:
        """A session is open."""
        self._append(name, {"seed": seed})

    def add(self, name: str, turn: Turn, rank: str | None) -> None:
        """It has gone on by a turn."""
        self._append(name, dataclasses.asdict(turn) | {"rank": rank})

    def end(self, name: str) -> None:
        """Nothing is kept of it."""
        self._path(name).unlink(missing_ok=True)

    def _append(self, name: str, value: Mapping) -> None:
        with self._path(name).open("ab") as file:
            file.write(json.dumps(value).encode() + b"\n")

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.jsonl"


def _turn(said: Mapping) -> Turn:
    return Turn(**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items()})
