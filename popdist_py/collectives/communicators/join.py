"""Functions that connect instances and return their communicator.

The instances of a host share memory, and a mesh connects the hosts. If sharing memory is impossible
or disabled, every instance is treated as a separate host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from popdist_py.collectives.between_hosts.mesh import Mesh
from popdist_py.collectives.between_hosts.tcp_connect import connect
from popdist_py.collectives.communicators.group_communicator import (
    ConnectHosts,
    GroupCommunicator,
    Links,
)
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.collectives.interfaces import Communicator, Meeting
from popdist_py.collectives.signature import Names
from popdist_py.collectives.waiting import WaitLimits
from popdist_py.collectives.within_host.host_barrier import is_supported
from popdist_py.collectives.within_host.host_group import make_window
from popdist_py.collectives.within_host.shared_window import Window, WindowError
from popdist_py.environment import NETWORK, CollectiveSettings
from popdist_py.errors import PopdistError

__all__ = ["JobMeeting", "join", "join_group", "join_job", "place_of_this_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A function that connects the processes of a Meeting and returns the mesh between them. All
# processes of the Meeting must call it.
OwnMesh: TypeAlias = Callable[[Any], Mesh]

# With MPI instead of shared memory, a collective call of two instances took 20 us instead of 4 us
# for 4 bytes. For 26 MB, such a call took 8.4 ms instead of 3.6 ms.
_SLOWER = (
    "the instances on one host cannot share memory (%s). Collective calls within a host therefore "
    "take 2 to 20 times as long. To turn off this warning, set POPDIST_SHARED_MEMORY=0"
)
_MPI_BETWEEN_HOSTS = (
    "popdist: the hosts do not reach one another by TCP on %s, so MPI transfers the data between "
    "the hosts, which is slower. Open the ports between the hosts, or choose another network with "
    "--host-subnet."
)


@runtime_checkable
class JobMeeting(Meeting, Protocol):
    """A Meeting of all instances of the job, which can also connect some instances alone."""

    @property
    def own_mesh(self) -> OwnMesh | None:
        """A function that makes a mesh over this transport; None if it cannot send arrays."""

    def group(self, ranks: Sequence[int], limits: WaitLimits, call: object) -> Meeting:
        """Return a Meeting of the given ranks. Only these ranks call this method, once.

        Args:
            ranks: The ranks in this Meeting.
            limits: The time limits of waits.
            call: The name of the call that waits, for error messages.

        Raises:
            InstanceLostError: A rank did not call this method in time.
        """


def join_job(settings: CollectiveSettings, meeting: JobMeeting | None = None) -> Communicator:
    """Connect all instances of the job. All instances must call this function.

    Args:
        settings: The settings of the user.
        meeting: All instances of the job, which can exchange small values already; None to connect
            them over MPI.
    """
    if meeting is None:
        from mpi4py import MPI

        from popdist_py.collectives.between_hosts.mpi import MpiMeeting

        # The communicator uses a duplicate of MPI's COMM_WORLD. So its messages never mix with the
        # messages of a program that uses mpi4py itself.
        meeting = MpiMeeting(MPI.COMM_WORLD.Dup())
    return join(meeting, settings, own_mesh=meeting.own_mesh)


def join_group(
    instances: Sequence[int], settings: CollectiveSettings, job: Communicator
) -> Communicator:
    """Connect some instances of the job. Only these instances call this function.

    Args:
        instances: The sorted indices of the instances, without duplicates.
        settings: The settings of the user.
        job: The communicator of the job, from ``join_job``.

    Raises:
        InstanceLostError: An instance did not call this function in time.
    """
    if len(instances) == 1:
        return SoloCommunicator(instances)
    assert isinstance(job, GroupCommunicator)
    assert isinstance(job.meeting, JobMeeting)
    call = f"execute_on_instances({set(instances)})"
    meeting = job.meeting.group(instances, WaitLimits(settings.hang_timeout), call)
    names = Names(numbers=tuple(instances), shows_index=False)
    return join(
        meeting,
        settings,
        own_mesh=job.meeting.own_mesh,
        limits=WaitLimits(settings.hang_timeout, names),
        instances=instances,
        tries_tcp=job.links_use_tcp,
    )


def join(
    meeting: Meeting,
    settings: CollectiveSettings,
    *,
    own_mesh: OwnMesh | None = None,
    towards: str | None = None,
    limits: WaitLimits | None = None,
    instances: Sequence[int] | None = None,
    tries_tcp: bool = True,
) -> GroupCommunicator:
    """Connect the instances of ``meeting``. All these instances must call this function.

    Args:
        meeting: A group of instances that can exchange small values already, in the order of their
            indices.
        settings: The settings of the user.
        own_mesh: A function that makes a mesh over the transport that ``meeting`` uses; None if the
            transport of ``meeting`` cannot send arrays.
        towards: The name of a host that is reached through the network between the hosts of the
            job. ``towards`` is used only if the user does not set a network.
        limits: The time limits of waits, and the names of instances in error messages. If
            ``limits`` is None, the time limit comes from ``settings``.
        instances: The index of each instance in the job; None for all instances of the job.
        tries_tcp: Whether to try TCP between the hosts. If ``tries_tcp`` is False, ``own_mesh`` is
            used.

    Raises:
        PopdistError: The hosts do not reach one another. All instances raise this error.
    """
    local, window, shares_memory = _share_memory(meeting, settings)
    if limits is None:
        limits = WaitLimits(settings.hang_timeout)
    if own_mesh is not None and not (shares_memory and tries_tcp):
        connect_hosts: ConnectHosts = partial(_connect_without_tcp, meeting, own_mesh)
    else:
        connect_hosts = partial(_connect_hosts, meeting, settings, own_mesh, towards)
    return GroupCommunicator(
        meeting,
        local,
        window,
        limits,
        connect_hosts,
        instances,
        shares_memory=shares_memory,
        in_tree_order=settings.deterministic,
    )


def place_of_this_process() -> str:
    """Return the boot id and PID name space; processes with equal values can share memory."""
    try:
        # Two containers on one machine have different PID name spaces, so a PID of one container
        # means another process in the other container.
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


def _share_memory(meeting: Meeting, settings: CollectiveSettings) -> tuple[Meeting, Window, bool]:
    """Return the instances of this host, their shared window, and whether they share memory."""
    wants = all(meeting.all_gather(settings.shared_memory))
    place = place_of_this_process() if wants and is_supported() else ""
    reason = "" if place else "shared memory needs Linux on x86-64 and a readable /proc"
    places = meeting.all_gather(place)
    reason = next(filter(None, meeting.all_gather(reason)), "") if wants else ""
    if all(places):
        local = meeting.split(places.index(places[meeting.rank]), meeting.rank)
        window, reason = _window_or_reason(local)
        # All hosts must use the same protocol. So no host uses shared memory if the instances of
        # any host cannot share memory.
        reasons = meeting.all_gather(reason)
        if window is not None and not any(reasons):
            return local, window, True
        reason = next(filter(None, reasons))
    if meeting.rank == 0 and reason:
        logging.getLogger("popdist").warning(_SLOWER, reason)
    alone = meeting.split(meeting.rank, 0)
    return alone, make_window(alone), False


def _window_or_reason(local: Meeting) -> tuple[Window | None, str]:
    """Make the shared memory of this host's instances; return it, or None and an error text."""
    try:
        return make_window(local), ""
    except WindowError as error:
        return None, str(error)


