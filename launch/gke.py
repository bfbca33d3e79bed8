"""Writes the roles of an experiment as a JobSet for Kubernetes, with GKE's names of nodes.

    python -m launch.gke --experiment=FILE.py:VARIANT --workdir=/DIR --image=IMAGE --claim=NAME --accelerator=tpu-v5p-slice \\
        --hosts=16 --devices=4 --tpu_topology=4x4x4 >run.yaml
    kubectl apply -f run.yaml

Each role is a replicated job, each replica of it a job with as many pods as it has hosts; pods find each other by the names of
the JobSet's headless service. Roles start in order, each when the one before it is ready. Where a role's replicas have
accelerators, each has a node pool for itself (exclusive placement). What dies or hangs is started again in its pod; a replica of
several hosts takes the whole set down, which starts again up to --restarts times and goes on from its checkpoint, and as often as
it takes where it was pre-empted, before which it saves. The set has ended with its main roles. IMAGE has this repository as its
working directory, and an environment; the volume of the claim NAME, which all pods may write, is mounted at DIR. Accelerators of a
known kind have the options of XLA for them (launch/xla_flags.py) in place of IMAGE's; --xla_flags='--NAME=VALUE ...' counts more.
Pods that have a node of eight H200 for themselves are on its fast network, as GKE's documentation names it (gvnic-1, rdma-0 to 7).
With --slices=2 the hosts are those of two slices of that topology, each a job; when one is lost for good, delete the set and apply
one of fewer --slices and --hosts for the same DIR (launch/run.py says what else). An error of the user is one line and exit code 2.

JobSet v1alpha2: github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go.
"""

import json
import math
import re
import sys
from typing import Any

from absl import flags

from glm5_jax.core.placement import AGAIN, SELF_URL, Role, filled
from launch import topology, xla_flags
from launch.pods import TORUS
from pallas_kernels.chips import CHIPS as KNOWN

_MEETING_PORT = 8476  # of the processes of a replica; jax's own for clusters of TPUs
# What GKE calls the chips whose options are known: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and gpus.
CHIPS = {
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
    "nvidia-h100-80gb": "h100",
    "nvidia-h100-mega-80gb": "h100",
    "nvidia-h200-141gb": "h200",
}
# What becomes of a set after `_stopped`: it starts again, which is not counted.
_INTERRUPTED = {
    "name": "interrupted",
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
# The fast network of nodes with eight H200, for pods that have a node for themselves: what GKE's documentation has such a
# pod say, with its names of networks (cloud.google.com/ai-hypercomputer/docs/create/gke-ai-hypercompute-custom).
_RDMA = "nvidia-h200-141gb"
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
_RDMA_START = ["bash", "-c", 'source /usr/local/gib/scripts/set_nccl_env.sh; exec "$@"', "bash"]
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {
    "true",
    "false",
    "yes",
    "no",
    "on",
    "off",
    "null",
    "y",
    "n",
}  # what YAML takes for no text


def define() -> flags.FlagValues:
    """The program's flags, besides those of the experiment."""
    values = topology.define()
    options = dict(flag_values=values)
    flags.DEFINE_string("image", None, "of all containers", **options)
    flags.DEFINE_string("claim", None, "of the volume that is mounted at --workdir", **options)
    flags.DEFINE_string(
        "accelerator", None, "as GKE names it: tpu-v5p-slice, nvidia-h200-141gb", **options
    )
    flags.DEFINE_string("xla_flags", "", "for all roles with accelerators", **options)
    flags.DEFINE_integer("restarts", 10, "of the whole set", 0, **options)
    return values


def job_set(run: topology.Topology, values: flags.FlagValues) -> dict[str, Any]:
    """The JobSet; ValueError if a role cannot be placed so."""
    _check(run, values)
    addresses = {
        role.name: [f"http://{_host(run, role, str(i))}:{role.port}" for i in range(role.count)]
        for role in run.roles
    }
    main = [role.name for role in run.roles if role.main]
    jobs: list[dict[str, Any]] = []
    for role in run.roles:
        words = topology.words_of(role, addresses)
        after = [{"name": jobs[-1]["name"], "status": "Ready"}] if jobs else []
        replicas = role.count * role.slices
        job = {"name": role.name, "replicas": replicas, "dependsOn": after}
        jobs.append(job | {"template": _job(run, role, words, values)})
    together = any(role.hosts > 1 for role in run.roles)
    spec = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": run.name,
            "publishNotReadyAddresses": True,
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": main} if main else None,
        "failurePolicy": {
            "maxRestarts": values.restarts,
            "rules": [_INTERRUPTED] if together else None,
        },
        "replicatedJobs": jobs,
    }
    return _present(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": run.name},
            "spec": spec,
        }
    )


