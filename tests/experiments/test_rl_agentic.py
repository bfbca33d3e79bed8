"""Agentic RL as an experiment: its programs, how they start, and refused configs."""

import dataclasses

import pytest
import yaml

from experiments import rl_agentic, rl_reasoning
from experiments.rl_reasoning import TaskWeight
from glm5_jax.agents.context import ContextConfig
from glm5_jax.envs.reasoning.task_file import TaskFile
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.envs.terminal import AttemptConfig, BashConfig, service as terminal_service
from glm5_jax.envs.terminal.registry import HarborShare
from glm5_jax.envs.terminal.service import TerminalShare
from glm5_jax.envs.verifiers.service import VerifiersShare
from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.cluster import ClusterConfig
from glm5_jax.rl.programs.program import ProgramConfig
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.runtime.placement import topological_order
from glm5_jax.text.tokenizer import Tokenizer
from launch import command_line, gke, local, run, slurm
from launch.local import LocalMachine, LocalPlacement
from tests.envs.terminal.folders import make_task, needs_root

FILE = rl_agentic.__file__
POD = ["--image=registry/glm5:1", "--claim=shared", "--accelerator=tpu-v5p-slice", "--workdir=/run"]


def tiny(**changes):
    return dataclasses.replace(rl_agentic.tiny(), checkpoint="nowhere", **changes)


def words_of(role):
    return " ".join(role.argv)


def test_roles_start_after_roles_that_they_need():
    roles = topological_order(rl_agentic.roles(tiny(), ["--experiment=x", "--workdir=y"]))
    assert [role.name for role in roles] == [
        "engine",
        "gateway",
        "orchestrator",
        "task-0",
        "task-1",
        "train",
    ]
    engine, gateway, orchestrator, first, second, train = roles
    assert all("launch.run --experiment=x --workdir=y" in words_of(role) for role in roles)
    assert "--experiment.program.engines={engine.urls}" in words_of(gateway)
    assert "--experiment.program.gateway={gateway.url}" in words_of(orchestrator)
    assert "program.role=task --" in words_of(first) and "program.number=1" in words_of(second)
    assert [role.main for role in roles] == [False] * 5 + [True]
    assert {"task-0", "task-1"} < set(train.needs), (
        "what is held out is asked before the first step"
    )
    LocalPlacement(LocalMachine(platform="cpu", devices=[], cores=[0])).check(roles)


def test_each_kind_of_rl_has_its_loss():
    """GLM-5 3.2 and Eq. 1; 3.3, 4.1.1 and Eq. 3 to 5."""
    reasoning, agentic = rl_reasoning.glm5(), rl_agentic.glm5()
    assert (reasoning.policy.correction, reasoning.credit.baseline) == ("icepop", "zscore")
    for config in (agentic, rl_agentic.small(), rl_agentic.tiny()):
        assert (config.policy.correction, config.credit.baseline) == ("double_sided", "centred")
        assert config.credit.kl_target == "none" and config.credit.normalisation == "sequence"
    assert agentic.reset_optimizer and agentic.rollout.group > 1


@pytest.mark.parametrize("variant", ["tiny", "small", "glm5"])
def test_sends_full_conversation_with_each_request(variant):
    """GLM-5 3.1: coding agents keep all thinking. 4.2.4 shortens only search agents' contexts, at inference."""
    assert rl_agentic.get_config(variant).loop().context == ContextConfig(
        keep_rounds=None, max_prompt_tokens=None
    )


def test_broken_call_ends_attempt_unless_flag_says_otherwise():
    """GLM-4.5 3.2."""
    flag = "--experiment.ends_on_broken_call=False"
    for words, ends in (([], True), ([flag], False)):
        config = command_line.parse(["run", f"--experiment={FILE}:glm5", *words]).config
        assert config.loop().ends_on_broken_call == ends


def test_full_size_batch_is_sent_at_threshold():
    """GLM-5 4.1.1: a batch waits for no slow group. The small recipes, which have few groups, wait."""
    pacing = [rl_agentic.get_config(size).pacing for size in ("tiny", "small", "glm5")]
    assert pacing == [True, True, False]


