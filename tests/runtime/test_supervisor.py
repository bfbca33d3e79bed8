"""Roles start in order, come back when they die, end the run when they cannot, and leave nothing behind."""

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
SECONDS = 60.0  # for what takes one; a machine under load may take long to start Python
SOON = Restarts(initial_delay_s=0.05, max_delay_s=0.05)
NEVER = Restarts(max_restarts=0)


def small(name: str, *words: str, **more) -> Role:
    """A role of small_role.py; what it is given is in `given`."""
    more = {"restarts": SOON, "grace_s": 20.0, "start_timeout_s": SECONDS} | more
    return Role(name=name, argv=["{python}", SMALL, "{host}", "{port}", "{ready}", *words], **more)


def shell(name: str, script: str, **more) -> Role:
    """A role that runs a script and serves nothing."""
    more = {"restarts": SOON, "grace_s": 20.0, "settle_s": 0.05} | more
    return Role(name=name, argv=["sh", "-c", script], **more)


def broken(name: str, script: str, **more) -> Role:
    """One whose script ends before it is ready."""
    return shell(name, script, settle_s=600.0, **more)


def roles(folder, *own: Role, **more) -> RoleSupervisor:
    machine = LocalMachine(platform="cpu", devices=[], cores=sorted(os.sched_getaffinity(0)))
    return RoleSupervisor(own, LocalPlacement(machine), folder, poll_interval_s=0.02, **more)


def until(met, what: str, seconds: float = SECONDS):
    """What `met` returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return found


def asked(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/given", timeout=SECONDS) as answer:
        return json.load(answer)


def restarted(running: RoleSupervisor, name: str, pid: int | None) -> int:
    """The pid of a role's only replica once it is another and ready."""

    def again():
        last = [e for e in read_events(running.folder) if e.role == name][-1]
        return last.what == "ready" and last.pid != pid and last.pid

    return until(again, f"{name} is back")


def told(folder, *names: str) -> list[str]:
    """NAME what, in the order of events."""
    events = read_events(folder)
    return [f"{e.role} {e.what}" for e in events if not names or e.role in names]


def test_a_role_starts_when_those_it_needs_are_healthy_and_is_told_their_addresses(tmp_path):
    own = [small("b", "{a.urls}", "{index}"), small("a", "late=0.3", count=2)]
    with roles(tmp_path, *own) as running:
        assert asked(running.url("b"))["given"] == [",".join(running.urls("a")), "0"]
        assert len({*running.urls("a"), running.url("b")}) == 3
        assert all(
            asked(url)["pid"] == running.pids("a", i)[0] for i, url in enumerate(running.urls("a"))
        )
    events = told(tmp_path)
    assert events.index("b started") > max(i for i, e in enumerate(events) if e == "a ready")
    assert events[-3:] == ["b stopped", "a stopped", "a stopped"]


def test_what_is_not_ready_in_time_ends_the_run_with_the_end_of_its_log(tmp_path):
    words = ["sh", "-c", "echo the last words; exec sleep 600", "{ready}"]
    own = Role(name="a", argv=words, start_timeout_s=0.5, restarts=NEVER)
    with pytest.raises(RoleError) as failed:
        roles(tmp_path, own).start()
    log = tmp_path / "a-0.log"
    assert str(failed.value) == f"a-0 was not ready within 0.5 s; {log} ends:\nthe last words"
    assert told(tmp_path) == ["a started", "a died", "a failed"]
    assert ends(read_events(tmp_path)[0].pid)


def test_restarts_killed_role_at_same_address_and_reports_each_event(tmp_path):
    seen = []
    with roles(tmp_path, small("a", "say=a life"), on_event=seen.append) as running:
        url, pid = running.url("a"), running.pids("a")[0]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        back = restarted(running, "a", pid)
        assert time.monotonic() - began < 30
        assert running.url("a") == url and asked(url)["pid"] == back == running.pids("a")[0]
        running.check()
    assert (tmp_path / "a-0.log").read_text() == "a life\na life\n", "the first log is kept"
    assert seen == read_events(tmp_path)
    assert [(e.role, e.what, e.num_starts) for e in seen] == [
        *(("a", "started", 1), ("a", "ready", 1), ("a", "died", 1)),
        *(("a", "started", 2), ("a", "ready", 2), ("a", "stopped", 2)),
    ]
    times = [e.time for e in seen]
    assert sorted(times) == times and abs(time.time() - times[0]) < 600
    assert seen[0].pid == seen[2].pid == pid != seen[3].pid == back
    assert [e.detail for e in seen[1:3]] == [seen[4].detail, "was killed by SIGKILL"]


def test_a_role_that_dies_too_often_ends_the_run(tmp_path):
    limited = dataclasses.replace(SOON, max_restarts=2)
    own = shell("a", "echo so be it; exec sleep 600", restarts=limited)
    with roles(tmp_path, own) as running:
        pid = None
        log = tmp_path / "a-0.log"
        for count in range(1, 4):
            pid = restarted(running, "a", pid)
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
    assert told(tmp_path)[-2:] == ["a died", "a failed"]