def _check(run: topology.Topology, values: flags.FlagValues) -> None:
    topology.check_ports(run.roles, "Kubernetes")
    for name, example in (("image", "REGISTRY/NAME:TAG"), ("claim", "NAME")):
        if not values[name].value:
            raise ValueError(f"--{name} is not given; use --{name}={example}")
    chip = CHIPS.get(values.accelerator)
    for word in values.xla_flags.split():
        if not word.startswith("--"):
            raise ValueError(f"--xla_flags has {word!r}; each option begins with --")
    if not run.workdir.is_absolute():
        raise ValueError(f"--workdir={run.workdir} is no absolute path; all pods must see it")
    for role in run.roles:
        hosts = role.hosts // role.slices
        longest = f"{run.name}-{role.name}-{role.count * role.slices - 1}-{hosts - 1}"
        if len(longest) > 63:
            raise ValueError(f"a pod would be called {longest}; host names have up to 63 letters")
        if role.devices and not values.accelerator:
            raise ValueError(f"role {role.name} has devices; give --accelerator=NAME")
        if not role.devices or not _is_tpu(values):
            if role.slices > 1:
                raise ValueError(
                    f"role {role.name} has {role.slices} slices, which only TPUs have; give it hosts alone"
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
            each = " in each slice" if role.slices > 1 else ""
            raise ValueError(
                f"role {role.name} has {hosts} hosts of {role.devices} chips{each}, and the topology {role.tpu_topology} "
                f"has {chips}"
            )


def _check_accelerator(name: str) -> None:
    """ValueError for none of GKE's names, and for what one of them begins with."""
    cut = [known for known in CHIPS if known.startswith(name)]
    if name not in CHIPS and (cut or not name.startswith("nvidia-")):
        names = ", ".join(cut or CHIPS)
        others = "" if cut else ", and other nvidia-NAMEs of GKE"
        raise ValueError(f"--accelerator={name} is not known; there are {names}{others}")


def _is_tpu(values: flags.FlagValues) -> bool:
    return (values.accelerator or "").startswith("tpu")


def _host(run: topology.Topology, role: Role, index: str) -> str:
    """The name of a replica's first pod."""
    return f"{run.name}-{role.name}-{index}-0.{run.name}"


def _job(run: topology.Topology, role: Role, words, values: flags.FlagValues) -> dict[str, Any]:
    together = role.hosts > 1  # none of its processes goes on alone
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    pod = {
        "restartPolicy": "Never" if together else "OnFailure",
        "terminationGracePeriodSeconds": math.ceil(role.grace),
        "nodeSelector": _node_selector(role, values),
        "containers": [_container(run, role, words, values)],
        "volumes": [
            {"name": "workdir", "persistentVolumeClaim": {"claimName": values.claim}},
            *(_RDMA_VOLUMES if _has_rdma(role, values) else []),
        ],
    }
    spec = {
        "parallelism": role.hosts // role.slices,
        "completions": role.hosts // role.slices,
        "completionMode": "Indexed",
        "backoffLimit": 0 if together else role.restarts.limit,
        "podFailurePolicy": {"rules": _stopped(role)} if together else None,
        "template": {
            "metadata": {"annotations": _INTERFACES} if _has_rdma(role, values) else None,
            "spec": pod,
        },
    }
    return {"metadata": {"annotations": exclusive} if role.devices else None, "spec": spec}


def _has_rdma(role: Role, values: flags.FlagValues) -> bool:
    return values.accelerator == _RDMA and role.devices == KNOWN[CHIPS[_RDMA]].per_host


def _stopped(role: Role) -> list[dict[str, Any]]:
    """What is no fault of a program: it was told to stop, and has saved, or its node goes away."""
    saved = {"containerName": role.name, "operator": "In", "values": [AGAIN]}
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


def _container(run: topology.Topology, role: Role, words, values) -> dict[str, Any]:
    # In a command $(NAME) is a variable of the environment; the job's controller sets the pod's own number.
    index = {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}
    meeting = f"{_host(run, role, chr(0) + 'ROLE_INDEX' + chr(0))}:{_MEETING_PORT}"
    own_index = "0" if role.slices > 1 else "\0ROLE_INDEX\0"
    own = {
        "python": "python3",
        "index": own_index,
        "host": "0.0.0.0",
        "port": str(role.port),
        "ready": "/tmp/ready",
        # Of several slices GKE tells each pod its place, which jax knows.
        SELF_URL: f"http://{_host(run, role, own_index)}:{role.port}",
        "distributed": "auto"
        if role.slices > 1
        else f"{meeting},{role.hosts},\0JOB_COMPLETION_INDEX\0",
    }
    command = [
        re.sub("\0(.*?)\0", r"$(\1)", text.replace("$(", "$$("))
        for text in filled(role.argv, own | words)
    ]
    kind = "google.com/tpu" if _is_tpu(values) else "nvidia.com/gpu"
    resources = {"cpu": role.cpus or None, "memory": f"{role.memory}Gi" if role.memory else None}
    return {
        "name": role.name,
        "image": values.image,
        "command": [*_RDMA_START, *command] if _has_rdma(role, values) else command,
        "env": [
            {"name": "ROLE_INDEX", "valueFrom": {"fieldRef": index}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *({"name": name, "value": value} for name, value in _own(role, values).items()),
        ],
        "ports": [{"containerPort": role.port}] if role.serves else None,
        "resources": {"requests": resources, "limits": {kind: role.devices or None}},
        "volumeMounts": [
            {"name": "workdir", "mountPath": str(run.workdir)},
            *(_RDMA_MOUNTS if _has_rdma(role, values) else []),
        ],
        **_probes(role),
    }


def _own(role: Role, values: flags.FlagValues) -> dict[str, str]:
    """The environment of a role, with the options of XLA for its accelerators."""
    env = dict(role.env)
    if not role.devices:
        return env
    name = "LIBTPU_INIT_ARGS" if _is_tpu(values) else "XLA_FLAGS"
    if said := f"{values.xla_flags} {env.get(name, '')}".strip():
        env[name] = said
    if _has_rdma(role, values):
        env = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"} | env
    return env | xla_flags.environment(CHIPS.get(values.accelerator), env)


def _probes(role: Role) -> dict[str, Any]:
    """Until it is healthy, whether it is ready for others, and whether it hangs."""
    health = role.health
    if not (role.serves and health):
        return {}
    ask = {
        "httpGet": {"path": health.path, "port": role.port},
        "periodSeconds": math.ceil(health.interval),
        "timeoutSeconds": math.ceil(health.timeout),
    }
    starts = math.ceil(role.start_seconds / ask["periodSeconds"])
    silent = math.ceil(health.silence / ask["periodSeconds"])
    return {
        "startupProbe": ask | {"failureThreshold": starts},
        "readinessProbe": ask,
        "livenessProbe": ask | {"failureThreshold": silent},
    }


def _present(value: Any) -> Any:
    """The same without what is None or empty in mappings."""
    if isinstance(value, dict):
        own = {key: _present(item) for key, item in value.items()}
        return {key: item for key, item in own.items() if item not in (None, {}, [])}
    return [_present(item) for item in value] if isinstance(value, list) else value


def as_yaml(value: Any, indent: str = "") -> str:
    """Mappings, lists, texts and numbers as YAML."""
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
    plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return value if plain else json.dumps(value)


def main(argv: list[str]) -> int:
    """Exit code of the program with these arguments (the program's name first)."""
    values = define()

    def answer() -> int:
        values(argv, known_only=True)
        if values.accelerator:
            _check_accelerator(values.accelerator)
        if values["tpu_topology"].present and not _is_tpu(values):
            raise ValueError(
                f"--tpu_topology is for TPUs, and --accelerator is {values.accelerator}; leave it out"
            )
        chip = CHIPS.get(values.accelerator)
        found = job_set(topology.read(argv, values, chip=chip), values)
        print("# Written by launch/gke.py.\n" + as_yaml(found), end="")
        return 0

    return topology.asked(argv, __doc__, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
