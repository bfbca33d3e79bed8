"""Serves a model over OpenAI's and Anthropic's APIs, with a chat page at http://127.0.0.1:8000.

    glm5 serve DIR

    curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "hi"}]}'

OpenAI's SDK takes base_url="http://127.0.0.1:8000/v1" (chats, responses and completions), Anthropic's takes
base_url="http://127.0.0.1:8000"; the api_key is any text unless the server has a key. docs/clients.md has the commands
of benchmarks and coding agents, and inference/server.py all endpoints.

DIR is the workdir of a run (such as that of experiments/sft.py), one of its checkpoints/STEP, a HuggingFace folder (also
one of experiments/quantise.py), or a repository owner/name of the hub, with @REVISION if it is not the default branch. Nothing is written, so there is no --workdir. Ctrl-C or SIGTERM stops the server
after the running requests.

A running server can load another DIR of the same model, with the same quantisation or none:

    curl http://127.0.0.1:8000/update_weights -d '{"path": "DIR", "version": 2, "policy": "finish"}'

version is any number up to 2**31 - 1; for a DIR that a trainer pushed (rl/weights/weight_sync.py), that of its manifest. A
trainer may also push to the server directly: it pulls the weights from the machine that requests it, and from those of
--server.pull_hosts (names, addresses and networks), such as other machines of the trainer. Each token of `/generate` reports the version of the weights that sampled
it. policy decides about running requests: finish (the default) lets them end first, keep continues from the old
weights' KV cache, recompute starts them again.

:tiny    for two CPU cores: 8 concurrent chats; each program is compiled when a request needs it
:small   for one accelerator: 64 concurrent chats, drafts by the MTP layer
:flash   for one accelerator with 80 GB: GLM-4.7-Flash, 32 concurrent chats of up to 32K tokens, drafts by the MTP layer
:glm5    for a slice of TPUs or some nodes of GPUs: expert parallelism over them, data-parallel attention over chats, 4
         drafts. By default bf16 weights on 32 v5p, 4 of each host

:small, :flash and :glm5 listen at once and then compile all programs (--warm). Meanwhile requests wait, and /health
says "compiling 11 of 178" with status 503. --engine.warms_prompt_logprobs=False skips the programs of log-probs of prompts
(echo with logprobs), a quarter of them. The first such requests then delay all others.

--adapter=FOLDER merges a LoRA adapter in PEFT's form, such as the folder `adapter` in the workdir of a run
that trained one (the workdir itself is served with its adapter, too).

With --engine.quantization=fp8 the weights are block-wise FP8, which takes half the memory of bfloat16. Plain weights are
converted while they are loaded and pushed, so that DIR is that of the trained model.

With --engine.index_cache=int8 and --engine.latent_cache=fp8 the cache holds 1.8 times as many
tokens. `glm5 compile serve:glm5 ...` computes the memory that a chip needs.
Other machines can connect with --server.host=0.0.0.0 and --server.api_key_file=FILE, which holds
the key that clients send. If the engine fails, the process ends with code 1, and all launchers restart a role with it.

An engine of several processes, one on each host, is started by launch/local.py, on_ray.py, slurm.py or gke.py. The first
process serves HTTP, and the others follow its steps. All end if one of them ends, and are restarted together:

    glm5 local serve:tiny --checkpoint=DIR --hosts=2 --devices=2 --mesh.expert=-1
    python -m launch.gke --experiment=experiments/serve.py:glm5 --experiment.checkpoint=DIR ... --accelerator=tpu-v5p-slice

On Slurm and Kubernetes the server listens on every network: give --server.api_key_file=FILE on a shared file system, or
--server.trusted_network=True.
--hosts, --devices (of each process) and --topology are its processes and chips.

With --prefill.replicas=2 the launchers start two further engines, role `prefill`, that read long prompts for the engine
that answers, which then is role `decode`: the pages of their KV cache are sent over the network while the rest of the prompt
is computed, so that a long prompt does not delay the tokens of other chats. --prefill.hosts, devices, topology and mesh are
those of each of them. Prompts of fewer than --server.prefill_min_tokens tokens, and all prompts while no such engine
answers, are read by the engine that decodes:

    glm5 local serve:tiny --checkpoint=DIR --prefill.replicas=1
"""

import asyncio
import dataclasses
import re
from collections.abc import Sequence

import jax

from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import ServerConfig
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.runtime.http_server import check_port
from glm5_jax.runtime.placement import Role
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import print_error
from glm5_jax.training.experiment import MeshConfig, choose

START_TIMEOUT_S = 1800.0  # of loading the weights
_FLAG = "--experiment.server"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Engines that prefill prompts for the one that decodes. Raises ValueError for sizes out of range.

    Attributes:
      replicas: number of them; 0: the serving engine prefills itself.
      hosts, devices, topology, mesh: those of each replica, as in `ServeConfig`.
    """

    replicas: int = 0
    hosts: int = 1
    devices: int = 0
    topology: str = ""
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        if self.replicas < 0 or self.hosts < 1:
            raise ValueError(
                f"prefill.replicas is {self.replicas} and prefill.hosts is {self.hosts}; they must be at least 0 and 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Model, engine and server of a serving process.

    Attributes:
      checkpoint: workdir, one of its checkpoints/STEP or a HuggingFace folder; None: not set, so the server cannot start.
      adapter: folder of a PEFT adapter of this model, which is merged into its weights; None: none.
      warm: whether to compile all programs before the first request, while the server already listens.
      hosts: number of processes of the engine, for launchers; without a launcher there is one.
      devices, topology: accelerators of each process, and their TPU topology, see `runtime.placement.Role`.
      mesh, engine, server: options of the mesh, the engine and the HTTP server.
      prefill: engines that prefill long prompts for this one, for launchers; without a launcher there are none.
      only_prefills: whether this process belongs to one of them, so that it has the mesh of `prefill`.
    """

    checkpoint: str | None = None
    adapter: str | None = None
    warm: bool = True
    hosts: int = 1
    devices: int = 0
    topology: str = ""
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    prefill: PrefillConfig = PrefillConfig()
    only_prefills: bool = False

    def __post_init__(self):
        if self.hosts < 1:
            raise ValueError(f"hosts is {self.hosts}; it must be positive")


