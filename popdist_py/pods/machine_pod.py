"""The default pod, for a machine on which no pod is configured. ``gc-info -l`` lists its IPUs.

Programs that name the id of a device attach to this pod, so that a device has one holder at a time.
Programs that use any device do not use this pod, and have any number of IPUs. The pod is a hidden
folder beside the pods of this user. It is made when a program first names an id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from popdist_py.pods.folder.pod_folders import make_pod, open_pod, pods_root
from popdist_py.pods.model.pod_errors import NameTakenError, PodError

if TYPE_CHECKING:
    from popdist_py.pods.folder.folder_store import FolderStore

#: The only partition, and the name of the pod.
MACHINE_PARTITION: Final = "emulated"


def existing_machine(environ: Mapping[str, str]) -> FolderStore | None:
    """Open the pod of this machine; None if no program has named an id yet.

    Raises:
        PodError: The pod cannot be used.
    """
    root = _root(environ)
    return open_pod(root, MACHINE_PARTITION) if (root / MACHINE_PARTITION).is_dir() else None


def open_machine(environ: Mapping[str, str]) -> FolderStore:
    """Open the pod of this machine, and make it first if it does not exist.

    Raises:
        PodError: The pod cannot be made or used.
    """
    from popdist_py.pods.model.graphcore_systems import MACHINE_IPUS, machine_pod
    from popdist_py.pods.model.pod_parts import PartitionRequest

    root = _root(environ)
    # Another program may make the pod or its partition at the same time.
    if not (root / MACHINE_PARTITION).is_dir():
        try:
            with suppress(NameTakenError):
                make_pod(root, machine_pod(MACHINE_PARTITION))
        except PodError as error:
            raise PodError(
                f"{error}; the list of ids in use is kept there: set POPRUN_PODS to a folder that "
                "can be written, or name no id"
            ) from None
    store = open_pod(root, MACHINE_PARTITION)
    if not store.partitions():
        with suppress(NameTakenError):
            store.create_partition(
                PartitionRequest(name=MACHINE_PARTITION, size=MACHINE_IPUS, reconfigurable=True)
            )
    return store


def _root(environ: Mapping[str, str]) -> Path:
    """Return the parent folder of this machine's pod, which no other host uses."""
    return pods_root(environ) / f".machine-{os.uname().nodename}"
