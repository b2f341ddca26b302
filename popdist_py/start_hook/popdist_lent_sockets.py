"""Sockets of another process that listen on every address, and how they get a single one.

mpirun and its daemons have no option for it. The launcher moves those of mpirun, which it starts;
on every other host the first wrapper those of the daemon that started it. The kernel lends sockets
to whoever may trace the process. Nothing here knows which process that is. Standard library only:
a wrapper imports it too.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import time

import popdist_listening  # type: ignore[import-not-found]

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PIDFD_GETFD = 438  # the same on every architecture
# <linux/ptrace.h>, <linux/wait.h>
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WAIT_ALL = 0x40000000
_STOP_SECONDS = 1.0
# In a handshake of TCP, between hosts, the caller has this long to answer.
_LOOPBACK, _HANDSHAKE_SECONDS = "lo", 0.001
# <asm-generic/socket.h>, and the instruction of <linux/bpf_common.h> that ends a filter.
_SO_ATTACH_FILTER, _BPF_RETURN = 26, 0x06
_UNCONNECTED = struct.pack("=H14x", socket.AF_UNSPEC)
# The interpreter's lock is kept: no thread of ours comes between the calls.
_LIBC = ctypes.PyDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long


def move_of(process: int, network: str) -> list[int]:
    """Move what another process listens on everywhere to this machine's address on a network.

    Only sockets whose port the kernel chose: it gives others no second address. Meanwhile the
    process stands still, and the kernel drops what comes: who connects sends again after a second.
    Where somebody waits to be accepted the socket stays; look again.

    Args:
        process: its id; of this user, and in some systems started by this process.
        network: as for ``popdist_listening.address_in``.

    Returns:
        The ports.

    Raises:
        OSError: the kernel does not lend this process the other's sockets.
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
        # What was closed meanwhile is no socket that listens.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{process}/fd/{name}").startswith("socket:"):
                lent = popdist_listening.borrowed(_lent(handle, int(name)))
                listener = held.enter_context(lent)
                if popdist_listening.listens_everywhere(listener):
                    yield listener


def _lent(handle: int, descriptor: int) -> int:
    """Return a descriptor of this process for one of another's: pidfd_getfd(2)."""
    lent: int = _LIBC.syscall(_PIDFD_GETFD, handle, descriptor, 0)
    if lent < 0:
        error = ctypes.get_errno()
        # Closed since it was listed: as one that is not there any more.
        raise OSError(errno.ENOENT if error == errno.EBADF else error, os.strerror(error))
    return lent


# --- the process stands still ------------------------------------------------------------------


@contextlib.contextmanager
def _standing_still(process: int) -> "Iterator[None]":
    """Hold all threads of a process where they are; they go on too if this process is killed.

    A thread that waits at a socket would see that it listens no more, and fail to accept.

    Raises:
        OSError: the process may not be traced, or has a thread that does not stop.
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
        for thread in held:
            _LIBC.ptrace(_DETACH, thread, None, None)


def _threads(process: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{process}/task")]


def _wait_until_stopped(thread: int) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    # How it ended, if it has, is for whoever waits for its process.
    while os.waitid(os.P_PID, thread, os.WSTOPPED | os.WNOHANG | _WAIT_ALL) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(None, "it does not stand still")
        time.sleep(0.0001)


# --- its sockets -------------------------------------------------------------------------------


def _rebind(listener: socket.socket, network: str) -> int:
    """Bind a socket that listens to an address; return its port, or 0 if it stayed as it was."""
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
            time.sleep(_HANDSHAKE_SECONDS)  # the kernel does not tell of who is about to be there
        if popdist_listening.queue(listener)[0]:
            return 0
        _LIBC.connect(number, _UNCONNECTED, len(_UNCONNECTED))
        failed = _LIBC.bind(number, wanted, len(wanted)) and _LIBC.bind(number, before, len(before))
        _LIBC.listen(number, most)
    return 0 if failed else int(port)


def _drop_all(screen: socket.socket) -> None:
    """Have the kernel drop what comes to a socket, instead of refusing it."""
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    screen.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _packed(family: int, address: str, port: int) -> bytes:
    """Return an address as C has it: sockaddr_in or sockaddr_in6."""
    head = struct.pack("=H", family) + struct.pack("!H", port)
    number = socket.inet_pton(family, address)
    if family == socket.AF_INET:
        return head + number + bytes(8)
    return head + bytes(4) + number + bytes(4)
