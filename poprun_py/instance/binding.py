"""Sets the binding of this process to CPUs and memory nodes, and reads the binding of a process.

The wrapper binds itself before it starts its program, which inherits the binding. Every wrapper
imports this module at its start, so it imports little; ctypes only to set a memory policy.
"""

import errno
import os
import time

from poprun_py.process_info import read_file, read_status

TYPE_CHECKING = False  # not imported from typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# Libraries take their number of threads from these variables. The launcher plans only the first.
# Each library prefers its own variable, so the planned value never overrules one that the user set.
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

# The number of the system call set_mempolicy on 64-bit machines (linux/arch/*/syscall*.tbl).
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
# From include/uapi/linux/mempolicy.h.
_MPOL_PREFERRED, _MPOL_BIND, _MPOL_PREFERRED_MANY = 1, 2, 5
_POLICY_NAMES = {"prefer": "preferred", "prefer (many)": "preferred"}


def apply_planned() -> "dict[str, Any]":
    """Bind this process as the launcher has planned; return the result of ``apply``."""
    cpus = [int(n) for n in os.environ.get("POPRUN_CPUS", "").split(",") if n]
    nodes = [int(n) for n in os.environ.get("POPRUN_MEMORY_NODES", "").split(",") if n]
    return apply(cpus, nodes)


def apply(cpus: list[int], memory_nodes: list[int]) -> "dict[str, Any]":
    """Bind this process, and so every program that it becomes or starts.

    If the kernel refuses the memory policy ``bind``, ``preferred`` is tried. A refusal never stops
    the instance. It is reported here, and ``read_back`` shows its effect.

    Args:
        cpus: The only CPUs to run on; empty for no change.
        memory_nodes: The only memory nodes for allocations; empty for no change.

    Returns:
        ``cpus``, which were set; ``memory_policy`` (bind, preferred or none), which was set for
        ``memory_nodes``; and ``refused``, one sentence for each refusal.
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
    """Set the strongest memory policy that the kernel accepts; return its name and nodes."""
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
        OSError: The kernel, or a filter of system calls, refused.
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
    # The kernel uses one bit less than this number (get_nodes in mm/mempolicy.c).
    bits = ctypes.c_ulong(len(mask) * word_bits + 1)
    if system_call(ctypes.c_long(number), ctypes.c_long(mode), mask, bits) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def read_back(pid: int) -> "dict[str, Any]":
    """Return the binding of a process. A value that cannot be read is None.

    Returns:
        ``ended``, whether the process has ended; ``cpus`` and ``memory_allowed``, from its status;
        ``memory_policy`` (default, bind, preferred, ...) and ``memory_nodes``, from its first
        mapping in numa_maps; ``omp_num_threads`` (0 if it is not set) and ``other_threads``, the
        other thread variables that are set, from its environment; and ``threads``, its number of
        threads.
    """
    variables = _environ(pid)
    policy, nodes = _memory_policy(pid)
    # The status is read last. If the process is alive now, it was alive when the rest was read.
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
    """Return name and nodes of the policy; ``(None, [])`` if it cannot be read."""
    # The first page has the first mapping. To read all, the kernel walks the whole address space.
    first = (read_file(pid, "numa_maps", first_page=True) or b"").split(b"\n", 1)[0].decode()
    _, _, rest = first.partition(" ")
    if not rest:
        return None, []
    # The names of these policies contain a blank.
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
        # During the last steps of exec, the kernel shows an empty environment.
        time.sleep(_ENVIRON_PAUSE_SECONDS)
    return b""


def _omp_num_threads(variables: bytes) -> int | None:
    for entry in variables.split(b"\0"):
        if entry.startswith(b"OMP_NUM_THREADS="):
            first = entry.partition(b"=")[2].split(b",")[0].strip()
            return int(first) if first.isdigit() else 0
    return 0 if variables else None


def _other_threads(variables: bytes) -> dict[str, str]:
    """Return the thread variables that are set, without OMP_NUM_THREADS."""
    entries = [entry.partition(b"=") for entry in variables.split(b"\0")]
    texts = {name.decode("ascii", "replace"): value for name, _, value in entries if value}
    return {
        name: texts[name].decode("utf-8", "replace")
        for name in THREAD_VARIABLES[1:]
        if name in texts
    }


def format_list(numbers: "Iterable[int]") -> str:
    """Return numbers as the kernel writes them: ``0-3,8``."""
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
