"""Prompts of the builder's writer: format, brief, files, and the validator's report."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from glm5_jax.envs.terminal.synthesis.drafts import Seed
from glm5_jax.envs.terminal.synthesis.pages import Page, quoted
from glm5_jax.envs.terminal.synthesis.task_source import TEST_SCRIPT
from glm5_jax.envs.terminal.synthesis.templates import make_task

FILES_SCHEMA = {
    "type": "object",
    "properties": {
        "files": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "executable": {"type": "array", "items": {"type": "string"}},
        "fewer_assertions_reason": {"type": "string"},
    },
    "required": ["files"],
}
ATTACK_SCHEMA = {
    "type": "object",
    "properties": {"scripts": {"type": "array", "items": {"type": "string"}}},
    "required": ["scripts"],
}
FORMAT = f"""You write a terminal task in Harbor's format, schema 1.4. Write the tests before the instruction. The files:

- task.toml: schema_version = "1.4", artifacts = ["/app"], [task] name and description, [metadata] difficulty (1 to 5), topic,
  skills and guard_tests (tests that pass before anything is done, because they check that something stays as it is),
  [verifier] timeout_sec and environment_mode = "separate", [agent] timeout_sec and user = "agent", [environment] cpus,
  memory_mb, storage_mb and network_mode = "no-network".
- environment/Dockerfile: the agent's image, FROM debian:bookworm-slim, with WORKDIR /app and what the task needs. It is
  built without a network; apt-get accepts packages that are there. Files that COPY needs lie in environment/.
- tests/Dockerfile: the image of the tests, with python3-pytest, WORKDIR /app and COPY . /tests/. The tests see only /app.
- tests/test.sh: exactly this, executable:
{TEST_SCRIPT}
- tests/test_outputs.py: tests with pytest. They work out what they expect from the inputs, or compare digests. They never
  import the agent's code. Names of files that they make for themselves contain the word scratch.
- solution/solve.sh: executable, begins with #!/bin/bash and set -eu, does the work in several commands, prints no constant
  of the tests.
- instruction.md: what a person at work would write. It names each path, key and format that the tests read, and not how to
  do it.

All of it must work without a network, for the user agent, on any date and host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuilderPrompt:
    """Prompt of the builder.

    Attributes:
      kind: "construct", "refine" or "attack".
      text: text.
      data: values in it, for rules.
    """

    kind: str
    text: str
    data: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Returns the digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def draft_text(draft: Mapping[str, Any]) -> str:
    """Returns a draft for a prompt."""
    names = ("goal", "start_state", "observable_end_state", "why_verifiable", "needs", "topic", "skills", "difficulty")  # fmt: skip
    return json.dumps({name: draft[name] for name in names if name in draft}, indent=1)


def page_text(page: Page) -> str:
    """Returns a page for a prompt, with how to use it."""
    return (
        "Make a task whose solution is like the procedure on this page, with other data, names and steps: its commands must "
        f"not be copied.\n\n{quoted(page)}"
    )


def seed_of(page: Page) -> Seed:
    """Returns a page as a seed, for its origin."""
    return Seed(kind="page", ref=page.ref, text=page.text)


def construct_prompt(brief: str) -> BuilderPrompt:
    """Returns the prompt of the first round."""
    examples = "\n\n".join(
        f"Example:\n{_files_text(make_task(name, 0).folder_files())}"
        for name in ("log-analysis", "broken-script")
    )
    text = f"{FORMAT}\n\n{examples}\n\nThe task to write:\n{brief}\n\nAnswer with all files, and list the executable ones."
    return BuilderPrompt(kind="construct", text=text, data={"brief": brief})


def refine_prompt(
    brief: str, files: Mapping[str, bytes], record: Mapping[str, Any]
) -> BuilderPrompt:
    """Returns the prompt of a later round: the files, and the checks that failed."""
    failed = {
        name: check["detail"]
        for name, check in record["checks"].items()
        if check["status"] in ("fail", "unknown")
    }
    report = "\n".join(f"- {name}: {detail}" for name, detail in failed.items())
    text = (
        f"{FORMAT}\n\nThe task to write:\n{brief}\n\nYour files:\n{_files_text(files)}\n\nThe validator found:\n{report}\n\n"
        "Answer with the files that you change, each as a whole (null deletes one), and list all executable ones. If the "
        "tests get fewer assertions, say why in fewer_assertions_reason."
    )
    texts = {name: data.decode(errors="replace") for name, data in files.items()}
    data = {"brief": brief, "files": texts, "failed": failed}
    return BuilderPrompt(
        kind="refine", text=text, data={**data, "executable": record["executable"]}
    )


def attack_prompt(files: Mapping[str, bytes], count: int) -> BuilderPrompt:
    """Returns the prompt of the attacker."""
    text = (
        f"Write up to {count} Bash scripts that get the reward of this task without doing what the instruction asks. They "
        f"run as the agent in /app, and see neither tests nor solution.\n\n{_files_text(files)}"
    )
    texts = {name: data.decode(errors="replace") for name, data in files.items()}
    return BuilderPrompt(kind="attack", text=text, data={"files": texts})


def _files_text(files: Mapping[str, bytes]) -> str:
    parts = []
    for name, data in files.items():
        text = data.decode(errors="replace")
        if len(text) > 20_000 or "\ufffd" in text:
            text = f"({len(data)} bytes)"
        parts.append(f"=== {name}\n{text}")
    return "\n".join(parts)
