"""Journal of the group buffer: its groups and its state on disk, with which the next process continues.

Each group is an entry by its order, with its members once it has finished. One more entry has the state of the buffer.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.rl.orchestrator.group_slot import GroupSlot
from glm5_jax.rl.orchestrator.journal import Entry, Journal, check_release
from glm5_jax.rl.orchestrator.staleness import BufferConfig, GroupTicket

_STATE = "state"  # name of the journal's entry that is not a group
# Options that must be the same when a journal is reopened.
_JOURNALED_OPTIONS = ("group", "batch_groups", "max_staleness")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferState:
    """State of the group buffer, without its groups.

    Attributes:
      run_id, step, version, lease, checksum: attributes of `GroupBuffer`.
      next_order: order of the next new group.
      num_started: number of orders by task.
      batches: group ids by step, not yet trained on.
      rollbacks: ranges low < v <= high of versions that are no more.
      num_trained: number of trajectories by task that were trained on.
    """

    run_id: str
    step: int
    version: int
    lease: int
    checksum: str | None
    next_order: int
    num_started: Mapping[str, int]
    batches: Mapping[int, tuple[str, ...]]
    rollbacks: Sequence[tuple[int, int]]
    num_trained: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredBuffer:
    """Contents of a journal that an earlier process wrote.

    Attributes:
      state: state of the buffer.
      waiting: finished groups by id.
      to_resample: groups that were running or dropped, by order.
      num_torn: number of groups that are lost because their entries are torn.
    """

    state: BufferState
    waiting: dict[str, GroupSlot]
    to_resample: dict[int, GroupSlot]
    num_torn: int


class GroupJournal:
    """Journal of a buffer's groups and state. Changes that fail are written later (`Journal`).

    - folder: folder that outlives the process; None: nothing is stored.
    - config: options of the buffer, some of which must stay the same.
    """

    def __init__(self, folder: pathlib.Path | None, config: BufferConfig):
        self._folder, self._config = folder, config
        self._journal = None if folder is None else Journal(folder, config.durable)

    @property
    def error(self) -> str:
        """Returns why the journal lacks the last changes, and what to do; "" if it has all."""
        return "" if self._journal is None else self._journal.error

    def flush(self) -> None:
        """Tries again to write the changes that the journal lacks."""
        if self._journal is not None:
            self._journal.flush()

    def write_group(self, slot: GroupSlot) -> None:
        """Writes the entry of a slot."""
        if self._journal is not None:
            head = {
                "ticket": dataclasses.asdict(slot.ticket),
                "version": slot.version,
                "num_rollbacks": slot.num_rollbacks,
            }
            self._journal.write(_entry_name(slot.ticket.order), head, slot.members)

    def write_state(self, state: BufferState, removed: Sequence[int] = ()) -> None:
        """Writes the state of the buffer, then removes the entries of the orders `removed`."""
        if self._journal is None:
            return
        head: dict[str, Any] = {
            **{name: getattr(self._config, name) for name in _JOURNALED_OPTIONS},
            **vars(state),
            "batches": list(state.batches.items()),
            # If this process is killed in between, the next one must not read them as groups.
            "removed": list(removed),
        }
        self._journal.write(_STATE, head)
        for order in removed:
            self._journal.remove(_entry_name(order))

    def read(self) -> RestoredBuffer | None:
        """Returns what an earlier process wrote; None if there is nothing.

        Raises ValueError if its options differ, or if the state cannot be read.
        """
        if self._journal is None or self._folder is None:
            return None
        with check_release(self._folder):
            entries, torn = self._journal.read()
            if not entries and not torn:
                return None
            if _STATE not in entries:
                raise ValueError(
                    f"the journal in {self._folder} has groups and no readable state: some may have been trained on; empty "
                    "the folder"
                )
            head = entries.pop(_STATE).head
            self._check_options(head)
            removed = {_entry_name(order) for order in head["removed"]}
            slots = {name: _slot_of(entry) for name, entry in entries.items()}
            self._check_names(slots, torn)
            state = _state_of(head, list(slots.values()), [*entries, *torn])

            # Groups, without those whose removal was interrupted.
            for name in removed:
                self._journal.remove(name)
            slots = [slot for name, slot in slots.items() if name not in removed]
            waiting = {slot.ticket.group_id: slot for slot in slots if slot.members}
            batches = {
                step: tuple(group_id for group_id in group_ids if group_id in waiting)
                for step, group_ids in state.batches.items()
            }
            return RestoredBuffer(
                state=dataclasses.replace(state, batches=batches),
                waiting=waiting,
                to_resample={slot.ticket.order: slot for slot in slots if not slot.members},
                num_torn=len(torn),
            )

    def _check_names(self, slots: Mapping[str, GroupSlot], torn: Sequence[str]) -> None:
        """Raises ValueError for a file with another name than that of its group, which may have been trained on."""
        names = {name: _entry_name(slot.ticket.order) for name, slot in slots.items()}
        names |= {name: name if name.isdecimal() else "no group" for name in torn}
        if wrong := [name for name, expected in names.items() if name != expected]:
            raise ValueError(
                f"the journal in {self._folder} has an entry {wrong[0]!r}, which is that of {names[wrong[0]]}; somebody "
                "copied or renamed files: restore them, or empty the folder"
            )

    def _check_options(self, head: Mapping[str, Any]) -> None:
        """Raises ValueError if the options of the journal differ from those of the buffer."""
        for name in _JOURNALED_OPTIONS:
            if head[name] != getattr(self._config, name):
                raise ValueError(
                    f"the journal in {self._folder} is of {name}={head[name]}, not {getattr(self._config, name)}; take "
                    "that, or another folder"
                )


def _state_of(
    head: Mapping[str, Any], slots: Sequence[GroupSlot], names: Sequence[str]
) -> BufferState:
    """Returns the state of the buffer from its entry, and from groups that were written after it.

    slots: all groups that can be read. names: names of the entries of all groups, torn ones included.
    """
    num_started = collections.Counter(head["num_started"])
    num_started.update(
        slot.ticket.task for slot in slots if slot.ticket.order >= head["next_order"]
    )
    return BufferState(
        run_id=head["run_id"],
        step=head["step"],
        version=head["version"],
        lease=head["lease"],
        checksum=head["checksum"],
        next_order=max([head["next_order"], *(int(name) + 1 for name in names)]),
        num_started=num_started,
        batches={step: tuple(group_ids) for step, group_ids in head["batches"]},
        rollbacks=[(low, high) for low, high in head["rollbacks"]],
        num_trained=collections.Counter(head["num_trained"]),
    )


def _slot_of(entry: Entry) -> GroupSlot:
    """Returns the slot that `write_group` wrote."""
    head = entry.head
    slot = GroupSlot(
        ticket=GroupTicket(**head["ticket"]),
        version=head["version"],
        num_rollbacks=head["num_rollbacks"],
    )
    if entry.members:
        slot.complete(entry.members)
    return slot


def _entry_name(order: int) -> str:
    return f"{order:012d}"
