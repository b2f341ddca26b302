"""The exchange of small values over sockets, for jobs that do not start MPI.

Instance 0 listens until every instance has connected, and then relays the values. In a job with one
host, it listens at a Unix socket in the job's folder. In a job with several hosts, it listens on
the network between the hosts, and both ends of a connection prove that they know the job's secret.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeAlias

from popdist_py.collectives.between_hosts.tcp_connect import family_of, own_address
from popdist_py.collectives.between_hosts.value_relay import Answer, Link, Relay
from popdist_py.collectives.waiting import WaitLimits, WaitTime
from popdist_py.environment import (
    JOB_FOLDER,
    MEETING_PORT,
    MEMORY_CHECKPOINTS,
    RESTART_COUNT,
    CollectiveSettings,
    InstanceEnvironment,
    job_secret,
)
from popdist_py.errors import InstanceLostError, PopdistError
from popdist_py.peers.calls import Calls
from popdist_py.peers.gate import Gate

__all__ = ["SocketMeeting", "address_of_relay", "connect_job"]

# The path of a Unix socket, or the host and the port of a TCP socket.
Address: TypeAlias = str | tuple[str, int]

_CALL = "popdist_py.init()"
_CLAIM_BYTES = 4
# Seconds between two attempts to reach instance 0, which may start later than the others.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-3, 0.1
# The longest time in seconds for which a thread waits for answers before it looks at time limits.
_CHECK_SECONDS = 0.05


def address_of_relay(environ: Mapping[str, str], instance: InstanceEnvironment) -> Address | None:
    """Return the address at which instance 0 relays values; None if the job connects over MPI."""
    if environ.get(MEMORY_CHECKPOINTS) != "1":
        return None
    if instance.num_local_instances == instance.num_instances:
        folder = environ.get(JOB_FOLDER)
        # A restarted program must not connect to the socket of a program that was killed.
        return f"{folder}/relay-{environ.get(RESTART_COUNT, '0')}" if folder else None
    host, port = environ.get("MASTER_ADDR"), environ.get(MEETING_PORT, "")
    return (host, int(port)) if host and port.isdecimal() else None


def connect_job(
    address: Address,
    instance: InstanceEnvironment,
    settings: CollectiveSettings,
    environ: Mapping[str, str],
) -> SocketMeeting:
    """Return a SocketMeeting of all instances of the job, which must all call this function.

    Like the start of MPI, this function waits for the other instances without a time limit: a
    program may prepare its data for a long time before it joins. The launcher ends the job if an
    instance fails.

    Raises:
        PopdistError: Instance 0 cannot listen at the address.
    """
    secret = job_secret(environ)
    if instance.instance_index > 0:
        link = Link(_call(address, secret, instance.instance_index))
    else:
        own, theirs = socket.socketpair()
        callers = _accept_all(address, secret, settings.network, instance.num_instances)
        Relay({0: Link(theirs), **{index: Link(each) for index, each in callers.items()}}).start()
        link = Link(own)
    members = range(instance.num_instances)
    relayed = _RelayedValues(link, instance.instance_index)
    relayed.exchange("joined", list(members), None, WaitLimits(float("inf")), _CALL)
    return SocketMeeting(relayed, members, "job", WaitLimits(settings.hang_timeout), _CALL)


class SocketMeeting:
    """Some or all instances of a job; satisfies the protocol ``JobMeeting``.

    Args:
        relayed: The values that this instance exchanges over the relay.
        members: The indices of the instances in the job, in the order of their ranks.
        name: The prefix of the names of all exchanges of this object.
        limits: The time limits of exchanges.
        call: The name of the call that makes the exchanges, for error messages.
    """

    # Sockets of a meeting cannot send arrays. Without TCP between the hosts, ``join`` fails.
    own_mesh = None

    def __init__(
        self,
        relayed: _RelayedValues,
        members: Sequence[int],
        name: str,
        limits: WaitLimits,
        call: object,
    ) -> None:
        self._relayed = relayed
        self._members = list(members)
        self._name = name
        self._limits = limits
        self._call = call
        self._count = 0
        self.rank = self._members.index(relayed.instance)
        self.size = len(self._members)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values that the instances passed, in the order of their ranks.

        Raises:
            InstanceLostError: An instance has ended, or did not make this call in time.
        """
        self._count += 1
        key = f"{self._name}/{self._count}"
        return self._relayed.exchange(key, self._members, value, self._limits, self._call)

    def broadcast(self, value: Any) -> Any:
        """Return the value that rank 0 passed."""
        return self.all_gather(value if self.rank == 0 else None)[0]

    def split(self, color: int, key: int) -> SocketMeeting:
        """Return a SocketMeeting of the instances with an equal ``color``, ordered by ``key``."""
        pairs = self.all_gather([color, key])
        ranks = [rank for rank in range(self.size) if pairs[rank][0] == color]
        ranks.sort(key=lambda rank: pairs[rank][1])
        members = [self._members[rank] for rank in ranks]
        name = f"{self._name}/{self._count}/{color}"
        return SocketMeeting(self._relayed, members, name, self._limits, self._call)

    def group(self, ranks: Sequence[int], limits: WaitLimits, call: object) -> SocketMeeting:
        """Return a SocketMeeting of the given ranks. Only these ranks call this method, once.

        Raises:
            InstanceLostError: A rank has ended, or did not call this method in time.
        """
        members = [self._members[rank] for rank in ranks]
        name = f"group/{','.join(map(str, members))}"
        meeting = SocketMeeting(self._relayed, members, name, limits, call)
        meeting.all_gather(None)
        return meeting


