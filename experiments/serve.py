"""Serves a model: OpenAI's API and a page to chat at http://127.0.0.1:8000.

    python -m launch.run --experiment=experiments/serve.py:tiny --experiment.checkpoint=DIR

DIR is the workdir of a run (such as that of experiments/sft.py), one of its checkpoints/STEP or a HuggingFace
folder, that of experiments/quantise.py too. Nothing is written, so there is no --workdir. Ctrl-C or SIGTERM lets
what runs end.

While it runs another DIR takes its place, if it is of the same model, and quantised alike or not at all:

    curl http://127.0.0.1:8000/update_weights -d '{"path": "DIR", "version": 2, "policy": "finish"}'

version is any number, unless DIR was pushed by a trainer (rl/weight_sync.py), which may also push to the server itself
and knows better: each token of `/generate` tells that of the weights that drew it. policy, for what is under way: finish
(the default) lets it end first, keep goes on from what the old weights computed, recompute begins it anew.

:tiny    for two CPU cores: 8 chats at once
:small   for one accelerator: 64 at once, drafts by the MTP layer
:glm5    for the chips of one process: experts over them, attention in parallel over their chats, 4 drafts

With --experiment.engine.index_cache=int8 and --experiment.engine.latent_cache=fp8 its memory holds 1.8 times as many tokens.
What it needs of which chips is known beforehand: `python -m launch.compile --experiment=experiments/serve.py:glm5 ...`.
Other machines reach it with --experiment.server.host=0.0.0.0 and --experiment.server.api_key_file=FILE, which holds the
key that clients send. An engine that fails ends the process with code 1, with which all launchers start a role again.
"""

import asyncio
import dataclasses
import sys

from glm5_jax.core.mesh import make_mesh
from glm5_jax.core.stopping import StopSignal
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import ServerConfig
from glm5_jax.training.experiment import MeshConfig, choose


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What is served, how, and where.

    Attributes:
      checkpoint: a workdir, one of its checkpoints/STEP or a HuggingFace folder.
      warm: whether all programs are compiled before the first request.
    """

    checkpoint: str | None = None
    warm: bool = True
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()


def get_config(variant: str = "tiny") -> ServeConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def tiny() -> ServeConfig:
    """Two cores."""
    engine = EngineConfig(page_size=16, max_batch=8, chunk=256)
    return ServeConfig(engine=engine, server=ServerConfig(model="glm-5-tiny"))


def small() -> ServeConfig:
    """One accelerator."""
    return ServeConfig(
        engine=EngineConfig(max_batch=64, max_length=32_768, chunk=2048, num_draft=2)
    )


def glm5() -> ServeConfig:
    """Drafts as in paper Table 2; lengths as trained. Pages of a device hold one chat of that length, or 32 of 6,400 tokens:
    22 GB on a GPU and 29 on a TPU, in 8 bits 13 and 19. What fits which chips: experiments/README.md."""
    engine = EngineConfig(
        num_pages=3200,
        max_batch=32,
        max_length=202_752,
        chunk=4096,
        num_draft=4,
        token_chunk=512,  # 0.8 GB on 16 devices for what one of them may receive at most
        vocab_block=40_960,
    )
    return ServeConfig(engine=engine, mesh=MeshConfig(fsdp=1, expert=-1))


def make_server(config: ServeConfig):
    """The server of a config; ValueError that says what cannot be."""
    from glm5_jax.checkpoint import models
    from glm5_jax.checkpoint.manifest import version_of
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
    version = version_of(config.checkpoint)
    engine = Engine(model, tokenizer, version=version, **dataclasses.asdict(config.engine))
    if config.warm:
        engine.warm(show=True)
    return Server(engine, tokenizer, config.server, models.loader_like(model))


def run(config: ServeConfig) -> int:
    """Serves until a signal ends it or the engine fails; returns the exit code."""
    try:
        with StopSignal(ends=True):
            server = make_server(config)
    except (ValueError, OSError) as error:
        return _fail(error)
    return serve_until_ended(server, config)


def serve_until_ended(server, config: ServeConfig) -> int:
    """Serves with a made server; returns 0 after a signal, 1 after a failure of the engine, 2 for a taken port."""
    try:
        asyncio.run(server.serve(lambda port: _say(config, port)))
    except OSError as error:
        where = f"{config.server.host}:{config.server.port}"
        return _fail(
            f"cannot listen at {where} ({error.strerror}); choose another --experiment.server.port"
        )
    if (failure := server.worker.failure) is not None:
        # Neither 2, a mistake of the user, which launchers do not start again, nor `placement.AGAIN`, which has no limit.
        return _fail(f"the engine has failed: {type(failure).__name__} {failure}", 1)
    return 0


def _fail(error, code: int = 2) -> int:
    print("error:", " ".join(str(error).split())[:1000], file=sys.stderr)
    return code


def _say(config: ServeConfig, port: int) -> None:
    host = config.server.host
    print(f"{config.server.model} answers at http://{host}:{port} (Ctrl-C ends it)", flush=True)


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
