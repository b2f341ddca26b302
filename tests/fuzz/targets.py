"""What reads bytes of others: each target takes any bytes, and raises only if a reader is at fault.

A reader may refuse with its documented error; it may raise nothing else, keep nothing that is much
larger than what it was given, and say the same however a stream was cut into pieces. test_fuzz.py
tries what hypothesis makes, coverage_guided.py what atheris finds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from popdist_py.collectives.between_hosts.mesh import ConnectionLostError
from popdist_py.html_pages.page import Chart
from popdist_py.ipu.page.comparison_section import comparison_section
from popdist_py.ipu.page.saved_reports import read_saved_reports
from popdist_py.peers import greeting
from popdist_py.peers.gate import Gate
from popdist_py.pods.model.json_values import decode, encode, to_json
from popdist_py.pods.model.pod_errors import InvalidRequestError
from popdist_py.pods.server import pod_api
from popdist_py.timeline.span_file import MIN_FILE_BYTES, SpanWriter, read_spans
from popdist_py.timeline.torch_traces import torch_spans
from popdist_py.torch_backend.messages.channels import INLINE_BYTES, Channel, Header, Kind
from poprun_py.display.formatting import read_json
from poprun_py.instance import control_protocol
from poprun_py.machines.lease_files import (
    JobProcess,
    LeaseRecord,
    QueueRecord,
    parse_record,
    record_text,
)
from poprun_py.machines.machine import HardwareError, load_machines
from poprun_py.planning.plan_file import plan_from_json
from poprun_py.running.supervise.connection import parse_hello

__all__ = ["TARGETS", "Target"]

SECRET, CLAIM_BYTES = b"s" * 32, 5
_ROOM: Final = 3000


@dataclass(frozen=True)
class Target:
    """A reader: ``run`` takes any bytes; ``seeds`` are those that it reads with success."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def pieces(data: bytes, most: int = 97) -> Iterator[bytes]:
    """Cut a stream into pieces of lengths that its own bytes decide."""
    at = 0
    while at < len(data):
        size = 1 + (data[at] + at) * 7 % most
        yield data[at : at + size]
        at += size


def is_short_line(error: Exception) -> None:
    """Check a refusal as people get it."""
    assert "\n" not in str(error)
    assert len(str(error)) < 1500


# --- the launcher's control channel ---------------------------------------------------------------


def _frames(parts: list[bytes]) -> tuple[list[tuple[bytes, bytes]], bool]:
    reader, found = control_protocol.Reader(), []
    try:
        for part in parts:
            found += reader.feed(part)
            # What waits for its end is not longer than a frame may be, whatever it announces.
            announced = int.from_bytes(reader._buffer[1:5], "big")
            assert len(reader._buffer) < 5 or announced <= control_protocol.MAX_PAYLOAD
    except ValueError:
        return found, True
    return found, False


def control_frames(data: bytes) -> None:
    """Frames are the same in one piece and in many; a first one is a hello, or refused."""
    cut, is_refused = _frames(list(pieces(data)))
    whole, also = _frames([data])
    assert is_refused == also
    # Of a stream that is refused, what came before is known in pieces alone.
    assert cut[: len(whole)] == whole
    assert is_refused or cut == whole
    for kind, payload in cut:
        with contextlib.suppress(ValueError):
            parse_hello(kind, payload)


def _control_seeds() -> list[bytes]:
    hello = {"rank": 0, "pid": 1, "host": "h", "token": "t", "port": 2, "time_ns": 3}
    first = control_protocol.pack(control_protocol.HELLO, json.dumps(hello).encode())
    more = control_protocol.pack(control_protocol.STDOUT, b"\x1b[31mred\n") + control_protocol.pack(
        control_protocol.KEYS_READ
    )
    return [first, first + more, control_protocol.pack(control_protocol.INSPECT, b'"stacks"')]


# --- connections between hosts --------------------------------------------------------------------


