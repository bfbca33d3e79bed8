"""Defines the records of SWE tasks in SWE-bench's field names, and reads and writes them as JSON lines.

- `SweInstance`: a task, with patches, commands, parser and the lists of tests.
- `LaunchRecord`: how the environment of a repository was built (RepoLaunch's fields).
- `Prediction`: a patch by a model.
- `AttemptReport`: the grading of one attempt.

The order of fields is fixed and dictionaries are sorted, so that equal records are equal bytes.
"""

import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from glm5_jax.envs.swe.parsers.report import Status
from glm5_jax.envs.swe.patches import PatchError, parse_patch
from glm5_jax.runtime.files import check_line, read_lines

TaskType = Literal["bug_fix", "feature", "refactor", "other"]
MAX_REQUIREMENTS = 8
TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS", "NEW_TO_PASS", "LOST", "MAY_SKIP")

_INSTANCE_ID = re.compile(r"[A-Za-z0-9][\w.+~-]{0,199}")
_Record = TypeVar("_Record", bound=msgspec.Struct)


class InstanceError(ValueError):
    """Raised for a row that is incomplete or wrong; the text names row, field and fix."""


class Issue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Issue, advisory or change log entry that describes the problem.

    Attributes:
      kind: issue, pull_request, advisory, changelog, dep3 or mutation.
      url: address; empty if there is none.
      title, body: text.
    """

    kind: str
    url: str = ""
    title: str = ""
    body: str = ""


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Environment in which the tests of an instance run.

    Attributes:
      recipe: name and version of the builder's recipe.
      layer: digest of the layer with the installed environment, `sha256:...`.
      image: name of a Docker image of other data sets.
      apt, npm, pip: packages with versions, `name=version`.
      workdir: folder of the sources.
      setup_cmds: commands that installed the environment.
      variables: environment variables.
    """

    recipe: str = ""
    layer: str = ""
    image: str = ""
    apt: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    workdir: str = "/testbed"
    setup_cmds: tuple[str, ...] = ()
    variables: dict[str, str] = {}


class SweInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Software engineering task.

    Attributes:
      instance_id: unique name, usable as a file name.
      repo: `owner/name`.
      language: one of `paths.LANGUAGES`, or another one of other data sets.
      source: where the sources come from, with the version; "mutation" in it marks a bug that was made.
      version: version of the project.
      base_commit: commit of git, or `tree:` and sha256 (see `tree.tree_digest`).
      created_at: date of the change, ISO 8601.
      license: SPDX name of the sources' licence.
      issue: description of the problem; None: unknown.
      problem_statement: prompt.
      requirements: interface facts that the tests need and the statement lacks.
      task_type: kind of change.
      hints_text: comments on the issue before the change.
      patch: gold patch, code only.
      test_patch: tests and their data.
      aux_patch: documentation and the like, applied with the tests.
      environment: where the tests run.
      rebuild_cmds, test_cmds, print_cmds: commands that build, run the tests, and print the report.
      log_parser: name in `parsers.PARSERS`, or "generated"; other data sets name parsers of their own, whose
        identifiers differ, so their instances are run again before they are graded here.
      log_parser_source: source of a generated parser.
      per_test_cmd: command for one test, with `{name}`; empty if there is none.
      FAIL_TO_PASS, PASS_TO_PASS: tests that must pass.
      NEW_TO_PASS, LOST: the part of FAIL_TO_PASS that is absent before the gold patch, and the part of PASS_TO_PASS that
        the test patch makes vanish.
      MAY_SKIP: tests of PASS_TO_PASS that gold runs may skip.
      runs: number of runs by arm.
      seconds: measured times, in seconds.
      labels: results of filters and judges.
      sha256: digests of the inputs by name.
    """

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    language: str = "python"
    source: str = ""
    version: str = ""
    created_at: str = ""
    license: str = ""
    issue: Issue | None = None
    requirements: tuple[str, ...] = ()
    task_type: TaskType = "other"
    hints_text: str = ""
    aux_patch: str = ""
    environment: Environment = Environment()
    rebuild_cmds: tuple[str, ...] = ()
    test_cmds: tuple[str, ...] = ()
    print_cmds: tuple[str, ...] = ()
    log_parser: str = ""
    log_parser_source: str | None = None
    per_test_cmd: str = ""
    FAIL_TO_PASS: tuple[str, ...] = ()
    PASS_TO_PASS: tuple[str, ...] = ()
    NEW_TO_PASS: tuple[str, ...] = ()
    LOST: tuple[str, ...] = ()
    MAY_SKIP: tuple[str, ...] = ()
    runs: dict[str, int] = {}
    seconds: dict[str, float] = {}
    labels: dict[str, Any] = {}
    sha256: dict[str, str] = {}


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the model calls of one stage of building."""

    input_tokens: int = 0
    output_tokens: int = 0


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record of building the environment of a repository, in RepoLaunch's fields.

    Attributes:
      base_layer: layer under the environment.
      setup_layer, organize_layer: commands of the two stages, from which the layers can be built again.
      test_status: status by test of the tree without patches.
      duration_min: time of building, in minutes.
      cost: tokens by stage.
      completed, organize_completed: whether the stages succeeded.
      exception: why building ended; None: it succeeded.
      trials: number of trials.
    """

    instance_id: str
    repo: str
    base_commit: str
    language: str
    base_layer: str = ""
    setup_layer: tuple[str, ...] = ()
    organize_layer: tuple[str, ...] = ()
    rebuild_cmds: tuple[str, ...] = ()
    test_cmds: tuple[str, ...] = ()
    print_cmds: tuple[str, ...] = ()
    log_parser: str = ""
    test_status: dict[str, Status] = {}
    per_test_cmd: str = ""
    duration_min: float = 0.0
    cost: dict[str, StageCost] = {}
    completed: bool = False
    organize_completed: bool = False
    exception: str | None = None
    trials: int = 0


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Patch of a model for an instance; None: the model wrote none."""

    instance_id: str
    model_patch: str | None
    model_name_or_path: str = ""


class ListReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tests of one list of an instance, by their result in an attempt.

    Attributes:
      success: tests that pass.
      failure: all others; missing and skipped tests are among them.
    """

    success: tuple[str, ...] = ()
    failure: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Returns the share of tests that pass; 1 if there are none."""
        total = len(self.success) + len(self.failure)
        return len(self.success) / total if total else 1.0


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """Grading of one attempt.

    Attributes:
      patch_exists, patch_applied: whether there is a patch, and whether it applies.
      resolved: whether all tests of both lists pass.
      reward: 1, 0, or None if the environment failed.
      error: what is wrong with the attempt; None: nothing.
      F2P, P2P: tests of both lists.
      canary_ok: whether the planted tests have their results; None: there were none.
      exit_code: of the test command; None: killed at its time limit.
      infra_reason: failure of the environment; None: there is none.
    """

    instance_id: str
    patch_exists: bool
    patch_applied: bool
    resolved: bool
    reward: float | None
    error: str | None = None
    F2P: ListReport = ListReport()
    P2P: ListReport = ListReport()
    canary_ok: bool | None = None
    exit_code: int | None = None
    infra_reason: str | None = None


def read_records(path: str | os.PathLike, kind: type[_Record]) -> list[_Record]:
    """Reads a JSON-lines file of records of one kind. Raises InstanceError that names the line and the field."""
    return [decode_record(raw, kind, where) for where, raw in read_rows(path)]


