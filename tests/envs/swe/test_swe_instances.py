"""Records of SWE tasks: own files, rows of public data sets, and their errors.

The rows are made up, in the schemas that the data sets publish.
"""

import json
import pathlib

import msgspec
import pytest

from glm5_jax.envs.swe.instance import (
    AttemptReport,
    Environment,
    InstanceError,
    Issue,
    LaunchRecord,
    ListReport,
    Prediction,
    SweInstance,
    check_gradable,
    encode_record,
    read_records,
    write_records,
)
from glm5_jax.envs.swe.instance_readers import FORMATS, detect_format, main_language, read_instances

ROWS = pathlib.Path(__file__).parent / "rows"
PATCH = "--- a/x.php\n+++ b/x.php\n@@ -1 +1 @@\n-a\n+b\n"
EXAMPLE = SweInstance(
    instance_id="guzzle__psr7-717",
    repo="guzzle/psr7",
    language="php",
    source="debian:php-guzzlehttp-psr7=2.4.5-1+deb12u1",
    version="2.4.5",
    base_commit="tree:" + "9f" * 32,
    created_at="2026-06-02T00:00:00Z",
    license="MIT",
    issue=Issue(kind="advisory", url="https://example.org/717", title="Host header"),
    problem_statement="The host is not checked. Grün.",
    requirements=("withHost throws InvalidArgumentException",),
    task_type="bug_fix",
    patch=PATCH,
    test_patch=PATCH.replace("x.php", "tests/XTest.php"),
    environment=Environment(recipe="php-composerless/1", apt=("phpunit=9.6.7-1+deb12u1",)),
    test_cmds=("phpunit --log-junit /results/junit.xml tests",),
    log_parser="phpunit",
    FAIL_TO_PASS=("A::testNew", "A::testHost"),
    PASS_TO_PASS=("A::testOld",),
    NEW_TO_PASS=("A::testNew",),
    runs={"gold": 3, "base": 1},
    seconds={"gold_median": 1.2},
    labels={"votes": [4, 4, 4], "clarity": "A"},
    sha256={"source": "ab"},
)


def row(**changes) -> dict:
    """Returns the example as an object with other values."""
    return msgspec.to_builtins(EXAMPLE) | changes


def write_rows(folder, *rows: dict) -> pathlib.Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows), "utf-8")
    return path


# -- own files ------------------------------------------------------------------------------------------


def test_reads_what_it_writes(tmp_path):
    write_records(tmp_path / "a.jsonl", [EXAMPLE])
    assert read_records(tmp_path / "a.jsonl", SweInstance) == [EXAMPLE]
    assert read_instances(tmp_path / "a.jsonl") == [EXAMPLE]


def test_writes_equal_records_as_equal_bytes(tmp_path):
    shuffled = dict(reversed(row(runs={"base": 1, "gold": 3}).items()))
    write_records(tmp_path / "a.jsonl", [EXAMPLE])
    path = write_rows(tmp_path, shuffled)
    write_records(tmp_path / "b.jsonl", read_records(path, SweInstance))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert list(tmp_path.glob(".*")) == []


def test_keeps_old_file_if_writing_fails(tmp_path):
    write_records(tmp_path / "a.jsonl", [EXAMPLE])
    before = (tmp_path / "a.jsonl").read_bytes()
    broken = msgspec.structs.replace(EXAMPLE, instance_id="b", labels={"x": object()})
    with pytest.raises(TypeError):
        write_records(tmp_path / "a.jsonl", [EXAMPLE, broken])
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_writes_names_of_swe_bench():
    value = json.loads(encode_record(EXAMPLE))
    names = "instance_id repo base_commit patch test_patch problem_statement hints_text created_at version".split()
    assert {*names, "FAIL_TO_PASS", "PASS_TO_PASS"} <= value.keys()
    report = AttemptReport(
        instance_id="a",
        patch_exists=True,
        patch_applied=True,
        resolved=False,
        reward=0.0,
        F2P=ListReport(failure=("t",)),
    )
    assert json.loads(encode_record(report))["F2P"] == {"success": [], "failure": ["t"]}


def test_reads_predictions_and_launch_records(tmp_path):
    path = write_rows(
        tmp_path, {"instance_id": "a", "model_patch": None, "model_name_or_path": "m"}
    )
    assert read_records(path, Prediction)[0].model_patch is None
    launch = LaunchRecord(
        instance_id="a",
        repo="b/c",
        base_commit="d",
        language="go",
        test_status={"t": "skip"},
        completed=True,
    )
    write_records(tmp_path / "launch.jsonl", [launch])
    assert read_records(tmp_path / "launch.jsonl", LaunchRecord) == [launch]
    bad = write_rows(tmp_path, msgspec.to_builtins(launch) | {"test_status": {"t": "PASSED"}})
    with pytest.raises(InstanceError, match="Invalid enum value 'PASSED'"):
        read_records(bad, LaunchRecord)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repo": 3}, r"row 1 \(guzzle__psr7-717\): Expected `str`, got `int` - at `\$.repo`"),
        ({"repo": " "}, "repo is ' '; give it a text"),
        ({"instance_id": "../etc"}, "instance_id is '../etc'; use letters"),
        ({"task_type": "chore"}, r"Invalid enum value 'chore' - at `\$.task_type`"),
        ({"requirements": ["x"] * 9}, "requirements is .*; write at most 8"),
        ({"patch": "no diff"}, "patch: no file of a diff begins"),
        ({"FAIL_TO_PASS": '["a"'}, "FAIL_TO_PASS is no JSON text"),
        ({"FAIL_TO_PASS": [1]}, r"FAIL_TO_PASS is \[1\]; write a list of texts"),
        ({"PASS_TO_PASS": ["A::testHost"]}, "'A::testHost' is in PASS_TO_PASS too"),
        ({"LOST": ["A::testHost"]}, "LOST is .*; it must be a part of PASS_TO_PASS"),
        ({"log_parser": "generated"}, "a source and log_parser = .generated. go together"),
        ({"pathc": ""}, "Object contains unknown field `pathc`"),
    ],
)
def test_rejects_wrong_field(tmp_path, changes, message):
    with pytest.raises(InstanceError, match=message):
        read_records(write_rows(tmp_path, row(**changes)), SweInstance)


