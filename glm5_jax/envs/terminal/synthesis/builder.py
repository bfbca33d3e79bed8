"""Lets a writer build a task in rounds: it writes the files, the validator runs, and its report goes back.

Each round is a folder with the task's files and record.json, written at its end. A run that was stopped continues with the
first round without a record. A task is accepted when all checks pass, and given up after the last round.
"""

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from glm5_jax.agents.writers import Writer, WriterError, WriterPrompt
from glm5_jax.envs.terminal.synthesis.builder_prompts import (
    ATTACK_SCHEMA,
    FILES_SCHEMA,
    attack_prompt,
    construct_prompt,
    refine_prompt,
)
from glm5_jax.envs.terminal.synthesis.reports import FAIL, Check, ValidationReport
from glm5_jax.envs.terminal.synthesis.task_source import (
    EXECUTABLE,
    read_task,
    write_provenance,
    write_task,
)
from glm5_jax.envs.terminal.synthesis.verifier_texts import TEST_FILE, count_assertions
from glm5_jax.runtime.files import replace_text

ACCEPTED, GIVEN_UP = "accepted", "given_up"
_PARTS = ("environment/", "tests/", "solution/")
_FILES = ("task.toml", "instruction.md")
_MAX_TASK_BYTES = 1 << 21
# Checks a task folder; the mapping has scripts of attackers by name.
Validate = Callable[[pathlib.Path, Mapping[str, str]], Awaitable[ValidationReport]]


