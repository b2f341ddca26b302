"""Moves listening sockets of another process from all addresses to a single address.

The command mpirun and its daemons listen on every address of the machine. No option of mpirun
changes this. The launcher starts mpirun and moves the sockets of mpirun to a single address. On
every other host, the first wrapper process moves the sockets of the MPI daemon that started the
wrapper. If a process may trace another process, the kernel also lets it use the other's sockets.
This module contains no code that is specific to MPI. The wrapper of a program imports this module
too, so the module imports only popdist_listening and the standard library.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import time

import popdist_listening  # type: ignore[import-not-found]

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# The number of the system call pidfd_getfd, which is the same on every architecture.
_PIDFD_GETFD = 438
# These constants are from <linux/ptrace.h> and <linux/wait.h>.
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WAIT_ALL = 0x40000000
_STOP_SECONDS = 1.0
# The name of the loopback interface, and the seconds in which a client on another host completes
# its TCP handshake.
_LOOPBACK, _HANDSHAKE_SECONDS = "lo", 0.001
# A socket option from <asm-generic/socket.h>, and the return instruction of a packet filter from
# <linux/bpf_common.h>.
_SO_ATTACH_FILTER, _BPF_RETURN = 26, 0x06
_UNCONNECTED = struct.pack("=H14x", socket.AF_UNSPEC)
# PyDLL holds the global interpreter lock during a C call, so no other Python thread runs meanwhile.
_LIBC = ctypes.PyDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long


def move_of(process: int, network: str) -> list[int]:
    """Make sockets of another process listen on one address instead of on all addresses.

    The new address is this machine's address on ``network``.

    A socket is moved only if the kernel chose its port. The kernel does not let other sockets
    change their address. The other process is stopped during the move. During the move, the kernel
    drops the packets of new connections, and the senders repeat these packets after a second. A
    socket is not moved while connections wait to be accepted. A later call of this function may
    move such a socket.

    Args:
        process: The id of the other process. The other process must belong to this user. Some
            systems also require that the other process is a child of this process.
        network: The name of an interface, such as ``lo``, or a CIDR.

    Returns:
        The ports of the moved sockets.

    Raises:
        OSError: The kernel does not let this process use the sockets of the other process.
    """
    with contextlib.ExitStack() as held:
        listeners = [*_listeners(process, held)]
        if not listeners:
            return []
        with _standing_still(process):
            return [port for each in listeners if (port := _rebind(each, network))]


def _listeners(process: int, held: contextlib.ExitStack) -> "Iterator[socket.socket]":
    handle = os.pidfd_open(process)
    held.callback(os.close, handle)
    for name in os.listdir(f"/proc/{process}/fd"):
        # The other process may close a descriptor at any time.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{process}/fd/{name}").startswith("socket:"):
                lent = popdist_listening.borrowed(_lent(handle, int(name)))
                listener = held.enter_context(lent)
                if popdist_listening.listens_everywhere(listener):
                    yield listener


def _lent(handle: int, descriptor: int) -> int:
    """Duplicate a file descriptor of another process into this process, by pidfd_getfd(2)."""
    lent: int = _LIBC.syscall(_PIDFD_GETFD, handle, descriptor, 0)
    if lent < 0:
        error = ctypes.get_errno()
        # EBADF means that the other process has closed the descriptor. The caller ignores ENOENT.
        raise OSError(errno.ENOENT if error == errno.EBADF else error, os.strerror(error))
    return lent


# --- stopping the process ----------------------------------------------------------------------


@contextlib.contextmanager
def _standing_still(process: int) -> "Iterator[None]":
    """Stop all threads of another process during a block.

    The stopped threads also continue if this process ends. A running thread that waits for a
    connection would notice the change of its socket and fail.

    Raises:
        OSError: The process may not be traced, or has a thread that does not stop.
    """
    held: list[int] = []
    try:
        while new := [each for each in _threads(process) if each not in held]:
            for thread in new:
                if _LIBC.ptrace(_SEIZE, thread, None, None):
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error))
                held.append(thread)
                _LIBC.ptrace(_INTERRUPT, thread, None, None)
            for thread in new:
                _wait_until_stopped(thread)
        yield
    finally:
        _let_go(process, held)


def _let_go(process: int, held: list[int]) -> None:
    """Let stopped threads continue; collect the ends of threads that were killed meanwhile.

    The system keeps a killed thread until its tracer has waited for it, and so the parent of the
    process would wait for ever for the process. The main thread of a child of this process is left
    out, because its end belongs to the code that waits for the child.
    """
    left = [thread for thread in held if _LIBC.ptrace(_DETACH, thread, None, None)]
    if process in left:
        # The main thread ends after the others.
        left.remove(process)
        left += [] if _parent_of(process) == os.getpid() else [process]
    deadline = time.monotonic() + _STOP_SECONDS
    for thread in left:
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_PID, thread, os.WEXITED | os.WNOHANG | _WAIT_ALL) is None:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.0001)


def _parent_of(process: int) -> int:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _threads(process: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{process}/task")]


def _wait_until_stopped(thread: int) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    # Without WEXITED, waitid leaves the exit status of the thread to the thread's parent process.
    while os.waitid(os.P_PID, thread, os.WSTOPPED | os.WNOHANG | _WAIT_ALL) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(None, "it does not stand still")
        time.sleep(0.0001)


# --- moving one socket -------------------------------------------------------------------------


def _rebind(listener: socket.socket, network: str) -> int:
    """Bind a listening socket to one address. Return the port, or 0 if the socket was not moved."""
    everywhere, port, *_ = listener.getsockname()
    address = popdist_listening.address_in(network, listener.family)
    if address is None:
        return 0
    most = popdist_listening.queue(listener)[1]
    wanted, before = (_packed(listener.family, each, port) for each in (address, everywhere))
    number = listener.fileno()
    with popdist_listening.sharing_port(listener, address) as screen:
        _drop_all(screen)
        screen.listen(1)
        if network != _LOOPBACK:
            time.sleep(_HANDSHAKE_SECONDS)  # the queue does not include incomplete handshakes
        if popdist_listening.queue(listener)[0]:
            return 0
        _LIBC.connect(number, _UNCONNECTED, len(_UNCONNECTED))
        failed = _LIBC.bind(number, wanted, len(wanted)) and _LIBC.bind(number, before, len(before))
        _LIBC.listen(number, most)
    return 0 if failed else int(port)


def _drop_all(screen: socket.socket) -> None:
    """Make the kernel drop packets that arrive at a socket, instead of refusing connections."""
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    screen.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _packed(family: int, address: str, port: int) -> bytes:
    """Return an address as the C structure sockaddr_in or sockaddr_in6."""
    head = struct.pack("=H", family) + struct.pack("!H", port)
    number = socket.inet_pton(family, address)
    if family == socket.AF_INET:
        return head + number + bytes(8)
    return head + bytes(4) + number + bytes(4)
