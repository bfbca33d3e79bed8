"""Runs pytest, and takes its verdict from what it reported for each test.

Modules of an attempt run in another process (`isolation`). A run has passed if pytest reported every
collected test and its own end, and if afterwards a test that must fail fails and one that must pass passes
(`canary`).
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import stat
import sys
import tempfile

from . import isolation, privileges, watched

_LIB = "/grader/lib"
_CANARY = pathlib.Path(__file__).with_name("canary.py")
_MAX_REPORT_BYTES = 1 << 24  # copied of a report
_USAGE_ERROR = 4
REPORTS = "/logs/"
# Options whose value is the next argument.
_VALUED = """-c -k -m -n -o -p -r -W --basetemp --confcutdir --config-file --deselect --ignore --import-mode --junitxml
--maxfail --rootdir --tb""".split()


class Missing(Exception):
    """Raised for something that tests need and that does not exist."""


def run(args, paths=()):
    """Returns the exit code of pytest, or `NOT_FINISHED` if code 0 is not supported by its reports.

    Args:
      args: arguments of pytest.
      paths: folders that tests may import from, after all others.
    """
    args, ctrf = _without_ctrf(args)
    folder = tempfile.mkdtemp(
        dir="/tmp"
    )  # root's, so that no program of an attempt can change a report
    try:
        args, reports = _redirected(args, folder)
        if changed := [
            path for folder in _test_paths(args) for path in isolation.changed_test_files(folder)
        ]:
            print(f"the tests have not passed: {changed[0]} was replaced", file=sys.stderr)
            return watched.NOT_FINISHED
        is_apart = not _are_of_attempt(args)
        hardened = _hardened(args)
        code, records = watched.run(lambda send: _run_tests(hardened, paths, is_apart, send))
        summary = _summarize(records)
        for temporary, target in reports.items():
            _copy_report(temporary, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if ctrf:
        _write(ctrf, json.dumps(_as_ctrf(summary["tests"])).encode())
    if code == _USAGE_ERROR and summary["unknown"]:
        raise Missing(f"pytest with {summary['unknown']}")
    if code == 0 and (problem := _problem(summary)):
        print(f"the tests have not passed: {problem}", file=sys.stderr)
        return watched.NOT_FINISHED
    return code


def available():
    """Makes pytest importable: the image's, or else the copy that grading provides."""
    if importlib.util.find_spec("pytest") is None:
        sys.path.append(_LIB)
        if importlib.util.find_spec("pytest") is None:
            raise Missing("pytest (in the image, or installed next to glm5_jax)")


def _hardened(args):
    """Returns the arguments with options that keep files of a work folder from configuring pytest or being
    loaded by it.
    """
    options = {arg.partition("=")[0] for arg in args}
    extra = ["-p", "no:cacheprovider"]
    if not options & {"-c", "--config-file"}:
        config = "/tests/pytest.ini"
        extra += ["-c", config if os.path.isfile(config) else os.devnull]
    if "--rootdir" not in options:
        extra += ["--rootdir", "/tests"]
    if "--confcutdir" not in options:
        extra += ["--confcutdir", "/tests"]
    return [*extra, *_image_plugins(args), *args]


