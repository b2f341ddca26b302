"""Sets this process's binding to CPUs and memory nodes, and reads the binding of any process.

The wrapper binds itself before it starts its program, which inherits the binding. This module has
few imports, because it is loaded at the start of every instance. ctypes is imported only to set a
memory policy.
"""

import errno
import os
import time

from poprun_py.process_info import read_file, read_status

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# The environment variables from which numerical libraries read their number of threads. The
# launcher sets only OMP_NUM_THREADS. A library prefers its own variable to OMP_NUM_THREADS, so a
# value that the user set for a library stays in force.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "NUMBA_NUM_THREADS",
    "RAYON_NUM_THREADS",
)

# The number of the system call set_mempolicy on each 64-bit architecture
# (linux/arch/*/syscall*.tbl).
_SET_MEMPOLICY = {
    "x86_64": 238,
    "aarch64": 237,
    "riscv64": 237,
    "loongarch64": 237,
    "ppc64le": 261,
    "ppc64": 261,
    "s390x": 270,
}
_ENVIRON_TRIES, _ENVIRON_PAUSE_SECONDS = 40, 0.0005
# Modes of set_mempolicy, from the kernel's include/uapi/linux/mempolicy.h.
_MPOL_PREFERRED, _MPOL_BIND, _MPOL_PREFERRED_MANY = 1, 2, 5
_POLICY_NAMES = {"prefer": "preferred", "prefer (many)": "preferred"}


def apply_planned() -> "dict[str, Any]":
    """Bind this process as the launcher planned; return the result of ``apply``."""
    cpus = [int(n) for n in os.environ.get("POPRUN_CPUS", "").split(",") if n]
    nodes = [int(n) for n in os.environ.get("POPRUN_MEMORY_NODES", "").split(",") if n]
    return apply(cpus, nodes)


def apply(cpus: list[int], memory_nodes: list[int]) -> "dict[str, Any]":
    """Bind this process to CPUs and memory nodes, and with it every program that it starts.

    If the kernel refuses the memory policy ``bind``, this function tries ``preferred``. A refusal
    never stops the instance. The result reports a refusal, and ``read_back`` shows the actual
    binding.

    Args:
        cpus: The CPUs that the process may use; empty for no change.
        memory_nodes: The memory nodes that the process may use; empty for no change.

    Returns:
        A dictionary. ``cpus`` contains the CPUs that were set. ``memory_policy`` (bind, preferred
        or none) is the policy that was set for ``memory_nodes``. ``refused`` contains one sentence
        for each refusal.
    """
    refused: list[str] = []
    bound: list[int] = []
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
            bound = sorted(cpus)
        except (OSError, ValueError, AttributeError) as error:
            refused.append(f"CPU affinity {format_list(cpus)}: {_reason(error)}")
    policy, nodes = "none", list[int]()
    if memory_nodes:
        policy, nodes = _set_memory_policy(sorted(memory_nodes), refused)
    return {"cpus": bound, "memory_policy": policy, "memory_nodes": nodes, "refused": refused}


def _set_memory_policy(nodes: list[int], refused: list[str]) -> tuple[str, list[int]]:
    """Set the strictest memory policy that the kernel accepts; return its name and memory nodes."""
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        refused.append(f"memory policy: not known for machine {os.uname().machine}")
        return "none", []
    policies = [("bind", _MPOL_BIND, nodes)]
    if len(nodes) > 1:
        policies.append(("preferred", _MPOL_PREFERRED_MANY, nodes))
    policies.append(("preferred", _MPOL_PREFERRED, nodes[:1]))
    for name, mode, chosen in policies:
        try:
            _call_set_mempolicy(number, mode, chosen)
        except OSError as error:
            refused.append(f"memory policy {name} {format_list(chosen)}: {_reason(error)}")
        else:
            return name, chosen
    return "none", []


