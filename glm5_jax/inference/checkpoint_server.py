"""Makes the HTTP server of a checkpoint: loads its model and tokenizer, and creates the engine.

In a pod each process calls it with the same arguments. The first process gets the server of the engine, and the others
that of a follower. If a process ends, all others end with code 1, and their launcher restarts them together.
"""

import os
import time

import jax
from jax.sharding import Mesh

from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.manifest import read_version
from glm5_jax.checkpoint.peft_adapters import with_adapter
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.followers.command_stream import CommandReceiver, connect
from glm5_jax.inference.followers.follower import Follower
from glm5_jax.inference.followers.server import FollowerServer
from glm5_jax.inference.quantize.table import make_leaf_converter, quantise_model
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.inference.weight_sources import WeightSources
from glm5_jax.runtime.terminal import print_error

_REPORT_S = 1.0  # time in which this process may report an error of its own before it ends


def make_checkpoint_server(
    checkpoint: str,
    mesh: Mesh,
    engine: EngineConfig,
    server: ServerConfig,
    *,
    warm: bool = True,
    adapter: str | None = None,
    trained: ModelConfig | None = None,
) -> Server | FollowerServer:
    """Returns the server of a checkpoint's model. Raises ValueError if the configuration or the checkpoint is invalid.

    - checkpoint: workdir, one of its checkpoints/STEP or a HuggingFace folder.
    - mesh: devices of the engine.
    - engine, server: options of the engine and of the HTTP server.
    - warm: whether to compile all programs before the first request, while the server already listens.
    - adapter: folder of a PEFT adapter, which is merged into the weights; None: none.
    - trained: config of the model whose weights a trainer will push (`models.load_model`); None: nothing is pushed.
    """
    stream = connect(_end_with) if jax.process_count() > 1 else None
    tokenizer = models.load_tokenizer(checkpoint)
    convert = None if adapter is not None else make_leaf_converter(engine.quantization)
    model = models.load_served_model(checkpoint, mesh if mesh.size > 1 else None, trained, convert)
    if adapter is not None:
        model = with_adapter(model, adapter)
    model = quantise_model(model, engine.quantization)
    load = models.make_weight_loader(model)
    sources = WeightSources(model.cfg, model.mesh, load)
    if isinstance(stream, CommandReceiver):
        follower = FollowerServer(
            Follower(model, engine, stream, sources.open), server, server.pull_hosts
        )
        sources.shards = follower.shards
        return follower
    leader = Server(
        Engine(
            model,
            tokenizer,
            engine,
            version=read_version(checkpoint),
            open_weights=sources.open,
            send=stream and stream.send,
        ),
        tokenizer,
        server,
        load,
        warm=warm,
        stream=stream,
    )
    sources.shards = leader.shards
    return leader


def _end_with(number: int) -> None:
    """Ends this process because another one of the engine has ended. A program on the devices may wait for it forever."""
    time.sleep(_REPORT_S)
    print_error(f"process {number} of this engine has ended, and all others end with it")
    os._exit(1)
