"""pytest, whose verdict is what it reported of each test.

Modules of an attempt run in another process (`apart`). A run has passed if it reported of every test that it collected
and its own end, and if after it a test that must fail fails and one that must pass passes (`canary`).
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

from . import apart, guard, watched

_LIB = "/grader/lib"
_CANARY = pathlib.Path(__file__).with_name("canary.py")
_MOST_BYTES = 1 << 24  # of a report
_USAGE_ERROR = 4
REPORTS = "/logs/"
# Options whose value is the next word.
_VALUED = """-c -k -m -n -o -p -r -W --basetemp --confcutdir --config-file --deselect --ignore --import-mode --junitxml
--maxfail --rootdir --tb""".split()


class Missing(Exception):
    """What tests need and there is not."""


def run(args, paths=()):
    """The exit code that pytest would have, or another if it was not come by honestly.

    paths: folders that tests may import from, behind all others.
    """
    args, ctrf = _without_ctrf(args)
    place = tempfile.mkdtemp(
        dir="/tmp"
    )  # root's, so that no program of an attempt gets at a report
    try:
        args, reports = _redirected(args, place)
        is_apart = not _are_of_attempt(args)
        hardened = _hardened(args)
        code, records = watched.run(lambda send: _run_tests(hardened, paths, is_apart, send))
        told = _told(records)
        for made, wanted in reports.items():
            _keep(made, wanted)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if ctrf:
        _write(ctrf, json.dumps(_as_ctrf(told["tests"])).encode())
    if code == _USAGE_ERROR and told["unknown"]:
        raise Missing(f"pytest with {told['unknown']}")
    if code == 0 and (problem := _problem(told)):
        print(f"the tests have not passed: {problem}", file=sys.stderr)
        return watched.NOT_FINISHED
    return code


def available():
    """Makes pytest importable: the image's own, or else the one that grading brings."""
    if importlib.util.find_spec("pytest") is None:
        sys.path.append(_LIB)
        if importlib.util.find_spec("pytest") is None:
            raise Missing("pytest (in the image, or installed beside glm5_jax)")


def _hardened(args):
    """Nothing that lies in a folder of work configures pytest, or is loaded by it."""
    given = {arg.partition("=")[0] for arg in args}
    extra = ["-p", "no:cacheprovider"]
    if not given & {"-c", "--config-file"}:
        own = "/tests/pytest.ini"
        extra += ["-c", own if os.path.isfile(own) else os.devnull]
    if "--rootdir" not in given:
        extra += ["--rootdir", "/tests"]
    if "--confcutdir" not in given:
        extra += ["--confcutdir", "/tests"]
    return [*extra, *_image_plugins(args), *args]


def _image_plugins(args):
    """Options for the plug-ins of the image, found before any folder of work is on sys.path."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    off = {after.removeprefix("no:") for arg, after in zip(args, args[1:]) if arg == "-p"}
    off |= {arg[5:] for arg in args if arg.startswith("-pno:")}
    found = importlib.metadata.entry_points(group="pytest11")
    names = {point.value.partition(":")[0] for point in found if point.name not in off}
    return [word for name in sorted(names) for word in ("-p", name)]


def _run_tests(args, paths, is_apart, send):
    """Runs pytest in a child process. is_apart: nothing of an attempt runs in it."""
    writes_itself = any(
        "/logs" in path.read_text(errors="replace") for path in pathlib.Path("/tests").rglob("*.py")
    )
    guard.keep_rights_here()
    if not writes_itself:
        guard.close_folders()
    pytest = importlib.import_module("pytest")
    if is_apart:
        apart.install()
        apart.install_in_pytest()
    sys.path.extend(paths)
    temporary = pathlib.Path(guard.HOME, "pytest")  # where links may be followed
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

    said = _Said(sys.stderr)
    sys.stderr = said
    code = int(pytest.main(args, plugins=[Reporter()]))
    sys.stderr = said.stream
    found = re.search(r"unrecognized arguments: (.*)", said.text) if code == _USAGE_ERROR else None
    send(end=code, unknown=found[1][:200] if found else "", canaries=_canaries(pytest))
    return code


def _are_of_attempt(args):
    """Whether tests are the attempt's own files, which cannot be kept out of the process that runs them."""
    pairs = zip(("", *args), args)
    words = [word for before, word in pairs if word[:1] != "-" and before not in _VALUED]
    places = [place for word in words if os.path.exists(place := word.partition("::")[0])]
    return any(apart.is_of_attempt(place) for place in places or [os.getcwd()])


def _canaries(pytest):
    """Outcomes of the two tests of `canary`, by name."""
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


class _Said:
    """A stream that also keeps the beginning of what is written to it."""

    def __init__(self, stream):
        self.stream, self.text = stream, ""

    def write(self, text):
        self.text += text[: 4000 - len(self.text)]
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def _told(records):
    told = {"collected": 0, "tests": {}, "end": None, "unknown": "", "canaries": None}
    for record in records:
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
    if told["canaries"] != {"test_that_fails": "failed", "test_that_passes": "passed"}:
        return f"tests whose outcomes are known came to {told['canaries']}"
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
