"""Serves a model over OpenAI's API, with a chat page at http://127.0.0.1:8000.

    python -m launch.run --experiment=experiments/serve.py:tiny --experiment.checkpoint=DIR

DIR is the workdir of a run (such as that of experiments/sft.py), one of its checkpoints/STEP, or a HuggingFace folder
(also one of experiments/quantise.py). Nothing is written, so there is no --workdir. Ctrl-C or SIGTERM stops the server
after the running requests.

A running server can load another DIR of the same model, with the same quantisation or none:

    curl http://127.0.0.1:8000/update_weights -d '{"path": "DIR", "version": 2, "policy": "finish"}'

version is any number up to 2**31 - 1; for a DIR that a trainer pushed (rl/weights/weight_sync.py), that of its manifest. A
trainer may also push to the server directly. Each token of `/generate` reports the version of the weights that sampled
it. policy decides about running requests: finish (the default) lets them end first, keep continues from the old
weights' KV cache, recompute starts them again.

:tiny    for two CPU cores: 8 concurrent chats
:small   for one accelerator: 64 concurrent chats, drafts by the MTP layer
:glm5    for the chips of one process: expert parallelism over them, data-parallel attention over chats, 4 drafts

With --experiment.engine.index_cache=int8 and --experiment.engine.latent_cache=fp8 the cache holds 1.8 times as many
tokens. `python -m launch.compile --experiment=experiments/serve.py:glm5 ...` computes the memory that a chip needs.
Other machines can connect with --experiment.server.host=0.0.0.0 and --experiment.server.api_key_file=FILE, which holds
the key that clients send. If the engine fails, the process ends with code 1, and all launchers restart a role with it.
"""

import asyncio
import dataclasses

from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import ServerConfig
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import print_error
from glm5_jax.training.experiment import MeshConfig, choose


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Model, engine and server of a serving process.

    Attributes:
      checkpoint: workdir, one of its checkpoints/STEP or a HuggingFace folder; None: not set, so the server cannot start.
      warm: whether to compile all programs before the first request.
      mesh, engine, server: options of the mesh, the engine and the HTTP server.
    """

    checkpoint: str | None = None
    warm: bool = True
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()


def get_config(variant: str = "tiny") -> ServeConfig:
    """Returns the configuration of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def tiny() -> ServeConfig:
    """Serves on two CPU cores."""
    engine = EngineConfig(page_size=16, max_num_seqs=8, prefill_chunk=256)
    return ServeConfig(engine=engine, server=ServerConfig(model="glm-5-tiny"))


def small() -> ServeConfig:
    """Serves on one accelerator."""
    return ServeConfig(
        engine=EngineConfig(
            max_num_seqs=64, max_length=32_768, prefill_chunk=2048, num_speculative_tokens=2
        )
    )


def glm5() -> ServeConfig:
    """Serves the 744B model with the drafts of the paper's Table 2 and the trained context length.

    A device's pages hold one chat of that length, or 32 of 6,400 tokens: 22 GB on a GPU and 29 GB on a TPU, in 8 bits 13
    and 19 GB. experiments/README.md lists the chips that are large enough.
    """
    engine = EngineConfig(
        num_pages=3200,
        max_num_seqs=32,
        max_length=202_752,
        prefill_chunk=4096,
        num_speculative_tokens=4,
        token_chunk=512,  # limits the receive buffers of one of 16 devices to 0.8 GB
        vocab_block=40_960,
    )
    return ServeConfig(engine=engine, mesh=MeshConfig(fsdp=1, expert=-1))


def make_server(config: ServeConfig):
    """Builds the server of a configuration. Raises ValueError if the configuration or checkpoint is invalid."""
    from glm5_jax.checkpoint import models
    from glm5_jax.checkpoint.manifest import read_version
    from glm5_jax.inference.engine import Engine
    from glm5_jax.inference.server import Server

    if config.checkpoint is None:
        raise ValueError(
            "nothing to serve; give --experiment.checkpoint=PATH, a run's workdir, one of its checkpoints/STEP or an "
            "HF folder"
        )
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    mesh = mesh if mesh.size > 1 else None
    tokenizer = models.load_tokenizer(config.checkpoint)
    model = models.load_model(config.checkpoint, mesh)
    version = read_version(config.checkpoint)
    engine = Engine(model, tokenizer, version=version, **dataclasses.asdict(config.engine))
    if config.warm:
        engine.warm(show=True)
    return Server(engine, tokenizer, config.server, models.make_weight_loader(model))


def run(config: ServeConfig) -> int:
    """Serves until a signal arrives or the engine fails. Returns the exit code."""
    try:
        with PreemptionGuard(ends=True):
            server = make_server(config)
    except (ValueError, OSError) as error:
        return _fail(error)
    return serve_until_ended(server, config)


def serve_until_ended(server, config: ServeConfig) -> int:
    """Runs a server. Returns 0 after a signal, 1 after an engine failure, 2 if the port is in use."""
    try:
        asyncio.run(server.serve(lambda port: _print_address(config, port)))
    except OSError as error:
        where = f"{config.server.host}:{config.server.port}"
        return _fail(
            f"cannot listen at {where} ({error.strerror}); choose another --experiment.server.port"
        )
    if (failure := server.worker.failure) is not None:
        # Not 2, a user error, which launchers do not restart. Not `placement.EXIT_RESTART`, which has no restart limit.
        return _fail(f"the engine has failed: {type(failure).__name__} {failure}", 1)
    return 0


def _fail(error, code: int = 2) -> int:
    print_error(error)
    return code


def _print_address(config: ServeConfig, port: int) -> None:
    host = config.server.host
    print(f"{config.server.model} answers at http://{host}:{port} (Ctrl-C ends it)", flush=True)


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