def read_rows(path: str | os.PathLike) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yields (description, object) of the lines of a JSON-lines file."""
    for line in read_lines(path):
        where = f"{path}, row {line.number}"
        try:
            check_line(line.content)
            row = msgspec.json.decode(line.content)
        except (ValueError, RecursionError) as error:
            raise InstanceError(f"{where}: {error}; write one JSON object a line") from None
        if not isinstance(row, dict):
            raise InstanceError(f"{where} is a {type(row).__name__}; write one JSON object a line")
        yield where, row


def decode_record(row: dict[str, Any], kind: type[_Record], where: str) -> _Record:
    """Returns the record in an object. Lists of tests may be JSON text, as in SWE-bench."""
    row = {
        name: parse_test_list(row[name], name, where) if name in TEST_LISTS else row[name]
        for name in row
    }
    try:
        record = msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        name = row.get("instance_id", "without instance_id")
        raise InstanceError(f"{where} ({name}): {error}; correct this field") from None
    if isinstance(record, SweInstance):
        check_instance(record, where)
    return record


def parse_test_list(value: Any, field: str, where: str) -> list[str]:
    """Returns a list of tests, which may be JSON text of a list; null is empty."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else []
        except msgspec.DecodeError as error:
            raise InstanceError(
                f"{where}: {field} is no JSON text: {error}; write a list"
            ) from None
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise InstanceError(f"{where}: {field} is {value!r:.80}; write a list of texts")
    return list(value)


def check_instance(instance: SweInstance, where: str) -> None:
    """Raises InstanceError for a field whose value cannot be right."""
    name = instance.instance_id

    def fail(field: str, fix: str) -> None:
        value = getattr(instance, field)
        raise InstanceError(f"{where} ({name}): {field} is {value!r:.80}; {fix}")

    if not _INSTANCE_ID.fullmatch(name):
        fail("instance_id", "use letters, digits and . _ - + ~ only, since it names files")
    for field in ("repo", "base_commit", "problem_statement"):
        if not getattr(instance, field).strip():
            fail(field, "give it a text")
    if len(instance.requirements) > MAX_REQUIREMENTS:
        fail("requirements", f"write at most {MAX_REQUIREMENTS}")
    if (instance.log_parser == "generated") != bool(instance.log_parser_source):
        fail("log_parser_source", 'a source and log_parser = "generated" go together')
    for field in ("patch", "test_patch", "aux_patch"):
        try:
            parse_patch(getattr(instance, field))
        except PatchError as error:
            raise InstanceError(
                f"{where} ({name}): {field}: {error}; make a unified diff"
            ) from None
    both = set(instance.FAIL_TO_PASS) & set(instance.PASS_TO_PASS)
    if both:
        fail("FAIL_TO_PASS", f"{sorted(both)[0]!r} is in PASS_TO_PASS too; keep it in one list")
    for part, full in (
        ("NEW_TO_PASS", "FAIL_TO_PASS"),
        ("LOST", "PASS_TO_PASS"),
        ("MAY_SKIP", "PASS_TO_PASS"),
    ):
        if not set(getattr(instance, part)) <= set(getattr(instance, full)):
            fail(part, f"it must be a part of {full}")


def check_gradable(instance: SweInstance) -> None:
    """Raises InstanceError if an attempt at the instance could not be graded."""
    # The tests of a bug that was made are in its tree already.
    needed = ("patch", "FAIL_TO_PASS", "test_cmds", "log_parser")
    is_mutation = instance.issue is not None and instance.issue.kind == "mutation"
    for field in needed if is_mutation else ("test_patch", *needed):
        if not getattr(instance, field):
            raise InstanceError(
                f"instance {instance.instance_id}: {field} is empty; run its three arms before it is graded"
            )


def encode_record(record: msgspec.Struct) -> bytes:
    """Returns the line of a record, the same bytes for equal records."""
    return msgspec.json.encode(record, order="deterministic") + b"\n"


def write_records(path: str | os.PathLike, records: Sequence[msgspec.Struct]) -> None:
    """Writes a JSON-lines file, which appears under its name only when it is complete.

    Raises InstanceError if two instances have one name.
    """
    names = [record.instance_id for record in records if isinstance(record, SweInstance)]
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise InstanceError(f"{path}: two instances are named {twice}; rename one")
    path = pathlib.Path(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        for record in records:
            file.write(encode_record(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
