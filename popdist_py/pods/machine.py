"""The pod of a machine for which none is configured: the IPUs that ``gc-info -l`` lists.

Only a program that names a device's id asks it, so that ids are checked and exclude one another;
programs that take any device have as many as they want. It lies beside this user's pods, hidden,
and is made when an id is named for the first time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from popdist_py.pods.errors import NameTakenError, PodError
from popdist_py.pods.folder import make_pod, open_pod, pods_root

if TYPE_CHECKING:
    from popdist_py.pods.database import FolderStore

__all__ = ["MACHINE_PARTITION", "existing_machine", "open_machine"]

#: The only partition, and the name of the pod.
MACHINE_PARTITION: Final = "emulated"


def existing_machine(environ: Mapping[str, str]) -> FolderStore | None:
    """Open the pod of this machine; None where no program has named an id yet.

    Raises:
        PodError: it cannot be used.
    """
    root = _root(environ)
    return open_pod(root, MACHINE_PARTITION) if (root / MACHINE_PARTITION).is_dir() else None


def open_machine(environ: Mapping[str, str]) -> FolderStore:
    """Open the pod of this machine; make it first where there is none.

    Raises:
        PodError: it cannot be made or used.
    """
    from popdist_py.pods.pod_file import MACHINE_IPUS, machine_pod
    from popdist_py.pods.values import PartitionRequest

    root = _root(environ)
    # Another program may make either at the same time.
    if not (root / MACHINE_PARTITION).is_dir():
        try:
            with suppress(NameTakenError):
                make_pod(root, machine_pod(MACHINE_PARTITION))
        except PodError as error:
            raise PodError(
                f"{error}; the ids in use are kept there: set POPRUN_PODS to a folder that can be "
                "written, or name no id"
            ) from None
    store = open_pod(root, MACHINE_PARTITION)
    if not store.partitions():
        with suppress(NameTakenError):
            store.create_partition(
                PartitionRequest(name=MACHINE_PARTITION, size=MACHINE_IPUS, reconfigurable=True)
            )
    return store


def _root(environ: Mapping[str, str]) -> Path:
    """Return the folder of this machine: hosts may share the one of the user's pods."""
    return pods_root(environ) / f".machine-{os.uname().nodename}"