class BuilderBusyError(RuntimeError):
    """Raised if another builder works at the same task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Brief:
    """Source of a task: a draft or a page.

    Attributes:
      name: name of the task's folder.
      text: draft or page as text for the writer.
      origin: facts about it for provenance.json.
      review: function that returns a problem of the finished files that the validator does not know, or None.
    """

    name: str
    text: str
    origin: Mapping[str, Any]
    review: Callable[[Mapping[str, bytes]], str | None] = lambda files: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuilderConfig:
    """Limits of a builder. Raises ValueError for values out of range.

    Attributes:
      max_rounds: maximum number of rounds of a task.
      max_attacks: maximum number of attacks that the attacker writes; 0: there is no attacker.
    """

    max_rounds: int = 6
    max_attacks: int = 3

    def __post_init__(self):
        if self.max_rounds < 1 or self.max_attacks < 0:
            raise ValueError(
                f"max_rounds is {self.max_rounds} and max_attacks {self.max_attacks}; use at least 1 and 0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildResult:
    """End of the work at a task.

    Attributes:
      name: name of the task.
      status: ACCEPTED or GIVEN_UP.
      rounds: number of rounds.
      built_first: whether the images were built in the first round that reached V02; None: none did.
      built_last: the same for the last such round.
      attacks_won: number of the attacker's scripts that got a reward, over all rounds.
    """

    name: str
    status: str
    rounds: int
    built_first: bool | None
    built_last: bool | None
    attacks_won: int


class TaskBuilder:
    """Builder of tasks.

    Args:
      writer: writer of the files.
      validate: validator.
      folder: folder of the rounds and of the accepted tasks.
      config: limits.
      attacker: writer of attacks; None: the writer.
      clock: clock of the rounds' durations, in seconds.
    """

    def __init__(
        self,
        writer: Writer,
        validate: Validate,
        folder: pathlib.Path,
        config: BuilderConfig = BuilderConfig(),
        attacker: Writer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._writer, self._validate, self._folder = writer, validate, folder
        self._config, self._attacker, self._clock = config, attacker or writer, clock

    async def build(self, brief: Brief) -> BuildResult:
        """Builds a task, from its first round without a record on. Raises BuilderBusyError."""
        work = self._folder / "work" / brief.name
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work):
            records = read_records(work)
            while not self._is_finished(records):
                records.append(await self._round(brief, work, records))
            result = _result(brief.name, records)
            if result.status == ACCEPTED:
                self._accept(brief, work, records)
            _write_json(work / "result.json", dataclasses.asdict(result))
            return result

    def _is_finished(self, records: list[dict]) -> bool:
        if records and records[-1]["ok"]:
            return True
        return len(records) >= self._config.max_rounds

    async def _round(self, brief: Brief, work: pathlib.Path, records: list[dict]) -> dict:
        """Runs the next round, and returns its record after it is on disk."""
        number, start = len(records) + 1, self._clock()
        folder = work / f"round-{number}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped within the round
        before = read_task(work / f"round-{number - 1}" / brief.name) if records else {}
        record: dict[str, Any] = {
            "task_id": brief.name,
            "round": number,
            "stage": "refine" if records else "construct",
        }
        if records:
            prompt = refine_prompt(brief.text, before, records[-1])
        else:
            prompt = construct_prompt(brief.text)
        record["prompt_sha256"], record["prompt_characters"] = prompt.sha256, len(prompt.text)
        # Edit.
        executable = records[-1]["executable"] if records else []
        files, rejected = before, None
        try:
            request = WriterPrompt(
                kind=prompt.kind, text=prompt.text, data=prompt.data, attempt=number
            )
            reply = await self._writer.ask(request, FILES_SCHEMA)
            files = apply_edits(before, reply["files"], reply.get("fewer_assertions_reason", ""))
            executable = reply.get("executable", executable)
        except (WriterError, ValueError) as error:
            rejected = str(error)
        record["edits"] = sorted(
            name for name in files.keys() | before.keys() if files.get(name) != before.get(name)
        )
        record["executable"] = [name for name in EXECUTABLE if name in executable]
        write_task(folder / brief.name, files, tuple(record["executable"]))
        # Check.
        report = await self._report(brief, folder / brief.name, files, rejected)
        record |= {"ok": report.is_green, "checks": report.as_dict()["checks"]}
        record["seconds"] = round(self._clock() - start, 2)
        _write_json(folder / "record.json", record)
        return record

    async def _report(
        self,
        brief: Brief,
        folder: pathlib.Path,
        files: Mapping[str, bytes],
        rejected: str | None,
    ) -> ValidationReport:
        if rejected is not None:
            check = Check(id="V01", status=FAIL, detail=f"the reply was not applied: {rejected}")
            return ValidationReport(task=brief.name, checks=(check,))
        if problem := brief.review(files):
            check = Check(id="V01", status=FAIL, detail=problem)
            return ValidationReport(task=brief.name, checks=(check,))
        report = await self._validate(folder, {})
        if not report.is_green or not self._config.max_attacks:
            return report
        # Only a task without other faults is worth an attack.
        attacks = await self._attacks(files)
        return await self._validate(folder, attacks) if attacks else report

    async def _attacks(self, files: Mapping[str, bytes]) -> dict[str, str]:
        prompt = attack_prompt(files, self._config.max_attacks)
        request = WriterPrompt(kind=prompt.kind, text=prompt.text, data=prompt.data)
        try:
            reply = await self._attacker.ask(request, ATTACK_SCHEMA)
        except WriterError:
            return {}
        scripts = reply["scripts"][: self._config.max_attacks]
        return {f"attacker {number}": script for number, script in enumerate(scripts, 1)}

    def _accept(self, brief: Brief, work: pathlib.Path, records: list[dict]) -> None:
        source = work / f"round-{len(records)}" / brief.name
        target = self._folder / "tasks" / brief.name
        write_task(target, read_task(source), tuple(records[-1]["executable"]))
        facts = {"origin": dict(brief.origin), "rounds": records}
        write_provenance(target, facts)


def apply_edits(
    before: Mapping[str, bytes], edits: Mapping[str, str | None], reason: str
) -> dict[str, bytes]:
    """Returns the files after edits: path -> new text, or None to delete.

    Raises ValueError for a path outside of the task's parts, for too many bytes, and if the tests get fewer assertions
    without a reason.
    """
    files = dict(before)
    for path, text in edits.items():
        parts = path.split("/")
        is_part = path in _FILES or path.startswith(_PARTS)
        if not is_part or ".." in parts or "" in parts or "." in parts:
            raise ValueError(f"{path!r} is no file of a task; use {', '.join((*_FILES, *_PARTS))}")
        if text is None:
            files.pop(path, None)
        else:
            files[path] = text.encode()
    if sum(map(len, files.values())) > _MAX_TASK_BYTES:
        raise ValueError(f"the task has more than {_MAX_TASK_BYTES:,} bytes")
    counts = [
        sum(
            count_assertions(data.decode(errors="replace"))
            for name, data in part.items()
            if name.startswith("tests/") and name.endswith(".py")
        )
        for part in (before, files)
    ]
    if counts[1] < counts[0] and not reason.strip():
        raise ValueError(
            f"the tests have {counts[1]} assertions instead of {counts[0]}; say why in fewer_assertions_reason, or add "
            f"them to {TEST_FILE} again"
        )
    return files


def read_records(work: pathlib.Path) -> list[dict]:
    """Returns the records of the complete rounds of a task, in order."""
    records = []
    while (file := work / f"round-{len(records) + 1}" / "record.json").is_file():
        records.append(json.loads(file.read_text()))
    return records


def _result(name: str, records: list[dict]) -> BuildResult:
    built = [r["checks"]["V02_builds"]["ok"] for r in records if "V02_builds" in r["checks"]]
    details = [r["checks"].get("V10_attacks", {}).get("detail", "") for r in records]
    return BuildResult(
        name=name,
        status=ACCEPTED if records[-1]["ok"] else GIVEN_UP,
        rounds=len(records),
        built_first=built[0] if built else None,
        built_last=built[-1] if built else None,
        attacks_won=sum(detail.count("attacker ") for detail in details),
    )


@contextlib.contextmanager
def _locked(work: pathlib.Path) -> Iterator[None]:
    """Holds a lock on the folder of a task, which ends with the process."""
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuilderBusyError(
                f"another builder works at {work}; give another folder"
            ) from None
        yield


def _write_json(file: pathlib.Path, content: Mapping) -> None:
    replace_text(file, json.dumps(content, indent=1, sort_keys=True) + "\n")
