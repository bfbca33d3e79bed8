"""The roles of an experiment as a script for Slurm and as a JobSet.

    python -m tests.launch.test_manifests

writes the goldens again after an intended change of their text.
"""

import dataclasses
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml

from glm5_jax.runtime.placement import EXIT_RESTART, Health, Role
from launch import gke, slurm, xla_flags
from launch.rehearsal.job_set_run import expand_variables
from launch.run_plan import RunPlan
from tests.contracts.source_tree import ROOT
from tests.launch.job_set import SCHEMA

KUBERNETES = "1.31"  # podFailurePolicy is stable from there on
FOLDER = ROOT / "tests" / "goldens" / "manifests"
SYSTEM = f"--experiment={ROOT}/tests/launch/small_system.py"
POD = ["--image=registry/glm5:1", "--claim=shared", "--accelerator=tpu-v5p-slice", "--workdir=/run"]
TRAINING = [f"--experiment={ROOT}/experiments/pretrain.py:glm5", "--experiment.train.steps=9"]
TRAINING += ["--experiment.mesh.fsdp=-1", "--experiment.mesh.expert=1"]
GOLDENS = {
    "system.sbatch": [slurm, f"{SYSTEM}:pod", "--workdir=/my run", "--devices_per_node=4"]
    + ["--partition=h200", "--cpu_partition=cpu", "--account=glm", "--time=2-00:00:00"],
    "training.sbatch": [slurm, *TRAINING, "--hosts=16", "--devices=8", "--workdir=/run"]
    + ["--chip=h200"],
    "system.yaml": [gke, f"{SYSTEM}:pod", *POD],
    "h200.yaml": [gke, *TRAINING, *POD[:2], POD[3], "--accelerator=nvidia-h200-141gb"]
    + ["--hosts=16", "--devices=8"],
    "training.yaml": [gke, *TRAINING, *POD, "--hosts=16", "--devices=4", "--tpu_topology=4x4x4"],
    "slices.yaml": [gke, *TRAINING, *POD, "--hosts=32", "--slices=2", "--devices=4"]
    + ["--tpu_topology=4x4x4"],
}


def output_of(program, *flags: str, capture) -> str:
    """Returns the output of a program, with the path of this repository as ROOT."""
    assert program.main([program.__name__, *flags]) == 0
    return capture().replace(str(ROOT), "ROOT")


@pytest.mark.parametrize("name", GOLDENS)
def test_output_equals_golden(name, capsys):
    text = output_of(*GOLDENS[name], capture=lambda: capsys.readouterr().out)
    assert text == (FOLDER / name).read_text()


@pytest.mark.parametrize("name", [name for name in GOLDENS if name.endswith(".sbatch")])
def test_scripts_parse(name):
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


@pytest.mark.parametrize("name", [name for name in GOLDENS if name.endswith(".yaml")])
def test_job_sets_match_api(name):
    job_set = yaml.safe_load((FOLDER / name).read_text())
    jsonschema.validate(job_set, SCHEMA)
    jobs = job_set["spec"]["replicatedJobs"]
    assert "dependsOn" not in jobs[0], "the first cannot depend on any"
    for before, job in zip(jobs, jobs[1:]):
        assert job["dependsOn"] == [{"name": before["name"], "status": "Ready"}]


