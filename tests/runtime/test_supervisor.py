"""Tests that roles start in order, restart when they die, end the run when they cannot, and leave no process."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from glm5_jax.runtime.placement import EXIT_RESTART, Health, Restarts, Role, SlotLostError
from glm5_jax.runtime.supervisor import RoleError, RoleSupervisor, read_events
from launch.local import LocalMachine, LocalPlacement
from tests.runtime.test_process import ROOT, ends, is_running

SMALL = str(pathlib.Path(__file__).parent / "small_role.py")
SECONDS = 60.0  # limit, because a busy machine may take long to start Python
SOON = Restarts(initial_delay_s=0.05, max_delay_s=0.05)
NEVER = Restarts(max_restarts=0)


def small(name: str, *words: str, **more) -> Role:
    """Returns a role of small_role.py with these arguments."""
    more = {"restarts": SOON, "grace_s": 20.0, "start_timeout_s": SECONDS} | more
    return Role(name=name, argv=["{python}", SMALL, "{host}", "{port}", "{ready}", *words], **more)


def shell(name: str, script: str, **more) -> Role:
    """Returns a role that runs a script and serves nothing."""
    more = {"restarts": SOON, "grace_s": 20.0, "settle_s": 0.05} | more
    return Role(name=name, argv=["sh", "-c", script], **more)


def failing(name: str, script: str, **more) -> Role:
    """Returns a role whose script ends before it is ready."""
    return shell(name, script, settle_s=600.0, **more)


def roles(folder, *role_list: Role, **more) -> RoleSupervisor:
    machine = LocalMachine(platform="cpu", devices=[], cores=sorted(os.sched_getaffinity(0)))
    return RoleSupervisor(role_list, LocalPlacement(machine), folder, poll_interval_s=0.02, **more)


def until(met, what: str, seconds: float = SECONDS):
    """Waits until `met` returns a true value and returns it."""
    deadline = time.monotonic() + seconds
    while not (value := met()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


def get_arguments(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/arguments", timeout=SECONDS) as answer:
        return json.load(answer)


def wait_for_restart(running: RoleSupervisor, name: str, pid: int | None) -> int:
    """Waits until the only replica of a role is ready in a new process, and returns its pid."""

    def pid_of_new_process():
        last = [e for e in read_events(running.folder) if e.role == name][-1]
        return last.what == "ready" and last.pid != pid and last.pid

    return until(pid_of_new_process, f"{name} is back")


def event_names(folder, *names: str) -> list[str]:
    """Returns "NAME what" of the events, in order."""
    events = read_events(folder)
    return [f"{e.role} {e.what}" for e in events if not names or e.role in names]


def test_starts_role_with_addresses_of_healthy_dependencies(tmp_path):
    role_list = [small("b", "{a.urls}", "{index}"), small("a", "late=0.3", count=2)]
    with roles(tmp_path, *role_list) as running:
        assert get_arguments(running.url("b"))["arguments"] == [",".join(running.urls("a")), "0"]
        assert len({*running.urls("a"), running.url("b")}) == 3
        assert all(
            get_arguments(url)["pid"] == running.pids("a", i)[0]
            for i, url in enumerate(running.urls("a"))
        )
    events = event_names(tmp_path)
    assert events.index("b started") > max(i for i, e in enumerate(events) if e == "a ready")
    assert events[-3:] == ["b stopped", "a stopped", "a stopped"]


def test_ends_run_if_role_is_not_ready_in_time(tmp_path):
    words = ["sh", "-c", "echo the last words; exec sleep 600", "{ready}"]
    role = Role(name="a", argv=words, start_timeout_s=0.5, restarts=NEVER)
    with pytest.raises(RoleError) as failed:
        roles(tmp_path, role).start()
    log = tmp_path / "a-0.log"
    assert str(failed.value) == f"a-0 was not ready within 0.5 s; {log} ends:\nthe last words"
    assert event_names(tmp_path) == ["a started", "a died", "a failed"]
    assert ends(read_events(tmp_path)[0].pid)


def test_restarts_killed_role_and_reports_events(tmp_path):
    seen = []
    with roles(tmp_path, small("a", "say=a life"), on_event=seen.append) as running:
        url, pid = running.url("a"), running.pids("a")[0]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        new_pid = wait_for_restart(running, "a", pid)
        assert time.monotonic() - began < 30
        assert (
            running.url("a") == url and get_arguments(url)["pid"] == new_pid == running.pids("a")[0]
        )
        running.check()
    assert (tmp_path / "a-0.log").read_text() == "a life\na life\n", (
        "the log of the first start is preserved"
    )
    assert seen == read_events(tmp_path)
    assert [(e.role, e.what, e.num_starts) for e in seen] == [
        *(("a", "started", 1), ("a", "ready", 1), ("a", "died", 1)),
        *(("a", "started", 2), ("a", "ready", 2), ("a", "stopped", 2)),
    ]
    times = [e.time for e in seen]
    assert sorted(times) == times and abs(time.time() - times[0]) < 600
    assert seen[0].pid == seen[2].pid == pid != seen[3].pid == new_pid
    assert [e.detail for e in seen[1:3]] == [seen[4].detail, "was killed by SIGKILL"]


def test_ends_run_after_too_many_restarts(tmp_path):
    limited = dataclasses.replace(SOON, max_restarts=2)
    role = shell("a", "echo so be it; exec sleep 600", restarts=limited)
    with roles(tmp_path, role) as running:
        pid = None
        log = tmp_path / "a-0.log"
        for count in range(1, 4):
            pid = wait_for_restart(running, "a", pid)
            until(lambda n=count: log.read_text().count("so be it\n") == n, "it has written")
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RoleError) as failed:
            running.wait(SECONDS)
        message = "a-0 died 3 times within 600 s; the last time it was killed by SIGKILL; "
        assert (
            str(failed.value)
            == message + f"{tmp_path / 'a-0.log'} ends:\nso be it\nso be it\nso be it"
        )
        with pytest.raises(RoleError):
            running.check()
    assert event_names(tmp_path)[-2:] == ["a died", "a failed"]


@pytest.mark.slow
def test_counts_deaths_within_window_only(tmp_path):
    script = "echo x >>lives; test $(wc -l <lives) -lt 5 && kill -9 $$; exit 0"
    spaced = Restarts(max_restarts=1, window_s=0.2, initial_delay_s=0.4, max_delay_s=0.4)
    role = shell("a", f"cd {tmp_path}; {script}", main=True, restarts=spaced)
    with roles(tmp_path, role) as running:
        assert running.wait(SECONDS)
    (tmp_path / "lives").unlink()
    growing = Restarts(max_restarts=4, initial_delay_s=0.1, max_delay_s=0.3)
    with roles(tmp_path / "2", dataclasses.replace(role, restarts=growing)) as running:
        assert running.wait(SECONDS)
    events = read_events(tmp_path / "2")
    pauses = [b.time - a.time for a, b in zip(events, events[1:]) if a.what == "died"]
    assert [pause >= min_pause for pause, min_pause in zip(pauses, (0.1, 0.2, 0.3, 0.3))] == [
        True
    ] * 4


def test_does_not_restart_role_that_was_never_ready(tmp_path):
    cases = {
        "echo it is wrong; exit 3": "a-0 ended with code 3; .*a-0.log ends:\nit is wrong",
        "echo it is wrong": "a-0 ended with code 0; .*a-0.log ends:\nit is wrong",
        "exit 7": "a-0.log is empty",
        f"exit {EXIT_RESTART}": f"a-0 ended with code {EXIT_RESTART}",  # serving roles cannot request a restart
    }
    for i, (script, message) in enumerate(cases.items()):
        with pytest.raises(RoleError, match=message):
            roles(tmp_path / str(i), failing("a", script)).start()
        assert event_names(tmp_path / str(i)) == ["a started", "a died", "a failed"], script


def test_reports_missing_command(tmp_path):
    with pytest.raises(
        RoleError, match="code 127; .*\nno-such-program cannot be started: No such file"
    ):
        roles(tmp_path, Role(name="a", argv=["no-such-program"], settle_s=600.0)).start()


def test_stops_other_roles_after_failed_start(tmp_path):
    with pytest.raises(RoleError):
        roles(tmp_path, small("a"), failing("b", "exit 7", after=["a"])).start()
    assert event_names(tmp_path, "a") == ["a started", "a ready", "a stopped"]
    assert ends(read_events(tmp_path)[0].pid)


def test_run_ends_with_main_roles(tmp_path):
    role_list = [
        small("service"),
        shell("train", "sleep 0.2", main=True, count=2, after=["service"]),
    ]
    with roles(tmp_path, *role_list) as running:
        assert running.wait(SECONDS)
    assert event_names(tmp_path, "train")[-2:] == ["train finished"] * 2
    assert event_names(tmp_path, "service")[-1] == "service stopped"


def test_wait_has_time_limit(tmp_path):
    with roles(tmp_path, shell("train", "sleep 600", main=True)) as running:
        assert running.wait(0.1) is False


def test_restarts_main_role_only_if_killed(tmp_path):
    life = "echo x >>lives; case $(wc -l <lives) in 1) sleep 0.2; kill -9 $$;; *) exit CODE;; esac"
    for code, folder in ((0, tmp_path / "0"), (2, tmp_path / "2")):
        folder.mkdir()
        script = f"cd {folder}; {life}".replace("CODE", str(code))
        with roles(folder, shell("train", script, main=True)) as running:
            if code == 0:
                assert running.wait(SECONDS)
            else:
                with pytest.raises(RoleError, match="ended with code 2"):
                    running.wait(SECONDS)
        assert [e for e in event_names(folder) if "started" in e] == ["train started"] * 2


LIFE = "cd {folder}; echo x >>lives; sleep 0.1; test $(wc -l <lives) -lt {lives} || exit 0"


def test_restarts_interrupted_main_role_without_limit(tmp_path):
    """The exit code EXIT_RESTART is neither a death nor the end of the run."""
    script = LIFE.format(folder=tmp_path, lives=4)
    with roles(
        tmp_path / "run",
        shell("train", f"{script}; exit {EXIT_RESTART}", main=True, restarts=NEVER),
    ) as running:
        assert running.wait(SECONDS)
    events = event_names(tmp_path / "run")
    assert events.count("train interrupted") == 3 and events[-1] == "train finished"
    assert not [e for e in events if "died" in e]


@pytest.mark.slow
def test_restarts_interrupted_processes_of_program_together(tmp_path):
    script = f"case {{distributed}} in *,1) sleep 0.2; exit {EXIT_RESTART};; esac; "
    script += f"{LIFE.format(folder=tmp_path, lives=8)}; exit {EXIT_RESTART}"
    both = shell("both", script, hosts=2, main=True, restarts=NEVER)
    with roles(tmp_path / "run", both) as running:
        until(lambda: event_names(tmp_path / "run").count("both started") > 2, "both start again")
        running.check()


@pytest.mark.slow
def test_restarts_role_that_hangs(tmp_path):
    health = Health(interval_s=0.05, timeout_s=0.2, max_silence_s=1.0)
    with roles(tmp_path, small("a", health=health)) as running:
        pid = running.pids("a")[0]
        os.kill(pid, signal.SIGSTOP)
        wait_for_restart(running, "a", pid)
        assert ends(pid)
    assert "has not replied for 1 s" in [e.detail for e in read_events(tmp_path)]


@pytest.mark.slow
def test_tolerates_short_unhealthy_period(tmp_path):
    sick = tmp_path / "sick"
    health = Health(interval_s=0.05, timeout_s=5.0, max_silence_s=600.0)
    with roles(tmp_path, small("a", f"sick={sick}", health=health)) as running:
        sick.touch()
        assert not running.wait(0.5)
        sick.unlink()
        assert not running.wait(0.2)
    assert event_names(tmp_path) == ["a started", "a ready", "a stopped"]


def test_restarts_all_processes_of_program(tmp_path):
    script = "echo {distributed} >>given-{index}.$$; echo $$; sleep 600"
    role = shell("train", f"cd {tmp_path}; {script}", hosts=2, main=True)
    with roles(tmp_path, role) as running:
        first = running.pids("train")
        assert len(first) == 2
        # A process that is killed before its script runs writes nothing.
        until(lambda: len([*tmp_path.glob("given-0.*")]) == 2, "both are written")
        os.kill(first[1], signal.SIGKILL)
        second = until(
            lambda: {*running.pids("train")}.isdisjoint(first) and running.pids("train"), "back"
        )
        until(lambda: len([*tmp_path.glob("given-0.*")]) == 4, "both are written again")
        assert ends(first[0])
    for pids in (first, second):
        words = [(tmp_path / f"given-0.{pid}").read_text().strip().split(",") for pid in pids]
        assert [w[1:] for w in words] == [["2", "0"], ["2", "1"]]
        assert words[0][0] == words[1][0] and words[0][0].startswith("127.0.0.1:")
    assert (tmp_path / "train-0.0.log").exists() and (tmp_path / "train-0.1.log").exists()


def test_restarts_all_processes_of_server_at_same_address(tmp_path):
    """The first process keeps its port. The others, here on one machine with it, listen at ports of their own."""
    with roles(tmp_path, small("a", hosts=2)) as running:
        url, first = running.url("a"), running.pids("a")
        assert get_arguments(url)["pid"] == first[0]
        os.kill(first[1], signal.SIGKILL)
        new_pid = wait_for_restart(running, "a", first[0])
        assert running.url("a") == url and get_arguments(url)["pid"] == new_pid
        assert ends(first[0]) and len(running.pids("a")) == 2
    assert event_names(tmp_path)[-1] == "a stopped"


def test_restarts_dependent_role_after_address_change(tmp_path):
    mover = Role(name="a", argv=["{python}", SMALL, "{host}", "0", "{ready}"], restarts=SOON)
    with roles(tmp_path, mover, small("b", "{a.url}", restarts=NEVER)) as running:
        url, pid = running.url("a"), running.pids("a")[0]
        os.kill(pid, signal.SIGKILL)
        until(lambda: running.url("a") != url, "a is elsewhere")
        until(lambda: event_names(tmp_path, "b").count("b ready") == 2, "b is back")
        assert get_arguments(running.url("b"))["arguments"] == [running.url("a")]
        running.check()
    assert event_names(tmp_path, "b") == [
        f"b {w}" for w in ("started", "ready", "moved", "started", "ready", "stopped")
    ]


class LosingPlacement(LocalPlacement):
    """Loses its first slot, and the process in it, when `lost` is set."""

    def __init__(self):
        super().__init__(LocalMachine(platform="cpu", devices=[], cores=[0]))
        self.claims, self.lost = [], False

    def claim(self, role, index, process, stem):
        slot = super().claim(role, index, process, stem)
        self.claims.append(slot)
        ended = slot.exit_code

        def exit_code():
            if self.lost and slot is self.claims[0]:
                raise SlotLostError("its machine is gone")
            return ended()

        slot.exit_code = exit_code
        return slot


def test_replaces_lost_slot(tmp_path):
    placement = LosingPlacement()
    with RoleSupervisor([small("a")], placement, tmp_path, poll_interval_s=0.02) as running:
        placement.lost = True
        until(lambda: event_names(tmp_path).count("a ready") == 2, "a is back")
        assert get_arguments(running.url("a"))["pid"] == running.pids("a")[0]
    assert len(placement.claims) == 2
    assert [e.detail for e in read_events(tmp_path) if e.what == "died"] == ["its machine is gone"]


def test_stopping_kills_children_and_deaf_roles(tmp_path):
    pids = tmp_path / "pids"
    role_list = [
        small("a", f"child={pids}"),
        shell("b", "trap '' TERM; while :; do sleep 1; done", grace_s=0.3),
    ]
    with roles(tmp_path, *role_list) as running:
        child, b = int(pids.read_text()), running.pids("b")[0]
        assert is_running(child)
    assert ends(child) and ends(b)


@pytest.mark.slow
def test_children_die_with_role(tmp_path):
    pids = tmp_path / "pids"
    with roles(tmp_path, small("a", f"child={pids}")) as running:
        child, pid = int(pids.read_text()), running.pids("a")[0]
        os.kill(pid, signal.SIGKILL)
        wait_for_restart(running, "a", pid)
        assert ends(child)


PARENT = """
import sys
from tests.runtime.test_supervisor import roles, small
with roles(sys.argv[1], small("a", f"child={sys.argv[1]}/pids"), small("b", "{a.url}")) as running:
    print(*running.pids("a"), *running.pids("b"), flush=True)
    running.wait()
"""


@pytest.mark.slow
def test_killed_run_leaves_no_process(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        pids.append(int((tmp_path / "pids").read_text()))
        assert len(pids) == 3 and all(map(is_running, pids))
        parent.kill()
    assert all(map(ends, pids))


def test_uses_requested_port(tmp_path):
    from glm5_jax.runtime.http_server import find_free_port

    port = find_free_port()
    role = Role(
        name="a",
        argv=["{python}", SMALL, "{host}", "{port}", str(tmp_path / "ready")],
        port=port,
        start_timeout_s=SECONDS,
    )
    with roles(tmp_path, role) as running:
        assert running.url("a") == f"http://127.0.0.1:{port}"
        assert get_arguments(running.url("a"))["pid"] == running.pids("a")[0]


def test_rejects_invalid_ready_file(tmp_path):
    role = Role(name="a", argv=["sh", "-c", "echo 8000 >{ready}; sleep 600"])
    with pytest.raises(ValueError, match='a-0.ready has .8000.*; a server writes {"port": N}'):
        roles(tmp_path, role).start()
