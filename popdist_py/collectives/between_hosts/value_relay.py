"""The relay, which forwards small values between the instances of a job over one star of sockets.

Instance 0 runs the relay in a thread. Every instance, including instance 0, has one link to the
relay. An instance sends its value for an exchange, and the relay answers when all members of the
exchange have sent theirs. Different exchanges may be open at the same time.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

__all__ = ["Answer", "Exchanges", "Link", "Relay"]

_LENGTH_BYTES = 4
_CHUNK = 1 << 16
# An instance that reads none of its answers for this time is treated as lost.
_SEND_SECONDS = 10.0
# An instance that fails because instance 0 has left waits 2 s before it ends. Instance 0 must end
# before, so that the launcher reports instance 0 and its exit code.
_END_SECONDS = 1.0


class Answer(NamedTuple):
    """The relay's answer about one exchange.

    Attributes:
        key: The name of the exchange.
        kind: "values" for a complete exchange, "lost" if a member has left before it sent its
            value, or "missing" after a request for the members that have not sent their values.
        content: The values in the order of the members, or the indices of lost or missing members.
    """

    key: str
    kind: Literal["values", "lost", "missing"]
    content: list[Any]


class Link:
    """One end of a connection that carries JSON values in both directions.

    A forked child closes its copy of the connection. Otherwise, the connection would stay open
    after this process has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        self._connection = connection
        self._received = bytearray()
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(reference))

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return self._connection.fileno()

    def send(self, value: Any) -> None:
        """Send a JSON value.

        Raises:
            OSError: The other end has closed the connection or reads nothing.
        """
        data = json.dumps(value).encode()
        self._connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def receive(self) -> list[Any]:
        """Receive once; return the JSON values that are now complete.

        Raises:
            OSError: The other end has closed the connection.
        """
        data = self._connection.recv(_CHUNK)
        if not data:
            raise ConnectionResetError
        self._received += data
        return list(self._complete_values())

    def close(self) -> None:
        """Close this end of the connection."""
        self._connection.close()

    def _complete_values(self) -> Iterator[Any]:
        while len(self._received) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if len(self._received) < end:
                return
            value = json.loads(self._received[_LENGTH_BYTES:end])
            del self._received[:end]
            yield value


def _close(reference: weakref.ref[Link]) -> None:
    link = reference()
    if link is not None:
        link.close()


class Exchanges:
    """The open exchanges of a job. Each method returns the answers to send, by instance index."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[list[int], dict[int, Any]]] = {}
        self._lost: set[int] = set()

    def offer(
        self, instance: int, key: str, members: list[int], value: Any
    ) -> list[tuple[int, Answer]]:
        """Add the value of ``instance`` to the exchange ``key`` between ``members``."""
        _, values = self._open.setdefault(key, (members, {}))
        values[instance] = value
        if all(member in values for member in members):
            del self._open[key]
            answer = Answer(key, "values", [values[member] for member in members])
            # Instance 0 comes last, because its process may end as soon as it has its answer.
            return [(member, answer) for member in sorted(members, reverse=True)]
        return self._answers_about_lost(key)

    def withdraw(self, instance: int, key: str) -> list[tuple[int, Answer]]:
        """Take back the value of ``instance``, and answer which members' values are missing."""
        if key not in self._open:
            return []
        members, values = self._open[key]
        missing = [member for member in members if member not in values]
        values.pop(instance, None)
        return [(instance, Answer(key, "missing", missing))]

    def lose(self, instance: int) -> list[tuple[int, Answer]]:
        """Record that ``instance`` has left or ended."""
        self._lost.add(instance)
        return [answer for key in list(self._open) for answer in self._answers_about_lost(key)]

    def _answers_about_lost(self, key: str) -> list[tuple[int, Answer]]:
        """End an exchange for the members that wait for a lost one."""
        members, values = self._open[key]
        lost = [member for member in members if member in self._lost and member not in values]
        if not lost:
            return []
        waiting = list(values)
        values.clear()
        return [(member, Answer(key, "lost", lost)) for member in waiting]


class Relay:
    """Answers the requests of all instances in a thread until no instance has a link any more.

    Args:
        links: The relay's end of the link to each instance, by instance index.
    """

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = dict(links)
        self._exchanges = Exchanges()
        self._poll = select.poll()
        self._others_left = threading.Event()
        self._pid = os.getpid()
        self._instances: dict[int, int] = {}
        for instance, link in links.items():
            self._poll.register(link.fileno(), select.POLLIN)
            self._instances[link.fileno()] = instance

    def start(self) -> None:
        """Start the thread, which serves the other instances until they end.

        When Python exits, this process waits for the other instances, but only for a short time:
        instances that are about to end may still exchange values.
        """
        threading.Thread(target=self._run, name="popdist-relay", daemon=True).start()
        atexit.register(self._wait_for_others)

    def _wait_for_others(self) -> None:
        if os.getpid() == self._pid:
            self._others_left.wait(_END_SECONDS)

    def _run(self) -> None:
        try:
            while self._links:
                if self._links.keys() <= {0}:
                    self._others_left.set()
                self._serve_readable()
        finally:
            self._others_left.set()

    def _serve_readable(self) -> None:
        for descriptor, _ in self._poll.poll():
            instance = self._instances[descriptor]
            if instance in self._links:
                self._send(self._serve(instance))

    def _serve(self, instance: int) -> list[tuple[int, Answer]]:
        """Read from an instance; return the answers to its requests."""
        try:
            requests = self._links[instance].receive()
        except OSError:
            return self._drop(instance)
        answers = []
        for key, members, value in requests:
            if members is None:
                answers += self._exchanges.withdraw(instance, key)
            else:
                answers += self._exchanges.offer(instance, key, members, value)
        return answers

    def _send(self, answers: list[tuple[int, Answer]]) -> None:
        while answers:
            instance, answer = answers.pop(0)
            link = self._links.get(instance)
            if link is not None:
                try:
                    link.send(answer)
                except OSError:
                    answers += self._drop(instance)

    def _drop(self, instance: int) -> list[tuple[int, Answer]]:
        link = self._links.pop(instance)
        with suppress(KeyError, ValueError, OSError):
            self._poll.unregister(link.fileno())
        link.close()
        return self._exchanges.lose(instance)
