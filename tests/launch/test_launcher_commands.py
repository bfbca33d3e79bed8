"""Each role of agentic RL starts from the command of each launcher, with an address that others can reach."""

import contextlib
import dataclasses
import io
import re
import subprocess
from urllib.parse import urlsplit

import pytest
import yaml

from experiments import rl_agentic
from experiments.rl_reasoning import TaskWeight
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.cluster import ClusterConfig
from glm5_jax.rl.programs.run_key import KEY_FILE
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.placement import Role, topological_order
from glm5_jax.runtime.supervisor import RoleSupervisor
from glm5_jax.text.tokenizer import Tokenizer
from launch import command_line, gke, slurm

ROLES = ["engine", "gateway", "orchestrator", "task", "task", "train"]


def tiny(port=0):
    tasks = tuple(TaskWeight(TaskConfig(kind=kind, size=20)) for kind in ("products", "chain"))
    options = dict(checkpoint="nowhere", length=4096, tasks=tasks)
    return dataclasses.replace(rl_agentic.tiny(), cluster=ClusterConfig(port=port), **options)


def flags(workdir, port=7000):
    return [*tiny(port).programs(), f"--workdir={workdir}"]


def output_of(main, argv):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(argv) == 0
    return text.getvalue()


def by_slurm(workdir):
    """Yields the commands of the steps, as bash expands them on nodes of these names."""
    text = output_of(slurm.main, ["slurm", *flags(workdir), "--partition=p"])
    steps = re.findall(r"^  srun .*\\\n  (.*) &$", text, re.MULTILINE)
    names = dict.fromkeys(re.findall(r"\$\{(\w+)\[", text))
    arrays = "".join(f"{name}=(node1 node2)\n" for name in names)
    for step in steps:
        script = f"logs=/logs\n{arrays}printf '%s\\0' {step}"
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
        yield done.stdout.split("\0")[:-1]


def by_gke(workdir):
    more = ["--image=i", "--claim=c"]
    job_set = yaml.safe_load(output_of(gke.main, ["gke", *flags(workdir), *more]))
    for job in job_set["spec"]["replicatedJobs"]:
        [container] = job["template"]["spec"]["template"]["spec"]["containers"]
        yield [word.replace("$(ROLE_INDEX)", "0") for word in container["command"]]


class Recorder:
    """Placement on a machine `host`, whose places record the commands and start nothing."""

    def __init__(self, host):
        self.host, self.commands, self.claimed = host, [], 0

    def check(self, roles):
        pass

    def claim(self, role, index, process, stem):
        self.claimed += 1
        return RecordedPlace(self, 9000 + self.claimed)


class RecordedPlace:
    python, log, ready = "python3", "/log", "/ready"

    def __init__(self, owner, port):
        self.host, self._owner, self._port = owner.host, owner, port

    def start(self, argv):
        self._owner.commands.append(argv)
        return 1

    def exit_code(self):
        return None

    def port(self):
        return self._port

    free_port = port

    def terminate(self):
        self.exit_code = lambda: 0

    kill = release = terminate


def by_placement(host):
    """Returns a function that lists the commands of launch.local and launch.on_ray on a host."""

    def commands(workdir):
        all_roles = rl_agentic.roles(tiny(), flags(workdir, port=0))
        roles = [dataclasses.replace(role, health=None, settle_s=0.01) for role in all_roles]
        placement = Recorder(host)
        with RoleSupervisor(roles, placement, workdir / "roles", poll_interval_s=0.01):
            return placement.commands

    return commands


LAUNCHERS = {
    "slurm": by_slurm,
    "gke": by_gke,
    "local": by_placement("127.0.0.1"),
    "ray": by_placement("10.0.0.5"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_starts_every_role_with_command_of_launcher(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(
        servers, "make_checkpoint_server", lambda path, mesh, engine, server, **options: server
    )
    monkeypatch.setattr(servers, "load_tokenizer", lambda config: Tokenizer.load("bytes"))
    started = []
    for command in LAUNCHERS[launcher](tmp_path):
        at = command.index("launch.run")
        parsed = command_line.parse(command[at:])
        program = parsed.config.program
        started.append(program.role)
        urls = filter(None, [program.gateway, program.orchestrator, program.url, program.engines])
        assert all(urlsplit(url).hostname not in ("0.0.0.0", None) for url in urls)
        if program.role == "train":
            assert program.orchestrator and program.engines
            continue
        server = servers.SERVERS[program.role](parsed.config, parsed.workdir)
        config = getattr(server, "config", server)
        assert read_key(config.api_key_file) == read_key(tmp_path / KEY_FILE)
        if program.role == "task":
            url = urlsplit(config.url)
            assert url.port == config.port
            if launcher in ("local", "ray"):
                assert url.hostname == config.host
    assert sorted(started) == sorted(ROLES)


@pytest.mark.parametrize("count", [1, 3])
def test_gives_each_replica_another_address(count, tmp_path):
    role = Role(name="web", argv=["{python}", "{port}", "{self.url}"], port=7000, count=count)
    placement = Recorder("10.0.0.5")
    assert topological_order([role]) == (role,) and role.needs == ()
    roles = [dataclasses.replace(role, health=None, main=True)]
    with RoleSupervisor(roles, placement, tmp_path, poll_interval_s=0.01):
        pass
    commands = sorted(argv[1:] for argv in placement.commands)
    assert commands == [[str(7000 + i), f"http://10.0.0.5:{7000 + i}"] for i in range(count)]


@pytest.mark.parametrize(
    "role, message",
    [
        (lambda: Role(name="self", argv=["a"]), "role name 'self' stands for the role itself"),
        (
            lambda: topological_order([Role(name="web", argv=["{self.url}"])]),
            "neither {ready} nor a port",
        ),
        (
            lambda: topological_order([Role(name="web", argv=["{self.urls}"], port=1)]),
            "needs|self.urls",
        ),
    ],
)
def test_rejects_role_without_address(role, message):
    with pytest.raises(ValueError, match=message):
        role()