def gate(data: bytes) -> None:
    """Nobody gets in who does not know the secret; nothing is kept of who was turned away."""
    told: list[str] = []
    door = Gate(SECRET, CLAIM_BYTES, 1, told.append)
    listener = socket.socket(socket.AF_INET)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with contextlib.closing(door), socket.create_connection(listener.getsockname()) as stranger:
        door.listen(listener)
        for part in pieces(data[:1000]):
            with contextlib.suppress(OSError):
                stranger.sendall(part)
            assert door.serve() == []
            assert all(len(each.received) < 100 for each in door._pending.values())
        assert len(told) <= 1


def proofs(data: bytes) -> None:
    """What somebody says who does not know the secret is no proof, on either side."""
    called, nonce, rest = data[:16].ljust(16), data[16:32].ljust(16), data[32:]
    for check in (
        lambda: greeting.claim_of(SECRET, called, nonce, rest),
        lambda: greeting.proof(SECRET, called, rest, b""),
    ):
        try:
            check()
        except greeting.RefusedError:
            continue
        raise AssertionError("who does not know the secret is let in")


class _Post:
    """Takes messages as ``Messages`` does: it waits for the bytes of announced number 1."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.rooms = 0

    def on_header(self, channel: Channel, header: Header, data: memoryview) -> None:
        assert len(data) <= INLINE_BYTES
        assert len(data) == (header.size if header.kind == Kind.INLINE else 0)
        self.taken.append((header, bytes(data)))

    def room_for(self, channel: Channel, header: Header) -> memoryview:
        if header.number != 1:
            raise ConnectionLostError(channel.rank)
        self.rooms += 1
        self._room = bytearray(_ROOM)
        return memoryview(self._room)

    def on_filled(self, channel: Channel, header: Header) -> None:
        self.taken.append((header, bytes(self._room)))


def _messages(parts: list[bytes]) -> tuple[list[Any], bool]:
    post = _Post()
    channel = Channel(1, post)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        channel.open(mine)
        try:
            for part in parts:
                for at in range(0, len(part), 1 << 14):
                    theirs.sendall(part[at : at + (1 << 14)])
                    while channel.receive():
                        pass
                assert len(channel._rest) <= INLINE_BYTES + 64
        except ConnectionLostError:
            return post.taken, True
    return post.taken, False


def messages(data: bytes) -> None:
    """Messages are the same in one piece and in many; what no rank sends ends the connection."""
    cut, is_lost = _messages(list(pieces(data, 900)))
    whole, also = _messages([data])
    assert is_lost == also
    assert cut == whole


def _message_seeds() -> list[bytes]:
    inline = Header(Kind.INLINE, 3, 1, 4, 16, dtype=b"float32").pack() + bytes(range(16))
    data = Header(Kind.DATA, 0, 1, 750, _ROOM).pack() + bytes(_ROOM)
    others = b"".join(Header(kind, number=7, size=9).pack() for kind in Kind if kind > Kind.DATA)
    return [inline, data, inline + data + others + inline, others]


# --- the server of a pod --------------------------------------------------------------------------


def requests(data: bytes) -> None:
    """A body is the arguments of a call and goes back to them, or is refused in one line."""
    try:
        said = decode(data)
    except InvalidRequestError as error:
        is_short_line(error)
        return
    for call in pod_api.CALLS:
        try:
            arguments = call.read_arguments(said)
        except InvalidRequestError as error:
            is_short_line(error)
            continue
        again = decode(encode(to_json(arguments)))
        assert call.read_arguments(again) == arguments


def _request_seeds() -> list[bytes]:
    holder = {"host": "h", "pid": 1, "user": "u", "program": "p", "run_id": "r"}
    attach = {"partition": "p", "num_ipus": 2, "holder": holder, "ipus": [0, 1]}
    bodies = [{"name": "p", "force": True}, {"ids": ["a", "b"]}, {"name": "p"}, attach]
    return [json.dumps(each).encode() for each in bodies]


# --- files ----------------------------------------------------------------------------------------


def spans(data: bytes) -> None:
    """A file of spans is read, as far as it goes; every span ends after it begins."""
    found = read_spans(data)
    if found is not None:
        assert len(found.spans) <= len(data)
        assert all(each.begin <= each.end for each in (*found.spans, *found.open))


def _span_seeds() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "instance-0.0.spans")
        writer = SpanWriter(path, MIN_FILE_BYTES, "main", (1, 1))
        name, track = writer.intern("step"), writer.intern("main")
        for at in range(20):
            writer.write(name, track, at, at + 1, number=at, arguments='{"x": 1}')
        writer.open(name, track, 50)
        return [path.read_bytes()]


def torch_traces(data: bytes) -> None:
    """A trace of torch.profiler is read, or is none."""
    with contextlib.suppress(ValueError):
        torch_spans(data.decode("utf-8", "replace"), 0)


def _trace_seeds() -> list[bytes]:
    events = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}},
        {"ph": "X", "name": "op", "cat": "cpu_op", "pid": 1, "tid": 2, "ts": 1.5, "dur": 2},
    ]
    return [json.dumps({"baseTimeNanoseconds": 1, "traceEvents": events}).encode()]


def plans(data: bytes) -> None:
    """A saved plan is read, or refused in one line."""
    from poprun_py.errors import UsageError

    try:
        value = read_json(data)
    except ValueError as error:
        is_short_line(error)
        return
    try:
        plan_from_json(value, {})
    except UsageError as error:
        is_short_line(error)


def _plan_seeds() -> list[bytes]:
    from support.launcher.run_folders import a_plan

    from poprun_py.planning.plan_file import plan_to_json

    return [json.dumps(plan_to_json(a_plan(2, env=("A=1",)))).encode()]


def machines(data: bytes) -> None:
    """A saved machine is read, or refused in one line."""
    with contextlib.suppress(UnicodeDecodeError, HardwareError):
        load_machines(data.decode(), "x.json", ["a"])


def _machine_seeds() -> list[bytes]:
    from support.launcher.sysfs_trees import SNAPSHOTS

    return [(SNAPSHOTS / "example.json").read_bytes()]


def leases(data: bytes) -> None:
    """A lease file of another user is either rejected or safe to print."""
    for name in ("lease-a", "ticket-a"):
        record = parse_record(name, "u", data)
        if record is not None:
            assert math.isfinite(record.since)
            assert record.job.program.isprintable()


def _lease_seeds() -> list[bytes]:
    job = JobProcess(pid=1, process_start=2, program="p", run_id="r")
    common = {"name": "n", "user": "u", "job": job, "since": 1.0}
    held = LeaseRecord(**common, cpus=(0, 1), numa_nodes=(0,), is_shared=False)
    return [
        record_text(each).encode() for each in (held, QueueRecord(**common, number=3, outer=""))
    ]


def saved_reports(data: bytes) -> None:
    """A saved report about a model on IPUs is compared, or refused in one line."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            found = read_saved_reports(Path(file.name))
        except ValueError as error:
            is_short_line(error)
            return
    for part in comparison_section(found, found).parts:
        if isinstance(part, Chart):
            json.dumps(part.figure, allow_nan=False)


