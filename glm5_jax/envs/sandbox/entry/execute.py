"""Runs commands in a sandbox."""

import _signal as signal  # pyright: ignore[reportMissingImports]: typeshed lacks it
import ctypes
import errno
import os
import resource

from .signals import SignalGuard, pass_listener
from .supervise import NOTE, ProgramRights, Supervisor, seize
from .system import ALL_NAMESPACES, Failed, become, call, libc, report
from .watch import Watch

SET_SECCOMP, CAPBSET_DROP, SET_NO_NEW_PRIVS = 22, 24, 38
SECCOMP_MODE_FILTER = 2


def execute(task):
    """Runs a command in the sandbox and reports how it ended."""
    groups = [os.open(path, os.O_WRONLY) for path in task["groups"]]
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY) if task["policy"] else None
    watched = task["policy"] and task["policy"]["watched"]
    watch = Watch(task, watched, proc) if watched else None
    guard = SignalGuard(task, proc) if watched and task["sandbox"] is not None else None
    if task["sandbox"] is not None:
        call("setns", task["sandbox"], ALL_NAMESPACES)
    waiting, ready = os.pipe()
    child = os.fork()
    if not child:
        os.close(ready)
        if os.read(waiting, 1):
            start_program(task, groups, guard and guard.channel)
        os._exit(1)
    if guard:
        guard.channel.close()
    if task["policy"]:
        policy = ProgramRights(**task["policy"])
        seize(child)
    os.write(ready, b"1")
    if task["policy"]:
        supervisor = Supervisor(child, policy, proc)
        code = supervisor.run()
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # A child that failed before the program started has already reported that.
    alert, note = watch.stop() if watch else "", ""
    if guard:
        guard.stop()
    if task["policy"]:
        alert, note = alert or supervisor.alert, supervisor.note
    how = f"exit {code}" if code >= 0 else f"signal {-code}"
    report(task, f"{how} {alert}{NOTE}{note}")


def start_program(task, groups, channel=None):
    """Executes the program in this process; reports the reason if the sandbox could not be entered.

    channel: socket of the process that decides on signals (`signals`); None: the kernel decides.
    """
    try:
        for descriptor in groups:
            os.write(descriptor, b"0")
        if task["sandbox"] is not None:
            os.setsid()
            restrict(task)
        for signal_ in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
            signal.signal(signal_, signal.SIG_DFL)
        for name, value in task["rlimits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        if channel:
            pass_listener(channel)
    except BaseException as error:
        report(task, f"failed {error}")
        os._exit(1)
    code, text = 127, "not found"
    try:
        os.chdir(task["cwd"])
        if task["filter"]:
            install_filter(task["filter"])
        replace(task["command"], task["env"])
    except FileNotFoundError as error:
        text = f"{error.filename or task['command'][0]}: not found"
    except OSError as error:
        code, text = 126, f"{error.filename or task['command'][0]}: {error.strerror}"
    except ValueError as error:  # a null byte
        code, text = 126, str(error)
    os.write(2, f"sandbox: {text}\n".encode(errors="replace"))
    os._exit(code)


def restrict(task):
    """Drops all capabilities except the task's, disables privileges by set-user-id, and changes the user."""
    for capability in range(64):
        if capability not in task["capabilities"]:
            if libc.prctl(CAPBSET_DROP, capability, 0, 0, 0) == -1:
                if ctypes.get_errno() != errno.EINVAL:  # after the last capability
                    raise Failed("capabilities cannot be dropped")
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    become(task["user"], task["owner"])


def install_filter(program):
    """Installs the filter of system calls for this process and all that it starts."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    data = Program(len(program) // 8, program)
    call("prctl", SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(data), 0, 0)


def replace(command, env):
    """Executes the command; looks up its name on the PATH of `env`, as a shell does."""
    name = command[0]
    if "/" in name:
        os.execve(name, command, env)
    error_to_raise = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            os.execve(os.path.join(folder, name), command, env)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except PermissionError as error:
            error_to_raise = error
    raise error_to_raise


def kill_all(task):
    """Kills every process of the sandbox except the first."""
    host = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    first, space = process_of(task["sandbox"], host)
    call("setns", task["sandbox"], ALL_NAMESPACES)
    become(0, task["owner"])
    while True:
        child = os.fork()
        if not child:
            try:  # one call kills all at once, so that no fork escapes
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os._exit(0)
        if os.WIFEXITED(os.waitpid(child, os.WUNTRACED)[1]):
            break
        # With only one user, programs inside can stop that child before it acts. They cannot see this process.
        sweep(host, first, space)
    report(task, "exit 0")


def process_of(pidfd, proc):
    """Returns a process's number and the name of its PID namespace, as seen on the host."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        fields = dict(line.split(":", 1) for line in file)
    number = fields["Pid"].strip()
    return number, os.readlink(f"{number}/ns/pid", dir_fd=proc)


def sweep(proc, first, space):
    """Kills the processes of a PID namespace except the first, one by one."""
    for number in os.listdir(proc):
        if not number.isdigit() or number == first:
            continue
        try:
            process = os.pidfd_open(
                int(number)
            )  # before the check, because the number may be reused
        except OSError:
            continue
        try:
            if os.readlink(f"{number}/ns/pid", dir_fd=proc) == space:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError:  # the process has ended or belongs to somebody else
            pass
        finally:
            os.close(process)