def _call_set_mempolicy(number: int, mode: int, nodes: list[int]) -> None:
    """Call set_mempolicy(2).

    Raises:
        OSError: The kernel or a filter of system calls refused the policy.
    """
    try:
        import ctypes

        system_call = ctypes.CDLL(None, use_errno=True).syscall
    except (ImportError, OSError, AttributeError) as error:
        raise OSError(errno.ENOSYS, f"no system calls from here ({error})") from None
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (nodes[-1] // word_bits + 1))()
    for node in nodes:
        mask[node // word_bits] |= 1 << (node % word_bits)
    # The kernel ignores the last bit of the mask, so the mask is announced with one bit more than
    # needed (get_nodes in mm/mempolicy.c).
    bits = ctypes.c_ulong(len(mask) * word_bits + 1)
    if system_call(ctypes.c_long(number), ctypes.c_long(mode), mask, bits) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def read_back(pid: int) -> "dict[str, Any]":
    """Return the binding of a process. Unreadable values are None.

    Returns:
        A dictionary. ``ended`` tells whether the process has ended. ``cpus`` and ``memory_allowed``
        come from the process's file status. ``memory_policy`` (default, bind, preferred, ...) and
        ``memory_nodes`` come from the first mapping in the process's file numa_maps.
        ``omp_num_threads`` (0 if it is not set) and ``other_threads``, the other thread variables
        that are set, come from the process's environment. ``threads`` is the number of threads of
        the process.
    """
    variables = _environ(pid)
    policy, nodes = _memory_policy(pid)
    # The file status is read last. If the process is still alive then, its other files were read
    # while it was alive.
    status = read_status(pid)
    return {
        "ended": status.get("State", "Z")[0] in "ZX",
        "cpus": parse_list(status.get("Cpus_allowed_list")),
        "memory_allowed": parse_list(status.get("Mems_allowed_list")),
        "memory_policy": policy,
        "memory_nodes": nodes,
        "omp_num_threads": _omp_num_threads(variables),
        "other_threads": _other_threads(variables),
        "threads": int(status["Threads"]) if status.get("Threads", "").isdigit() else None,
    }


def _memory_policy(pid: int) -> tuple[str | None, list[int]]:
    """Return the name and nodes of a process's memory policy; ``(None, [])`` if unreadable."""
    # One page of the file numa_maps is enough, because it contains the first mapping. Reading the
    # whole file would make the kernel walk the whole address space.
    first = (read_file(pid, "numa_maps", first_page=True) or b"").split(b"\n", 1)[0].decode()
    _, _, rest = first.partition(" ")
    if not rest:
        return None, []
    # The blank in the names of two memory policies is replaced, because a blank ends the name.
    for name in ("prefer (many)", "weighted interleave"):
        if rest.startswith(name):
            rest = rest.replace(name, name.replace(" ", "_"), 1)
    word = rest.split(" ", 1)[0].replace("_", " ")
    name, _, nodes = word.replace("=static", "").replace("=relative", "").partition(":")
    return _POLICY_NAMES.get(name, name), parse_list(nodes) or []


def _environ(pid: int) -> bytes:
    """Return the environment of a process; empty if it cannot be read."""
    for _ in range(_ENVIRON_TRIES):
        variables = read_file(pid, "environ")
        if variables or variables is None or read_status(pid).get("State", "Z")[0] in "ZX":
            return variables or b""
        # While a process is executing a new program, the kernel shows an empty environment for a
        # moment.
        time.sleep(_ENVIRON_PAUSE_SECONDS)
    return b""


def _omp_num_threads(variables: bytes) -> int | None:
    for entry in variables.split(b"\0"):
        if entry.startswith(b"OMP_NUM_THREADS="):
            first = entry.partition(b"=")[2].split(b",")[0].strip()
            return int(first) if first.isdigit() else 0
    return 0 if variables else None


def _other_threads(variables: bytes) -> dict[str, str]:
    """Return the variables of ``THREAD_VARIABLES`` that are set, except OMP_NUM_THREADS."""
    entries = [entry.partition(b"=") for entry in variables.split(b"\0")]
    texts = {name.decode("ascii", "replace"): value for name, _, value in entries if value}
    return {
        name: texts[name].decode("utf-8", "replace")
        for name in THREAD_VARIABLES[1:]
        if name in texts
    }


def format_list(numbers: "Iterable[int]") -> str:
    """Return numbers in the kernel's format for lists: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_list(text: str | None) -> list[int] | None:
    """Return the numbers of a kernel list such as ``0-3,8``, or None for any other text."""
    if text is None:
        return None
    numbers: list[int] = []
    try:
        for part in text.split(","):
            if part.strip():
                first, _, last = part.partition("-")
                numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        return None
    return numbers