def _report_seeds() -> list[bytes]:
    ipu = {
        **{"ipu": 0, "needed": 9, "capacity": 20, "fullest_tile": 5, "fullest_io_tile": 0},
        "by_category": {"weights": 9},
    }
    memory = {"device": "mk2", "tile_bytes": 10, "fits": True, "ipus": [ipu]}
    execution = {
        **{"samples_per_second": 1.5, "cycles": 7, "seconds": 0.5, "samples": 3},
        "ipus": [{"ipu": 0, "busy": 0.5}],
    }
    return [json.dumps({"memory": memory, "execution": execution}).encode()]


TARGETS: Final = {
    "control_frames": Target(control_frames, _control_seeds),
    "gate": Target(gate, lambda: [os.urandom(0), bytes(16), bytes(16 + 32 + CLAIM_BYTES)]),
    "proofs": Target(proofs, lambda: [bytes(80), b"x" * 100]),
    "messages": Target(messages, _message_seeds),
    "requests": Target(requests, _request_seeds),
    "spans": Target(spans, _span_seeds),
    "torch_traces": Target(torch_traces, _trace_seeds),
    "plans": Target(plans, _plan_seeds),
    "machines": Target(machines, _machine_seeds),
    "leases": Target(leases, _lease_seeds),
    "saved_reports": Target(saved_reports, _report_seeds),
}