def roles(config: ServeConfig, command: Sequence[str]) -> list[Role]:
    """Returns the roles of the servers, for launchers. command: flags of launch/run.py."""
    words = [word for word in command if not re.match("--?workdir(=|$)", word)]
    if config.prefill.replicas == 0:
        return [_role("serve", config, config, words)]
    words = [*words, "--experiment.engine.moves_pages=True"]
    return [
        _role("decode", config, config, [*words, f"{_FLAG}.prefill_urls={{prefill.urls}}"]),
        _role(
            "prefill",
            config,
            config.prefill,
            [*words, "--experiment.only_prefills=True"],
            count=config.prefill.replicas,
            port=config.server.port and config.server.port + 1,
        ),
    ]


def _role(
    name: str,
    config: ServeConfig,
    machines: ServeConfig | PrefillConfig,
    words: Sequence[str],
    count: int = 1,
    port: int | None = None,
) -> Role:
    """Returns the role of a server; port: None: that of the config."""
    listen = ("host={host}", "port={port}", "ready_file={ready}")
    argv = ["{python}", "-m", "launch.run", *words, *(f"{_FLAG}.{flag}" for flag in listen)]
    if machines.hosts > 1:
        argv.append("--distributed={distributed}")
    return Role(
        name=name,
        argv=argv,
        count=count,
        hosts=machines.hosts,
        devices=machines.devices,
        tpu_topology=machines.topology,
        port=config.server.port if port is None else port,
        start_timeout_s=START_TIMEOUT_S,
        grace_s=2 * config.server.grace_s,
    )


def get_config(variant: str = "tiny") -> ServeConfig:
    """Returns the configuration of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "flash": flash, "glm5": glm5})


def tiny() -> ServeConfig:
    """Serves on two CPU cores."""
    engine = EngineConfig(page_size=16, max_num_seqs=8, prefill_chunk=256)
    return ServeConfig(engine=engine, server=ServerConfig(model="glm-5-tiny"), warm=False)


def small() -> ServeConfig:
    """Serves on one accelerator."""
    return ServeConfig(
        engine=EngineConfig(
            max_num_seqs=64, max_length=32_768, prefill_chunk=2048, num_speculative_tokens=2
        )
    )


def flash() -> ServeConfig:
    """Serves GLM-4.7-Flash on one accelerator with 80 GB: weights of 60 GB, and pages of 131,072 tokens in 7 GB."""
    return ServeConfig(
        engine=EngineConfig(
            num_pages=2048,
            max_num_seqs=32,
            max_length=32_768,
            prefill_chunk=2048,
            num_speculative_tokens=1,
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
    mesh = MeshConfig(fsdp=1, expert=-1)
    return ServeConfig(engine=engine, mesh=mesh, hosts=8, devices=4, topology="2x4x4")


def make_server(config: ServeConfig):
    """Builds the server of a configuration. Raises ValueError if the configuration or checkpoint is invalid."""
    from glm5_jax.inference.checkpoint_server import make_checkpoint_server

    if config.checkpoint is None:
        raise ValueError(
            "nothing to serve; give --experiment.checkpoint=PATH, a run's workdir, one of its checkpoints/STEP or an "
            "HF folder"
        )
    mesh = config.prefill.mesh if config.only_prefills else config.mesh
    return make_checkpoint_server(
        config.checkpoint,
        make_mesh(dataclasses.asdict(mesh)),
        config.engine,
        config.server,
        warm=config.warm,
        adapter=config.adapter,
    )


def run(config: ServeConfig) -> int:
    """Serves until a signal arrives or the engine fails. Returns the exit code."""
    try:
        # Before the weights are loaded, which may take minutes.
        check_port(config.server)
    except OSError as error:
        return _fail_to_listen(config, error)
    try:
        with PreemptionGuard(ends=True):
            server = make_server(config)
    except (ConnectionError, TimeoutError) as error:  # of another process of the engine
        return _fail(error, 1)
    except (ValueError, OSError) as error:
        return _fail(error)
    return serve_until_ended(server, config)


def serve_until_ended(server, config: ServeConfig) -> int:
    """Runs a server. Returns 0 after a signal, 1 after an engine failure, 2 if the port is in use."""
    try:
        asyncio.run(server.serve(lambda port: _print_address(config, port)))
    except OSError as error:
        return _fail_to_listen(config, error)
    if server.failed:
        # Not 2, a user error, which launchers do not restart. Not `placement.EXIT_RESTART`, which has no restart limit.
        failure = server.failure
        return _fail(f"the engine has failed: {type(failure).__name__} {failure}", 1)
    return 0


def _fail_to_listen(config: ServeConfig, error: OSError) -> int:
    where = f"{config.server.host}:{config.server.port}"
    return _fail(
        f"cannot listen at {where} ({error.strerror}); choose another --experiment.server.port"
    )


def _fail(error, code: int = 2) -> int:
    print_error(error)
    return code


def _print_address(config: ServeConfig, port: int) -> None:
    if jax.process_index() > 0:
        return  # this server answers health checks only
    host = config.server.host
    verb = "will answer" if config.warm else "answers"
    print(f"{config.server.model} {verb} at http://{host}:{port} (Ctrl-C ends it)", flush=True)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
