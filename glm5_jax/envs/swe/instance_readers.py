"""Reads rows of public SWE data sets as `SweInstance`s.

| format | data sets |
|---|---|
| swe-bench | SWE-bench, Lite, Verified, Multilingual; SWE-Gym, nemotron and others in its schema |
| swe-bench-live | SWE-bench-Live, with lists of commands |
| multi-swe-bench | Multi-SWE-bench, Multi-SWE-RL |
| swe-rebench | SWE-rebench and SWE-rebench V2, with `install_config` |
| own | files that `instance.write_records` wrote |

A row's other fields, such as votes of judges and image names, are kept in `labels`.
"""

import collections
import os
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.envs.swe.instance import (
    InstanceError,
    SweInstance,
    decode_record,
    parse_test_list,
    read_rows,
)
from glm5_jax.envs.swe.patches import PatchError, parse_patch
from glm5_jax.envs.swe.paths import language_of

_ALIASES = {
    "py": "python",
    "golang": "go",
    "js": "javascript",
    "ts": "typescript",
    "c++": "cpp",
    "cc": "cpp",
    "rb": "ruby",
}
_SHARED = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement")
_TEXTS = ("hints_text", "version")


def read_instances(path: str | os.PathLike, format: str | None = None) -> list[SweInstance]:
    """Reads the instances of a JSON-lines file.

    format: name in `FORMATS`; None: found by the fields of each row. Raises InstanceError that names the row, the field
    and the fix.
    """
    if format is not None and format not in FORMATS:
        raise InstanceError(f"format is {format!r}; use one of {', '.join(FORMATS)}")
    instances = []
    rows: dict[str, str] = {}
    for where, row in read_rows(path):
        instance = FORMATS[format or detect_format(row)](row, where)
        if first := rows.get(instance.instance_id):
            raise InstanceError(f"{where}: {instance.instance_id} is in {first} too; remove one")
        rows[instance.instance_id] = where
        instances.append(instance)
    return instances


def detect_format(row: Mapping[str, Any]) -> str:
    """Returns the format of a row by the fields that only one data set has."""
    if "fix_patch" in row and "org" in row:
        return "multi-swe-bench"
    if "install_config" in row:
        return "swe-rebench"
    if "rebuild_cmds" in row and "sha256" in row:
        return "own"
    if "test_cmds" in row or "pull_number" in row:
        return "swe-bench-live"
    return "swe-bench"


def _read_own(row: Mapping[str, Any], where: str) -> SweInstance:
    return decode_record(dict(row), SweInstance, where)


def _read_swe_bench(row: Mapping[str, Any], where: str) -> SweInstance:
    fields = _shared_fields(row, where)
    return _instance(row, where, fields, {*_SHARED, *_TEXTS})


def _read_swe_bench_live(row: Mapping[str, Any], where: str) -> SweInstance:
    fields = _shared_fields(row, where)
    used = {*_SHARED, *_TEXTS}
    for name in ("rebuild_cmds", "test_cmds", "print_cmds"):
        value = row.get(name)
        # Some versions hold one command as text.
        fields[name] = [value] if isinstance(value, str) and value else value or []
        used.add(name)
    fields["log_parser"] = row.get("log_parser") or ""
    if fields["log_parser"] and "\n" in fields["log_parser"]:
        fields["log_parser_source"], fields["log_parser"] = fields["log_parser"], "generated"
    image = row.get("docker_image") or row.get("image_name") or ""
    fields["environment"] = {"image": image}
    return _instance(row, where, fields, {*used, "log_parser", "docker_image", "image_name"})


def _read_multi_swe_bench(row: Mapping[str, Any], where: str) -> SweInstance:
    org, repo, number = (_required(row, name, where) for name in ("org", "repo", "number"))
    base = _required(row, "base", where)
    issues = row.get("resolved_issues") or []
    if not isinstance(base, dict) or not isinstance(issues, list):
        raise InstanceError(f"{where}: base must be an object and resolved_issues a list")
    texts = [_issue_text(issue, where) for issue in issues] or [_issue_text(row, where)]
    first = issues[0] if issues and isinstance(issues[0], dict) else row
    new = _names(row, "n2p_tests", where)
    fields = {
        "instance_id": row.get("instance_id") or f"{org}__{repo}-{number}",
        "repo": f"{org}/{repo}",
        "base_commit": _required(base, "sha", where),
        "patch": _required(row, "fix_patch", where),
        "test_patch": _required(row, "test_patch", where),
        "problem_statement": "\n\n".join(texts),
        "hints_text": row.get("hints") or "",
        "issue": {
            "kind": "issue" if issues else "pull_request",
            "url": f"https://github.com/{org}/{repo}/issues/{first.get('number', number)}",
            "title": first.get("title") or "",
            "body": first.get("body") or "",
        },
        "FAIL_TO_PASS": [*_names(row, "f2p_tests", where), *_names(row, "s2p_tests", where), *new],
        "PASS_TO_PASS": _names(row, "p2p_tests", where),
        "NEW_TO_PASS": new,
    }
    used = {
        "org",
        "repo",
        "number",
        "base",
        "resolved_issues",
        "fix_patch",
        "test_patch",
        "hints",
        "title",
        "body",
    }
    used |= {"instance_id", "f2p_tests", "s2p_tests", "n2p_tests", "p2p_tests", "fixed_tests"}
    # Their results of all tests in three arms are large, and follow from the lists.
    used |= {"run_result", "test_patch_result", "fix_patch_result"}
    return _instance(row, where, fields, used)