@pytest.mark.parametrize("name", [name for name in GOLDENS if name.endswith(".yaml")])
def test_jobs_match_kubernetes_schema(name):
    """Uses the published schema of batch/v1, with pods and containers. job_set.py covers only JobSet's fields."""
    import kubernetes_validate

    for job in yaml.safe_load((FOLDER / name).read_text())["spec"]["replicatedJobs"]:
        document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        document |= {"spec": job["template"]["spec"]}
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        document["spec"]["template"]["spec"]["containers"][0]["comand"] = []
        with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_preempted_job_set_restarts_without_counting(capsys):
    """Its processes save within the grace time. Their exit code fails the job with that reason, like a lost node."""
    text = output_of(*GOLDENS["training.yaml"], capture=lambda: capsys.readouterr().out)
    spec = yaml.safe_load(text)["spec"]
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    exits, disrupted = job["podFailurePolicy"]["rules"]
    assert exits["action"] == disrupted["action"] == "FailJob"
    assert exits["onExitCodes"] == {
        "containerName": "train",
        "operator": "In",
        "values": [EXIT_RESTART],
    }
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    pod = job["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 300)


def test_each_slice_is_job_of_one_program(capsys):
    text = output_of(*GOLDENS["slices.yaml"], capture=lambda: capsys.readouterr().out)
    [job] = yaml.safe_load(text)["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["parallelism"], spec["completions"]) == (2, 16, 16)
    assert spec["template"]["spec"]["containers"][0]["command"][-1] == "--distributed=auto"


def test_job_set_keeps_argument_texts(capsys):
    text = output_of(*GOLDENS["system.yaml"], capture=lambda: capsys.readouterr().out)
    jobs = {job["name"]: job for job in yaml.safe_load(text)["spec"]["replicatedJobs"]}

    def command(name: str) -> list[str]:
        [container] = jobs[name]["template"]["spec"]["template"]["spec"]["containers"]
        return container["command"]

    engines = ",".join(
        f"http://small-system-pod-engine-{i}-0.small-system-pod:7000" for i in (0, 1)
    )
    assert command("gateway")[-2:] == [engines, 'cost=$5 `a` "b" it\'s']
    assert command("engine")[-1] == "number=$(ROLE_INDEX)"
    train = "small-system-pod-train-$(ROLE_INDEX)-0.small-system-pod:8476,2,$(JOB_COMPLETION_INDEX)"
    assert command("train")[-1] == train and "\n" in command("train")[2]


def container_of(role: Role, *flags: str) -> dict:
    """Returns the only container of a JobSet of one role."""
    values = gke.define()
    values(["gke", "--image=i", "--claim=c", *flags])
    [job] = gke.make_job_set(RunPlan("a", (role,), ROOT), values)["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    return container


def test_escapes_kubernetes_variables_in_command():
    container = container_of(Role(name="a", argv=["sh", "-c", "echo $(date) $(ROLE_INDEX)"]))
    assert container["command"][2] == "echo $$(date) $$(ROLE_INDEX)"


@pytest.mark.parametrize("text", ["$$x$$", "$$(A)", "$$$(A)", "$", "a$", "$5", "${A}", "$(A", "$$"])
def test_kubernetes_passes_dollars_to_programs(text):
    """An instruction may hold display math."""
    container = container_of(Role(name="a", argv=["sh", text], env={"B": text}))
    assert expand_variables(container["command"][1], {"A": "wrong"}) == text
    [value] = (entry["value"] for entry in container["env"] if entry["name"] == "B")
    assert expand_variables(value, {"A": "wrong"}) == text


SERVE = f"--experiment={ROOT}/experiments/serve.py:glm5"
TRUSTED = "--experiment.server.trusted_network=True"


@pytest.mark.parametrize(
    ("accelerator", "topology", "hosts", "devices"),
    [
        ("tpu-v5p-slice", "2x4x4", 8, 4),
        ("tpu7x", "2x2x4", 4, 4),
        ("tpu-v6e-slice", "8x16", 32, 4),
        ("nvidia-h200-141gb", "", 2, 8),
        ("tpu-v5p-slice", "2x2x2", 2, 4),
        ("tpu7x", "2x2x1", 1, 4),
        ("tpu-v6e-slice", "4x8", 8, 4),
        ("nvidia-h200-141gb", "", 1, 4),
    ],
)
def test_serving_layout_starts_on_its_hosts(accelerator, topology, hosts, devices):
    """The layouts of experiments/README.md. A lost process ends the others, and all restart in place."""
    shape = {"hosts": hosts, "devices": devices, "topology": topology}
    flags = [f"--experiment.{name}={value}" for name, value in shape.items()]
    argv = ["gke", SERVE, TRUSTED, *POD[:2], POD[3], f"--accelerator={accelerator}", *flags]
    plan, job_set = gke.generate(argv, gke.define())
    assert [(role.name, role.hosts, role.devices) for role in plan.roles] == [
        ("serve", hosts, devices)
    ]
    [job] = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == hosts and spec["backoffLimit"] == 5 * hosts
    assert spec["template"]["spec"]["restartPolicy"] == "OnFailure"
    [container] = spec["template"]["spec"]["containers"]
    joined = [word for word in container["command"] if word.startswith("--distributed=")]
    assert len(joined) == (hosts > 1)
    assert not any("workdir" in word for word in container["command"])


def test_agentic_engines_start_on_their_hosts():
    argv = ["gke", f"--experiment={ROOT}/experiments/rl_agentic.py:glm5", *POD]
    plan, job_set = gke.generate([*argv, "--experiment.checkpoint=/sft"], gke.define())
    [engine] = [role for role in plan.roles if role.name == "engine"]
    assert (engine.count, engine.hosts, engine.devices, engine.tpu_topology) == (64, 2, 4, "2x2x2")
    job, *_, trainer = job_set["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert trainer["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    address = "rl-agentic-glm5-engine-$(ROLE_INDEX)-0.rl-agentic-glm5:8476"
    assert f"--distributed={address},2,$(JOB_COMPLETION_INDEX)" in container["command"]


def test_full_h200_node_uses_fast_network():
    """The shell replaces itself by the program, which therefore gets signals."""
    mounts = {}
    for accelerator, devices in (
        ("nvidia-h200-141gb", 8),
        ("nvidia-h200-141gb", 4),
        ("nvidia-h100-80gb", 8),
        ("nvidia-h200-141gb", 0),
    ):
        container = container_of(
            Role(name="a", argv=["x"], devices=devices), f"--accelerator={accelerator}"
        )
        mounts[accelerator, devices] = [one["name"] for one in container["volumeMounts"]]
        assert ("bash" == container["command"][0]) == ("gib" in mounts[accelerator, devices])
    assert mounts.pop(("nvidia-h200-141gb", 8)) == ["workdir", "nvidia", "gib", "shm"]
    assert [*mounts.values()] == [["workdir"]] * 3


# -- options of XLA ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "chip", "variable", "resource"),
    [
        ("tpu-v5p-slice", "v5p", "LIBTPU_INIT_ARGS", "google.com/tpu"),
        ("tpu7x", "tpu7x", "LIBTPU_INIT_ARGS", "google.com/tpu"),
        ("nvidia-h200-141gb", "h200", "XLA_FLAGS", "nvidia.com/gpu"),
        ("nvidia-l4", None, "XLA_FLAGS", "nvidia.com/gpu"),
    ],
)
def test_pods_with_accelerators_have_xla_flags(accelerator, chip, variable, resource):
    def flags_of(role: Role, *flags: str) -> str | None:
        container = container_of(role, f"--accelerator={accelerator}", *flags)
        limits = container.get("resources", {}).get("limits", {})
        assert limits == ({resource: 4} if role.devices else {})
        return {e["name"]: e.get("value") for e in container["env"]}.get(variable)

    role = Role(name="train", argv=["true"], devices=4, tpu_topology="2x2x1")
    assert flags_of(role) == (xla_flags.format_flags(chip) if chip else None)
    name, value = next(iter(xla_flags.FLAGS[chip or "h200"].items()))
    assert value == "true"
    flag = f"--{name}=false"
    assert flags_of(role, f"--xla_flags={flag}") == (
        xla_flags.format_flags(chip, flag) if chip else flag
    )
    both = flags_of(dataclasses.replace(role, env={variable: "--b=2"}), f"--xla_flags={flag}")
    assert both.endswith(f"{flag} --b=2") and f"--{name}=true" not in both
    assert flags_of(Role(name="orchestrator", argv=["true"]), f"--xla_flags={flag}") is None


def test_steps_with_accelerators_have_xla_flags():
    roles = [
        Role(name="orchestrator", argv=["true"]),
        Role(name="engine", argv=["true"], devices=8, env={"XLA_FLAGS": "--own=1", "A": "b"}),
        Role(name="train", argv=["true"], devices=8),
    ]
    text = slurm_text(*roles, chip="h100")
    steps = [line.strip() for line in text.splitlines() if line.endswith(" true &")]
    assert steps == [
        "true &",
        'env "XLA_FLAGS=${xla_flags} --own=1" A=b true &',
        'env "XLA_FLAGS=${xla_flags}" true &',
    ]
    [line] = [line for line in text.splitlines() if line.startswith("xla_flags=")]
    command = ["bash", "-euc", f'{line}; echo "$xla_flags"']
    for environment in ({}, {"XLA_FLAGS": "--mine=1 --too=2"}):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        want = xla_flags.format_flags("h100") + f" {environment.get('XLA_FLAGS', '')}"
        assert done.stdout == want + "\n"
    plain = slurm_text(*roles)
    assert "xla_flags" not in plain and "env XLA_FLAGS=--own=1 A=b true &" in plain


def test_yaml_survives_round_trip():
    texts = ["", "yes", "null", "1", "1e3", "a: b", "- a", "#", "a\n b", "it's", '"', "é", "\\"]
    for text in [*texts, "a b", "~", "{x}", "😀 \\U0001f600", "\\ud83d", "\x7f\u2028"]:
        nested = {"a": [text, {"b": text, "c": [text]}], text or "d": 3, "e": True}
        assert yaml.safe_load(gke.as_yaml(nested)) == nested, text


# -- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "flags", "scheduler"),
    [(slurm, ["--devices_per_node=4", "--chip=v5p"], "Slurm"), (gke, POD[:3], "Kubernetes")],
)
def test_refuses_server_that_everybody_reaches(program, flags, scheduler, capsys):
    """Before anything is submitted, not when the server starts."""
    argv = [program.__name__, SERVE, "--experiment.checkpoint=/glm5", "--workdir=/run", *flags]
    assert program.main(argv) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and f"under {scheduler} the server listens on every network" in error
    )
    assert "give --experiment.server.api_key_file=FILE on a file system" in error
    for fix in (TRUSTED, "--experiment.server.api_key_file=/data/key"):
        assert program.main([*argv, fix]) == 0


@pytest.mark.parametrize(
    ("program", "flags", "message"),
    [
        (
            slurm,
            [f"{SYSTEM}:tiny"],
            "role engine listens at any free port; Slurm must know the port: set it",
        ),
        (slurm, TRAINING, "--devices is missing; give the number of accelerators of each host"),
        (
            slurm,
            [*TRAINING, "--devices=16"],
            "asks for 16 devices of a node, --devices_per_node is 8; give it more hosts",
        ),
        (slurm, [*TRAINING, "--devices=8", "--color=1"], "no field 'color'; there are --"),
        (slurm, [*TRAINING, "--devices=8", "--chip=abacus"], "--chip=abacus: value should be one"),
        (slurm, [f"{SYSTEM}:pod", "--hosts=2"], "--hosts is for one stage of training"),
        (slurm, [*TRAINING, "--devices=8", "--account=a\n#SBATCH -x b"], "is not one word"),
        (slurm, [*TRAINING, "--devices=8", "--time=2 days"], "--time='2 days' is not one word"),
        (
            gke,
            [*TRAINING, *POD, "--devices=4", "--accelerator=h200"],
            "--accelerator=h200 is not known; there are tpu-v5-lite-podslice, ",
        ),
        (
            gke,
            [*TRAINING, *POD, "--devices=8", "--accelerator=nvidia-h200"],
            "--accelerator=nvidia-h200 is not known; there are nvidia-h200-141gb\n",
        ),
        (
            gke,
            ["--experiment=experiments/pretrain.py:glm5", *POD, "--accelerator=tpu7x-standard"],
            "--accelerator=tpu7x-standard is not known; there are tpu-v5-lite-podslice, ",
        ),
        (
            gke,
            [*TRAINING, *POD, "--devices=4", "--accelerator=TPU-v5p-slice"],
            "--accelerator=TPU-v5p-slice is",
        ),
        (
            gke,
            [*TRAINING, *POD, "--devices=4", "--xla_flags=--a=1 b=2"],
            "--xla_flags has 'b=2'; each option",
        ),
        (
            gke,
            [*TRAINING, *POD, "--devices=4", "--hosts=4", "--tpu_topology=4x4"],
            "has the TPU topology 4x4; a slice of v5p has 3 dimensions",
        ),
        (gke, [f"{SYSTEM}:tiny", *POD], "Kubernetes must know the port: set it"),
        (gke, [f"{SYSTEM}:pod", *POD[1:]], "--image is not given; use --image=REGISTRY/NAME:TAG"),
        (gke, [f"{SYSTEM}:pod", POD[0], *POD[2:]], "--claim is not given; use --claim=NAME"),
        (gke, [f"{SYSTEM}:pod", *POD[:3]], "is not an absolute path; all pods must see it"),
        (gke, [f"{SYSTEM}:pod", *POD[:2], POD[3]], "has devices; give --accelerator=NAME"),
        (gke, [*TRAINING, *POD, "--devices=4"], "has the TPU topology ''; give one such as 4x4x4"),
        (
            gke,
            [*TRAINING, *POD, "--devices=4", "--hosts=2", "--tpu_topology=4x4x4"],
            "role train has 2 hosts of 4 chips, and the topology 4x4x4 has 64",
        ),
        (gke, [*TRAINING, *POD, "--restarts=-1"], "--restarts=-1"),
        (
            gke,
            [*TRAINING, *POD, "--devices=4", "--hosts=16", "--slices=2", "--tpu_topology=4x4x4"],
            "role train has 8 hosts of 4 chips in each slice, and the topology 4x4x4 has 64",
        ),
        (
            gke,
            [*TRAINING, *POD, "--devices=4", "--hosts=3", "--slices=2"]
            + [f"--experiment.batch.{name}={3 << 24}" for name in ("start", "end", "multiple")],
            "role train: 2 slices cannot have equal parts of 3 hosts",
        ),
        (
            gke,
            [*TRAINING, *POD[:2], POD[3], "--accelerator=nvidia-h200-141gb", "--devices=8"]
            + ["--hosts=2", "--slices=2"],
            "role train has 2 slices, which only TPUs have; give it only hosts",
        ),
        (gke, [f"{SYSTEM}:pod", *POD, "--slices=2"], "--slices is for one stage of training"),
        (
            gke,
            [*TRAINING, *POD[:2], POD[3], "--accelerator=nvidia-h200-141gb", "--devices=8"]
            + ["--tpu_topology=2x2"],
            "--tpu_topology is for TPUs, and --accelerator is nvidia-h200-141gb; leave it out",
        ),
        (slurm, [*TRAINING, "--devices=8", "--slices=2"], "--slices is not for Slurm"),
        (slurm, [*TRAINING, "--devices=8", "--tpu_topology=2x4"], "--tpu_topology is not for"),
        (
            slurm,
            [*TRAINING, "--devices=4", "--hosts=3", "--experiment.mesh.expert=8"],
            "3 hosts of 4 accelerators: mesh fsdp=-1, expert=8 does not divide the 12 devices",
        ),
        (
            slurm,
            [f"--experiment={ROOT}/experiments/pretrain.py:glm5", "--devices=8", "--hosts=96"]
            + ["--experiment.mesh.fsdp=-1"],
            "96 hosts of 8 accelerators: batch.start is 16777216 tokens; it must be a multiple of 3145728",
        ),
        (
            slurm,
            [
                f"--experiment={ROOT}/experiments/lifecycle.py:tiny",
                "--stage=sft",
                "--devices=4",
                "--chip=tpu7x",
            ]
            + ["--experiment.sft.mesh.fsdp=4"],
            "1 hosts of 4 accelerators, 2 devices of JAX each: mesh fsdp=4 does not divide the 8 devices",
        ),
        (
            slurm,
            [*TRAINING, "--devices=4", "--chip=tpu7x", "--experiment.mesh.fsdp=4"],
            "1 hosts of 4 accelerators, 2 devices of JAX each: mesh fsdp=4 does not divide the 8",
        ),
    ],
)
def test_reports_mistake_in_one_line(program, flags, message, capsys):
    assert program.main([program.__name__, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


def error_of(program, *roles: Role, name: str = "a") -> str:
    values = program.define()
    values(["program", *POD[:3]] if program is gke else ["program"])
    write = gke.make_job_set if program is gke else slurm.make_script
    with pytest.raises(ValueError) as error:
        write(RunPlan(name, roles, ROOT), values)
    return str(error.value)


@pytest.mark.parametrize("limits", [{}, {"memory_gib": 8}, {"cpus": 8}])
def test_shared_node_needs_memory_and_cpus(limits):
    role = Role(name="engine", argv=["true"], count=4, devices=2, **limits)
    assert "4 replicas of role engine share a node, and Slurm must know" in error_of(slurm, role)


def test_roles_on_shared_nodes_need_different_ports():
    roles = [
        Role(name="a", argv=["true"], port=80, count=2),
        Role(name="b", argv=["true"], port=81),
    ]
    assert (
        error_of(slurm, *roles)
        == "roles a and b share nodes and port 81; give one of them another port"
    )


def test_refuses_replicas_of_several_slices():
    role = Role(
        name="train", argv=["true"], count=2, hosts=2, slices=2, devices=4, tpu_topology="2x2x1"
    )
    assert "2 replicas of 2 slices; a job is a replica or a slice" in error_of(gke, role)


def test_pod_names_are_valid_host_names():
    role = Role(name="r" * 32, argv=["true"])
    message = error_of(gke, role, name="s" * 30)
    assert message.endswith("host names have up to 63 letters")


@pytest.mark.parametrize("program", [slurm, gke])
def test_prints_help(program, capsys):
    assert program.main(["program", "--help"]) == 0
    assert (
        f"python -m launch.{program.__name__.rpartition('.')[2]} --experiment="
        in capsys.readouterr().out
    )


# -- where replicas go ---------------------------------------------------------------------------------------


def slurm_text(*roles: Role, **flags) -> str:
    values = slurm.define()
    values(["slurm", *(f"--{name}={value}" for name, value in flags.items())])
    return slurm.make_script(RunPlan("run", roles, ROOT), values)


def nodes_of(text: str) -> list[str]:
    """Returns the nodes of each step of a script."""
    return re.findall('"--nodelist=([^"]*)"', text)


def test_slurm_requests_no_tpu_devices():
    text = slurm_text(Role(name="train", argv=["true"], hosts=2, devices=4), chip="v5p")
    assert "--nodes=2" in text and "LIBTPU_INIT_ARGS=" in text and "gpus" not in text
    role = Role(name="engine", argv=["true"], count=2, devices=4, memory_gib=8, cpus=8)
    with pytest.raises(ValueError, match="2 replicas of role engine share a node of v5p, which"):
        slurm_text(role, chip="v5p")
    slurm_text(role, chip="v5p", devices_per_node=4)


def test_roles_without_accelerators_share_nodes_in_turn():
    text = slurm_text(Role(name="judge", argv=["true"], count=3, cpus=4, memory_gib=8), cpu_nodes=2)
    nodes = nodes_of(text)
    assert nodes == ["${nodes[0]}", "${nodes[1]}", "${nodes[0]}"]
    for line in ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4", "--mem=16G"):
        assert f"#SBATCH {line}\n" in text
    assert "hetjob" not in text and "--het-group" not in text


def test_replicas_of_several_hosts_have_separate_nodes():
    text = slurm_text(Role(name="engine", argv=["true"], count=2, hosts=2, devices=8))
    nodes = nodes_of(text)
    array = "nodes_engine"
    assert "--exact" not in text and "--overlap" not in text, "a step has its nodes for itself"
    assert nodes == [f"${{{array}[0]}},${{{array}[1]}}", f"${{{array}[2]}},${{{array}[3]}}"]
    assert "#SBATCH --nodes=4\n" in text and "#SBATCH --gpus-per-node=8\n" in text


def test_replicas_on_one_node_have_equal_parts():
    role = Role(
        name="engine",
        argv=["true", "{port}"],
        count=5,
        devices=2,
        cpus=16,
        memory_gib=100,
        port=7000,
    )
    text = slurm_text(role)
    assert nodes_of(text) == ["${nodes_engine[0]}"] * 4 + ["${nodes_engine[1]}"]
    for line in (
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=8",
        "--cpus-per-task=16",
        "--mem=400G",
    ):
        assert f"#SBATCH {line}\n" in text
    options = "--nodes=1 --ntasks=1 --cpus-per-task=16 --gpus-per-task=2 --mem=100G"
    assert text.count(options) == text.count("--exact") == 5


def test_waits_only_for_roles_with_health_check():
    a = Role(name="a", argv=["true"], port=80, health=Health(path="/well"), start_timeout_s=7)
    text = slurm_text(
        a, Role(name="b", argv=["{a.url}"]), Role(name="c", argv=["{a.url}"], after=["b"])
    )
    lines = [line for line in text.splitlines() if line.startswith("wait_until_healthy ")]
    assert lines == ['wait_until_healthy 7 "http://${nodes[0]}:80/well"']


if __name__ == "__main__":
    for file, golden in GOLDENS.items():
        flags = [sys.executable, "-m", golden[0].__name__, *golden[1:]]
        done = subprocess.run(flags, cwd=ROOT, check=True, capture_output=True, text=True)
        (FOLDER / file).write_text(done.stdout.replace(str(ROOT), "ROOT"))
