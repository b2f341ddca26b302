"""The choice of a communicator: shared memory where that works, else MPI alone.

Importing this module initialises MPI. Nothing here communicates after the choice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpi4py import MPI

from popdist_py.collectives import Communicator
from popdist_py.collectives.communicators.mpi_links import MpiLinks, MpiMeeting
from popdist_py.collectives.communicators.mpi_only import MpiCommunicator
from popdist_py.collectives.communicators.shared_memory import SharedCommunicator
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.collectives.within_host.host_barrier import is_supported
from popdist_py.collectives.within_host.host_group import make_window
from popdist_py.collectives.within_host.shared_window import Window, WindowError
from popdist_py.environment import CollectiveSettings

__all__ = ["join", "join_group"]

# Measured with two instances: 4 bytes in 14 us instead of 4, 26 MB in 55 ms instead of 3.6.
_SLOWER = (
    "the instances of a host cannot share memory (%s): collectives go through MPI, which takes 4 "
    "to 15 times as long within a host; POPDIST_SHARED_MEMORY=0 says that it is meant"
)


def join(settings: CollectiveSettings) -> Communicator:
    """Connect all instances of the job.

    The communicator has a duplicate of MPI's world, so that the library's messages never mix with
    those of a program that uses mpi4py itself.
    """
    world = MPI.COMM_WORLD.Dup()
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.Get_rank())
    window, reason = _window_or_none(local, settings)
    # If one host cannot share memory, none does: all instances must use the same protocol.
    if all(MpiMeeting(world).all_gather(window is not None)) and window is not None:
        links = MpiLinks(world, settings)
        return SharedCommunicator(MpiMeeting(world), MpiMeeting(local), window, settings, links)
    reasons = list(filter(None, MpiMeeting(world).all_gather(reason)))
    if reasons and world.Get_rank() == 0:
        logging.getLogger("popdist").warning(_SLOWER, reasons[0])
    return MpiCommunicator(world, settings)


def _window_or_none(local: MPI.Comm, settings: CollectiveSettings) -> tuple[Window | None, str]:
    """Return the window of this host's instances, or None and why they cannot share memory.

    There is no reason where the user does not want it.
    """
    meeting = MpiMeeting(local)
    if not all(meeting.all_gather(settings.shared_memory)):
        return None, ""
    if not is_supported():
        # The instances of a host are on the same machine.
        return None, "that needs Linux on x86-64"
    try:
        return make_window(meeting), ""
    except WindowError as error:
        return None, str(error)


def join_group(instances: Sequence[int], settings: CollectiveSettings) -> Communicator:
    """Connect some instances of the job; only these make the call.

    Args:
        instances: their indices, sorted, without repetition.
        settings: the user's.
    """
    if len(instances) == 1:
        return SoloCommunicator(instances)
    group = MPI.COMM_WORLD.Get_group().Incl(list(instances))
    return MpiCommunicator(MPI.COMM_WORLD.Create_group(group), settings, instances)