@pytest.mark.parametrize("content", [b"{", b"[1]\n", b'{"a": NaN}\n', b"\xff\n"])
def test_rejects_line_that_is_no_object(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InstanceError, match="a.jsonl, row 1"):
        read_instances(tmp_path / "a.jsonl")


def test_rejects_two_instances_of_one_name(tmp_path):
    with pytest.raises(InstanceError, match="two instances are named guzzle__psr7-717"):
        write_records(tmp_path / "a.jsonl", [EXAMPLE, EXAMPLE])
    with pytest.raises(InstanceError, match="row 2: guzzle__psr7-717 is in .*row 1 too"):
        read_instances(write_rows(tmp_path, row(), row()))


@pytest.mark.parametrize("field", ["FAIL_TO_PASS", "test_cmds", "log_parser", "test_patch"])
def test_rejects_instance_that_cannot_be_graded(field):
    check_gradable(EXAMPLE)
    empty = "" if isinstance(getattr(EXAMPLE, field), str) else ()
    with pytest.raises(InstanceError, match=f"{field} is empty; run its three arms"):
        check_gradable(msgspec.structs.replace(EXAMPLE, **{field: empty}))


# -- rows of public data sets ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"own"}))
def test_detects_format_of_row(name):
    for line in (ROWS / f"{name}.jsonl").read_text().splitlines():
        assert detect_format(json.loads(line)) == name
    assert read_instances(ROWS / f"{name}.jsonl") == read_instances(ROWS / f"{name}.jsonl", name)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"own"}))
def test_converted_rows_survive_round_trip(tmp_path, name):
    instances = read_instances(ROWS / f"{name}.jsonl")
    write_records(tmp_path / "a.jsonl", instances)
    assert read_instances(tmp_path / "a.jsonl", "own") == instances


def test_reads_swe_bench():
    [instance] = read_instances(ROWS / "swe-bench.jsonl")
    assert instance.FAIL_TO_PASS == ("tests/test_calc.py::test_add",)
    assert (instance.repo, instance.language) == ("someone/calc", "python")
    assert instance.labels["difficulty"] == "<15 min fix"


def test_reads_swe_bench_live():
    [instance] = read_instances(ROWS / "swe-bench-live.jsonl")
    assert instance.test_cmds == ("pytest -rA",)
    assert instance.rebuild_cmds == ("pip install .",)
    assert instance.environment.image.startswith("starryzhang/")
    assert instance.labels["issue_numbers"] == ["11"]


def test_reads_multi_swe_bench():
    [instance] = read_instances(ROWS / "multi-swe-bench.jsonl")
    assert instance.repo == "someone/calc"
    assert instance.language == "typescript"
    assert instance.FAIL_TO_PASS == ("calc > adds", "calc > is new")
    assert instance.NEW_TO_PASS == ("calc > is new",)
    assert instance.PASS_TO_PASS == ("calc > subtracts",)
    assert instance.problem_statement == "add subtracts\n\nadd(1, 2) gives -1."
    assert instance.issue is not None
    assert instance.issue.url.endswith("/issues/11")
    assert "run_result" not in instance.labels


def test_reads_swe_rebench():
    first, second = read_instances(ROWS / "swe-rebench.jsonl")
    assert first.log_parser == "parse_log_pytest"
    assert first.environment.setup_cmds == ("apt-get update", "pip install -e .[dev]")
    assert first.requirements == ()
    assert first.license == "MIT License"
    assert second.language == "typescript"
    assert second.requirements == ("Function: add(a: number, b: number): number",)
    assert second.labels["meta"]["llm_metadata"] == {"code": "A"}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("swe-bench", "base_commit"),
        ("multi-swe-bench", "fix_patch"),
        ("swe-rebench", "install_config"),
    ],
)
def test_names_missing_field_of_row(tmp_path, name, field):
    value = json.loads((ROWS / f"{name}.jsonl").read_text().splitlines()[0])
    del value[field]
    with pytest.raises(InstanceError, match=f"row 1: {field} is missing; give it"):
        read_instances(write_rows(tmp_path, value), name)


def test_rejects_unknown_format():
    with pytest.raises(InstanceError, match="format is 'swe'; use one of own, swe-bench"):
        read_instances(ROWS / "swe-bench.jsonl", "swe")


def test_finds_main_language_by_changed_lines():
    diff = PATCH + "--- a/y.c\n+++ b/y.c\n@@ -1,2 +1,2 @@\n-a\n-b\n+c\n+d\n"
    assert main_language(diff) == "c"
    assert main_language(PATCH.replace(".php", ".txt")) == "unknown"
