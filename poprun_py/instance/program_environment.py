"""Environment variables that the wrapper sets for its program, besides the launcher's variables.

Some of these variables contain ranks under the names of Open MPI and torchrun. Other variables keep
the traffic of MPI, UCX and gloo on the network of the job, or load the library's start hook
(popdist_py/start_hook) into every Python process.
"""

import os
import sys

from poprun_py.instance import job_folders
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.instance.quick_imports import signal, socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from poprun_py.instance.job_folders import JobFolder

# Variables of Open MPI and torchrun, and the variables from which their values are copied.
_SAME_VALUES = {
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "NODE_RANK": "GROUP_RANK",
    "ROLE_RANK": "RANK",
    "ROLE_WORLD_SIZE": "WORLD_SIZE",
}
# No torchrun agent runs, so instance 0 opens torch's key-value store.
_TORCHRUN_VALUES = {
    "ROLE_NAME": "default",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
# Prefixes of the devices below /dev on which torch may be able to compute: NVIDIA, AMD, WSL, TPUs
# and Habana, Ascend, Cambricon, MetaX, Moore Threads, AWS; render nodes of GPUs (dri), TPUs (vfio).
# dri/card0 and vfio/vfio do not count, because even servers without a GPU have these devices.
_ACCELERATORS = (
    *("nvidia", "kfd", "dxg", "accel", "hl", "davinci", "cambricon", "mxcd", "mtgpu", "neuron"),
    *("dri/renderD", *(f"vfio/{digit}" for digit in range(10))),
)
_HIDDEN_BY_CUDA = ("nvidia", "kfd", "dxg")
# Variables that name Open MPI's folder for shared memory: for messages in Open MPI 5 (btl_sm) and
# Open MPI 4 (btl_vader), and for MPI windows (osc).
_SHARED_MEMORY_FOLDERS = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_btl_vader_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "OMPI_MCA_osc_rdma_backing_directory",
    "OMPI_MCA_osc_ucx_backing_directory",
)
_HERE = os.path.dirname(os.path.abspath(__file__))
_HOOK = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "popdist_py", "start_hook")
_DIAGNOSTICS_HOOK = os.path.join(_HERE, "diagnostics_hook")
# The signal that asks a program for its Python stacks; programs do not use this signal.
STACKS_SIGNAL = signal.SIGRTMAX - 3
# The kernel's file with the routes of this host, and the folder with its InfiniBand devices.
_ROUTES, _FABRIC = "/proc/net/route", "/sys/class/infiniband"


