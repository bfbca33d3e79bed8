"""An experiment of small real programs: two engines, a gateway, an orchestrator and a trainer.

The trainer requests the orchestrator's arguments, prints them and completes after `seconds`. Before that it dies
`deaths` times. On SIGTERM it saves and exits like launch.run.
"""

import dataclasses
import pathlib

from glm5_jax.runtime.placement import Restarts, Role

SMALL = str(pathlib.Path(__file__).parents[1] / "runtime" / "small_role.py")
TRAIN = """
import os, pathlib, signal, sys, time, urllib.request
url, seconds, deaths, lives = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
def stopped(*_):
    with open(lives, "a") as file:
        file.write("saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, stopped)
with open(lives, "a") as file:
    file.write("life\\n")
print(urllib.request.urlopen(url + "/arguments").read().decode())
print("trains as", os.getpid(), flush=True)
time.sleep(seconds)
if lives.read_text().count("\\n") <= deaths:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclasses.dataclass(frozen=True)
class System:
    """Config of the small system.

    Ports are 0 for any free port; the engines have two. `seconds` and `deaths` are of the trainer, which counts its
    starts in the file `lives`.
    """

    engine_port: int = 0
    gateway_port: int = 0
    orchestrator_port: int = 0
    engine_devices: int = 0
    engine_memory: int = 0
    engine_cpus: int = 0
    train_hosts: int = 1
    train_devices: int = 0
    tpu_topology: str = ""
    limit: int = 3
    seconds: float = 0.1
    deaths: int = 0
    lives: str = "lives"


def get_config(variant: str = "tiny") -> System:
    if variant not in ("tiny", "pod"):
        raise ValueError(f"unknown variant {variant!r}; use one of tiny, pod")
    if variant == "tiny":
        return System()
    return System(7000, 8000, 9000, 4, 64, 8, 2, 4, "2x2x2", lives="/run/lives")


def roles(config: System, command) -> list[Role]:
    """Returns the roles; the trainer starts last, though it is listed first."""

    def server(name: str, port: int, *words: str, **more) -> Role:
        argv = ["{python}", SMALL, "{host}", "{port}", "{ready}", *words]
        return Role(name=name, argv=argv, port=port, grace_s=20, restarts=limits, **more)

    limits = Restarts(max_restarts=config.limit, initial_delay_s=0.05, max_delay_s=0.05)
    arguments = [str(config.seconds), str(config.deaths), config.lives]
    words = ["{python}", "-c", TRAIN, "{orchestrator.url}", *arguments]
    words += ["{distributed}"] if config.train_hosts > 1 else []
    hosts, devices = config.train_hosts, config.train_devices
    engines = dict(count=2, devices=config.engine_devices, tpu_topology="2x2x1")
    engines |= dict(memory_gib=config.engine_memory, cpus=config.engine_cpus)
    return [
        Role(
            name="train",
            argv=words,
            hosts=hosts,
            devices=devices,
            tpu_topology=config.tpu_topology,
            main=True,
            restarts=limits,
            settle_s=0.05,
            env={"WANDB_MODE": "off line"},
        ),
        server("orchestrator", config.orchestrator_port, "{gateway.url}", *command),
        server("gateway", config.gateway_port, "{engine.urls}", 'cost=$5 `a` "b" it\'s'),
        server("engine", config.engine_port, "number={index}", **engines),
    ]
