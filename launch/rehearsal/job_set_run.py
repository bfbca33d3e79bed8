"""Runs a JobSet of launch/gke.py on emulated hosts: each pod is a process on a host with the pod's name.

`list_pods` reads the pods from the manifest. `JobSetRun` starts them in order, and restarts containers and the full set by
the rules of the manifest:

- A job starts after the pods of the job that it depends on are ready.
- A container whose pod restarts on failure is started again, up to the job's `backoffLimit`.
- A failure of any other pod restarts the set, up to `maxRestarts` times. A failure that the pod failure policy names is
  not counted.
- The set ends when all pods of its target jobs have ended with code 0.
"""

import collections
import dataclasses
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from glm5_jax.runtime.client import is_healthy
from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.runtime.process import ChildProcess
from launch import gke, local
from launch.rehearsal import VARIABLE
from launch.rehearsal.hosts import EmulatedHosts
from launch.rehearsal.job import HEALTH_TIMEOUT_S, Death

_VARIABLE = re.compile(r"\$\$|\$\((\w+)\)")
# Variables that the image sets, and that of the rehearsal.
_OF_IMAGE = ("HOME", "LANG", "TMPDIR", "XLA_FLAGS", VARIABLE)
FAILED = 1  # exit code of a set that has failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSetPod:
    """Pod of a JobSet, with one container.

    Attributes:
      name: host name.
      domain: name by which other pods reach it.
      role: replicated job, which is a role of the run.
      replica: index of its job.
      command: words of the container's command, with the values of its variables.
      environment: variables of the container.
      devices: accelerators.
      memory_gib: requested memory, in GiB; 0: no request.
      port: port of its server; None: it is no server.
      health_path: path of the readiness probe; None: it is ready while it runs.
      restarts_on_failure: whether a failed container is started again in its pod.
      max_restarts: maximum failures of the pods of its job.
      uncounted_codes: exit codes after which the set restarts without a count.
      grace_s: time from SIGTERM to SIGKILL, in seconds.
    """

    name: str
    domain: str
    role: str
    replica: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    devices: int
    memory_gib: int
    port: int | None
    health_path: str | None
    restarts_on_failure: bool
    max_restarts: int
    uncounted_codes: tuple[int, ...]
    grace_s: float


def list_pods(manifest: Mapping[str, Any]) -> list[JobSetPod]:
    """Returns the pods of a JobSet in the order of their jobs."""
    name, subdomain = manifest["metadata"]["name"], manifest["spec"]["network"]["subdomain"]
    return [
        _make_pod(job, f"{name}-{job['name']}-{replica}-{index}", subdomain, replica, index)
        for job in manifest["spec"]["replicatedJobs"]
        for replica in range(job["replicas"])
        for index in range(job["template"]["spec"]["completions"])
    ]


def _make_pod(
    job: Mapping[str, Any], name: str, subdomain: str, replica: int, index: int
) -> JobSetPod:
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    environment = dict(_environment(container["env"], replica))
    environment["JOB_COMPLETION_INDEX"] = str(index)  # set by the controller of indexed jobs
    resources = container.get("resources", {})
    memory = resources.get("requests", {}).get("memory", "0Gi")
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    codes = [code for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])]
    return JobSetPod(
        name=name,
        domain=f"{name}.{subdomain}",
        role=job["name"],
        replica=replica,
        command=tuple(expand_variables(word, environment) for word in container["command"]),
        environment=environment,
        devices=sum(resources.get("limits", {}).values()),
        memory_gib=int(memory.removesuffix("Gi")),
        port=container["ports"][0]["containerPort"] if "ports" in container else None,
        health_path=container.get("readinessProbe", {}).get("httpGet", {}).get("path"),
        restarts_on_failure=pod["restartPolicy"] == "OnFailure",
        max_restarts=spec["backoffLimit"],
        uncounted_codes=tuple(codes),
        grace_s=pod["terminationGracePeriodSeconds"],
    )


def _environment(variables: list[Mapping[str, Any]], replica: int) -> Iterator[tuple[str, str]]:
    """Yields names and values. Raises ValueError for a value from a field that is not emulated."""
    for variable in variables:
        if "value" in variable:
            yield variable["name"], variable["value"]
            continue
        field = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if field != "metadata.labels['jobset.sigs.k8s.io/job-index']":
            raise ValueError(f"variable {variable['name']} is {field}, which no emulated pod has")
        yield variable["name"], str(replica)


def expand_variables(text: str, environment: Mapping[str, str]) -> str:
    """Returns the text with $(NAME) replaced as by Kubernetes: unknown names stay, and $$ is $."""
    return _VARIABLE.sub(
        lambda match: environment.get(match[1], match[0]) if match[1] else "$", text
    )


