"""What an instance finds on its host: rank, launcher, the job's folders, what programs are told.

Runs in the wrapper in front of every program: standard library only, and cheap to import.
"""

import os
import sys
import time

from poprun_py.instance import control_protocol, job_folders
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.instance.job_folders import JobFolder
from poprun_py.instance.quick_imports import socket

_CONNECT_SECONDS = 20
_CALL_AGAIN_SECONDS = 0.05
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_INT_BYTES = 4  # the size of a descriptor in a message of a Unix socket
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
# Prefixes of the names below /dev of devices that torch may compute on: NVIDIA, AMD, WSL, TPUs and
# Habana, Ascend, Cambricon, MetaX, Moore Threads, AWS; then, in folders, render nodes and TPUs.
# dri/card0 and vfio/vfio do not count: a server without a GPU has them, the first for its console.
_ACCELERATORS = (
    *("nvidia", "kfd", "dxg", "accel", "hl", "davinci", "cambricon", "mxcd", "mtgpu", "neuron"),
    *("dri/renderD", *(f"vfio/{digit}" for digit in range(10))),
)
_HIDDEN_BY_CUDA = ("nvidia", "kfd", "dxg")
_OPEN_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
)


def connect(address: str, token: str) -> socket.socket:
    """Connect to the launcher at ``unix:PATH``; or at ``tcp:HOST:PORT``, by the secret ``token``.

    Raises:
        OSError: the launcher cannot be reached.
        SystemExit: who listens there is not this job's launcher.
    """
    kind, _, where = address.partition(":")
    if kind == "unix":
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.connect(where)
        return local
    host, _, port = where.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        remote = socket.socket(family, socket.SOCK_STREAM)
        remote.settimeout(_CONNECT_SECONDS)
        remote.connect((host.strip("[]"), int(port)))
        control_protocol.keep_alive(remote)
        try:
            if _is_let_in(remote, token.encode()):
                remote.settimeout(None)
                return remote
            sys.exit(f"poprun-py: who listens at {where} is not the launcher of this job")
        except ConnectionError:
            # Strangers crowd the launcher, which cannot tell whom it turns away.
            remote.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_CALL_AGAIN_SECONDS)


def _is_let_in(channel: socket.socket, secret: bytes) -> bool:
    """Greet the launcher, and tell whether it is the one that knows the secret.

    The caller's half of ``popdist_py/peers/greeting.py``, which takes long to import.

    Raises:
        ConnectionError: this process was turned away.
    """
    called = os.urandom(_NONCE_BYTES)
    channel.sendall(called)
    # While the answer is on its way: only instances of several hosts pay for it.
    from hmac import compare_digest, digest

    answered = _exactly(channel, _NONCE_BYTES + _PROOF_BYTES)
    nonce, shown = answered[:_NONCE_BYTES], answered[_NONCE_BYTES:]
    if not compare_digest(shown, digest(secret, b"listener %b %b" % (called, nonce), "sha256")):
        return False
    # It claims nothing: what comes after the last blank.
    channel.sendall(digest(secret, b"caller %b %b " % (called, nonce), "sha256"))
    _exactly(channel, 1)
    return True


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def secret_of_programs(token: str) -> str:
    """Return what the programs of a job know, and nobody who connects to its launcher needs."""
    from hmac import digest

    return digest(token.encode(), b"programs", "sha256").hex()


def name_of_folder(token: str) -> str:
    """Return how the job's folder in memory is called on every host: it tells no other secret."""
    from hmac import digest

    return job_folders.folder_name("host", digest(token.encode(), b"folders", "sha256")[:6])


def share_memory_in(folders: "list[JobFolder]") -> None:
    """Tell Open MPI to keep shared memory in the job's folder in memory, if there is one."""
    places = [f.path for f in folders if f.path.startswith(f"{job_folders.SHARED_MEMORY}/")]
    variables = job_folders.memory_variables(places[-1] if places else None, os.environ)
    for name, value in variables.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def name_folder(folders: "list[JobFolder]") -> None:
    """Tell the program where the job's folder is, for files that must not outlive the job."""
    if folders:
        os.environ["POPDIST_JOB_FOLDER"] = folders[0].path
    else:
        os.environ.pop("POPDIST_JOB_FOLDER", None)  # set by an outer job


