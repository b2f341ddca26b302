"""``pod.toml``: a pod's description in a file, and the systems that are known by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from popdist_py.pods.values import Pod

__all__ = [
    "POD_FILE",
    "SYSTEMS",
    "format_pod",
    "machine_pod",
    "parse_pod",
    "read_pod",
    "system_pod",
]

POD_FILE = "pod.toml"
# IPU-Machines and IPU-Link domains of each system (vipu reference: link domains).
SYSTEMS: dict[str, tuple[int, int]] = {
    "POD4": (1, 1),
    "POD16": (4, 1),
    "POD64": (16, 1),
    "POD128": (32, 2),
    "POD256": (64, 4),
}


def system_pod(system: str, name: str, hosts: Sequence[str] | None = None) -> Pod:
    """Return a pod like ``system`` (a key of SYSTEMS); ``hosts`` (this one) share its agents."""
    raise NotImplementedError


def machine_pod(name: str, num_ipus: int = 16) -> Pod:
    """Return a pod of this host's IPUs."""
    raise NotImplementedError


def format_pod(pod: Pod) -> str:
    """Return the text of ``pod.toml``."""
    raise NotImplementedError


def parse_pod(text: str, source: str) -> Pod:
    """Read the text of ``pod.toml`` (DamagedError, naming ``source``)."""
    raise NotImplementedError


def read_pod(file: Path) -> Pod:
    """Read a ``pod.toml`` (DamagedError, PodError)."""
    raise NotImplementedError
