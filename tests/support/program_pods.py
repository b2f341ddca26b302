"""A pod in a folder, as the one that a program finds which no launcher started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from popdist_py.pods import program_devices
from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_folders import make_pod, open_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_parts import PartitionRequest


def partition(name: str = "p16", size: int = 16, **values) -> PartitionRequest:
    given = {} if values else {"reconfigurable": True}
    return PartitionRequest(name=name, size=size, **given, **values)


@contextlib.contextmanager
def configuring(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FolderStore]]:
    """Give a function that makes the only pod, with these partitions.

    What it returns looks at the pod from outside of the program. This process has then not looked
    for its pod yet, and forgets at the end that it did.
    """
    monkeypatch.setenv("POPRUN_PODS", str(root))
    with (
        patch.multiple(program_devices, _pod=None, _was_sought=False),
        contextlib.ExitStack() as stack,
    ):

        def configure(*partitions: PartitionRequest, system: str = "POD16") -> FolderStore:
            make_pod(root, system_pod(system, "pod"))
            store = stack.enter_context(contextlib.closing(open_pod(root, "pod")))
            for each in partitions:
                store.create_partition(each)
            return store

        yield configure
        if program_devices._pod is not None:
            program_devices._pod.store.close()


def held(pod: FolderStore) -> list[tuple[int, ...]]:
    return [each.ipus for each in pod.attachments()]
