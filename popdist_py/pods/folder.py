"""The pods of this machine: folders below one root."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from popdist_py.pods.database import FolderStore
from popdist_py.pods.values import Pod

__all__ = ["list_pods", "make_pod", "open_pod", "pods_root", "remove_pod"]


def pods_root(environ: Mapping[str, str]) -> Path:
    """Return POPRUN_PODS, or ``poprun-py/pods`` in XDG_STATE_HOME (~/.local/state)."""
    raise NotImplementedError


def list_pods(root: Path) -> tuple[str, ...]:
    """Return the names of the pods below ``root``, sorted; none where there is no such folder."""
    raise NotImplementedError


def make_pod(root: Path, pod: Pod) -> Path:
    """Make the folder of a new pod below ``root``, whole or not at all (NameTakenError)."""
    raise NotImplementedError


def open_pod(root: Path, name: str, *, user: str | None = None) -> FolderStore:
    """Open a pod below ``root`` (UnknownNameError)."""
    raise NotImplementedError


def remove_pod(root: Path, name: str, *, force: bool = False) -> None:
    """Remove a pod and its folder (UnknownNameError; InUseError while somebody holds IPUs)."""
    raise NotImplementedError
