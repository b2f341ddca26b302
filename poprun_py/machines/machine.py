"""The hardware of one host as a ``Machine``, which can be saved as JSON; parsing of CPU lists.

machine_reader.py creates a ``Machine`` from the kernel's files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from poprun_py.display.formatting import ranges_text, read_json
from poprun_py.errors import UsageError

HARDWARE_VERSION = 1
_MAX_WHOLE = 1 << 63
_MAX_CPU = 1 << 16
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?", re.ASCII)
_NO_MACHINE = "not a saved machine: expected the JSON written by --print-hardware=json"


class HardwareError(UsageError):
    """A saved machine is not valid, or the kernel's files do not describe a usable machine."""


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core, with its online hardware threads (SMT siblings) and its location.

    Cores that share a last-level cache have the same number ``l3``; ``l3`` is None if the cache is
    unknown. ``efficiency`` is 0 for the slowest class of cores, and higher for the faster classes
    of a hybrid machine.
    """

    cpus: tuple[int, ...]
    package: int
    numa_node: int
    l3: int | None
    efficiency: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node of a host.

    ``distances`` are the relative costs at which CPUs of this node access the memory of each node.
    """

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The online CPUs and NUMA nodes of one host, and the part that jobs may use.

    ``allowed_cpus`` and ``allowed_memory_nodes`` are the CPUs and NUMA nodes that CPU affinity and
    cpusets allow. ``cpu_quota`` is the limit of CPU time of the control groups, as a number of
    CPUs; None for no limit. ``held_cpus`` are the CPUs that other jobs have leased.
    ``sharing_jobs`` has an entry for each other job with which a job shares CPUs: the CPUs of that
    other job. ``cores`` is sorted by NUMA node.
    """

    cores: tuple[Core, ...]
    numa_nodes: tuple[NumaNode, ...]
    allowed_cpus: frozenset[int]
    allowed_memory_nodes: frozenset[int]
    cpu_quota: float | None = None
    held_cpus: frozenset[int] = frozenset()
    sharing_jobs: tuple[frozenset[int], ...] = ()

    @property
    def quota_cpus(self) -> int | None:
        """The CPU quota rounded down to whole CPUs, but at least 1."""
        return None if self.cpu_quota is None else max(1, math.floor(self.cpu_quota))

    @property
    def usable_cores(self) -> tuple[Core, ...]:
        """The cores with at least one allowed CPU, reduced to the allowed CPUs.

        If another job holds a CPU of a core, the whole core is left out.
        """
        usable = []
        for core in self.cores:
            if not self.held_cpus.isdisjoint(core.cpus):
                continue
            cpus = tuple(cpu for cpu in core.cpus if cpu in self.allowed_cpus)
            if cpus == core.cpus:
                usable.append(core)
            elif cpus:
                usable.append(replace(core, cpus=cpus))
        return tuple(usable)

    def to_json(self) -> dict[str, Any]:
        """Return the machine as JSON values for ``from_json``."""
        return {
            "version": HARDWARE_VERSION,
            "numa_nodes": [
                {**asdict(node), "cpus": ranges_text(node.cpus), "distances": [*node.distances]}
                for node in self.numa_nodes
            ],
            "cores": [{**asdict(core), "cpus": ranges_text(core.cpus)} for core in self.cores],
            "allowed_cpus": ranges_text(self.allowed_cpus),
            "allowed_memory_nodes": ranges_text(self.allowed_memory_nodes),
            "cpu_quota": self.cpu_quota,
            **({"held_cpus": ranges_text(self.held_cpus)} if self.held_cpus else {}),
            **(
                {"sharing_jobs": [ranges_text(cpus) for cpus in self.sharing_jobs]}
                if self.sharing_jobs
                else {}
            ),
        }

    @classmethod
    def from_json(cls, data: Any) -> Machine:
        """Return the machine that the JSON values of ``to_json`` describe.

        Raises:
            HardwareError: ``data`` is no saved machine, has another version, or is damaged.
        """
        if not isinstance(data, dict) or "version" not in data:
            raise HardwareError(_NO_MACHINE)
        if data["version"] != HARDWARE_VERSION:
            raise HardwareError(
                f"the saved machine has version {data['version']!r}; expected version "
                f"{HARDWARE_VERSION}; save the machine again with --print-hardware=json of this "
                "poprun-py"
            )
        try:
            machine = _from_json(data)
        except KeyError as error:
            raise HardwareError(
                f"the saved machine is damaged: the key {error.args[0]!r} is missing"
            ) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise HardwareError(f"the saved machine is damaged: {error}") from None
        _check(machine)
        return machine


def load_machines(text: str, path: str, host_names: Sequence[str]) -> tuple[Machine | None, ...]:
    """Return the machine of each host from the text of a file that --print-hardware=json wrote.

    A file with one machine describes all hosts. A file with several machines names the host of each
    machine. If the file does not name a host, the machine of the host is None. ``path`` is the name
    of the file in error messages.

    Raises:
        HardwareError: The file is not valid, has another version, or describes none of the hosts.
    """
    try:
        data = read_json(text)
        if not isinstance(data, dict) or "hosts" not in data:
            return (Machine.from_json(data),) * len(host_names)
        described = data["hosts"]
        if not isinstance(described, dict):
            raise HardwareError(_NO_MACHINE)
        if not any(name in described for name in host_names):
            names = ", ".join(described)
            raise HardwareError(
                f"the file describes {names or 'no host'}; expected a description of "
                f"{', '.join(host_names)}"
            )
        machines = {
            name: Machine.from_json(described[name])
            for name in dict.fromkeys(host_names)
            if name in described
        }
    except ValueError as error:
        raise HardwareError(
            f"{path}: the file is not JSON ({error}); expected the output of --print-hardware=json"
        ) from None
    except HardwareError as error:
        raise HardwareError(f"{path}: {error}") from None
    return tuple(machines.get(name) for name in host_names)


def _from_json(data: dict[str, Any]) -> Machine:
    quota = data["cpu_quota"]
    if quota is not None and (type(quota) not in (int, float) or not 0 < quota < _MAX_WHOLE):
        raise ValueError(f"cpu_quota is {repr(quota)[:40]}; expected a number above 0, or null")
    return Machine(
        cores=tuple(Core(**values) for values in _checked(data, "cores", Core)),
        numa_nodes=tuple(NumaNode(**values) for values in _checked(data, "numa_nodes", NumaNode)),
        allowed_cpus=frozenset(_cpus(data["allowed_cpus"], "allowed_cpus")),
        allowed_memory_nodes=frozenset(_cpus(data["allowed_memory_nodes"], "allowed_memory_nodes")),
        cpu_quota=quota,
        held_cpus=frozenset(_cpus(data.get("held_cpus", ""), "held_cpus")),
        sharing_jobs=tuple(
            frozenset(_cpus(cpus, "sharing_jobs"))
            for cpus in _list(data.get("sharing_jobs", []), "sharing_jobs")
        ),
    )


def _check(machine: Machine) -> None:
    """Raise HardwareError if the saved values of a machine contradict each other."""
    in_cores = [cpu for core in machine.cores for cpu in core.cpus]
    nodes = {node.index for node in machine.numa_nodes}
    node_of = {cpu: node.index for node in machine.numa_nodes for cpu in node.cpus}
    in_nodes = [cpu for node in machine.numa_nodes for cpu in node.cpus]
    problems = {
        "the machine has no usable CPU": not machine.usable_cores,
        "a core has no CPU": not all(core.cpus for core in machine.cores),
        "a CPU is in two cores": len(set(in_cores)) != len(in_cores),
        "a NUMA node is listed twice": len(nodes) != len(machine.numa_nodes),
        "cores and NUMA nodes list different CPUs": sorted(in_cores) != sorted(in_nodes),
        "a core is in another NUMA node than its CPUs": any(
            node_of.get(cpu) != core.numa_node for core in machine.cores for cpu in core.cpus
        ),
        "a NUMA node has more or fewer distances than there are NUMA nodes": any(
            len(node.distances) != len(nodes) for node in machine.numa_nodes
        ),
    }
    contradictions = [text for text, is_so in problems.items() if is_so]
    if contradictions:
        raise HardwareError(f"the saved machine is damaged: {'; '.join(contradictions)}")


def _checked(
    data: dict[str, Any], key: str, part: type[Core] | type[NumaNode]
) -> list[dict[str, Any]]:
    """Check a saved list of cores or NUMA nodes (``part``), and return the values of each entry."""
    entries = _list(data[key], key)
    if not all(isinstance(entry, dict) for entry in entries):
        raise TypeError(f"{key} must list objects")
    names = [field.name for field in fields(part)]
    return [{name: _CHECKS[name](entry[name], name) for name in names} for entry in entries]


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{key} is {value!r}; expected a list")
    return value


def _whole(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value < _MAX_WHOLE:
        raise ValueError(
            f"{key} is {repr(value)[:40]}; expected a whole number from 0 to 2**63 - 1"
        )
    return value


def _cpus(value: Any, key: str) -> tuple[int, ...]:
    if not isinstance(value, str):
        raise TypeError(f"{key} is {value!r}; expected a list of CPUs such as '0-3,8'")
    return parse_cpu_list(value)


# The functions that check the saved fields of cores and NUMA nodes.
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("index", "package", "numa_node", "memory_bytes", "efficiency"), _whole),
    "cpus": _cpus,
    "l3": lambda value, key: None if value is None else _whole(value, key),
    "distances": lambda value, key: tuple(_whole(each, key) for each in _list(value, key)),
}


# --- CPU lists ----------------------------------------------------------------------------------


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the sorted CPU numbers of a list in the kernel's form: ``0-3,8`` or ``0-31:2/4``.

    Raises:
        ValueError: The text is not a valid CPU list.
    """
    numbers: set[int] = set()
    for part in text.replace("\n", ",").split(","):
        word = part.strip(" \t\0")
        if not word:
            continue
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ValueError(
                f"{word!r} is not a CPU number or a range of CPU numbers; expected a list such as "
                "0-3,8"
            )
        first, last, used, group = match.groups()
        start, stop = int(first), int(last or first)
        if start > stop or stop >= _MAX_CPU or (group is not None and int(group) == 0):
            raise ValueError(f"{word!r} is not an ascending range of CPU numbers below {_MAX_CPU}")
        if group is None:
            numbers.update(range(start, stop + 1))
        else:
            numbers.update(
                n for n in range(start, stop + 1) if (n - start) % int(group) < int(used)
            )
    return tuple(sorted(numbers))
