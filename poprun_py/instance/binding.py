"""Sets this process's binding to CPUs and memory nodes, and reads the binding of any process.

The wrapper binds itself before it starts its program, which inherits the binding.
"""

import os
import time

from poprun_py.process_info import read_fields, read_file

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from typing import Any

# The environment variables from which numerical libraries read their number of threads. The
# launcher sets only OMP_NUM_THREADS. Each library prefers its own variable, such as
# MKL_NUM_THREADS, which the user may set.
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


def apply_planned() -> None:
    """Bind this process to the CPUs and memory nodes that the launcher planned for it."""
    cpus, nodes = (
        [int(number) for number in os.environ.get(name, "").split(",") if number]
        for name in ("POPRUN_CPUS", "POPRUN_MEMORY_NODES")
    )
    apply(cpus, nodes)


def apply(cpus: list[int], memory_nodes: list[int]) -> None:
    """Bind this process to CPUs and memory nodes; an empty list changes nothing.

    If the kernel refuses the binding, this process goes on without it.
    """
    if cpus:
        try:  # noqa: SIM105 (importing contextlib would take longer than this module)
            os.sched_setaffinity(0, cpus)
        except (OSError, ValueError):
            pass
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if memory_nodes and number is not None:
        _set_memory_policy(number, sorted(memory_nodes))


def _set_memory_policy(number: int, nodes: list[int]) -> None:
    """Set the strictest memory policy that the kernel and its filters (seccomp) accept."""
    import ctypes

    system_call = ctypes.CDLL(None, use_errno=True).syscall
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    policies = [(_MPOL_BIND, nodes), (_MPOL_PREFERRED, nodes[:1])]
    if len(nodes) > 1:
        policies.insert(1, (_MPOL_PREFERRED_MANY, nodes))
    for mode, chosen in policies:
        mask = (ctypes.c_ulong * (chosen[-1] // word_bits + 1))()
        for node in chosen:
            mask[node // word_bits] |= 1 << (node % word_bits)
        # set_mempolicy ignores the last bit of the mask of nodes, so the given size of the mask is
        # one bit larger than the mask (get_nodes in mm/mempolicy.c).
        bits = ctypes.c_ulong(len(mask) * word_bits + 1)
        if system_call(ctypes.c_long(number), ctypes.c_long(mode), mask, bits) == 0:
            return


def read_back(pid: int) -> "dict[str, Any]":
    """Return the binding of a process, with None for each value that cannot be read.

    Returns:
        A dictionary. ``ended`` tells whether the process has ended. ``cpus`` are the CPUs that the
        process may use. ``memory_policy`` (default, bind, preferred, ...) and ``memory_nodes`` come
        from the first mapping in the process's file numa_maps. ``omp_num_threads`` is the process's
        OMP_NUM_THREADS, 0 if not set. ``other_threads`` contains the other ``THREAD_VARIABLES`` of
        the process.
    """
    variables = _thread_variables(pid)
    policy, nodes = _memory_policy(pid)
    # /proc/PID/status is read last, to tell whether the process was alive during all reads.
    status = read_fields(pid, "status")
    others = dict(variables or {})
    first_word = others.pop("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(first_word) if first_word.isdecimal() else 0
    return {
        "ended": status.get("State", "Z")[0] in "ZX",
        "cpus": _parse_list(status.get("Cpus_allowed_list")),
        "memory_policy": policy,
        "memory_nodes": nodes,
        "omp_num_threads": None if variables is None else threads,
        "other_threads": others,
    }


def _memory_policy(pid: int) -> tuple[str | None, list[int]]:
    """Return the name and nodes of a process's memory policy; ``(None, [])`` if unreadable."""
    # Reading all of numa_maps would make the kernel walk the process's whole address space.
    first = (read_file(pid, "numa_maps", first_page=True) or b"").split(b"\n", 1)[0].decode()
    _, _, rest = first.partition(" ")
    if not rest:
        return None, []
    # Two memory policies have a blank in their names. The blank in such a name is replaced, because
    # the first blank of the line must be the end of the name.
    for name in ("prefer (many)", "weighted interleave"):
        if rest.startswith(name):
            rest = rest.replace(name, name.replace(" ", "_"), 1)
    word = rest.split(" ", 1)[0].replace("_", " ")
    name, _, nodes = word.replace("=static", "").replace("=relative", "").partition(":")
    return _POLICY_NAMES.get(name, name), _parse_list(nodes) or []


def _thread_variables(pid: int) -> "dict[str, str] | None":
    """Return the ``THREAD_VARIABLES`` in a process's environment; None if it cannot be read."""
    environ: bytes | None = None
    for _ in range(_ENVIRON_TRIES):
        environ = read_file(pid, "environ")
        if environ or environ is None or read_fields(pid, "status").get("State", "Z")[0] in "ZX":
            break
        # While a process executes a new program, its file environ is empty for a moment.
        time.sleep(_ENVIRON_PAUSE_SECONDS)
    if not environ:
        return None
    entries = (entry.partition("=") for entry in environ.decode("utf-8", "replace").split("\0"))
    variables = {name: value for name, _, value in entries if value}
    return {name: variables[name] for name in THREAD_VARIABLES if name in variables}


def _parse_list(text: str | None) -> list[int] | None:
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
