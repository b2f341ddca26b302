"""A stranger: connects again and again to whoever listens at an address of a job's hosts.

``stranger_program.py find ADDRESS TARGETS END`` writes down who listens at this host's address.
``stranger_program.py besiege TARGETS END [USER]`` connects to them, and says different things each
time: nothing, a little, random bytes, other protocols, lengths that no frame has, a pickle. When
something stands in the file END, it says how often somebody was there. What listens at all
addresses, as MPI and torch do, is left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import sys
import time
from pathlib import Path

MOST_OPEN = 300
_LISTENS = "0A"
WORDS = (
    b"",
    b"x",
    bytes(16),
    bytes(100),
    random.randbytes(5000),
    b"GET / HTTP/1.1\r\n\r\n",
    b"H\xff\xff\xff\xff" + bytes(1000),
    b"H\x00\x01\x00\x00" + b"[" * 65536,
    # A pickle that makes a file in the folder in which it is read.
    b"cos\nsystem\n(S'touch pickle-was-read'\ntR.",
)


def find(address: str, targets: int, end: int) -> None:
    """Write down each port at which somebody listens at an address."""
    mine = f"{int.from_bytes(socket.inet_aton(address), 'little'):08X}"
    known = set()
    while not os.fstat(end).st_size:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            host, port = words[1].split(":")
            if words[3] == _LISTENS and host == mine and port not in known:
                known.add(port)
                os.write(targets, f"{address} {int(port, 16)}\n".encode())
        time.sleep(0.005)


def besiege(targets: int, end: int) -> None:
    """Connect to the newest target, with many connections open at a time."""
    poll, connections, num_met = select.epoll(), {}, 0
    for words in itertools.cycle(WORDS):
        if os.fstat(end).st_size:
            break
        lines = os.pread(targets, 1 << 20, 0).decode().splitlines()
        if not lines:
            time.sleep(0.005)
            continue
        address, port = random.choice(lines[-4:]).split()
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection.connect_ex((address, int(port)))
        connections[connection.fileno()] = connection, words
        poll.register(connection, select.EPOLLOUT)
        while len(connections) > MOST_OPEN:
            connections.pop(next(iter(connections)))[0].close()
        for descriptor, event in poll.poll(0.001):
            each, said = connections[descriptor]
            if event & (select.EPOLLERR | select.EPOLLHUP):
                connections.pop(descriptor)[0].close()
                continue
            num_met += 1
            with contextlib.suppress(OSError):
                each.send(said)
            poll.modify(descriptor, 0)
    print(num_met, flush=True)


if __name__ == "__main__":
    _, what, *rest = sys.argv
    if what == "find":
        host, file, stop = rest
        find(host, os.open(file, os.O_WRONLY | os.O_APPEND), os.open(stop, os.O_RDONLY))
    else:
        found, stopped = (os.open(each, os.O_RDONLY) for each in rest[:2])
        if rest[2:]:
            os.setuid(int(rest[2]))
        besiege(found, stopped)
