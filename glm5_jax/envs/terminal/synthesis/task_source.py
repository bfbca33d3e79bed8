"""Describes a synthesised task and writes it as a folder in Harbor's format, schema 1.4.

The same description always gives the same bytes. The tests run in an image of their own (tests/Dockerfile), which gets
the work folder /app as an artifact.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping

from glm5_jax.envs.terminal.build import digest_of

SCHEMA_VERSION = "1.4"
WORKDIR = "/app"
BASE_IMAGE = "debian:bookworm-slim"
USER = "agent"
EXECUTABLE = ("tests/test.sh", "solution/solve.sh")
TEST_SCRIPT = """#!/bin/bash
# Runs after the agent stops. Nothing here needs a network.
set -u
cd /  # never in the work folder, from which a planted file would be imported
mkdir -p /logs/verifier
chmod 700 /logs/verifier
if python3 -I -m pytest -q -c /dev/null --rootdir /tests -p no:cacheprovider /tests/test_outputs.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
MAX_DIFFICULTY = 5


class FolderExistsError(ValueError):
    """Raised if a task folder exists with other content."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticTask:
    """Synthesised task.

    Attributes:
      name: name of the folder, lower-case with hyphens.
      topic: topic of the taxonomy (`drafts.TOPICS`).
      skills: programs or techniques that a solution needs.
      difficulty: 1 to 5.
      title: description in a few words.
      instruction: prompt.
      files: path below the work folder -> content at the start.
      setup: shell commands that change the work folder when the image is built.
      packages: Debian packages of the image, in addition to python3.
      verifier_packages: Debian packages of the tests' image, in addition to python3-pytest.
      tests: text of tests/test_outputs.py.
      solution: commands of solution/solve.sh, without its head.
      guard_tests: tests that pass before anything is done, because they check that something stays as it is.
      agent_timeout_s: time limit of the agent, in seconds.
    """

    name: str
    topic: str
    skills: tuple[str, ...]
    difficulty: int
    title: str
    instruction: str
    files: Mapping[str, bytes]
    tests: str
    solution: str
    setup: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    verifier_packages: tuple[str, ...] = ()
    guard_tests: tuple[str, ...] = ()
    agent_timeout_s: float = 600.0

    def __post_init__(self):
        if not 1 <= self.difficulty <= MAX_DIFFICULTY:
            raise ValueError(
                f"task {self.name}: difficulty is {self.difficulty}; use 1 to {MAX_DIFFICULTY}"
            )

    def folder_files(self) -> dict[str, bytes]:
        """Returns the content of each file of the task folder, by path."""
        files = {
            "task.toml": self._config().encode(),
            "instruction.md": f"{self.instruction.strip()}\n".encode(),
            "environment/Dockerfile": self._dockerfile().encode(),
            "tests/Dockerfile": self._verifier_dockerfile().encode(),
            "tests/test.sh": TEST_SCRIPT.encode(),
            "tests/test_outputs.py": f"{self.tests.strip()}\n".encode(),
            "solution/solve.sh": (
                f"#!/bin/bash\nset -eu\ncd {WORKDIR}\n{self.solution.strip()}\n".encode()
            ),
        }
        files |= {f"environment/files/{path}": content for path, content in self.files.items()}
        return dict(sorted(files.items()))

    def _dockerfile(self) -> str:
        packages = " ".join(sorted({"python3", *self.packages}))
        lines = [
            f"FROM {BASE_IMAGE}",
            f"RUN apt-get update && apt-get install -y --no-install-recommends {packages}",
            f"RUN id {USER} > /dev/null 2>&1 || useradd --create-home {USER}",
            f"WORKDIR {WORKDIR}",
        ]
        if self.files:
            lines.append(f"COPY files/ {WORKDIR}/")
        commands = [*self.setup, f"chown -R {USER}:{USER} {WORKDIR}"]
        lines.append(f"RUN {' && '.join(commands)}")
        return "\n".join(lines) + "\n"

    def _verifier_dockerfile(self) -> str:
        packages = " ".join(sorted({"python3", "python3-pytest", *self.verifier_packages}))
        return (
            f"FROM {BASE_IMAGE}\n"
            f"RUN apt-get update && apt-get install -y --no-install-recommends {packages}\n"
            f"WORKDIR {WORKDIR}\n"
            "COPY . /tests/\n"
        )

    def _config(self) -> str:
        metadata = {
            "difficulty": self.difficulty,
            "topic": self.topic,
            "skills": list(self.skills),
            "guard_tests": list(self.guard_tests),
            "license": "Apache-2.0",
        }
        limits = {"cpus": 1, "memory_mb": 512, "storage_mb": 256, "network_mode": "no-network"}
        sections = {
            "task": {
                "name": f"glm5-jax/{self.name}",
                "description": self.title,
                "keywords": [self.topic, *self.skills],
            },
            "metadata": metadata,
            "verifier": {"timeout_sec": 120.0, "environment_mode": "separate"},
            "verifier.environment": {"build_timeout_sec": 300.0, **limits},
            "agent": {"timeout_sec": self.agent_timeout_s, "user": USER},
            "environment": {"build_timeout_sec": 300.0, **limits},
        }
        text = f'schema_version = "{SCHEMA_VERSION}"\nartifacts = ["{WORKDIR}"]\n'
        for name, table in sections.items():
            # JSON's texts, numbers and lists are TOML's too.
            rows = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
            text += "\n".join(["", f"[{name}]", *rows, ""])
        return text


def write_task(
    folder: pathlib.Path, files: Mapping[str, bytes], executable: tuple[str, ...] = EXECUTABLE
) -> pathlib.Path:
    """Writes the files of a task to a new folder, and returns it.

    A folder with the same content is left as it is. Raises FolderExistsError if it has other content.
    """
    if folder.exists():
        if read_task(folder) == dict(files):
            return folder
        raise FolderExistsError(f"{folder} exists with other content; give another folder")
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        place.chmod(0o755 if path in executable else 0o644)
    return folder


def read_task(folder: pathlib.Path, *, without: tuple[str, ...] = ("provenance.json",)) -> dict:
    """Returns the content of each regular file of a task folder, by path, except for those of `without`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if name not in without}


def write_provenance(folder: pathlib.Path, facts: Mapping) -> None:
    """Writes provenance.json with the facts and the digest of each part of the task."""
    digests = {name: digest_of(folder / name) for name in ("environment", "tests", "solution")}
    text = (folder / "instruction.md").read_bytes()
    digests["instruction.md"] = hashlib.sha256(text).hexdigest()
    content = {**facts, "sha256": digests}
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    (folder / "provenance.json").write_text(text)
