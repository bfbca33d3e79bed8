"""Runs a process of an engine that is not the first one: it follows the first one's commands.

    stream = connect(end_engine)
    if isinstance(stream, CommandSender):          # the first process schedules and serves
        engine = Engine(model, tokenizer, config, open_weights=open_weights, send=stream.send)
    else:
        Follower(model, config, stream, open_weights).run()

All processes create their engine or follower at the same point, because its start runs device programs.
"""

from glm5_jax.inference.commands import OpenWeights, Stop
from glm5_jax.inference.engine_weights import EngineWeights
from glm5_jax.inference.followers.command_stream import CommandReceiver
from glm5_jax.inference.quantize.table import quantise_model
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.runner import OpenSource, Runner
from glm5_jax.inference.shapes import resolve_shapes
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig


class Follower:
    """Weights and pages of a process that runs the first one's commands.

    Attributes:
      cfg: config of the model.
      stream: connection to the first process.
    """

    def __init__(
        self,
        model: glm5.Glm5,
        config: EngineConfig,
        stream: CommandReceiver,
        open_weights: OpenSource | None = None,
        *,
        execution: ExecutionConfig = ExecutionConfig(),
    ):
        """Creates the pages. model, config, execution: those of the first process. open_weights: see `Runner`."""
        model = quantise_model(model, config.quantization)
        shape, _ = resolve_shapes(model.cfg, config)
        self.cfg = model.cfg
        self._runner = Runner(model, shape, config.execution(execution), open_weights)
        self.stream = stream

    @property
    def weights(self) -> EngineWeights:
        """Weights on the devices of this process."""
        return self._runner.weights

    def run(self) -> None:
        """Runs commands until the first process stops. Raises ProcessLost if that process has ended."""
        while True:
            command, arrays = self.stream.receive()
            if isinstance(command, Stop):
                return
            try:
                self._runner.execute(command, arrays)
            except (ValueError, OSError):
                # The first process raises it, too, and reports it. The old weights stay.
                if not isinstance(command, OpenWeights):
                    raise
