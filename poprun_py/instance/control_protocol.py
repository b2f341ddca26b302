"""The control channel between launcher and instance wrapper: frames on a stream socket.

A frame is one kind byte, the payload's length in four bytes, and the payload. Standard library
only and tiny: the wrapper imports this in front of every program.
"""

from poprun_py.instance.quick_imports import socket

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket as Socket

_HEADER_SIZE = 5  # without the struct module, which every start would import
MAX_PAYLOAD = 1 << 20

# wrapper -> launcher
HELLO = b"H"  # JSON: token, rank, pid, host, time_ns; instance 0 adds a free port
STARTED = b"S"  # JSON: the program's pid, what was bound
STDOUT = b"O"  # raw bytes
STDERR = b"E"  # raw bytes
PROGRESS = b"A"  # JSON: how far the program is, when the launcher wants it and it has changed
ACTIVITY = (
    b"I"  # JSON: the activity of a program that makes no steps, as SignsOfLife.look() returns it
)
OBSERVED = b"N"  # JSON: where time goes, what the program uses, new steps: the answer to OBSERVE
POLLED = b"P"  # JSON: the answer to PROPOSE_STOP: the proposal, and how often the program has asked
STACKS = b"Y"  # JSON: the Python stacks of the instance's processes, the answer to DUMP_STACKS
UNREAD = b"r"  # JSON: how many bytes of the KEYS the program had not read when it ended
KEYS_READ = b"k"  # the program has read the KEYS: there may be more
TERMINAL_MODES = (
    b"M"  # JSON: the program set its terminal: iflag, oflag, lflag, cc, whether input is dropped
)
DEBUGGER = b"V"  # JSON: [enter|leave, call] of breakpoint(), or [wait, call, instance]
PAUSED = b"Z"  # the answer to PAUSE: all processes of the program are stopped
CLOCK = b"C"  # JSON: [the launcher's monotonic nanoseconds that ASK_CLOCK brought, this host's]
FILE = b"F"  # a name, NUL, a part of that file of the program (zlib), when it has ended
INPUT_FILE = (
    b"J"  # JSON: the path that the program finds the INPUT_FILE file at, or the problem with it
)
LEASED = b"L"  # JSON: the answer to LEASE: empty, or who is in the way, or a problem
STOP_SIGNAL = b"T"  # JSON: the signal by which a process other than the launcher asked for the end
LEFTOVERS = (
    b"K"  # JSON: [[pid, command], ...] of killed processes that a program left at a good end
)
PROGRAM_ENDED = (
    b"D"  # JSON: how the program ended, at once, and its last steps; its output may follow
)
INSTANCE_ENDED = (
    b"X"  # JSON: how it ended, once nothing is left of the program and its output is sent
)
# Of these, those whose payload is no JSON.
RAW = (STDOUT, STDERR, FILE)
# launcher -> wrapper
GO = b"G"  # JSON: variables for the program; how often to look for what, and whether to tell all
LEASE = b"L"  # JSON: the CPUs of this host to lease for all instances here, before GO
INPUT_FILE = b"J"  # raw bytes of a file for the program, before GO; none: its end, once
KEYS = b"k"  # raw bytes for the program to read; none: the end of its input, once
WINDOW_SIZE = b"W"  # JSON: rows and columns of the program's terminal
NEW_TERMINAL = b"M"  # JSON: what a new terminal is like: the debugger of the program may use it
DEBUGGER_LEFT = b"V"  # JSON: the call of breakpoint() whose debugger was left, by any instance
PAUSE = b"Z"  # JSON: true stops all processes of the program, false lets them go on
SIGNAL = b"K"  # JSON: a signal number for the program
PROPOSE_STOP = b"Q"  # JSON: stop at this call of stopRequested(); 0 only asks how many there were
AGREE_STOP = b"R"  # JSON: the proposal that holds for all instances
ASK_CLOCK = b"C"  # JSON: the launcher's monotonic nanoseconds: answer with this host's
DUMP_STACKS = b"U"  # send the stacks
OBSERVE = b"N"  # tell where time goes
STOP = b"T"  # JSON: [grace seconds, signal]; send the signal, and SIGKILL after the grace time
BYE = b"B"  # the wrapper may end
# child of a wrapper -> launcher on this host, on the socket in its private folder
STDIN = b"i"  # the answer is one byte that carries the descriptor of the launcher's standard input
# whoever inspects a running job -> launcher, on the socket in its private folder
INSPECT = b"I"  # JSON: what is wanted; the answer comes as one STACKS frame


# A host that says nothing for this long is lost; a network that stalls for less is not.
LOST_AFTER_SECONDS = 15


def keep_alive(channel: "Socket") -> None:
    """Let the kernel notice a TCP peer that is gone without a word, also while data is unsent."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", (LOST_AFTER_SECONDS - 5) // 2),
        ("TCP_USER_TIMEOUT", LOST_AFTER_SECONDS * 1000),
    ):
        channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def pack(kind: bytes, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return kind + len(payload).to_bytes(4, "big") + payload


class Reader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take bytes and return the list of (kind, payload) that are complete now.

        Raises:
            ValueError: the peer does not speak this protocol.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEADER_SIZE:
            kind = bytes(self._buffer[:1])
            length = int.from_bytes(self._buffer[1:_HEADER_SIZE], "big")
            if length > MAX_PAYLOAD:
                raise ValueError("frame too long")
            end = _HEADER_SIZE + length
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[_HEADER_SIZE:end])))
            del self._buffer[:end]
        return frames
