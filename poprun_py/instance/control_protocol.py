"""Messages between the launcher and the wrappers of the instances, as frames on a stream socket.

A frame is one byte for the kind of message, the length of the payload in four bytes, and the
payload. Payloads are JSON unless the comment of their kind says otherwise. Every wrapper imports
this module at its start, so it imports little.
"""

from poprun_py.instance.quick_imports import socket

TYPE_CHECKING = False  # not imported from typing, which takes long to import
if TYPE_CHECKING:
    from _socket import socket as Socket

_HEADER_SIZE = 5  # converted without the struct module, whose import would delay every start
MAX_PAYLOAD = 1 << 20

# From the wrapper to the launcher.
# The first message, with token, rank, pid, host and time_ns. Instance 0 adds a free port.
HELLO = b"H"
# The program has started. The payload has its process id and its binding.
STARTED = b"S"
# Output of the program, as raw bytes.
STDOUT, STDERR = b"O", b"E"
# Steps and other calls of the program, if the launcher asked for them and they have changed.
PROGRESS = b"A"
# The result of ActivitySampler.sample() for a program that counts no steps.
ACTIVITY = b"I"
# Answers OBSERVE with the program's time per activity, its resource usage and its new steps.
OBSERVED = b"N"
# Answers PROPOSE_STOP with the proposal and the number of calls of stopRequested() so far.
POLLED = b"P"
# Answers DUMP_STACKS with the Python stacks of the instance's processes.
STACKS = b"Y"
# The number of bytes of KEYS that the program had not read when it ended.
UNREAD = b"r"
# The program has read the KEYS, so the launcher may send more. No payload.
KEYS_READ = b"k"
# The program changed its terminal to [iflag, oflag, lflag, cc, whether unread input was dropped].
TERMINAL_MODES = b"M"
# The program calls breakpoint(): [enter or leave, call] or [wait, call, instance].
DEBUGGER = b"V"
# Answers PAUSE when all processes of the program are stopped.
PAUSED = b"Z"
# Answers ASK_CLOCK with [the launcher's nanoseconds, the monotonic nanoseconds of this host].
CLOCK = b"C"
# A part of a file that the program wrote. It is sent after the program's end, and consists of the
# file's name, a NUL and the part, compressed by zlib.
FILE = b"F"
# Answers LEASE with an empty object, with the jobs that hold the CPUs, or with a problem.
LEASED = b"L"
# Another process than the launcher has asked the wrapper to end. The payload is its signal.
STOP_SIGNAL = b"T"
# [[pid, command], ...] of processes that the program left at a good end and that were killed.
LEFTOVERS = b"K"
# How the program ended, and its last steps. Sent at once; output of the program may follow.
PROGRAM_ENDED = b"D"
# How the program ended. Sent after all of its output, when none of its processes is left.
INSTANCE_ENDED = b"X"
# The kinds of these whose payload is not JSON.
RAW = (STDOUT, STDERR, FILE)

# Sent in both directions before GO. The launcher sends a file for the program in parts, as raw
# bytes; an empty part ends the file. The wrapper answers with the path of the file or a problem.
INPUT_FILE = b"J"

# From the launcher to the wrapper.
# Starts the program. The payload has its variables, and how often to report its progress.
GO = b"G"
# Asks the wrapper to lease CPUs of its host for all instances on that host. Sent before GO.
LEASE = b"L"
# Input of the program, as raw bytes. An empty payload ends the input.
KEYS = b"k"
# The rows and columns of the program's terminal.
WINDOW_SIZE = b"W"
# The modes of a new terminal, which the debugger of the program may use.
NEW_TERMINAL = b"M"
# The call of breakpoint() whose debugger the user has left, in any instance.
DEBUGGER_LEFT = b"V"
# true stops all processes of the program, false continues them.
PAUSE = b"Z"
# The number of a signal for the program.
SIGNAL = b"K"
# The call of stopRequested() that is to stop the program. 0 only asks for the calls so far.
PROPOSE_STOP = b"Q"
# The proposal that all instances accept.
AGREE_STOP = b"R"
# The launcher's monotonic nanoseconds.
ASK_CLOCK = b"C"
# Requests for STACKS and for OBSERVED, without a payload.
DUMP_STACKS, OBSERVE = b"U", b"N"
# Stops the program: [grace seconds, signal]. SIGKILL follows after the grace time.
STOP = b"T"
# The wrapper may end. No payload.
BYE = b"B"

# Other connections to the launcher's socket on its host.
# A request of a wrapper's child. The answer is one byte, sent together with the descriptor of the
# launcher's standard input.
STDIN = b"i"
# A request of a command that inspects a running job. The answer is one STACKS frame.
INSPECT = b"I"

# A host that sends nothing for this long is lost. Shorter stalls of the network are tolerated.
LOST_AFTER_SECONDS = 15


def keep_alive(channel: "Socket") -> None:
    """Let the kernel close a TCP connection whose peer no longer answers, even with unsent data."""
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
        """Add received bytes, and return kind and payload of each frame that is complete now.

        Raises:
            ValueError: A payload is too long, so the peer does not use this protocol.
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
