"""The choice of a communicator: shared memory where that works, else MPI alone.

Importing this module initialises MPI. Nothing here communicates after the choice.
"""

from __future__ import annotations

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


def join(settings: CollectiveSettings) -> Communicator:
    """Connect all instances of the job.

    The communicator has a duplicate of MPI's world, so that the library's messages never mix with
    those of a program that uses mpi4py itself.
    """
    world = MPI.COMM_WORLD.Dup()
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.Get_rank())
    window = _window_or_none(local, settings)
    # If one host cannot share memory, none does: all instances must use the same protocol.
    if all(MpiMeeting(world).all_gather(window is not None)) and window is not None:
        links = MpiLinks(world, settings)
        return SharedCommunicator(MpiMeeting(world), MpiMeeting(local), window, settings, links)
    return MpiCommunicator(world, settings)


def _window_or_none(local: MPI.Comm, settings: CollectiveSettings) -> Window | None:
    """Return the window of this host's instances, or None if they cannot share memory."""
    if not all(MpiMeeting(local).all_gather(settings.shared_memory and is_supported())):
        return None
    try:
        return make_window(MpiMeeting(local))
    except WindowError:
        return None


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