@pytest.mark.slow
def test_deaths_outside_the_window_are_forgotten_and_delays_grow_within_it(tmp_path):
    script = "echo x >>lives; test $(wc -l <lives) -lt 5 && kill -9 $$; exit 0"
    spaced = Restarts(max_restarts=1, window_s=0.2, initial_delay_s=0.4, max_delay_s=0.4)
    own = shell("a", f"cd {tmp_path}; {script}", main=True, restarts=spaced)
    with roles(tmp_path, own) as running:
        assert running.wait(SECONDS)
    (tmp_path / "lives").unlink()
    growing = Restarts(max_restarts=4, initial_delay_s=0.1, max_delay_s=0.3)
    with roles(tmp_path / "2", dataclasses.replace(own, restarts=growing)) as running:
        assert running.wait(SECONDS)
    events = read_events(tmp_path / "2")
    pauses = [b.time - a.time for a, b in zip(events, events[1:]) if a.what == "died"]
    assert [pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.3, 0.3))] == [True] * 4


def test_tries_nothing_again_that_ends_before_it_was_ever_ready(tmp_path):
    cases = {
        "echo it is wrong; exit 3": "a-0 ended with code 3; .*a-0.log ends:\nit is wrong",
        "echo it is wrong": "a-0 ended with code 0; .*a-0.log ends:\nit is wrong",
        "exit 7": "a-0.log is empty",
        f"exit {EXIT_RESTART}": f"a-0 ended with code {EXIT_RESTART}",  # a role that serves may not ask for it
    }
    for i, (script, message) in enumerate(cases.items()):
        with pytest.raises(RoleError, match=message):
            roles(tmp_path / str(i), broken("a", script)).start()
        assert told(tmp_path / str(i)) == ["a started", "a died", "a failed"], script


def test_a_command_that_is_not_there_is_told(tmp_path):
    with pytest.raises(
        RoleError, match="code 127; .*\nno-such-program cannot be started: No such file"
    ):
        roles(tmp_path, Role(name="a", argv=["no-such-program"], settle_s=600.0)).start()


def test_the_others_are_stopped_when_one_cannot_start(tmp_path):
    with pytest.raises(RoleError):
        roles(tmp_path, small("a"), broken("b", "exit 7", after=["a"])).start()
    assert told(tmp_path, "a") == ["a started", "a ready", "a stopped"]
    assert ends(read_events(tmp_path)[0].pid)


def test_the_run_ends_with_its_main_roles_not_with_others(tmp_path):
    own = [small("service"), shell("train", "sleep 0.2", main=True, count=2, after=["service"])]
    with roles(tmp_path, *own) as running:
        assert running.wait(SECONDS)
    assert told(tmp_path, "train")[-2:] == ["train finished"] * 2
    assert told(tmp_path, "service")[-1] == "service stopped"


def test_waiting_has_a_time_limit(tmp_path):
    with roles(tmp_path, shell("train", "sleep 600", main=True)) as running:
        assert running.wait(0.1) is False


def test_a_main_role_that_is_killed_goes_on_but_a_mistake_is_not_repeated(tmp_path):
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
        assert [e for e in told(folder) if "started" in e] == ["train started"] * 2


LIFE = "cd {folder}; echo x >>lives; sleep 0.1; test $(wc -l <lives) -lt {lives} || exit 0"


def test_restarts_main_role_that_saved_when_told_to_stop_however_often(tmp_path):
    """It ends with a code of its own, which is neither a death nor the end of the run."""
    script = LIFE.format(folder=tmp_path, lives=4)
    with roles(
        tmp_path / "run",
        shell("train", f"{script}; exit {EXIT_RESTART}", main=True, restarts=NEVER),
    ) as running:
        assert running.wait(SECONDS)
    events = told(tmp_path / "run")
    assert events.count("train interrupted") == 3 and events[-1] == "train finished"
    assert not [e for e in events if "died" in e]


@pytest.mark.slow
def test_restarts_processes_of_one_program_that_saved_together(tmp_path):
    script = f"case {{distributed}} in *,1) sleep 0.2; exit {EXIT_RESTART};; esac; "
    script += f"{LIFE.format(folder=tmp_path, lives=8)}; exit {EXIT_RESTART}"
    both = shell("both", script, hosts=2, main=True, restarts=NEVER)
    with roles(tmp_path / "run", both) as running:
        until(lambda: told(tmp_path / "run").count("both started") > 2, "both start again")
        running.check()


@pytest.mark.slow
def test_a_role_that_hangs_is_killed_and_started_again(tmp_path):
    health = Health(interval_s=0.05, timeout_s=0.2, max_silence_s=1.0)
    with roles(tmp_path, small("a", health=health)) as running:
        pid = running.pids("a")[0]
        os.kill(pid, signal.SIGSTOP)
        restarted(running, "a", pid)
        assert ends(pid)
    assert "has not replied for 1 s" in [e.detail for e in read_events(tmp_path)]


