"""What an instance finds on its host: its rank, the launcher, a free port.

Runs in the wrapper in front of every program: standard library only, and cheap to import.
"""

import os

from poprun_py.instance import protocol
from poprun_py.instance.fast_stdlib import socket

_CONNECT_SECONDS = 20
# What torchrun sets besides the ranks, by ours; and what is the same in every instance. There is no
# agent of torchrun's: instance 0 opens the store itself.
_TORCHRUN_NAMES = (
    ("NODE_RANK", "GROUP_RANK"),
    ("ROLE_RANK", "RANK"),
    ("ROLE_WORLD_SIZE", "WORLD_SIZE"),
)
_TORCHRUN_VALUES = (
    ("ROLE_NAME", "default"),
    ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
)
_OPEN_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
)


def connect(address: str) -> socket.socket:
    """Connect to the launcher at ``unix:PATH`` or ``tcp:HOST:PORT``."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.connect(where)
        return local
    host, _, port = where.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    remote = socket.socket(family, socket.SOCK_STREAM)
    remote.settimeout(_CONNECT_SECONDS)
    remote.connect((host.strip("[]"), int(port)))
    protocol.keep_alive(remote)
    remote.settimeout(None)
    return remote


def rank() -> int:
    """Return the instance index: as planned, else (a job too large for the command) as MPI says."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def drop_empty() -> None:
    """Unset what is set empty so that Open MPI does not give it another instance's value."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(name) == "":
            del os.environ[name]


def set_other_names() -> None:
    """Give instances the names that Open MPI and torchrun give them: programs read those."""
    for theirs, ours in _OPEN_MPI_NAMES + _TORCHRUN_NAMES:
        if ours in os.environ:
            os.environ.setdefault(theirs, os.environ[ours])
    if "RANK" not in os.environ:
        # A job too large for the command: it is told later.
        return
    for theirs, value in _TORCHRUN_VALUES:
        os.environ.setdefault(theirs, value)
    size, share = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if size.isdigit() and share.isdigit() and int(share) > 0:
        os.environ.setdefault("GROUP_WORLD_SIZE", str(int(size) // int(share)))


def take_stdin() -> None:
    """Give one instance the launcher's own standard input: Open MPI 5 never says where it ends."""
    path = os.environ.pop("POPRUN_STDIN", "")
    reader = int(os.environ.pop("POPRUN_STDIN_READER", "0"))
    if path:
        path = path if rank() == reader else os.devnull
        try:
            # Opening a named pipe that has no writer would block.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return
        os.set_blocking(descriptor, True)
        os.dup2(descriptor, 0)
        os.close(descriptor)


def free_port() -> int:
    """Return a port that is free on this host."""
    probe = socket.socket()
    probe.bind(("", 0))
    port: int = probe.getsockname()[1]
    probe.close()
    return port


def remove_run_folder(address: str) -> None:
    """Remove the private folder of a launcher that was killed before it could do so itself."""
    kind, _, path = address.partition(":")
    if kind != "unix":
        return
    for remove, what in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        try:
            remove(what)
        except OSError:
            return
