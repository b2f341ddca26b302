"""A bad wire between a host and the switch: a process that carries every packet, or does not.

python wire.py PORT

It runs in the network of the switch, takes PORT off it, and moves packets between the two by a pair
of taps: kernels made for virtual machines often have no netem. A line of JSON on stdin is what the
wire does from then on (``Faults``); at the end of stdin the port is on the switch again.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import ipaddress
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TAP_DEVICE = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 1 << 16
_ARP, _IPV4 = b"\x08\x06", b"\x08\x00"
IN, OUT = "in", "out"


def missing() -> str:
    """Say what keeps this machine from having such a wire; empty if nothing does."""
    return "" if os.access(TAP_DEVICE, os.W_OK) else f"no {TAP_DEVICE} that can be written"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a wire does to packets.

    ``loss``: share of the packets that are dropped, in each direction. ``delay_ms`` and
    ``jitter_ms``: each packet comes later by the first, give or take up to the second. ``dropped``:
    directions in which nothing passes, from (``out``) or to (``in``) the host; with ``peers``, only
    packets with these addresses at the other end. ``firewall``: directions in which TCP connections
    cannot be opened; the packets of those that are open pass.
    """

    loss: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    dropped: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    firewall: tuple[str, ...] = ()

    def drops(self, frame: bytes, direction: str, dice: random.Random) -> bool:
        """Whether a packet is lost."""
        if direction in self.dropped and (
            not self.peers or _other_end(frame, direction) in self.peers
        ):
            return True
        if direction in self.firewall and _opens_connection(frame):
            return True
        return self.loss > 0 and dice.random() < self.loss

    def seconds(self, dice: random.Random) -> float:
        """Return how much later a packet comes."""
        return max(0.0, self.delay_ms + dice.uniform(-1, 1) * self.jitter_ms) / 1000


def _other_end(frame: bytes, direction: str) -> str:
    """Return the IPv4 address at the other end of a packet; empty if it has none."""
    kind = frame[12:14]
    if kind not in (_ARP, _IPV4):
        return ""
    source, target = (28, 38) if kind == _ARP else (26, 30)
    start = target if direction == OUT else source
    return str(ipaddress.IPv4Address(frame[start : start + 4]))


def _opens_connection(frame: bytes) -> bool:
    """Tell whether a packet is the first of a TCP connection: SYN without ACK."""
    if frame[12:14] != _IPV4 or frame[23] != socket.IPPROTO_TCP:
        return False
    flags = frame[14 + 4 * (frame[14] & 0x0F) + 13]
    return flags & 0x12 == 0x02


def _tap(name: str) -> int:
    descriptor = os.open(TAP_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


def _ip(*words: str) -> None:
    subprocess.run(["ip", "link", *words], check=True)


def _carry(taps: dict[int, tuple[int, str]]) -> None:
    """Move packets until stdin ends.

    Args:
        taps: by where a packet comes from, where it goes, and the direction.
    """
    faults, dice, waiting, count = Faults(), random.Random(), [], 0
    poll = select.poll()
    for descriptor in (*taps, 0):
        poll.register(descriptor, select.POLLIN)
    while True:
        pause = None if not waiting else max(0.0, 1000 * (waiting[0][0] - time.monotonic()))
        for descriptor, _ in poll.poll(pause):
            if descriptor == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                faults = Faults(**json.loads(line))
                print("done", flush=True)
                continue
            target, direction = taps[descriptor]
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(descriptor, _FRAME)
                    if not faults.drops(frame, direction, dice):
                        due = time.monotonic() + faults.seconds(dice)
                        heapq.heappush(waiting, (due, count := count + 1, target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, target, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a link that is down takes nothing
                os.write(target, frame)


def main(port: str) -> None:
    host_side, switch_side, bridge = f"h-{port}", f"s-{port}", f"b-{port}"
    host_tap, switch_tap = _tap(host_side), _tap(switch_side)
    _ip("add", bridge, "type", "bridge")
    try:
        _ip("set", bridge, "up")
        _ip("set", host_side, "master", bridge, "up")
        _ip("set", switch_side, "master", "switch", "up")
        _ip("set", port, "master", bridge)
        print("ready", flush=True)
        _carry({host_tap: (switch_tap, OUT), switch_tap: (host_tap, IN)})
    finally:
        _ip("set", port, "master", "switch")
        _ip("delete", bridge)


if __name__ == "__main__":
    main(sys.argv[1])