def _read_swe_rebench(row: Mapping[str, Any], where: str) -> SweInstance:
    fields = _shared_fields(row, where)
    config = _required(row, "install_config", where)
    if not isinstance(config, dict):
        raise InstanceError(f"{where}: install_config is {config!r:.60}; it must be an object")
    commands = config.get("test_cmd") or []
    fields["test_cmds"] = [commands] if isinstance(commands, str) else commands
    fields["log_parser"] = config.get("log_parser") or ""
    setup = [config.get("pre_install") or [], config.get("install") or []]
    lists = [[value] if isinstance(value, str) else value for value in setup]
    packages = config.get("pip_packages") or []
    fields["environment"] = {
        "image": row.get("docker_image") or row.get("image_name") or "",
        "pip": packages,
        "setup_cmds": [command for commands in lists for command in commands],
    }
    # A text of V2; the field `requirements` of V1 lists Python packages.
    interface = row.get("interface")
    fields["requirements"] = (
        [interface.strip()] if isinstance(interface, str) and interface.strip() else []
    )
    fields["license"] = row.get("license_name") or row.get("license") or ""
    used = {*_SHARED, *_TEXTS, "docker_image", "image_name", "interface", "license", "license_name"}
    # Freezes of the environment, which the image holds.
    used |= {"requirements", "environment"}
    return _instance(row, where, fields, used)


FORMATS: Mapping[str, Callable[[Mapping[str, Any], str], SweInstance]] = {
    "own": _read_own,
    "swe-bench": _read_swe_bench,
    "swe-bench-live": _read_swe_bench_live,
    "multi-swe-bench": _read_multi_swe_bench,
    "swe-rebench": _read_swe_rebench,
}


def _required(row: Mapping[str, Any], field: str, where: str) -> Any:
    if row.get(field) in (None, ""):
        known = ", ".join(sorted(row)[:12])
        raise InstanceError(
            f"{where}: {field} is missing; give it, or name the format of a row with {known}"
        )
    return row[field]


def _shared_fields(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields = {name: _required(row, name, where) for name in _SHARED}
    fields |= {name: row.get(name) or "" for name in _TEXTS}
    fields |= {name: row.get(name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    return fields


def _instance(row: Mapping[str, Any], where: str, fields: dict, used: set[str]) -> SweInstance:
    """Returns the instance with these fields; the row's other ones become labels."""
    if not isinstance(fields["patch"], str):
        raise InstanceError(f"{where}: patch is {fields['patch']!r:.60}; it must be a text")
    language = row.get("language") or row.get("lang") or main_language(fields["patch"], where)
    used = used | {"language", "lang", "created_at", "FAIL_TO_PASS", "PASS_TO_PASS"}
    created = row.get("created_at")
    fields["language"] = _ALIASES.get(str(language).lower(), str(language).lower())
    fields["created_at"] = "" if created is None else str(created)
    fields["labels"] = {name: row[name] for name in sorted(row) if name not in used}
    fields["source"] = fields.get("source") or f"github:{fields['repo']}"
    return decode_record(fields, SweInstance, where)


def main_language(patch: str, where: str = "the patch") -> str:
    """Returns the language with the most changed lines in a patch."""
    lines: collections.Counter[str] = collections.Counter()
    try:
        files = parse_patch(patch)
    except PatchError as error:
        raise InstanceError(f"{where}: patch: {error}; make a unified diff") from None
    for file in files:
        if language := language_of(file.path):
            lines[language] += file.count("+") + file.count("-") + 1
    return lines.most_common(1)[0][0] if lines else "unknown"


def _issue_text(issue: Any, where: str) -> str:
    if not isinstance(issue, dict):
        raise InstanceError(
            f"{where}: an issue is {issue!r:.60}; it must be an object with title and body"
        )
    return f"{issue.get('title') or ''}\n\n{issue.get('body') or ''}".strip()


def _names(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    """Returns the tests of Multi-SWE-bench's {name: {run, test, fix}}, or of a plain list."""
    value = row.get(field) or {}
    if isinstance(value, dict):
        # Tables of the hub give each name to each row, with null for those that a row lacks.
        return sorted(name for name, arms in value.items() if arms is not None)
    return parse_test_list(value, field, where)