def test_pod_has_port_for_each_process(capsys):
    config = rl_agentic.glm5()
    pod_roles = rl_agentic.roles(config, [])
    taken = [range(role.port, role.port + role.count) for role in pod_roles if not role.main]
    assert len({port for ports in taken for port in ports}) == sum(map(len, taken))
    train = pod_roles[-1]
    assert train.hosts * train.devices == 1024 and "{distributed}" in train.argv[-1]
    more = [f"--experiment={FILE}:glm5", "--experiment.checkpoint=/run/sft"]
    assert gke.main(["gke", *more, *POD]) == 0
    jobs = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs][:3] == ["engine", "gateway", "orchestrator"]
    assert [job["replicas"] for job in jobs][:2] == [64, 1]
    assert slurm.main(["slurm", *more, "--workdir=/run", "--partition=p"]) == 0
    assert "program.role=gateway" in capsys.readouterr().out


def test_gateway_gets_ranks_of_all_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "load_tokenizer", lambda config: None)
    program = ProgramConfig(role="gateway", engines="http://a:1,http://b:2")
    cluster = ClusterConfig(engines=2, ranks=2)
    calls = []
    monkeypatch.setattr(servers, "Gateway", lambda tokenizer, ranks, config: calls.append(ranks))
    servers.SERVERS["gateway"](tiny(program=program, cluster=cluster), tmp_path)
    assert calls == [["http://a:1@0", "http://a:1@1", "http://b:2@0", "http://b:2@1"]]


def test_flags_restore_same_config(tmp_path):
    terminals = TerminalShare(
        folder="tasks", weight=0.5, images={"python:3.12": "host"}, bash=BashConfig(timeout_s=9.0)
    )
    others = (
        HarborShare(harbor="numbers@1.0", registry="registry.json"),
        VerifiersShare(verifiers="sums", config={"agent": {"harness": {"id": "null"}}}),
    )
    tasks = (TaskWeight(TaskConfig(kind="chain", size=30), 2.0), terminals, *others)
    config = tiny(tasks=tasks, seed=3, max_staleness=1, program=ProgramConfig())
    words = config.programs()
    parsed = command_line.parse(["run", *words, f"--workdir={tmp_path}"])
    # The module differs, because it is read from its file.
    assert dataclasses.asdict(parsed.config) == dataclasses.asdict(config)
    assert not dataclasses.replace(config, program=ProgramConfig(role="orchestrator")).programs()
    flags = ["run", f"--experiment={FILE}:tiny", "--experiment.tasks=({'folder': 'tasks'},)"]
    [share] = command_line.parse(flags).config.tasks
    assert dataclasses.asdict(share) == dataclasses.asdict(TerminalShare(folder="tasks"))
    assert [type(share).__name__ for share in parsed.config.tasks[2:]] == [
        "HarborShare",
        "VerifiersShare",
    ]


@needs_root
def test_terminal_service_has_limits_of_run(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "load_tokenizer", lambda config: Tokenizer.load("bytes"))
    for number in range(9):
        make_task(tmp_path, f"task-{number}", **{"instruction.md": f"Do {number}.\n"})
    program = ProgramConfig(role="task", orchestrator="http://127.0.0.1:1")
    tasks = (TerminalShare(folder=str(tmp_path), weight=2.0, held_out_fraction=0.3),)
    with pytest.raises(ValueError, match="are held out; .* lower held_out_fraction=0.999"):
        dataclasses.replace(tasks[0], held_out_fraction=0.999).load()
    config = tiny(tasks=tasks, program=program, length=4096)
    # Image and tests of a task may take longer than a rollout may.
    with pytest.raises(ValueError, match="task 'task-.' may take 690 s .* a rollout has 660 s"):
        servers.SERVERS["task"](config, tmp_path)
    config = dataclasses.replace(config, judge_timeout_s=900.0)
    plain, configs = terminal_service.TerminalService, []

    def record(*args, **options):
        configs.extend(arg for arg in args if isinstance(arg, AttemptConfig))
        return plain(*args, **options)

    monkeypatch.setattr(terminal_service, "TerminalService", record)
    service = servers.SERVERS["task"](config, tmp_path)
    assert (service.config.name, service.config.weight) == ("terminal", 2.0)
    assert service.size + service.held_out == 9 and service.held_out > 0
    [limits] = (dataclasses.asdict(one.loop()) for one in configs)
    # In terminal tasks a broken call ends nothing, and commands have a separate time limit.
    other = {"tool_timeout_s": 60.0, "ends_on_broken_call": True}
    assert limits | other == dataclasses.asdict(config.loop())


