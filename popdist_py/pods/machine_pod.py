"""The default pod of this machine, which is used if no pod is configured.

``gc-info -l`` lists the IPUs of the default pod. A program that asks for a device by its id
attaches to the default pod, so that only one process at a time uses the device. A program that
accepts any device does not use the default pod, and may use any number of IPUs. The default pod is
stored in a hidden folder beside the folders of this user's pods. The hidden folder is made when a
program first asks for a device by its id.
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

#: The name of the default pod and of its only partition.
MACHINE_PARTITION: Final = "emulated"


def existing_machine(environ: Mapping[str, str]) -> FolderStore | None:
    """Open the default pod of this machine; return None if the pod has not been made yet.

    Raises:
        PodError: The pod cannot be used.
    """
    root = _root(environ)
    return open_pod(root, MACHINE_PARTITION) if (root / MACHINE_PARTITION).is_dir() else None


def open_machine(environ: Mapping[str, str]) -> FolderStore:
    """Open the default pod of this machine; make the pod if it does not exist.

    Raises:
        PodError: The pod cannot be made or used.
    """
    from popdist_py.pods.model.graphcore_systems import MACHINE_IPUS, machine_pod
    from popdist_py.pods.model.pod_parts import PartitionRequest

    root = _root(environ)
    # NameTakenError is ignored, because another program may make the pod or its partition at the
    # same time.
    if not (root / MACHINE_PARTITION).is_dir():
        try:
            with suppress(NameTakenError):
                make_pod(root, machine_pod(MACHINE_PARTITION))
        except PodError as error:
            raise PodError(
                f"{error}; the ids of the devices in use are stored in this folder: set "
                "POPRUN_PODS to a writable folder, or do not select a device by its id"
            ) from None
    store = open_pod(root, MACHINE_PARTITION)
    if not store.partitions():
        with suppress(NameTakenError):
            store.create_partition(
                PartitionRequest(name=MACHINE_PARTITION, size=MACHINE_IPUS, reconfigurable=True)
            )
    return store


def _root(environ: Mapping[str, str]) -> Path:
    """Return the parent folder of the default pod; its name contains the name of the host."""
    return pods_root(environ) / f".machine-{os.uname().nodename}"
