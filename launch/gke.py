"""Writes the roles of an experiment as a JobSet for Kubernetes, with GKE's node labels.

    python -m launch.gke --experiment=FILE.py:VARIANT --workdir=/DIR --image=IMAGE --claim=NAME --accelerator=tpu-v5p-slice \\
        --hosts=16 --devices=4 --tpu_topology=4x4x4 >run.yaml
    kubectl apply -f run.yaml

- Jobs: each role is a replicated job. Each replica is a job with one pod for each host. Pods reach each other by the names
  of the JobSet's headless service.
- Order: each role starts after the previous one is ready.
- Nodes: a replica with accelerators has its node pool to itself (exclusive placement).
- Restarts: a pod that dies or hangs is restarted. A main role of several hosts takes the whole set down. The set restarts
  up to --restarts times and continues from its checkpoint; preemptions, before which it saves, are not counted. The pods of
  a server of several hosts, such as an engine, end together, and each is restarted in place.
- End: the set ends with its main roles.
- Image and volume: IMAGE has this repository as its working directory, and a Python environment. The volume of the claim
  NAME is mounted at DIR, or at a parent of it with --mount, such as the folder of checkpoints that the run reads; all pods
  may write to it.
- XLA options: accelerators of a known kind get the options of launch/xla_flags.py in place of those of IMAGE.
  --xla_flags='--NAME=VALUE ...' takes precedence.
- Network: pods that use all eight H200 of a node are on its fast network, by the names of GKE's documentation (gvnic-1,
  rdma-0 to 7).
- Slices: with --slices=2 the hosts belong to two slices of that topology, with one job for each slice. If a slice is lost
  permanently, delete the set and apply one with fewer --slices and --hosts for the same DIR (the conditions are in
  launch/run.py).

A user's error is one line and exit code 2.

JobSet v1alpha2: github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go.
"""

import json
import math
import re
import sys
from typing import Any

from absl import flags

from glm5_jax.runtime.placement import EXIT_RESTART, SELF_URL, Role, substitute_words
from launch import run_plan, xla_flags
from launch.pods import TORUS
from pallas_kernels.chips import CHIPS as CHIP_SPECS

_COORDINATOR_PORT = 8476  # of the coordinator of a replica; jax's port on TPU clusters
# GKE's names of the chips with known options: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and gpus.
CHIPS = {
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
    "nvidia-h100-80gb": "h100",
    "nvidia-h100-mega-80gb": "h100",
    "nvidia-h200-141gb": "h200",
}
# After a failure by `_interruption_rules` the set restarts, and the restart is not counted.
_INTERRUPTED = {
    "name": "interrupted",
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
# Fast network of nodes with eight H200, for pods that use a full node: the annotations and volumes of GKE's documentation,
# with its network names (cloud.google.com/ai-hypercomputer/docs/create/gke-ai-hypercompute-custom).
_RDMA_ACCELERATOR = "nvidia-h200-141gb"
_NETWORKS = ("default", "gvnic-1", *(f"rdma-{n}" for n in range(8)))
_INTERFACES = {
    "networking.gke.io/default-interface": "eth0",
    "networking.gke.io/interfaces": json.dumps(
        [{"interfaceName": f"eth{n}", "network": name} for n, name in enumerate(_NETWORKS)]
    ),
}
_RDMA_VOLUMES = [
    {"name": "nvidia", "hostPath": {"path": "/home/kubernetes/bin/nvidia"}},
    {"name": "gib", "hostPath": {"path": "/home/kubernetes/bin/gib"}},
    {"name": "shm", "emptyDir": {"medium": "Memory"}},
]
_RDMA_MOUNTS = [
    {"name": "nvidia", "mountPath": "/usr/local/nvidia"},
    {"name": "gib", "mountPath": "/usr/local/gib"},
    {"name": "shm", "mountPath": "/dev/shm"},
]
RDMA_START = ["bash", "-c", 'source /usr/local/gib/scripts/set_nccl_env.sh; exec "$@"', "bash"]
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_YAML_KEYWORDS = {
    "true",
    "false",
    "yes",
    "no",
    "on",
    "off",
    "null",
    "y",
    "n",
}  # YAML reads these as other types than text


def define() -> flags.FlagValues:
    """Returns the program's flags, in addition to the experiment's."""
    values = run_plan.define()
    flags.DEFINE_string("image", None, "image of all containers", flag_values=values)
    flags.DEFINE_string("claim", None, "claim of the volume for all pods", flag_values=values)
    flags.DEFINE_string(
        "mount",
        None,
        "folder of the volume, --workdir or a parent; default: --workdir",
        flag_values=values,
    )
    flags.DEFINE_string(
        "accelerator", None, "GKE's name: tpu-v5p-slice, nvidia-h200-141gb", flag_values=values
    )
    flags.DEFINE_string(
        "xla_flags", "", "options for all roles with accelerators", flag_values=values
    )
    flags.DEFINE_integer("restarts", 10, "maximum restarts of the full set", 0, flag_values=values)
    return values


def make_job_set(plan: run_plan.RunPlan, values: flags.FlagValues) -> dict[str, Any]:
    """Returns the JobSet. Raises ValueError if Kubernetes cannot place a role."""
    _check(plan, values)
    # A replicated job for each role, each after the previous one.
    addresses = {
        role.name: [f"http://{_host(plan, role, str(i))}:{role.port}" for i in range(role.count)]
        for role in plan.roles
    }
    main = [role.name for role in plan.roles if role.main]
    jobs: list[dict[str, Any]] = []
    for role in plan.roles:
        addresses_by_word = run_plan.resolve_addresses(role, addresses)
        after = [{"name": jobs[-1]["name"], "status": "Ready"}] if jobs else []
        replicas = role.count * role.slices
        job = {"name": role.name, "replicas": replicas, "dependsOn": after}
        jobs.append(job | {"template": _job(plan, role, addresses_by_word, values)})
    # A set with a main role of several hosts restarts as a unit.
    has_multi_host_role = any(role.hosts > 1 and role.main for role in plan.roles)
    spec = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": plan.name,
            "publishNotReadyAddresses": True,
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": main} if main else None,
        "failurePolicy": {
            "maxRestarts": values.restarts,
            "rules": [_INTERRUPTED] if has_multi_host_role else None,
        },
        "replicatedJobs": jobs,
    }
    return _present(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": plan.name},
            "spec": spec,
        }
    )