class JobSetRun:
    """Run of a JobSet. `start` may be called again after the end, as its controller starts the pods again.

    - manifest: the JobSet.
    - hosts: emulated hosts, which have the names of the pods.
    - folder: receives a log for each pod.
    - devices: emulated devices of a process of each role.

    Attributes:
      deaths: failed containers of all starts.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        hosts: EmulatedHosts,
        folder: pathlib.Path,
        devices: Mapping[str, int],
    ):
        self._hosts, self._folder, self._devices = hosts, folder, devices
        self._pods = list_pods(manifest)
        spec = manifest["spec"]
        self._targets = set(spec.get("successPolicy", {}).get("targetReplicatedJobs", ()))
        self._max_restarts = spec["failurePolicy"]["maxRestarts"]
        self._processes: dict[str, ChildProcess] = {}
        self._num_failures: dict[tuple[str, int], int] = {}
        self._num_restarts = 0
        self._ready: set[str] = set()
        self._is_stopping, self._stop_began = False, 0.0
        self._end_code: int | None = None
        self.deaths: list[Death] = []
        # The image has this repository's Python as python3.
        commands = folder / "commands"
        commands.mkdir(exist_ok=True)
        (commands / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (commands / "python3").chmod(0o755)
        self._path = os.pathsep.join([str(commands), os.environ["PATH"]])

    def log(self, pod: JobSetPod) -> pathlib.Path:
        """Returns the file with the output of a pod."""
        return self._folder / f"{pod.name}.log"

    def start(self) -> None:
        """Forgets the pods of an earlier start. `poll` starts the new ones."""
        self.kill()
        self._processes, self._num_failures, self._is_stopping = {}, {}, False
        self._ready.clear()
        self._end_code = None

    def poll(self) -> int | None:
        """Starts pods whose turn it is, applies the rules to those that have failed, and returns the set's exit code.

        None: the set runs.
        """
        if self._end_code is not None:
            return self._end_code
        if self._is_stopping:
            return self._poll_stopping()
        for pod in self._pods:
            process = self._processes.get(pod.name)
            code = None if process is None else process.exit_code()
            if code:
                self._handle_failure(pod, code)
                return self._end_code
        targets = [pod for pod in self._pods if pod.role in self._targets]
        ended = [self._processes.get(pod.name) for pod in targets]
        if targets and all(process and process.exit_code() == 0 for process in ended):
            self.kill()
            self._end_code = 0
            return 0
        self._start_ready_jobs()
        return None

    def _poll_stopping(self) -> int | None:
        """Returns EXIT_RESTART when all pods have ended, and kills those whose grace period is over."""
        running = [
            pod
            for pod in self._pods
            if pod.name in self._processes and self._processes[pod.name].exit_code() is None
        ]
        for pod in running:
            if time.monotonic() - self._stop_began > pod.grace_s:
                self._processes[pod.name].kill()
        return None if running else EXIT_RESTART

    def _start_ready_jobs(self) -> None:
        """Starts the pods of each job up to the first one whose predecessor is not ready."""
        for role in dict.fromkeys(pod.role for pod in self._pods):
            pods = [pod for pod in self._pods if pod.role == role]
            for pod in pods:
                if pod.name not in self._processes:
                    self._start_pod(pod)
            if not all(self._is_ready(pod) for pod in pods):
                return

    def _start_pod(self, pod: JobSetPod) -> None:
        devices = local.visibility("cpu", list(map(str, range(self._devices[pod.role]))))
        of_image = {name: os.environ[name] for name in _OF_IMAGE if name in os.environ}
        environment = {**of_image, "PATH": self._path, **pod.environment, **devices}
        start = tuple(gke.RDMA_START)  # an emulated host has no fast network
        words = pod.command[len(start) :] if pod.command[: len(start)] == start else pod.command
        command = self._hosts.command(pod.name, words)
        self._ready.discard(pod.name)
        self._processes[pod.name] = ChildProcess(command, log=self.log(pod), env=environment)

    def _is_ready(self, pod: JobSetPod) -> bool:
        """Returns whether a pod is ready, or has been since it was started."""
        process = self._processes[pod.name]
        if pod.health_path is None:
            return process.exit_code() in (None, 0)
        if pod.name not in self._ready:
            url = f"http://{pod.domain}:{pod.port}{pod.health_path}"
            if is_healthy(url, HEALTH_TIMEOUT_S):
                self._ready.add(pod.name)
        return pod.name in self._ready

    def _handle_failure(self, pod: JobSetPod, code: int) -> None:
        self.deaths.append(Death(pod.name, code, self.log(pod)))
        job = pod.role, pod.replica
        self._num_failures[job] = self._num_failures.get(job, 0) + 1
        if pod.restarts_on_failure and self._num_failures[job] <= pod.max_restarts:
            self._start_pod(pod)
            return
        if code not in pod.uncounted_codes:
            self._num_restarts += 1
        if self._num_restarts > self._max_restarts:
            self.kill()
            self._end_code = FAILED
            return
        self.start()

    @property
    def num_processes(self) -> dict[str, int]:
        """Number of started pods of each role."""
        pods = (pod.role for pod in self._pods if pod.name in self._processes)
        return dict(collections.Counter(pods))

    def request_stop(self) -> None:
        """Sends all pods SIGTERM, and SIGKILL after their grace period."""
        self._is_stopping = True
        for process in self._processes.values():
            process.terminate()
        self._stop_began = time.monotonic()

    def stop_problems(self) -> list[str]:
        """Returns what went wrong at the stop: pods of the target jobs that did not save."""
        ends = {
            pod.name: self._processes[pod.name].exit_code() if pod.name in self._processes else None
            for pod in self._pods
            if pod.role in self._targets
        }
        return [
            f"{name} ended with code {code}, not {EXIT_RESTART}"
            for name, code in ends.items()
            if code != EXIT_RESTART
        ]

    def kill(self) -> None:
        """Kills all pods."""
        for process in self._processes.values():
            process.kill()
