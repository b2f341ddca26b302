"""The communicator of any processes that can meet, without MPI.

Those of one host share memory; sockets connect the hosts. Where memory cannot be shared, every
process is a host of its own.

Nothing here knows how the processes meet.
"""

from __future__ import annotations

import os
from pathlib import Path

from popdist_py.collectives.communicators.shared_memory import Links, SharedCommunicator
from popdist_py.collectives.meeting import Meeting
from popdist_py.collectives.signature import INSTANCES, Names
from popdist_py.collectives.within_host.host_barrier import is_supported
from popdist_py.collectives.within_host.host_group import make_window
from popdist_py.collectives.within_host.shared_window import Window, WindowError
from popdist_py.environment import CollectiveSettings

__all__ = ["join_meeting", "place_of_this_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def place_of_this_process() -> str:
    """Return what is equal for processes that can share memory: one boot, one PID name space."""
    try:
        # Two containers of one machine see different processes under one number.
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


def join_meeting(
    meeting: Meeting, settings: CollectiveSettings, links: Links, names: Names = INSTANCES
) -> SharedCommunicator:
    """Connect the processes of ``meeting``; collective.

    Args:
        meeting: the processes; rank = instance index.
        settings: the user's.
        links: what connects several hosts.
        names: of the processes, in messages.
    """
    shares = settings.shared_memory and is_supported()
    places = meeting.all_gather(place_of_this_process() if shares else "")
    alone = not all(places)
    color = meeting.rank if alone else places.index(places[meeting.rank])
    local = meeting.split(color, meeting.rank)
    window = _window_or_none(local)
    if not all(meeting.all_gather(window is not None)):
        local = meeting.split(meeting.rank, meeting.rank)
        window = make_window(local)
    assert window is not None
    return SharedCommunicator(meeting, local, window, settings, links, names)


def _window_or_none(local: Meeting) -> Window | None:
    try:
        return make_window(local)
    except WindowError:
        return None