def rank() -> int:
    """Return the instance index: as planned, else (a job too large for the command) as MPI says."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def is_first_elsewhere(channel: socket.socket) -> bool:
    """Whether this instance is the first of its host, and the launcher is on another one."""
    if channel.family == socket.AF_UNIX or channel.getsockname()[0] == channel.getpeername()[0]:
        return False
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def drop_empty() -> None:
    """Unset what is set empty so that Open MPI does not give it another instance's value."""
    for name in THREAD_VARIABLES:
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
    if os.environ.get("WORLD_SIZE") != "1" and not has_accelerator():
        # Without it, Accelerate and trainers built on it take every instance for the only one.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    size, share = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if size.isdigit() and share.isdigit() and int(share) > 0:
        os.environ.setdefault("GROUP_WORLD_SIZE", str(int(size) // int(share)))


def has_accelerator(devices: str = "/dev") -> bool:
    """Tell whether this host may have a device, beside its CPUs, that torch can compute on."""
    names = _names_in(devices)
    for folder in {"dri", "vfio"}.intersection(names):
        names += [f"{folder}/{name}" for name in _names_in(os.path.join(devices, folder))]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        names = [name for name in names if not name.startswith(_HIDDEN_BY_CUDA)]
    return any(name.startswith(_ACCELERATORS) for name in names)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def take_stdin() -> None:
    """Give one instance the launcher's own standard input, and the others an empty one."""
    path = os.environ.pop("POPRUN_STDIN", "")
    reader = int(os.environ.pop("POPRUN_STDIN_READER", "0"))
    if not path:
        return
    descriptor = _stdin_of_launcher(path) if rank() == reader else None
    if descriptor is None:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    if descriptor != 0:
        os.dup2(descriptor, 0)
        os.close(descriptor)


def _stdin_of_launcher(path: str) -> int | None:
    """Ask the launcher, by its socket ``path``, for its standard input; None if there is none."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        asking.connect(path)
        asking.sendall(control_protocol.pack(control_protocol.STDIN))
        _, given, _, _ = asking.recvmsg(1, socket.CMSG_SPACE(_INT_BYTES))
    except OSError:
        return None  # the launcher has ended
    finally:
        asking.close()
    for level, kind, data in given:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return int.from_bytes(data[:_INT_BYTES], sys.byteorder)
    return None


def free_port() -> int:
    """Return a port that is free on this host."""
    probe = socket.socket()
    probe.bind(("", 0))
    port: int = probe.getsockname()[1]
    probe.close()
    return port


def hold_folders(address: str, name: str) -> "list[JobFolder]":
    """Have the job's folders on this host; the last is in memory, unless there is none.

    Args:
        address: of the launcher. Where it is on this host, the folders are its own.
        name: of the folder in memory, where the launcher may be on another host; else empty.
    """
    folders: list[JobFolder | None] = []
    files = os.environ.get("PMIX_SERVER_TMPDIR", "")
    if name:
        if job_folders.is_job_folder(os.path.dirname(files)):
            # The launcher is on this host after all.
            folders.append(JobFolder.join(os.path.dirname(files)))
        try:
            folders.append(JobFolder.make(job_folders.SHARED_MEMORY, name))
        except OSError:
            folders.append(None)  # Open MPI then keeps to its own places
    else:
        private = os.path.dirname(address.partition(":")[2])
        in_memory = os.path.join(job_folders.SHARED_MEMORY, os.path.basename(private))
        folders += [JobFolder.join(private), JobFolder.join(in_memory)]
    held = [folder for folder in folders if folder is not None]
    if held and not any(files.startswith(f"{folder.path}/") for folder in held):
        # Killed, it leaves them.
        held[-1].note_daemon(files, os.getppid())
    return held
