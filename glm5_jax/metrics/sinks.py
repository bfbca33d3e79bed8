"""Sinks of a run's metrics in addition to metrics.jsonl and TensorBoard: Weights & Biases, or one of the user.

    --train.sinks="('wandb',)"          in the project of WANDB_PROJECT; WANDB_MODE=offline stores it on this machine
    --train.sinks="('my_sinks:Sink',)"  my_sinks.Sink(run), from a module on Python's path

Only the first process of a run writes to them.
"""

import dataclasses
import importlib
import importlib.util
import pathlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PROJECT = "glm5_jax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Description of a run for a sink.

    Attributes:
      name: name of the run.
      workdir: folder of the run.
      config: all options of the run, as JSON values.
      step: step of the checkpoint that the run resumes from; 0: it starts.
    """

    name: str
    workdir: pathlib.Path
    config: Mapping[str, Any]
    step: int = 0


class MetricsSink(Protocol):
    """Destination of metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes values of one step; a step may have several writes."""
        ...

    def close(self) -> None:
        """Ends the run, after its last write."""
        ...


class WandbSink:
    """Run of Weights & Biases. A resumed run has the same id, which is in the workdir."""

    def __init__(self, run: RunInfo):
        import wandb  # pyright: ignore[reportMissingImports]: an extra

        file = run.workdir / "wandb_id"
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            # The environment's project comes first.
            project=None if wandb.Settings().project else _PROJECT,
            name=run.name,
            id=file.read_text().strip(),
            resume="allow",
            dir=run.workdir,
            config=dict(run.config),
            # Its copy of the terminal would record every update of the progress bar.
            settings=wandb.Settings(console="off"),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[RunInfo], MetricsSink]] = {"wandb": WandbSink}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ValueError for an unknown sink, and for one whose package or module is missing."""
    for name in names:
        if name in SINKS:
            if importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"the sink {name} needs a package that is not installed: pip install -e '.[{name}]'"
                )
            continue
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the sink {name!r} is unknown; use {', '.join(SINKS)}, or MODULE:NAME"
            )
        _find(name)


def open_sinks(names: Sequence[str], run: RunInfo) -> list[MetricsSink]:
    """Opens the sinks of a run. Raises ValueError as `check_sinks` does."""
    check_sinks(names)
    return [SINKS[name](run) if name in SINKS else _find(name)(run) for name in names]


def _find(name: str) -> Callable[[RunInfo], MetricsSink]:
    """Returns the class or function that MODULE:NAME names. Raises ValueError."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the sink {name} cannot be imported ({error}); its module must be on PYTHONPATH"
        ) from error
