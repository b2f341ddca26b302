"""Sockets of another process that are moved to one address while it waits at them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from poprun_py.instance import program_environment

lent_sockets = program_environment.import_lent_sockets()
# A program that accepts every connection, as MPI does. An event without a connection is an error.
OTHER = """
import select, socket
sockets = [socket.create_server(("", 0)) for _ in range({each})]
sockets += [socket.create_server(("::", 0), family=socket.AF_INET6) for _ in range({each})]
print(*(each.getsockname()[1] for each in sockets), flush=True)
waiter = select.{waiter}()
for each in sockets:
    each.setblocking(False)
    waiter.register(each, {events})
by_number = {{each.fileno(): each for each in sockets}}
while True:
    for number, _ in waiter.poll():
        visitor, _ = by_number[number].accept()
        visitor.sendall(by_number[number].getsockname()[0].encode())
        visitor.close()
"""
WAITERS = {"poll": "select.POLLIN", "epoll": "select.EPOLLIN"}


@contextlib.contextmanager
def other(each: int, waiter: str = "poll") -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """Run a process that listens on every address, with ``each`` ports of each address family."""
    program = OTHER.format(each=each, waiter=waiter, events=WAITERS[waiter])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, [*map(int, process.stdout.readline().split())]
        finally:
            process.kill()


def visit(address: str, port: int) -> str:
    """Connect to a port and return the address that the listening process reports."""
    with socket.create_connection((address, port), 10) as visitor:
        return visitor.recv(100).decode()


@pytest.mark.parametrize("waiter", WAITERS)
def test_they_move_while_their_process_waits_and_sees_nothing_of_it(waiter):
    with other(20, waiter) as (process, ports):
        assert sorted(lent_sockets.move_of(process.pid, "lo")) == sorted(ports)
        assert lent_sockets.move_of(process.pid, "lo") == []
        for address, some in (("127.0.0.1", ports[:20]), ("::1", ports[20:])):
            assert {visit(address, port) for port in some} == {address}
        assert process.poll() is None


class Slow:
    """The C library, whose sockets take long to get another address."""

    def __init__(self, port: int) -> None:
        self._real = lent_sockets._LIBC
        self._port = port
        self.answers: list[str] = []
        self.visitor = threading.Thread(target=self._come)

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def connect(self, *words) -> int:
        done = self._real.connect(*words)
        self.visitor.start()
        self.visitor.join(0.05)
        return done

    def _come(self) -> None:
        try:
            self.answers.append(visit("127.0.0.1", self._port))
        except OSError as error:
            self.answers.append(str(error))


def test_who_comes_meanwhile_is_not_refused(monkeypatch):
    program = (
        "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); "
        "s.accept()[0].sendall(s.getsockname()[0].encode())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        slow = Slow(int(process.stdout.readline()))
        monkeypatch.setattr(lent_sockets, "_LIBC", slow)
        assert len(lent_sockets.move_of(process.pid, "lo")) == 1
        slow.visitor.join(20)
        process.kill()
        assert slow.answers == ["127.0.0.1"]


def test_a_socket_to_which_somebody_has_come_stays():
    program = (
        "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); "
        "input(); s.accept(); print(s.getsockname()[0])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), 5):
            assert lent_sockets.move_of(process.pid, "lo") == []
            assert process.communicate("\n", timeout=10)[0] == "0.0.0.0\n"


def test_how_it_ended_is_left_to_whoever_waits_for_it():
    with other(1) as (process, _):
        process.kill()
        with contextlib.suppress(OSError):
            lent_sockets.move_of(process.pid, "lo")
        assert process.wait(10) == -9


def test_a_process_that_is_killed_while_it_stands_still_ends():
    program = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
        "print('here', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with lent_sockets._standing_still(process.pid):
            assert len(lent_sockets._threads(process.pid)) == 2
            process.kill()
        assert process.wait(10) == -9


def test_a_process_that_is_gone_is_an_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        with pytest.raises(OSError):
            lent_sockets.move_of(ended.pid, "lo")