def _check(plan: run_plan.RunPlan, values: flags.FlagValues) -> None:
    run_plan.check_ports(plan.roles, "Kubernetes")
    run_plan.check_reach(plan.config, "Kubernetes")
    for name, example in (("image", "REGISTRY/NAME:TAG"), ("claim", "NAME")):
        if not values[name].value:
            raise ValueError(f"--{name} is not given; use --{name}={example}")
    chip = CHIPS.get(values.accelerator)
    for word in values.xla_flags.split():
        if not word.startswith("--"):
            raise ValueError(f"--xla_flags has {word!r}; each option begins with --")
    if not plan.workdir.is_absolute():
        raise ValueError(f"--workdir={plan.workdir} is not an absolute path; all pods must see it")
    if values.mount and not plan.workdir.is_relative_to(values.mount):
        raise ValueError(
            f"--workdir={plan.workdir} is not in --mount={values.mount}, the folder of the volume; mount a parent of it"
        )
    for role in plan.roles:
        hosts = role.hosts // role.slices
        longest = f"{plan.name}-{role.name}-{role.count * role.slices - 1}-{hosts - 1}"
        if len(longest) > 63:
            raise ValueError(f"a pod would be called {longest}; host names have up to 63 letters")
        if role.devices and not values.accelerator:
            raise ValueError(f"role {role.name} has devices; give --accelerator=NAME")
        if not role.devices or chip is None or not _is_tpu(values):
            if role.slices > 1:
                raise ValueError(
                    f"role {role.name} has {role.slices} slices, which only TPUs have; give it only hosts"
                )
            continue
        if role.count > 1 and role.slices > 1:
            raise ValueError(
                f"role {role.name} has {role.count} replicas of {role.slices} slices; a job is a replica or a slice, so use "
                "one replica"
            )
        if not re.fullmatch(r"\d+(x\d+)+", role.tpu_topology):
            raise ValueError(
                f"role {role.name} has the TPU topology {role.tpu_topology!r}; give one such as 4x4x4"
            )
        if len(role.tpu_topology.split("x")) != TORUS[chip]:
            raise ValueError(
                f"role {role.name} has the TPU topology {role.tpu_topology}; a slice of {chip} has {TORUS[chip]} dimensions"
            )
        chips = math.prod(int(number) for number in role.tpu_topology.split("x"))
        if chips != hosts * role.devices:
            unit = " in each slice" if role.slices > 1 else ""
            raise ValueError(
                f"role {role.name} has {hosts} hosts of {role.devices} chips{unit}, and the topology {role.tpu_topology} "
                f"has {chips}"
            )