def test_serves_tasks_of_file(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n')
    flags = [f"--experiment={FILE}:tiny", f"--experiment.tasks=({{'file': '{file}'}},)"]
    config = command_line.parse(["run", *flags])[1]
    assert config.tasks == (TaskFile(file=str(file)),)
    service = config.make_task_service(ServiceConfig(name="mine"), Tokenizer.load("bytes"))
    assert service.size + service.held_out == 2
    file.with_suffix(".py").write_text("")
    (share,) = config.tasks
    wrong = dataclasses.replace(share, file=str(file.with_suffix(".py")))
    with pytest.raises(ValueError, match=r"has no function tasks\(\)"):
        rl_agentic.check_tasks([wrong])


def test_checks_config_before_start(tmp_path, capsys):
    flags = [f"--experiment={FILE}:tiny", f"--workdir={tmp_path}/run"]
    assert run.main(["run", *flags]) == 2
    assert "give --experiment.checkpoint=PATH" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    missing = {
        "checkpoint=/nowhere": "checkpoint /nowhere does not exist",
        "schedule.total_steps=3": "--experiment.schedule: warmup_steps 5 must be in 0",
        f"checkpoint={tmp_path}": f"{tmp_path} is not a checkpoint; give a run's workdir",
    }
    for changes, why in {"": "give --experiment.checkpoint=PATH", **missing}.items():
        extra = [f"--experiment.{changes}"] if changes else []
        assert local.main(["local", *flags, *extra]) == 2
        assert why in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    for role in ("gateway", "task", "engine"):
        program = [
            f"--experiment.program.role={role}",
            "--experiment.program.orchestrator=http://127.0.0.1:1",
        ]
        program.append("--experiment.program.engines=http://127.0.0.1:1")
        assert run.main(["run", *flags, *program]) == 2
        assert "--experiment.checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tasks": ()}, "tasks is empty"),
        ({"tasks": (TaskWeight(), TaskWeight())}, "two of the tasks have one name"),
        ({"transport": "pigeons"}, "use network or storage"),
        (
            {"program": ProgramConfig(role="judge")},
            "use one of train, engine, gateway, orchestrator, task",
        ),
        ({"mismatch": MismatchConfig(attempts=1)}, "so give 0"),
        ({"agent_timeout_s": 0.0}, "timeout_s is 0.0"),
        (
            {"tasks": (TerminalShare(folder="a"), TerminalShare(folder="b"))},
            "two of the tasks have one name",
        ),
    ],
)
def test_rejects_contradictory_config(changes, why):
    with pytest.raises(ValueError, match=why):
        tiny(**changes)


def test_rejects_invalid_clusters_and_variants():
    with pytest.raises(ValueError, match="folder is empty"):
        TerminalShare()
    with pytest.raises(ValueError, match="held_out_fraction is 1.0"):
        TerminalShare(folder="tasks", held_out_fraction=1.0)
    with pytest.raises(ValueError, match="engines is 0"):
        ClusterConfig(engines=0)
    with pytest.raises(ValueError, match="unknown variant 'huge'; use one of tiny, small, glm5"):
        rl_agentic.get_config("huge")
    assert rl_agentic.small().cluster.engine_devices == 1
