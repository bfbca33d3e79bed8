"""pytest, whose verdict is what it reported of each test.

Tests may import what an attempt wrote. That can end the process with any exit code, at once or when Python ends, so
the code alone says nothing: a run has passed if it reported of every test it collected, and its own end.
"""

import importlib.util
import json
import os
import pathlib
import re
import secrets
import stat
import sys
import tempfile
import threading

from . import guard

_LIB = "/grader/lib"
_MOST_BYTES = 1 << 24  # of a report
_USAGE_ERROR = 4
_NOT_FINISHED = 70
REPORTS = "/logs/"


class Missing(Exception):
    """What tests need and there is not."""


def run(args, paths=()):
    """The exit code that pytest would have, or another if it was not come by honestly.

    paths: folders that tests may import from, behind all others.
    """
    args, ctrf = _without_ctrf(args)
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        args, reports = _redirected(args, place)
        nonce = secrets.token_hex(16)
        receiving, sending = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.close(receiving)
            code = _NOT_FINISHED
            try:
                code = _run_tests(_hardened(args), paths, sending, nonce)
            except BaseException as error:
                print(f"pytest did not run: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(sending)
        lines = []
        # A process that an attempt leaves behind may hold the pipe open for ever.
        reader = threading.Thread(target=_read, args=(receiving, lines), daemon=True)
        reader.start()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        reader.join(2)
        told = _told(b"".join(lines), nonce)
        for made, wanted in reports.items():
            _keep(made, wanted)
    if ctrf:
        _write(ctrf, json.dumps(_as_ctrf(told["tests"])).encode())
    if code == _USAGE_ERROR and told["unknown"]:
        raise Missing(f"pytest with {told['unknown']}")
    if code == 0 and (problem := _problem(told)):
        print(f"the tests have not passed: {problem}", file=sys.stderr)
        return _NOT_FINISHED
    return code


def available():
    """Makes pytest importable: the image's own, or else the one that grading brings."""
    if importlib.util.find_spec("pytest") is None:
        sys.path.append(_LIB)
        if importlib.util.find_spec("pytest") is None:
            raise Missing("pytest (in the image, or installed beside glm5_jax)")


def _hardened(args):
    """Nothing that lies in a folder of work configures pytest."""
    given = {arg.partition("=")[0] for arg in args}
    extra = ["-p", "no:cacheprovider"]
    if not given & {"-c", "--config-file"}:
        own = "/tests/pytest.ini"
        extra += ["-c", own if os.path.isfile(own) else os.devnull]
    if "--rootdir" not in given:
        extra += ["--rootdir", "/tests"]
    return [*extra, *args]


def _run_tests(args, paths, sending, nonce):
    """In the child: all that tests and attempts do happens here."""
    writes_itself = any(
        "/logs" in path.read_text(errors="replace") for path in pathlib.Path("/tests").rglob("*.py")
    )
    guard.keep_rights_here()
    if not writes_itself:
        guard.close_folders()
    sys.path.extend(paths)
    pytest = importlib.import_module("pytest")

    def tell(**record):
        os.write(sending, (json.dumps({**record, "nonce": nonce}) + "\n").encode())

    class Reporter:
        """Tells of each test as it is done."""

        def pytest_collection_finish(self, session):
            tell(collected=len(session.items))

        def pytest_runtest_logreport(self, report):
            seconds = getattr(report, "duration", 0.0)
            tell(
                test=report.nodeid[:500], when=report.when, outcome=report.outcome, seconds=seconds
            )

    said = _Said(sys.stderr)
    sys.stderr = said
    code = int(pytest.main(args, plugins=[Reporter()]))
    sys.stderr = said.stream
    found = re.search(r"unrecognized arguments: (.*)", said.text) if code == _USAGE_ERROR else None
    tell(end=code, unknown=found[1][:200] if found else "")
    return code


class _Said:
    """A stream that also keeps the beginning of what is written to it."""

    def __init__(self, stream):
        self.stream, self.text = stream, ""

    def write(self, text):
        self.text += text[: 4000 - len(self.text)]
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def _read(descriptor, lines):
    while data := os.read(descriptor, 1 << 16):
        lines.append(data)


def _told(data, nonce):
    told = {"collected": 0, "tests": {}, "end": None, "unknown": ""}
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or record.pop("nonce", None) != nonce:
            continue
        if "test" in record:
            phases = told["tests"].setdefault(record["test"], {})
            phases[record["when"]] = record["outcome"], record["seconds"]
        else:
            told.update(record)
    return told


def _problem(told):
    """Why a run that ended with 0 has not passed, or None."""
    if told["end"] != 0:
        return "pytest was ended before it was done"
    outcomes = [_outcome(phases) for phases in told["tests"].values()]
    if not outcomes or len(outcomes) < told["collected"]:
        return f"{len(outcomes)} of {told['collected']} tests told how they ended"
    if "failed" in outcomes:
        return "a test failed"
    return None


def _outcome(phases):
    outcomes = {outcome for outcome, _ in phases.values()}
    if "failed" in outcomes or "setup" not in phases:
        return "failed"
    return "skipped" if "skipped" in outcomes else "passed" if "call" in phases else "failed"


def _as_ctrf(tests):
    """The report of pytest-json-ctrf, as far as scripts read it."""
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


def _redirected(args, place):
    """Reports below /logs are written elsewhere first: tests cannot write there."""
    reports, rest = {}, []
    for arg in args:
        name, equals, path = arg.partition("=") if arg.startswith("-") else ("", "", arg)
        if path.startswith(REPORTS):
            made = os.path.join(place, str(len(reports)))
            reports[made] = path
            arg = name + equals + made
        rest.append(arg)
    return rest, reports


def _keep(made, wanted):
    """Copies a report to where it was asked for, if it is a regular file."""
    try:
        descriptor = os.open(made, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with open(descriptor, "rb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _write(wanted, file.read(_MOST_BYTES))


def _write(path, data):
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(path, flags, 0o644), "wb") as file:
            file.write(data)
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr)