def _check_accelerator(name: str) -> None:
    """Raises ValueError for a name that is not GKE's, and for an incomplete name."""
    completions = [known for known in CHIPS if known.startswith(name)]
    if name not in CHIPS and (completions or not name.startswith("nvidia-")):
        names = ", ".join(completions or CHIPS)
        hint = "" if completions else ", and other nvidia-NAMEs of GKE"
        raise ValueError(f"--accelerator={name} is not known; there are {names}{hint}")


def _is_tpu(values: flags.FlagValues) -> bool:
    return (values.accelerator or "").startswith("tpu")


def _host(plan: run_plan.RunPlan, role: Role, index: str) -> str:
    """Returns the host name of a replica's first pod."""
    return f"{plan.name}-{role.name}-{index}-0.{plan.name}"


def _job(plan: run_plan.RunPlan, role: Role, words, values: flags.FlagValues) -> dict[str, Any]:
    # The processes of a training run restart with the set. Those of a server end together and restart in place.
    restarts_with_set = role.hosts > 1 and role.main
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    pod = {
        "restartPolicy": "Never" if restarts_with_set else "OnFailure",
        "terminationGracePeriodSeconds": math.ceil(role.grace_s),
        "nodeSelector": _node_selector(role, values),
        "containers": [_container(plan, role, words, values)],
        "volumes": [
            {"name": "workdir", "persistentVolumeClaim": {"claimName": values.claim}},
            *(_RDMA_VOLUMES if _has_rdma(role, values) else []),
        ],
    }
    spec = {
        "parallelism": role.hosts // role.slices,
        "completions": role.hosts // role.slices,
        "completionMode": "Indexed",
        # It counts the restarts of all pods of the job.
        "backoffLimit": 0 if restarts_with_set else role.restarts.max_restarts * role.hosts,
        "podFailurePolicy": {"rules": _interruption_rules(role)} if restarts_with_set else None,
        "template": {
            "metadata": {"annotations": _INTERFACES} if _has_rdma(role, values) else None,
            "spec": pod,
        },
    }
    return {"metadata": {"annotations": exclusive} if role.devices else None, "spec": spec}


def _has_rdma(role: Role, values: flags.FlagValues) -> bool:
    return (
        values.accelerator == _RDMA_ACCELERATOR
        and role.devices == CHIP_SPECS[CHIPS[_RDMA_ACCELERATOR]].per_host
    )