class _RelayedValues:
    """The exchanges of one instance over its link to the relay, which several threads may make.

    Args:
        link: This instance's end of its link to the relay.
        instance: The index of this instance in the job.
    """

    def __init__(self, link: Link, instance: int) -> None:
        self.instance = instance
        self._link = link
        # The last meeting that uses the link closes it, so that the relay's thread can end.
        weakref.finalize(self, link.close)
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}

    def exchange(
        self, key: str, members: list[int], value: Any, limits: WaitLimits, call: object
    ) -> list[Any]:
        """Return the values that the members passed to the exchange ``key``.

        Raises:
            InstanceLostError: A member has ended, or did not make the exchange in time.
        """
        waited, has_asked = WaitTime(), False
        try:
            self._send([key, members, value])
            while (answer := self._answers.pop(key, None)) is None:
                self._receive()
                if not has_asked and waited.seconds() > limits.hang_timeout:
                    has_asked = True
                    self._send([key, None, None])
        except OSError:
            # The relay ends with instance 0.
            answer = Answer(key, "lost", [0])
        match answer.kind:
            case "values":
                return answer.content
            case "missing":
                raise limits.late_error(answer.content, call)
            case "lost":
                time.sleep(limits.launcher_grace)
                instances = ", ".join(map(str, answer.content))
                raise InstanceLostError(f"{call}: instance {instances} ended or left the job")

    def _send(self, request: list[Any]) -> None:
        with self._lock:
            self._link.send(request)

    def _receive(self) -> None:
        """Wait a short time for answers of any exchange; another thread may receive them, too."""
        if not self._lock.acquire(timeout=_CHECK_SECONDS):
            return
        try:
            poll = select.poll()
            poll.register(self._link.fileno(), select.POLLIN)
            if poll.poll(1000 * _CHECK_SECONDS):
                for answer in map(Answer._make, self._link.receive()):
                    self._answers[answer.key] = answer
        finally:
            self._lock.release()


def _accept_all(
    address: Address, secret: bytes, network: str | None, size: int
) -> dict[int, socket.socket]:
    """Return the connections to the instances 1 to ``size`` - 1, after all have connected.

    Raises:
        PopdistError: This process cannot listen at the address.
    """
    callers: dict[int, socket.socket] = {}
    gate = Gate(secret, _CLAIM_BYTES, size, logging.getLogger("popdist").warning)
    with closing(gate):
        gate.listen(_listener(address, network))
        poll = select.poll()
        poll.register(gate, select.POLLIN)
        while len(callers) < size - 1:
            # While a handshake is incomplete, the gate must also look at its time limit.
            poll.poll(1000 if gate.has_pending else None)
            for caller in gate.serve():
                index = int.from_bytes(caller.claim, "big")
                if 0 < index < size and index not in callers:
                    callers[index] = caller.connection
                else:
                    caller.connection.close()
    if isinstance(address, str):
        Path(address).unlink(missing_ok=True)
    return callers


def _listener(address: Address, network: str | None) -> socket.socket:
    """Return a socket that listens at the address of the relay.

    Raises:
        PopdistError: This process cannot listen at the address.
    """
    try:
        if isinstance(address, str):
            return _local_listener(address)
        host, port = address
        own = own_address(network, set(), towards=host) or host
        return socket.create_server((own, port), family=family_of(own), backlog=socket.SOMAXCONN)
    except OSError as error:
        raise PopdistError(
            f"instance 0 cannot open the address {address}, to which the other instances connect: "
            f"{error}"
        ) from None


def _local_listener(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def _call(address: Address, secret: bytes, index: int) -> socket.socket:
    """Return a connection to the relay; repeat the attempt until instance 0 listens."""
    claim, pause = index.to_bytes(_CLAIM_BYTES, "big"), _SHORTEST_PAUSE
    while True:
        if isinstance(address, str):
            connection = _call_local(address, claim)
        else:
            connection = _call_remote(address, secret, claim)
        if connection is not None:
            return connection
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _call_local(path: str, claim: bytes) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        connection.connect(path)
        connection.sendall(claim)
        return connection
    connection.close()
    return None


def _call_remote(address: tuple[str, int], secret: bytes, claim: bytes) -> socket.socket | None:
    calls: Calls[int] = Calls()
    with closing(calls), suppress(OSError):
        calls.begin(0, address, secret, claim)
        poll = select.poll()
        poll.register(calls, select.POLLIN)
        while calls:
            poll.poll(1000 * _CHECK_SECONDS)
            for _, connection in calls.serve():
                return connection
    return None
