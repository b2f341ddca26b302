"""Trees of the files by which Linux describes a machine, for several kinds of machines.

The layouts follow the kernel's documentation (ABI/stable/sysfs-devices-node,
ABI/stable/sysfs-devices-system-cpu) and files of real machines. The emulated machines of tests/numa
check the same reader with a real kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from poprun_py.display.formatting import ranges_text
from poprun_py.machines.machine import Machine

GIB = 1 << 30
# The machine that is read from each tree, as JSON.
SNAPSHOTS = Path(__file__).with_name("snapshots")


@dataclass(frozen=True)
class Thread:
    """One hardware thread (CPU) of the machine, with the values of its files in sysfs."""

    cpu: int
    core: tuple[int, int]  # package and core
    node: int
    l3: int | None
    online: bool = True
    capacity: int | None = None


@dataclass(frozen=True)
class Tree:
    """A machine as files: ``extra`` adds or replaces files, ``without`` leaves folders out."""

    threads: tuple[Thread, ...]
    memory: dict[int, int]  # bytes by NUMA node
    distances: Callable[[int, int], int] = lambda a, b: 10 if a == b else 20
    extra: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    allowed: str | None = None
    allowed_nodes: str | None = None

    def write(self, root: Path) -> Path:
        for path, text in {**self._files(), **self.extra}.items():
            if not any(path.startswith(prefix) for prefix in self.without):
                file = root / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n")
        return root

    def _files(self) -> dict[str, str]:
        online = [t for t in self.threads if t.online]
        cpus = "sys/devices/system/cpu"
        files = {
            f"{cpus}/online": ranges_text([t.cpu for t in online]),
            f"{cpus}/possible": ranges_text([t.cpu for t in self.threads]),
            f"{cpus}/present": ranges_text([t.cpu for t in self.threads]),
            "proc/self/status": "Name:\tpython\n"
            f"Cpus_allowed_list:\t{self.allowed or ranges_text([t.cpu for t in online])}\n"
            f"Mems_allowed_list:\t{self.allowed_nodes or ranges_text(list(self.memory))}",
            "proc/meminfo": f"MemTotal: {sum(self.memory.values()) // 1024} kB\nMemFree: 1 kB",
        }
        for thread in self.threads:
            files |= self._thread_files(thread, online)
        for node, memory in self.memory.items():
            folder = f"sys/devices/system/node/node{node}"
            own = [t.cpu for t in online if t.node == node]
            files[f"{folder}/cpulist"] = ranges_text(own)
            files[f"{folder}/meminfo"] = (
                f"\nNode {node} MemTotal:       {memory // 1024} kB\nNode {node} MemFree: 1 kB"
            )
            files[f"{folder}/distance"] = " ".join(
                str(self.distances(node, other)) for other in self.memory
            )
        files["sys/devices/system/node/online"] = ranges_text(list(self.memory))
        return files

    def _thread_files(self, thread: Thread, online: list[Thread]) -> dict[str, str]:
        folder = f"sys/devices/system/cpu/cpu{thread.cpu}"
        # On most machines CPU 0 cannot be switched off, so it lacks this file.
        files = {} if thread.cpu == 0 else {f"{folder}/online": str(int(thread.online))}
        if not thread.online:
            return files
        package, core = thread.core
        siblings = ranges_text([t.cpu for t in online if t.core == thread.core])
        together = ranges_text([t.cpu for t in online if t.core[0] == package])
        files |= {
            f"{folder}/topology/physical_package_id": str(package),
            f"{folder}/topology/core_id": str(core),
            f"{folder}/topology/core_cpus_list": siblings,
            f"{folder}/topology/thread_siblings_list": siblings,
            f"{folder}/topology/package_cpus_list": together,
            f"{folder}/topology/core_siblings_list": together,
            f"{folder}/cache/index0/level": "1",
            f"{folder}/cache/index0/shared_cpu_list": siblings,
        }
        if thread.l3 is not None:
            shared = [t.cpu for t in online if t.l3 == thread.l3]
            files[f"{folder}/cache/index3/level"] = "3"
            files[f"{folder}/cache/index3/shared_cpu_list"] = ranges_text(shared)
        if thread.capacity is not None:
            files[f"{folder}/cpu_capacity"] = str(thread.capacity)
        return files


def regular(
    *, packages: int, nodes: int, cores: int, smt: int, l3: int | None = None
) -> tuple[Thread, ...]:
    """Return the threads of equal packages, where ``l3`` cores share an L3 cache.

    Hardware thread 1 of all cores is numbered after thread 0 of all cores, as on x86.
    """
    total = packages * cores
    return tuple(
        Thread(
            cpu=thread * total + index,
            core=(index // cores, index % cores),
            node=index // cores * nodes + index % cores * nodes // cores,
            l3=None if l3 is None else index // l3,
        )
        for thread in range(smt)
        for index in range(total)
    )


def _epyc_distance(a: int, b: int) -> int:
    return 10 if a == b else 12 if a // 4 == b // 4 else 32


def _hybrid() -> tuple[Thread, ...]:
    fast = [Thread(cpu, (0, cpu // 2), 0, 0) for cpu in range(16)]
    slow = [Thread(16 + i, (0, 100 + i), 0, 0) for i in range(16)]
    return (*fast, *slow)


def _big_little() -> tuple[Thread, ...]:
    capacity = [381, 381, 381, 381, 871, 868, 865, 1024]
    return tuple(Thread(i, (0, i), 0, 0, capacity=c) for i, c in enumerate(capacity))


def _sparse() -> tuple[Thread, ...]:
    # A POWER machine with nodes 0 and 8, and four hardware threads per core, of which some are off.
    return tuple(
        Thread(base + 8 * core + thread, (node, base + 8 * core), node, None)
        for node, base in ((0, 0), (8, 80))
        for core in range(4)
        for thread in range(4)
    )


def _offline() -> tuple[Thread, ...]:
    threads = regular(packages=1, nodes=1, cores=8, smt=2, l3=8)
    return tuple(
        Thread(t.cpu, t.core, t.node, t.l3, online=t.cpu not in (3, 8, 9, 15)) for t in threads
    )


_CGROUP_2 = {"proc/self/cgroup": "0::/system.slice/job.scope"}
_JOB = "sys/fs/cgroup/system.slice/job.scope"

TREES: dict[str, Tree] = {
    "example": Tree(
        # The machine of docs/placement.md.
        regular(packages=2, nodes=2, cores=16, smt=2, l3=4), dict.fromkeys(range(4), 32 * GIB),
        distances=lambda a, b: 10 if a == b else 12 if a // 2 == b // 2 else 32,
    ),
    "one-node": Tree(regular(packages=1, nodes=1, cores=8, smt=2, l3=8), {0: 32 * GIB}),
    "two-socket-smt": Tree(
        regular(packages=2, nodes=1, cores=16, smt=2, l3=16), {0: 96 * GIB, 1: 96 * GIB},
        distances=lambda a, b: 10 if a == b else 21,
    ),
    "epyc-nps4": Tree(
        regular(packages=2, nodes=4, cores=64, smt=2, l3=8), dict.fromkeys(range(8), 64 * GIB),
        distances=_epyc_distance,
    ),
    "hybrid": Tree(
        _hybrid(), {0: 64 * GIB},
        extra={"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-31"},
    ),
    "big-little": Tree(_big_little(), {0: 8 * GIB}, without=("sys/devices/system/node",)),
    "memory-only-node": Tree(
        # Node 2 is memory on an expansion card near package 1.
        regular(packages=2, nodes=1, cores=4, smt=1, l3=4),
        {0: 16 * GIB, 1: 16 * GIB, 2: 128 * GIB},
        distances=lambda a, b: 10 if a == b else 14 if {a, b} == {1, 2} else 21,
    ),
    "node-without-memory": Tree(
        regular(packages=2, nodes=2, cores=4, smt=1, l3=2), {0: 16 * GIB, 1: 0, 2: 16 * GIB, 3: 0},
        distances=lambda a, b: 10 if a == b else 12 if a // 2 == b // 2 else 32,
    ),
    "sparse": Tree(
        _sparse(), {0: 64 * GIB, 8: 64 * GIB}, distances=lambda a, b: 10 if a == b else 40
    ),
    "asymmetric": Tree(
        tuple(Thread(i, (0, i), int(i >= 12), i // 4) for i in range(16)),
        {0: 48 * GIB, 1: 16 * GIB},
    ),
    "offline-cpus": Tree(_offline(), {0: 32 * GIB}),
    "bare": Tree(
        # A kernel without NUMA and cache information, as some virtual machines have.
        regular(packages=1, nodes=1, cores=4, smt=1), {0: 4 * GIB},
        without=("sys/devices/system/node", "proc/self/status"),
    ),
    "cpuset-container": Tree(
        # Half of package 0 and two hardware threads of package 1, memory of package 0 only.
        regular(packages=2, nodes=1, cores=16, smt=2, l3=16), {0: 96 * GIB, 1: 96 * GIB},
        distances=lambda a, b: 10 if a == b else 21,
        without=("proc/self/status",),
        extra={
            **_CGROUP_2,
            f"{_JOB}/cpuset.cpus.effective": "0-7,32-39,16,17",
            f"{_JOB}/cpuset.mems.effective": "0",
            f"{_JOB}/cpu.max": "max 100000",
        },
    ),
    "quota-container": Tree(
        # 6.5 CPUs for the slice above, no limit of its own.
        regular(packages=1, nodes=2, cores=32, smt=2, l3=8), {0: 64 * GIB, 1: 64 * GIB},
        extra={
            **_CGROUP_2,
            f"{_JOB}/cpu.max": "max 100000",
            "sys/fs/cgroup/system.slice/cpu.max": "650000 100000",
        },
    ),
    "quota-container-v1": Tree(
        # Half a CPU; the path of the group is the host's and does not exist in the container.
        regular(packages=1, nodes=1, cores=4, smt=1, l3=4), {0: 16 * GIB},
        extra={
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/0123abc\n3:cpuset:/docker/0123abc",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "1-2",
        },
    ),
}  # fmt: skip


def snapshot(name: str) -> Machine:
    """Return the machine that is read from the tree ``name``."""
    return Machine.from_json(json.loads((SNAPSHOTS / f"{name}.json").read_text()))
