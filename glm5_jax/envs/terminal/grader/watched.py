"""Runs work in a child process, whose success counts only if the work itself reported its end."""

import atexit
import json
import os
import sys
import threading

NOT_FINISHED = 70


def run(work):
    """Returns (exit code, records) of work(report) in a child; report(**record) sends a record to this process.

    The code is `NOT_FINISHED` instead of 0 if the child ended before the work did.
    """
    receiving, sending = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        os.close(receiving)
        _work(work, sending)
    os.close(sending)
    chunks = []
    # A process that the child started may hold the pipe open forever.
    reader = threading.Thread(target=_read, args=(receiving, chunks), daemon=True)
    reader.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    reader.join(2)
    records = list(_records(b"".join(chunks)))
    code = 128 - code if code < 0 else code
    if code == 0 and not any("ended" in record for record in records):
        print("the process ended before its work did", file=sys.stderr)
        code = NOT_FINISHED
    return code, records


def _work(work, sending):
    code = NOT_FINISHED
    atexit._clear()  # the parent runs its exit functions itself

    def report(**record):
        os.write(sending, (json.dumps(record) + "\n").encode())

    try:
        code = _code_of(work, report)
        # Python does this at exit, and os._exit does not.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]: typeshed lacks it
        atexit._run_exitfuncs()
        report(ended=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(code)


def _code_of(work, report):
    try:
        return work(report) or 0
    except SystemExit as end:
        # RemoteExit comes from the attempt's code, not from the tests.
        if type(end) is not SystemExit:
            print(f"the attempt's code ended itself with {end.code!r}", file=sys.stderr)
            return NOT_FINISHED
        if isinstance(end.code, int) or end.code is None:
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1


def _read(descriptor, chunks):
    while data := os.read(descriptor, 1 << 16):
        chunks.append(data)


def _records(data):
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
