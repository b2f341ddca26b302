"""Messages between the launcher and the wrappers of the instances, as frames on a stream socket.

A frame is one byte for the kind of message, the length of the payload in four bytes, and the
payload. Payloads are JSON unless the comment of their kind says otherwise.
"""

from poprun_py.instance.quick_imports import socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from _socket import socket as Socket

# The number of bytes of a frame before its payload. Frames are packed without the struct module,
# because its import takes time.
_HEADER_SIZE = 5
MAX_PAYLOAD = 1 << 20

# --- messages from the wrapper to the launcher ----------------------------------------------------

# The first message: token, rank, pid, host, time_ns and, from instance 0, a free port.
HELLO = b"H"
# The program has started: its process id and binding.
STARTED = b"S"
# Output of the program, as raw bytes.
STDOUT, STDERR = b"O", b"E"
# The number of steps and other calls so far, if the launcher asked for it and if it has changed.
PROGRESS = b"A"
# The result of ActivitySampler.sample() for a program that counts no steps.
ACTIVITY = b"I"
# Answers OBSERVE with the program's time per activity, resource usage and new steps.
OBSERVED = b"N"
# Answers PROPOSE_STOP with the proposal and the number of calls of stopRequested() so far.
POLLED = b"P"
# Answers DUMP_STACKS with the Python stacks of the instance's processes.
STACKS = b"Y"
# The number of bytes of keyboard input that the program had not read when it ended.
UNREAD = b"r"
# The program has read its keyboard input, so the launcher may send more. No payload.
KEYS_READ = b"k"
# The program changed the modes of its terminal: [iflag, oflag, lflag, cc, whether unread input was
# dropped].
TERMINAL_MODES = b"M"
# A request of a program in breakpoint(): ["enter" or "leave", number of the call] or ["wait",
# number of the call, instance].
DEBUGGER = b"V"
# Answers PAUSE when all processes of the program are suspended.
PAUSED = b"Z"
# Answers ASK_CLOCK with [the launcher's nanoseconds, the monotonic nanoseconds of this host].
CLOCK = b"C"
# A part of a file that the program wrote, sent after its end: the file's name, a NUL, and the part
# compressed by zlib.
FILE = b"F"
# Answers LEASE: an empty object after success, or the jobs that hold the CPUs, or a problem.
LEASED = b"L"
# A process other than the launcher has asked the wrapper to end by the signal with this number.
STOP_SIGNAL = b"T"
# The processes that the program left running when it succeeded, and that were then killed: [[pid,
# command], ...].
LEFTOVERS = b"K"
# How the program ended, with the steps that were not yet reported. More output may follow.
PROGRAM_ENDED = b"D"
# How the program ended, after all of its processes have ended and all output was sent.
INSTANCE_ENDED = b"X"
# The kinds of messages from the wrapper whose payload is not JSON.
RAW = (STDOUT, STDERR, FILE)

# --- messages in both directions ------------------------------------------------------------------

# A file for the program, sent before GO in parts of raw bytes; an empty part ends the file. The
# wrapper answers with the path of the file or with a problem.
INPUT_FILE = b"J"

# --- messages from the launcher to the wrapper ----------------------------------------------------

# Starts the program: its environment variables, and the seconds between reports of its progress.
GO = b"G"
# Asks the wrapper, before GO, to lease CPUs of its host for all instances on that host.
LEASE = b"L"
# Keyboard input for the program, as raw bytes. An empty payload ends the input.
KEYS = b"k"
# Sets the size of the program's terminal: [rows, columns].
WINDOW_SIZE = b"W"
# Creates a terminal with these settings for the program, unless it has one, and lends the terminal
# to the program's debugger.
NEW_TERMINAL = b"M"
# The user has left the debugger of some instance, at the call of breakpoint() with this number.
DEBUGGER_LEFT = b"V"
# Suspends all processes of the program (true) or continues them (false).
PAUSE = b"Z"
# Asks the wrapper to send the signal with this number to the program.
SIGNAL = b"K"
# Proposes the number of a call of stopRequested() that is to stop the program. The number 0 only
# asks for the number of calls so far.
PROPOSE_STOP = b"Q"
# All instances have accepted the proposed call of stopRequested().
AGREE_STOP = b"R"
# Asks for the clock of the wrapper's host: the launcher's monotonic nanoseconds.
ASK_CLOCK = b"C"
# DUMP_STACKS asks for the message STACKS, and OBSERVE for the message OBSERVED. No payload.
DUMP_STACKS, OBSERVE = b"U", b"N"
# Stops the program: [grace seconds, number of the signal]. SIGKILL follows after the grace time.
STOP = b"T"
# The wrapper may end. No payload.
BYE = b"B"

# --- requests of other processes to the launcher's socket on its host -----------------------------

# A child process of a wrapper asks for the launcher's standard input. The launcher answers with one
# byte, sent together with the descriptor of its standard input.
STDIN = b"i"
# A command that inspects a running job asks for its Python stacks. The launcher answers with one
# STACKS frame.
INSPECT = b"I"

# --- time-out, frames -----------------------------------------------------------------------------

# A host that sends nothing for 15 seconds is considered lost. Shorter stalls of the network are
# tolerated.
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
            length = int.from_bytes(self._buffer[1:_HEADER_SIZE], "big")
            if length > MAX_PAYLOAD:
                raise ValueError("frame too long")
            end = _HEADER_SIZE + length
            if len(self._buffer) < end:
                break
            frames.append((bytes(self._buffer[:1]), bytes(self._buffer[_HEADER_SIZE:end])))
            del self._buffer[:end]
        return frames