def _interruption_rules(role: Role) -> list[dict[str, Any]]:
    """Returns the rules for ends without a fault: the program saved after SIGTERM, or its node was lost."""
    saved = {"containerName": role.name, "operator": "In", "values": [EXIT_RESTART]}
    return [
        {"action": "FailJob", "onExitCodes": saved},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _node_selector(role: Role, values: flags.FlagValues) -> dict[str, str] | None:
    if not role.devices:
        return None
    if _is_tpu(values):
        return {
            "cloud.google.com/gke-tpu-accelerator": values.accelerator,
            "cloud.google.com/gke-tpu-topology": role.tpu_topology,
        }
    return {"cloud.google.com/gke-accelerator": values.accelerator}


def _container(plan: run_plan.RunPlan, role: Role, words, values) -> dict[str, Any]:
    # In a command $(NAME) is an environment variable; the job's controller sets the index of the pod.
    index = {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}
    coordinator = f"{_host(plan, role, chr(0) + 'ROLE_INDEX' + chr(0))}:{_COORDINATOR_PORT}"
    replica_index = "0" if role.slices > 1 else "\0ROLE_INDEX\0"
    own_words = {
        "python": "python3",
        "index": replica_index,
        "host": "0.0.0.0",
        "port": str(role.port),
        "ready": "/tmp/ready",
        # With several slices GKE sets each pod's position in its environment, where jax reads it.
        SELF_URL: f"http://{_host(plan, role, replica_index)}:{role.port}",
        "distributed": "auto"
        if role.slices > 1
        else f"{coordinator},{role.hosts},\0JOB_COMPLETION_INDEX\0",
    }
    command = [
        re.sub("\0(.*?)\0", r"$(\1)", _escape_variables(text))
        for text in substitute_words(role.argv, own_words | words)
    ]
    kind = "google.com/tpu" if _is_tpu(values) else "nvidia.com/gpu"
    resources = {
        "cpu": role.cpus or None,
        "memory": f"{role.memory_gib}Gi" if role.memory_gib else None,
    }
    return {
        "name": role.name,
        "image": values.image,
        "command": [*RDMA_START, *command] if _has_rdma(role, values) else command,
        "env": [
            {"name": "ROLE_INDEX", "valueFrom": {"fieldRef": index}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *(
                {"name": name, "value": _escape_variables(value)}
                for name, value in _role_env(role, values).items()
            ),
        ],
        "ports": [{"containerPort": role.port}] if role.serves else None,
        "resources": {"requests": resources, "limits": {kind: role.devices or None}},
        "volumeMounts": [
            {"name": "workdir", "mountPath": values.mount or str(plan.workdir)},
            *(_RDMA_MOUNTS if _has_rdma(role, values) else []),
        ],
        **_probes(role),
    }


def _escape_variables(text: str) -> str:
    """Returns a text that Kubernetes expands to this one: it replaces $(NAME), and $$ by $."""
    return re.sub(r"\$(?=[$(\0])", "$$", text)


def _role_env(role: Role, values: flags.FlagValues) -> dict[str, str]:
    """Returns the environment of a role, with the XLA options for its accelerators."""
    env = dict(role.env)
    if not role.devices:
        return env
    name = "LIBTPU_INIT_ARGS" if _is_tpu(values) else "XLA_FLAGS"
    if value := f"{values.xla_flags} {env.get(name, '')}".strip():
        env[name] = value
    if _has_rdma(role, values):
        env = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"} | env
    return env | xla_flags.flag_environment(CHIPS.get(values.accelerator), env)


def _probes(role: Role) -> dict[str, Any]:
    """Returns the startup, readiness and liveness probes of a role; {} for one without a health check."""
    health = role.health
    if not (role.serves and health):
        return {}
    probe = {
        "httpGet": {"path": health.path, "port": role.port},
        "periodSeconds": math.ceil(health.interval_s),
        "timeoutSeconds": math.ceil(health.timeout_s),
    }
    max_start_failures = math.ceil(role.start_timeout_s / probe["periodSeconds"])
    max_silent_failures = math.ceil(health.max_silence_s / probe["periodSeconds"])
    return {
        "startupProbe": probe | {"failureThreshold": max_start_failures},
        "readinessProbe": probe,
        "livenessProbe": probe | {"failureThreshold": max_silent_failures},
    }


def _present(value: Any) -> Any:
    """Returns the value without entries of mappings that are None or empty."""
    if isinstance(value, dict):
        items = {key: _present(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item not in (None, {}, [])}
    return [_present(item) for item in value] if isinstance(value, list) else value


def as_yaml(value: Any, indent: str = "") -> str:
    """Returns mappings, lists, texts and numbers as YAML."""
    if isinstance(value, dict):
        pairs = [(f"{_scalar(key)}:", item) for key, item in value.items()]
    elif isinstance(value, list):
        pairs = [("-", item) for item in value]
    lines = []
    for head, item in pairs:
        if not isinstance(item, (dict, list)):
            lines.append(f"{indent}{head} {_scalar(item)}\n")
        elif head == "-":
            lines.append(f"{indent}- {as_yaml(item, indent + '  ').lstrip()}")
        else:
            lines.append(f"{indent}{head}\n{as_yaml(item, indent + '  ')}")
    return "".join(lines)


def _scalar(value: str | int | bool) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _YAML_KEYWORDS:
        return value
    # JSON writes characters beyond 16 bits as two halves, which YAML does not join.
    return re.sub(r"\\ud[89ab]..\\ud[c-f]..", _as_one_escape, json.dumps(value))


def _as_one_escape(pair: re.Match[str]) -> str:
    """Returns the escape of YAML for two halves of a character."""
    character = json.loads(f'"{pair[0]}"')
    return f"\\U{ord(character):08x}"


def generate(argv: list[str], values: flags.FlagValues) -> tuple[run_plan.RunPlan, dict[str, Any]]:
    """Returns the run plan of the program's arguments and its JobSet. Raises ValueError or flags.Error for invalid ones."""
    values(argv, known_only=True)
    if values.accelerator:
        _check_accelerator(values.accelerator)
    if values["tpu_topology"].present and not _is_tpu(values):
        raise ValueError(
            f"--tpu_topology is for TPUs, and --accelerator is {values.accelerator}; leave it out"
        )
    plan = run_plan.read(argv, values, chip=CHIPS.get(values.accelerator))
    return plan, make_job_set(plan, values)


def main(argv: list[str]) -> int:
    """Prints the manifest and returns the exit code; argv[0] is the program's name."""

    def print_job_set() -> int:
        manifest = generate(argv, define())[1]
        print("# Written by launch/gke.py.\n" + as_yaml(manifest), end="")
        return 0

    return run_plan.run_cli(argv, __doc__, print_job_set)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