def _image_plugins(args):
    """Returns options for the image's plug-ins, looked up before a work folder is on sys.path."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    off = {after.removeprefix("no:") for arg, after in zip(args, args[1:]) if arg == "-p"}
    off |= {arg[5:] for arg in args if arg.startswith("-pno:")}
    entry_points = importlib.metadata.entry_points(group="pytest11")
    names = {point.value.partition(":")[0] for point in entry_points if point.name not in off}
    return [word for name in sorted(names) for word in ("-p", name)]


def _run_tests(args, paths, is_apart, send):
    """Runs pytest in a child process.

    Args:
      is_apart: whether attempts' modules run in another process.
    """
    writes_itself = any(
        "/logs" in path.read_text(errors="replace") for path in pathlib.Path("/tests").rglob("*.py")
    )
    privileges.keep_rights_of_this_process()
    privileges.close_folders(writes_reward=writes_itself)
    # Attempts' modules run elsewhere from here on.
    pytest = importlib.import_module("pytest")
    if is_apart:
        isolation.install()
        isolation.install_in_pytest()
    sys.path.extend(paths)
    temporary = pathlib.Path(privileges.HOME, "pytest")  # a folder in which links may be followed
    temporary.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(temporary)

    class Reporter:
        """Reports each test as it is done."""

        def pytest_collection_finish(self, session):
            send(collected=len(session.items))

        def pytest_runtest_logreport(self, report):
            send(
                test=report.nodeid[:500],
                when=report.when,
                outcome=report.outcome,
                seconds=getattr(report, "duration", 0.0),
            )

    # The beginning of stderr shows unknown arguments.
    stderr = _Tee(sys.stderr)
    sys.stderr = stderr
    code = int(pytest.main(args, plugins=[Reporter()]))
    sys.stderr = stderr.stream
    match = (
        re.search(r"unrecognized arguments: (.*)", stderr.text) if code == _USAGE_ERROR else None
    )
    send(end=code, unknown=match[1][:200] if match else "", canaries=_canaries(pytest))
    return code


def _are_of_attempt(args):
    """Returns whether all tests are the attempt's files, which have to run in the process of pytest.

    One such path proves nothing: a file of the attempt may have the name of an option's value.
    """
    return all(isolation.is_of_attempt(path) for path in _test_paths(args))


def _test_paths(args):
    """Returns the files and folders in which pytest is to find tests."""
    pairs = zip(("", *args), args)
    words = [word for before, word in pairs if word[:1] != "-" and before not in _VALUED]
    return [p for word in words if os.path.exists(p := word.partition("::")[0])] or [os.getcwd()]


def _canaries(pytest):
    """Returns the outcomes of the two tests of `canary`, by name."""
    outcomes = {}

    class Listener:
        """Keeps the outcome of each test's call."""

        def pytest_runtest_logreport(self, report):
            if report.when == "call":
                outcomes[report.nodeid.rpartition("::")[2]] = report.outcome

    options = [
        "-c",
        os.devnull,
        "--rootdir",
        str(_CANARY.parent),
        "--noconftest",
        "-p",
        "no:cacheprovider",
    ]
    os.environ.pop("PYTEST_ADDOPTS", None)
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, str(_CANARY)], plugins=[Listener()])
    return outcomes


class _Tee:
    """Stream that also keeps the beginning of the text that is written to it."""

    def __init__(self, stream):
        self.stream, self.text = stream, ""

    def write(self, text):
        self.text += text[: 4000 - len(self.text)]
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def _summarize(records):
    summary = {"collected": 0, "tests": {}, "end": None, "unknown": "", "canaries": None}
    for record in records:
        if "test" in record:
            phases = summary["tests"].setdefault(record["test"], {})
            phases[record["when"]] = record["outcome"], record["seconds"]
        else:
            summary.update(record)
    return summary


def _problem(summary):
    """Returns why a run that ended with 0 has not passed, or None."""
    if summary["end"] != 0:
        return "pytest was ended before it was done"
    outcomes = [_outcome(phases) for phases in summary["tests"].values()]
    if not outcomes or len(outcomes) < summary["collected"]:
        return f"{len(outcomes)} of {summary['collected']} tests reported how they ended"
    if "failed" in outcomes:
        return "a test failed"
    if "passed" not in outcomes:
        return "all tests were skipped"
    if summary["canaries"] != {"test_that_fails": "failed", "test_that_passes": "passed"}:
        return f"tests whose outcomes are known came to {summary['canaries']}"
    return None


def _outcome(phases):
    outcomes = {outcome for outcome, _ in phases.values()}
    if "failed" in outcomes or "setup" not in phases:
        return "failed"
    return "skipped" if "skipped" in outcomes else "passed" if "call" in phases else "failed"


def _as_ctrf(tests):
    """Returns the report of pytest-json-ctrf, with the fields that scripts read."""
    rows = [
        {
            "name": name,
            "status": _outcome(phases),
            "duration": sum(seconds for _, seconds in phases.values()),
        }
        for name, phases in tests.items()
    ]
    counts = {status: 0 for status in ("passed", "failed", "skipped", "pending", "other")}
    for row in rows:
        counts[row["status"]] += 1
    summary = {"tests": len(rows), **counts}
    return {"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": rows}}


def _without_ctrf(args):
    rest, path = [], None
    args = iter(args)
    for arg in args:
        if arg == "--ctrf":
            path = next(args, None)
        elif arg.startswith("--ctrf="):
            path = arg.partition("=")[2]
        else:
            rest.append(arg)
    return rest, path


def _redirected(args, folder):
    """Replaces paths of reports below /logs by temporary ones, because tests cannot write there."""
    reports, rest = {}, []
    for arg in args:
        name, equals, path = arg.partition("=") if arg.startswith("-") else ("", "", arg)
        if path.startswith(REPORTS):
            temporary = os.path.join(folder, str(len(reports)))
            reports[temporary] = path
            arg = name + equals + temporary
        rest.append(arg)
    return rest, reports


def _copy_report(temporary, target):
    """Copies a report to the requested path if it is a regular file."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with open(descriptor, "rb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _write(target, file.read(_MAX_REPORT_BYTES))


def _write(path, data):
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(path, flags, 0o644), "wb") as file:
            file.write(data)
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr)
