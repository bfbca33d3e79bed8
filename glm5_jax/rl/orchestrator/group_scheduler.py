"""Scheduler of groups: starts them whenever the buffer admits them, and runs their rollouts concurrently.

The group buffer says how many groups may start, the task registry selects their tasks, and the dispatcher runs their
rollouts. A finished group goes into the buffer. Each change of state wakes the requests that wait for one.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Coroutine

from glm5_jax.rl.orchestrator.dispatcher import RolloutDispatcher
from glm5_jax.rl.orchestrator.group_buffer import GroupBuffer, GroupTicket
from glm5_jax.rl.orchestrator.task_registry import RegisteredService, TaskRegistry
from glm5_jax.rl.trajectory import Trajectory

_log = logging.getLogger(__name__)
RETRY_S = 1.0  # between two attempts to write the journal of a full disk


@dataclasses.dataclass(eq=False, kw_only=True)
class RunningGroup:
    """Group whose rollouts are running.

    Attributes:
      service: service of the task.
      ticket: identity of the group.
      num_left: number of rollouts that have not ended.
      should_resample: whether the task number is sampled again if the group is cancelled.
      is_accepted: whether the buffer has accepted the finished group; None: it has not finished.
      task: asyncio task that runs the group; None: not started yet.
    """

    service: RegisteredService
    ticket: GroupTicket
    num_left: int
    should_resample: bool = True
    is_accepted: bool | None = None
    task: asyncio.Task | None = None


class GroupScheduler:
    """Starts groups, runs them, and puts them into the buffer when they finish.

    - clock: returns the time in seconds.
    - poll_interval_s: time between two checks of what only time changes, in seconds.

    Attributes:
      groups: running groups by id.
      is_paused, is_draining: whether no group may start, until it is resumed or for ever.
      change: event that is set at the next change of state, and then replaced.
      main_loop: task that starts groups, which ends only by an error; set by `start`.
    """

    main_loop: asyncio.Task[None]

    def __init__(
        self,
        buffer: GroupBuffer,
        registry: TaskRegistry,
        *,
        clock: Callable[[], float],
        poll_interval_s: float,
    ):
        self._buffer, self._registry = buffer, registry
        self._clock, self._poll_interval_s = clock, poll_interval_s
        self.groups: dict[str, RunningGroup] = {}
        self.is_paused = self.is_draining = False
        self.change = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()  # all tasks that run until they are cancelled
        self._next_write = 0.0

    def start(self, dispatcher: RolloutDispatcher) -> None:
        """Starts the loops of the scheduler and of the dispatcher."""
        self._dispatcher = dispatcher
        self.main_loop = self._create_task(self._start_groups_forever())
        self._create_task(dispatcher.delete_orphans())

    async def stop(self, timeout_s: float) -> None:
        """Cancels the loops and all groups, and waits at most `timeout_s` seconds for their end."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        # Cancelled rollouts end their sessions. Their task numbers are in the journal.
        await asyncio.wait(tasks, timeout=timeout_s)

    def _create_task(self, coroutine: Coroutine) -> asyncio.Task:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start_groups_forever(self) -> None:
        """Starts groups whenever the buffer admits them, and detects lost services."""
        while True:
            change, now = self.change, self._clock()
            for service in self._registry.expire(now):
                _log.warning("%s is lost: %s", service.spec.name, service.error)
                self.cancel_calls(service)
            if now >= self._next_write:
                self.write_journal(now)
            can_start = not (self.is_draining or self.is_paused or self._buffer.journal_error)
            if self._buffer.lease and can_start:
                self._start_groups(now)
            await self.wait(change, self._poll_interval_s)

    def write_journal(self, now: float) -> None:
        """Writes the pending changes of the journal, and sets the time of the next attempt."""
        error_before = self._buffer.journal_error
        self._buffer.write_journal()
        self._next_write = now + (RETRY_S if self._buffer.journal_error else 0.0)
        if self._buffer.journal_error and not error_before:
            _log.error("%s", self._buffer.journal_error)
        if error_before and not self._buffer.journal_error:
            _log.warning("the journal can be written again")
            self.notify()

    def _start_groups(self, now: float) -> None:
        accepted = None
        while self._buffer.num_admissible() and not self._dispatcher.gateway.wait(now):
            if self._buffer.journal_error:
                return
            ready = self._registry.ready_tasks(now)
            if not ready:
                return
            if accepted is None:  # counting takes time, and starting groups does not change it
                accepted = self._buffer.accepted
            service, number = self._registry.next_group(accepted, ready)
            self._start_group(service, number, now)

    def _start_group(self, service: RegisteredService, number: int, now: float) -> None:
        ticket = self._buffer.admit(service.spec.name, number)
        self._dispatcher.gateway.start_trial(now)
        self._registry.start_group(service, now)
        group = RunningGroup(service=service, ticket=ticket, num_left=self._buffer.config.group)
        group.task = self._create_task(self._run_group(group))
        group.task.add_done_callback(functools.partial(self._finish_group, group))
        self.groups[ticket.group_id] = group

    async def _run_group(self, group: RunningGroup) -> None:
        async def run(index: int) -> Trajectory:
            try:
                return await self._dispatcher.run_rollout(group.service, group.ticket, index)
            finally:
                group.num_left -= 1
                group.service.in_flight -= 1
                self.notify()

        # Not `gather`, whose cancellation waits for the first rollout only.
        async with asyncio.TaskGroup() as members:
            tasks = [members.create_task(run(index)) for index in range(group.num_left)]
        trajectories = [task.result() for task in tasks]
        group.is_accepted = self._buffer.put(group.ticket.group_id, trajectories)

    def _finish_group(self, group: RunningGroup, task: asyncio.Task) -> None:
        """Records the end of a group. It is a callback, because a task may be cancelled before it starts."""
        del self.groups[group.ticket.group_id]
        group.service.in_flight -= group.num_left
        if not task.cancelled() and (error := task.exception()):
            _log.error("group %s", group.ticket.group_id, exc_info=error)
            group.service.trip_breaker(f"{type(error).__name__}: {error}", self._clock())
        if group.is_accepted is None:
            self._buffer.cancel(group.ticket.group_id, group.should_resample)
        self._registry.finish_group(group.service, group.is_accepted)
        self.queue_resamples()
        self.notify()

    def queue_resamples(self) -> None:
        """Queues the task numbers of dropped groups at the registry."""
        for task, number in self._buffer.pop_resamples():
            self._registry.resample(task, number)

    def cancel_calls(self, service: RegisteredService) -> None:
        """Cancels the running requests to a service, so that their rollouts fail."""
        for call in tuple(service.calls):
            call.cancel()

    def notify(self) -> None:
        """Wakes everything that waits for a change."""
        self.change.set()
        self.change = asyncio.Event()

    async def wait(self, change: asyncio.Event, timeout_s: float) -> None:
        """Waits for a change that was read from `change` before, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await change.wait()