@pytest.mark.slow
def test_a_role_that_is_unwell_for_a_while_stays(tmp_path):
    sick = tmp_path / "sick"
    health = Health(interval_s=0.05, timeout_s=5.0, max_silence_s=600.0)
    with roles(tmp_path, small("a", f"sick={sick}", health=health)) as running:
        sick.touch()
        assert not running.wait(0.5)
        sick.unlink()
        assert not running.wait(0.2)
    assert told(tmp_path) == ["a started", "a ready", "a stopped"]


def test_processes_of_one_program_live_and_die_together(tmp_path):
    script = "echo {distributed} >>given-{index}.$$; echo $$; sleep 600"
    own = shell("train", f"cd {tmp_path}; {script}", hosts=2, main=True)
    with roles(tmp_path, own) as running:
        first = running.pids("train")
        assert len(first) == 2
        # Who is killed before it has begun writes nothing.
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


def test_who_was_told_an_address_that_changed_is_started_again_with_the_new_one(tmp_path):
    mover = Role(name="a", argv=["{python}", SMALL, "{host}", "0", "{ready}"], restarts=SOON)
    with roles(tmp_path, mover, small("b", "{a.url}", restarts=NEVER)) as running:
        url, pid = running.url("a"), running.pids("a")[0]
        os.kill(pid, signal.SIGKILL)
        until(lambda: running.url("a") != url, "a is elsewhere")
        until(lambda: told(tmp_path, "b").count("b ready") == 2, "b is back")
        assert asked(running.url("b"))["given"] == [running.url("a")]
        running.check()
    assert told(tmp_path, "b") == [
        f"b {w}" for w in ("started", "ready", "moved", "started", "ready", "stopped")
    ]


class Losing(LocalPlacement):
    """Loses its first place, and what runs there, when `lost` is set."""

    def __init__(self):
        super().__init__(LocalMachine(platform="cpu", devices=[], cores=[0]))
        self.claims, self.lost = [], False

    def claim(self, role, index, process, stem):
        place = super().claim(role, index, process, stem)
        self.claims.append(place)
        ended = place.exit_code

        def exit_code():
            if self.lost and place is self.claims[0]:
                raise SlotLostError("its machine is gone")
            return ended()

        place.exit_code = exit_code
        return place


def test_a_place_that_is_lost_is_replaced_by_another(tmp_path):
    placement = Losing()
    with RoleSupervisor([small("a")], placement, tmp_path, poll_interval_s=0.02) as running:
        placement.lost = True
        until(lambda: told(tmp_path).count("a ready") == 2, "a is back")
        assert asked(running.url("a"))["pid"] == running.pids("a")[0]
    assert len(placement.claims) == 2
    assert [e.detail for e in read_events(tmp_path) if e.what == "died"] == ["its machine is gone"]


def test_stopping_kills_what_a_role_started_and_what_does_not_listen(tmp_path):
    pids = tmp_path / "pids"
    own = [
        small("a", f"child={pids}"),
        shell("b", "trap '' TERM; while :; do sleep 1; done", grace_s=0.3),
    ]
    with roles(tmp_path, *own) as running:
        child, b = int(pids.read_text()), running.pids("b")[0]
        assert is_running(child)
    assert ends(child) and ends(b)


@pytest.mark.slow
def test_what_a_role_started_dies_with_it(tmp_path):
    pids = tmp_path / "pids"
    with roles(tmp_path, small("a", f"child={pids}")) as running:
        child, pid = int(pids.read_text()), running.pids("a")[0]
        os.kill(pid, signal.SIGKILL)
        restarted(running, "a", pid)
        assert ends(child)


PARENT = """
import sys
from tests.runtime.test_supervisor import roles, small
with roles(sys.argv[1], small("a", f"child={sys.argv[1]}/pids"), small("b", "{a.url}")) as running:
    print(*running.pids("a"), *running.pids("b"), flush=True)
    running.wait()
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        pids.append(int((tmp_path / "pids").read_text()))
        assert len(pids) == 3 and all(map(is_running, pids))
        parent.kill()
    assert all(map(ends, pids))


def test_a_port_that_is_asked_for_is_kept_to(tmp_path):
    from glm5_jax.runtime.http_server import find_free_port

    port = find_free_port()
    own = Role(
        name="a",
        argv=["{python}", SMALL, "{host}", "{port}", str(tmp_path / "ready")],
        port=port,
        start_timeout_s=SECONDS,
    )
    with roles(tmp_path, own) as running:
        assert running.url("a") == f"http://127.0.0.1:{port}"
        assert asked(running.url("a"))["pid"] == running.pids("a")[0]


def test_a_ready_file_with_something_else_is_an_error_at_once(tmp_path):
    own = Role(name="a", argv=["sh", "-c", "echo 8000 >{ready}; sleep 600"])
    with pytest.raises(ValueError, match='a-0.ready has .8000.*; a server writes {"port": N}'):
        roles(tmp_path, own).start()
