"""Messages between the launcher and the wrappers of the instances, as frames on a stream socket.

A frame is one byte for the kind of message, the length of the payload in four bytes, and the
payload. A payload is JSON unless the comment on its kind of message says otherwise.
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

# A wrapper first sends token, rank, pid, host and time_ns. Instance 0 also sends a free TCP port.
HELLO = b"H"
# After the program has started, the wrapper sends the program's process id and binding.
STARTED = b"S"
# Output of the program, as raw bytes.
STDOUT, STDERR = b"O", b"E"
# The changed result of ProgressMemory.progress() for a program that counts steps.
PROGRESS = b"A"
# The result of ActivitySampler.sample() for a program that counts no steps.
ACTIVITY = b"I"
# The wrapper answers OBSERVE with the program's time per activity, resource usage and new steps.
OBSERVED = b"N"
# The wrapper answers PROPOSE_STOP with the proposal and the number of stopRequested() calls.
POLLED = b"P"
# The wrapper answers DUMP_STACKS with the Python stacks of the instance's processes.
STACKS = b"Y"
# The number of bytes of keyboard input that the program had not read when it ended.
UNREAD = b"r"
# The program has read its keyboard input, so the launcher may send more input. No payload.
KEYS_READ = b"k"
# The program changed the modes of its terminal to [iflag, oflag, lflag, cc, whether the program
# dropped unread input].
TERMINAL_MODES = b"M"
# A program in breakpoint() sends ["enter", CALL], ["leave", CALL] or ["wait", CALL, INSTANCE],
# where CALL is the number of the call of breakpoint().
DEBUGGER = b"V"
# The wrapper answers PAUSE when all processes of the program are suspended.
PAUSED = b"Z"
# The wrapper answers ASK_CLOCK with [launcher's clock, wrapper's clock], in nanoseconds.
CLOCK = b"C"
# After the end of the program, the wrapper sends each part of the program's files: the file's name,
# a NUL, and the part compressed by zlib.
FILE = b"F"
# The wrapper answers LEASE with an empty object, the jobs that hold the CPUs, or a problem.
LEASED = b"L"
# The wrapper answers PREPARE: whether a spare can fork the program.
PREPARED = b"p"
# The number of the signal by which a process other than the launcher asked the wrapper to end.
STOP_SIGNAL = b"T"
# The program has started MPI itself, so that mpirun must not end before it. No payload.
STARTED_MPI = b"m"
# The wrapper killed processes that a successful program left running: [[pid, command], ...].
LEFTOVERS = b"K"
# The wrapper reports how the program ended, and its last steps. More output may follow.
PROGRAM_ENDED = b"D"
# After the end of all processes and all output, the wrapper repeats how the program ended.
INSTANCE_ENDED = b"X"
# The payloads of these messages from the wrapper are not JSON.
RAW = (STDOUT, STDERR, FILE)

# --- messages in both directions ------------------------------------------------------------------

# The launcher sends a file for the program before GO, in parts of raw bytes. An empty part is the
# end of the file. The wrapper answers with the path of the received file or with a problem.
INPUT_FILE = b"J"

# --- messages from the launcher to the wrapper ----------------------------------------------------

# GO asks the wrapper to start the program, and contains settings such as environment variables.
GO = b"G"
# Before GO, LEASE asks a wrapper to lease CPUs of its host for all instances on that host.
LEASE = b"L"
# Before GO, PREPARE asks a wrapper for a spare, which forks the program after GO. The payload is
# that of GO. Any later message ends a preparation that is not complete.
PREPARE = b"E"
# Keyboard input for the program, as raw bytes. An empty payload of KEYS ends the program's input.
KEYS = b"k"
# WINDOW_SIZE sets the size of the program's terminal: [rows, columns].
WINDOW_SIZE = b"W"
# NEW_TERMINAL lends the program's terminal to the program's debugger. If the program has no
# terminal, the wrapper creates one with the settings in the payload.
NEW_TERMINAL = b"M"
# The user has left the debugger at the call of breakpoint() whose number is the payload.
DEBUGGER_LEFT = b"V"
# PAUSE with true suspends all processes of the program; PAUSE with false lets them continue.
PAUSE = b"Z"
# SIGNAL asks the wrapper to send the program the signal whose number is the payload.
SIGNAL = b"K"
# PROPOSE_STOP proposes the number of the stopRequested() call that is to stop the program. With the
# number 0, PROPOSE_STOP only asks how often the program has called stopRequested().
PROPOSE_STOP = b"Q"
# All instances have accepted the proposed call of stopRequested().
AGREE_STOP = b"R"
# ASK_CLOCK contains the launcher's clock, and asks for the clock of the wrapper's host.
ASK_CLOCK = b"C"
# DUMP_STACKS asks for the message STACKS, and OBSERVE for the message OBSERVED. No payload.
DUMP_STACKS, OBSERVE = b"U", b"N"
# STOP sends the program a signal, later SIGKILL: [grace seconds, number of the signal].
STOP = b"T"
# After INSTANCE_ENDED, NEXT asks the wrapper to run the program once more, in the next attempt at
# the job. The messages that follow are those before GO, and GO, whose variables tell the wrapper
# its new instance. No payload.
NEXT = b"X"
# The wrapper may end. The payload tells whether the launcher restarts the job.
BYE = b"B"

# --- requests of other processes to the launcher's socket on its host -----------------------------

# A child process of a wrapper asks for the launcher's standard input. The launcher answers with one
# byte and the descriptor of its standard input.
STDIN = b"i"
# A command that inspects a running job asks for the Python stacks of the job's processes. The
# launcher answers INSPECT with one STACKS frame.
INSPECT = b"I"

# --- time-out, frames -----------------------------------------------------------------------------

# A host that sends nothing for 15 seconds is considered lost. Shorter stalls of the network are
# tolerated.
LOST_AFTER_SECONDS = 15


def keep_alive(channel: "Socket", idle_seconds: int = 5, interval_seconds: int = 2) -> None:
    """Let the kernel close a TCP connection whose peer stops answering, even with unsent data.

    The kernel probes a connection that was idle for some seconds, and repeats this at an interval.
    """
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", idle_seconds),
        ("TCP_KEEPINTVL", interval_seconds),
        ("TCP_KEEPCNT", (LOST_AFTER_SECONDS - 5) // 2),
        ("TCP_USER_TIMEOUT", LOST_AFTER_SECONDS * 1000),
    ):
        channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def pack(kind: bytes, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return kind + len(payload).to_bytes(4, "big") + payload


class Reader:
    """Cuts the byte stream of a connection into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Add received bytes, and return the kind and payload of each frame that is now complete.

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
