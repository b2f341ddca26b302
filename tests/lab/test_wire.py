"""The lab's bad wire does what it is told: packets are lost, late, or pass one way only."""

from __future__ import annotations

import sys

import pytest
from lab.lab import Lab
from lab.wire import IN, OUT, Faults, missing

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(60)]
ASKED = 60
ECHO = """
import socket
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.bind(("", 7))
print("here", flush=True)
while True:
    data, whence = asked.recvfrom(100)
    asked.sendto(data, whence)
"""
ASK = """
import socket, sys, time
address, count = sys.argv[1], int(sys.argv[2])
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
began, seconds = {}, []
for number in range(count):
    began[number] = time.monotonic()
    asking.sendto(str(number).encode(), (address, 7))
asking.settimeout(float(sys.argv[3]))
try:
    while len(seconds) < count:
        number = int(asking.recv(100))
        seconds.append(time.monotonic() - began[number])
except TimeoutError:
    pass
print(len(seconds), min(seconds, default=0))
"""


@pytest.fixture(scope="module")
def answered(lab_permitted, tmp_path_factory):
    """Three hosts, of which the second and third answer packets, and a function that sends some."""
    if missing():
        pytest.skip(missing())
    with Lab(tmp_path_factory.mktemp("lab"), 3) as lab:
        yield from _answered(lab)


def _answered(lab):
    echoes = [host.start(sys.executable, "-c", ECHO) for host in lab.hosts[1:]]
    for echo in echoes:
        assert echo.stdout.readline() == "here\n"

    def ask(host, count=ASKED, seconds=5):
        """Return how many packets were answered, and the shortest time that one took."""
        done = lab[0].run(sys.executable, "-c", ASK, lab[host].address, count, seconds)
        number, shortest = done.stdout.split()
        return int(number), float(shortest)

    yield lab, ask
    for echo in echoes:
        echo.kill()  # and what it started ends with the host
        echo.wait()
        echo.stdout.close()
        echo.stderr.close()


def test_a_bad_wire_loses_and_delays_packets_and_can_be_put_right(answered):
    lab, ask = answered
    lab[1].wire(Faults())
    assert ask(1)[0] == ASKED
    lab[1].wire(Faults(loss=0.3))
    assert 0 < ask(1, seconds=1)[0] < ASKED
    assert ask(2)[0] == ASKED  # another host's is good
    lab[1].wire(Faults(delay_ms=60, jitter_ms=10))
    count, shortest = ask(1)
    assert count == ASKED
    assert shortest > 0.1  # there and back
    lab[1].wire(Faults(loss=1))
    assert ask(1, 5, 0.5)[0] == 0
    lab[1].repair()
    assert ask(1)[0] == ASKED


def test_a_wire_that_passes_packets_one_way_only(answered):
    lab, ask = answered
    assert ask(1)[0] == ASKED  # they know where each other is
    for direction in (IN, OUT):
        lab[1].wire(Faults(dropped=(direction,)))
        assert ask(1, 5, 0.5)[0] == 0
    lab[1].wire(Faults(dropped=(OUT,), peers=(lab[2].address,)))
    assert ask(1)[0] == ASKED
    lab[1].wire(Faults(dropped=(OUT,), peers=(lab[0].address,)))
    assert ask(1, 5, 0.5)[0] == 0
    lab[1].repair()


def test_a_host_with_another_address_is_gone_until_it_has_its_own_again(answered):
    lab, ask = answered
    lab[1].readdress("10.99.0.77")
    assert ask(1, 5, 0.5)[0] == 0
    lab[1].repair()
    assert ask(1)[0] == ASKED