def _connect_without_tcp(
    meeting: Meeting, own_mesh: OwnMesh, color: int, key: int, *, takes_part: bool
) -> Links:
    """Connect one instance of each host by ``own_mesh``, without trying TCP."""
    mesh = own_mesh(meeting.split(color, key))
    return Links(mesh if takes_part else None, use_tcp=False)


def _connect_hosts(
    meeting: Meeting,
    settings: CollectiveSettings,
    own_mesh: OwnMesh | None,
    towards: str | None,
    color: int,
    key: int,
    *,
    takes_part: bool,
) -> Links:
    """Connect one instance of each host. All instances of ``meeting`` call this function.

    Args:
        meeting: All instances of the new communicator, which can exchange small values already.
        settings: The settings of the user.
        own_mesh: A function that makes a mesh if the hosts do not reach one another by TCP.
        towards: The argument ``towards`` of ``join``.
        color: A number. Instances with the same ``color`` are connected with one another.
        key: Instances with the same ``color`` are sorted by their ``key``.
        takes_part: Whether this instance is to be connected.

    Raises:
        PopdistError: The hosts do not reach one another, and ``own_mesh`` is None.
    """
    members = meeting.split(color, key)
    mesh = connect(members, settings.network, towards) if takes_part else None
    if all(meeting.all_gather(mesh is not None or not takes_part)):
        return Links(mesh, use_tcp=True)
    if mesh is not None:
        mesh.close()
    if own_mesh is None:
        raise PopdistError(_unreachable(settings.network, towards))
    if meeting.rank == 0:
        logging.getLogger("popdist").warning(_MPI_BETWEEN_HOSTS, settings.network or "any network")
    own = own_mesh(members)
    return Links(own if takes_part else None, use_tcp=False)


def _unreachable(network: str | None, towards: str | None) -> str:
    tried = network or (f"the network to {towards}" if towards else "the network of the host name")
    return (
        f"the hosts do not reach one another by TCP on {tried}. Open the ports between the hosts, "
        "or choose another network (an interface or a CIDR) with poprun-py --host-subnet, "
        f"{NETWORK} or GLOO_SOCKET_IFNAME"
    )