def rank() -> int:
    """Return the index of this instance, as set by the launcher or, in a large job, by MPI."""
    return int(_first_of("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def is_first_on_host() -> bool:
    """Return whether this is the first instance of its host, according to the launcher or MPI."""
    return _first_of("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID") == "0"


def _first_of(*names: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "0")


def set_variables(variables: "Mapping[str, str | None]") -> None:
    """Set environment variables of this process; the value None unsets a variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def complete() -> None:
    """Set the environment variables that the wrapper derives from the launcher's variables."""
    # The start hook's variables are set first: they depend on variables that MPI itself has set.
    os.environ.update(hook_variables(os.environ))
    set_mpi_and_torchrun_variables()
    for name in THREAD_VARIABLES:
        # The launcher sets thread variables to an empty value, so that Open MPI does not pass on
        # another instance's value.
        if os.environ.get(name) == "":
            del os.environ[name]


def set_mpi_and_torchrun_variables() -> None:
    """Set the variables that programs expect from Open MPI and torchrun, unless already set.

    With checkpoints in memory, mpirun may have started only some of the instances, and a wrapper
    may run another instance than before, so Open MPI's own values may be wrong.
    """
    may_differ = os.environ.get("POPDIST_MEMORY_CHECKPOINTS") == "1"
    for name, same in _SAME_VALUES.items():
        if same in os.environ and (may_differ or name not in os.environ):
            os.environ[name] = os.environ[same]
    if "RANK" not in os.environ:  # the user copied the command of a large job into a shell
        return
    for name, value in _TORCHRUN_VALUES.items():
        os.environ.setdefault(name, value)
    if os.environ.get("WORLD_SIZE") != "1" and not has_accelerator():
        # Without ACCELERATE_USE_CPU, Hugging Face Accelerate runs as if it had one instance.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    size, local_size = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if size.isdigit() and local_size.isdigit() and int(local_size) > 0:
        os.environ.setdefault("GROUP_WORLD_SIZE", str(int(size) // int(local_size)))


def has_accelerator(devices: str = "/dev") -> bool:
    """Return whether torch may be able to compute on some device of this host other than CPUs."""
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


def set_job_folders(folders: "Sequence[JobFolder]") -> None:
    """Set the variables that tell the program and Open MPI where the job's folders are.

    The first of ``folders`` is for files that must not outlive the job. Open MPI creates its shared
    memory in the last of ``folders`` that is below /dev/shm.
    """
    paths = [folder.path for folder in folders]
    in_memory = [path for path in paths if path.startswith(f"{job_folders.SHARED_MEMORY}/")]
    set_variables(shared_memory_variables(in_memory[-1] if in_memory else None, os.environ))
    # If the job has no folders, a POPDIST_JOB_FOLDER inherited from an outer job is unset.
    set_variables({"POPDIST_JOB_FOLDER": paths[0] if paths else None})


def shared_memory_variables(
    folder: str | None, environ: "Mapping[str, str]"
) -> "dict[str, str | None]":
    """Return the variables that make Open MPI create its shared memory in ``folder``.

    If ``folder`` is None, the variables that were inherited from an outer job are unset. Variables
    that the user has set are left out.
    """
    return {
        name: folder
        for name in _SHARED_MEMORY_FOLDERS
        if not environ.get(name) or job_folders.is_job_folder(environ[name])
    }


def hook_variables(environ: "Mapping[str, str]") -> dict[str, str]:
    """Return the variables that load the library's start hook, if settings in ``environ`` need it.

    The hook lets programs import the library by the SDK's package names, offers them the library's
    back end for torch, and keeps MPI on the network of the job.
    """
    gives_names = environ.get("POPDIST_SDK_NAMES") in ("auto", "yes")
    replaces_back_end = environ.get("POPDIST_TORCH_BACKEND") in ("gloo", "popdist")
    network = environ.get("POPDIST_MPI_NETWORK") or environ.get("POPDIST_NETWORK")
    has_folder = environ.get("POPDIST_JOB_FOLDER")
    if not (gives_names or replaces_back_end or network or has_folder):
        return {}
    found = _interface_variables(network, environ) if network else {}
    return {"PYTHONPATH": _python_path(_HOOK, environ), **found}


def _python_path(hook: str, environ: "Mapping[str, str]") -> str:
    """Return PYTHONPATH with the folder of a hook added in front."""
    path = environ.get("PYTHONPATH", "")
    # The hook's folder comes first, because Python runs only the first sitecustomize that it finds.
    rest = [entry for entry in path.split(os.pathsep) if entry != hook] if path else []
    return os.pathsep.join([hook, *rest])


def _interface_variables(network: str, environ: "Mapping[str, str]") -> dict[str, str]:
    """Return the variables that keep gloo, and UCX under MPICH, on the interface of ``network``.

    Variables that the user has set are left out. Without these variables, gloo uses the address of
    this host's name, and UCX uses every address.
    """
    names = {"GLOO_SOCKET_IFNAME"}
    if "PMI_RANK" in environ and "OMPI_COMM_WORLD_RANK" not in environ:
        names |= set() if os.path.isdir(_FABRIC) else {"UCX_NET_DEVICES"}
    interface = _interface_of(network)
    return {name: interface for name in names if interface and name not in environ}


def _interface_of(network: str) -> str:
    """Return the name of this host's interface on a network; empty if the host is not on it.

    A ``network`` without a slash is already the name of an interface.
    """
    address, slash, bits = network.partition("/")
    if not slash:
        return network
    try:
        # /proc/net/route shows an address as a number in this machine's byte order.
        wanted = int.from_bytes(socket.inet_aton(address), sys.byteorder)
        mask = (1 << 32) - (1 << 32 - int(bits))
        mask = int.from_bytes(mask.to_bytes(4, "big"), sys.byteorder)
        with open(_ROUTES, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                name, target, gateway = line.split()[:3]
                if int(gateway, 16) == 0 and int(target, 16) & mask == wanted & mask:
                    return name
    except (OSError, ValueError):
        pass
    return ""


def stacks_variables(
    file: int, command: "Sequence[str]", environ: "Mapping[str, str]"
) -> dict[str, str]:
    """Return the variables that let the program write its stacks to the open file ``file``.

    If the command starts Python, the variables also load diagnostics_hook, which writes the stacks
    on ``STACKS_SIGNAL``.
    """
    variables = {"POPDIST_STACKS": f"{int(STACKS_SIGNAL)}:/proc/{os.getpid()}/fd/{file}"}
    if is_python(command):
        variables["PYTHONPATH"] = _python_path(_DIAGNOSTICS_HOOK, environ)
    return variables


def is_python(command: "Sequence[str]") -> bool:
    """Return whether a command starts Python, as far as its first word tells."""
    is_named = os.path.basename(command[0]).startswith(("python", "pypy"))
    return is_named or command[0] == sys.executable


def import_lent_sockets() -> "ModuleType":
    """Import and return the module popdist_lent_sockets, without importing the whole library."""
    sys.path.insert(0, _HOOK)
    try:
        import popdist_lent_sockets  # type: ignore[import-not-found]
    finally:
        sys.path.remove(_HOOK)
    module: ModuleType = popdist_lent_sockets
    return module


def programs_secret(token: str) -> str:
    """Return the secret that a job's programs share; it does not reveal the token of the job."""
    from hmac import digest

    return digest(token.encode(), b"programs", "sha256").hex()
