"""What a host is asked, and what it reports: two values. Nothing is asked or decide_on_table here.

The facts of a report are the JSON values that host_probe.py describes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poprun_py.machines.host_list import Host
from poprun_py.machines.leases import OtherJobs, parse_other_jobs
from poprun_py.machines.machine import HardwareError, Machine
from poprun_py.machines.network_choice import Interface
from poprun_py.machines.remote_shell import Problem

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("mpi4py", "torch", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What every host is asked; the fields are described in host_probe.py."""

    root: str
    program: str
    folder: str
    mpirun: str
    packages: tuple[str, ...] = _PACKAGES
    call_back: tuple[str, int] | None = None
    leases: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON values."""
        return asdict(self)


def make_request(
    program: Sequence[str],
    mpirun: str,
    call_back: tuple[str, int] | None = None,
    *,
    leases: bool = False,
) -> Request:
    """Return the request for a program, in the working folder, under ``mpirun``."""
    script = program[1] if len(program) > 1 and program[0] == sys.executable else ""
    named = script or (program[0] if program and "/" in program[0] else "")
    return Request(
        root=str(_ROOT),
        program=str(Path(named).absolute()) if named and not named.startswith("-") else "",
        folder=str(Path.cwd()),
        mpirun=mpirun,
        call_back=call_back,
        leases=leases,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """What one host reported, or why it reported nothing.

    ``clock_seconds`` is how far its clock is off at least: a report takes time to arrive.
    """

    host: Host
    facts: Mapping[str, Any] | None = None
    problem: Problem | None = None
    clock_seconds: float = 0.0

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The host's addresses."""
        return tuple(Interface(*entry) for entry in (self.facts or {}).get("networks", ()))

    @property
    def machine(self) -> Machine | None:
        """The host's hardware; None where it is not known."""
        description = (self.facts or {}).get("machine")
        with contextlib.suppress(HardwareError):
            return Machine.from_json(description) if description is not None else None
        return None

    def other_jobs(self, within: str) -> OtherJobs:
        """Return the other jobs on the host, but for the run that this job is launched within."""
        return parse_other_jobs((self.facts or {}).get("leases"), within)

    @property
    def hostname(self) -> str:
        """The name that the host gives itself; empty where it is not known."""
        return str((self.facts or {}).get("host", ""))

    @property
    def has_fabric(self) -> bool:
        """Whether it has a faster network than TCP, or nobody knows."""
        return bool((self.facts or {}).get("fabric", True))
