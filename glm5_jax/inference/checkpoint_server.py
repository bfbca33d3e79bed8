"""Makes the HTTP server of a checkpoint: loads its model and tokenizer, and creates the engine."""

from jax.sharding import Mesh

from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.manifest import read_version
from glm5_jax.checkpoint.peft_adapters import with_adapter
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig


def make_checkpoint_server(
    checkpoint: str,
    mesh: Mesh,
    engine: EngineConfig,
    server: ServerConfig,
    *,
    warm: bool = True,
    adapter: str | None = None,
    trained: ModelConfig | None = None,
) -> Server:
    """Returns the server of a checkpoint's model. Raises ValueError if the configuration or the checkpoint is invalid.

    - checkpoint: workdir, one of its checkpoints/STEP or a HuggingFace folder.
    - mesh: devices of the engine.
    - engine, server: options of the engine and of the HTTP server.
    - warm: whether to compile all programs before the first request, while the server already listens.
    - adapter: folder of a PEFT adapter, which is merged into the weights; None: none.
    - trained: config of the model whose weights a trainer will push (`models.load_model`); None: nothing is pushed.
    """
    tokenizer = models.load_tokenizer(checkpoint)
    model = models.load_model(checkpoint, mesh if mesh.size > 1 else None, trained)
    if adapter is not None:
        model = with_adapter(model, adapter)
    version = read_version(checkpoint)
    return Server(
        Engine(model, tokenizer, engine, version=version),
        tokenizer,
        server,
        models.make_weight_loader(model),
        warm=warm,
    )
