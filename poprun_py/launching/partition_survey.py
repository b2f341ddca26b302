"""Asks a pod what a launch needs to know, and decides with it; changes nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from popdist_py.pods.errors import PodError
from popdist_py.pods.finding import find_pod
from poprun_py.errors import StartError
from poprun_py.options.launch_config import LaunchConfig

if TYPE_CHECKING:
    from popdist_py.pods.store import PodStore
    from popdist_py.pods.values import Partition
    from poprun_py.planning.partition_decision import PartitionDecision, PodState

NO_POD = "none"
_HOST, _PORT = "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PORT"


def open_pod(config: LaunchConfig, environ: Mapping[str, str]) -> PodStore | None:
    """Open the pod of a launch; None where none is configured, or --offline-mode yes.

    Raises:
        StartError: it cannot be opened, or is not known which one is meant.
    """
    if config.offline_mode or config.pod == NO_POD:
        return None
    server = {
        **({_HOST: config.vipu_server_host} if config.vipu_server_host is not None else {}),
        **({_PORT: str(config.vipu_server_port)} if config.is_given("vipu_server_port") else {}),
    }
    try:
        return find_pod(
            config.pod, {**environ, **server}, timeout=float(config.vipu_server_timeout)
        )
    except PodError as error:
        raise StartError(str(error)) from None


def look(store: PodStore) -> PodState:
    """Return what a pod is now (PodError)."""
    from poprun_py.planning.partition_decision import PodState

    return PodState(
        where=store.where,
        user=store.user,
        pod=store.pod(),
        partitions=store.partitions(),
        attachments=store.attachments(),
    )


def decide_now(
    store: PodStore, config: LaunchConfig, environ: Mapping[str, str]
) -> tuple[PartitionDecision, tuple[Partition, ...]]:
    """Decide what a launch does, as the pod is now without what launches left behind (PodError).

    Returns that, and the partitions which are to be removed first: another one may have done it.
    """
    from dataclasses import replace

    from poprun_py.planning.partition_decision import decide_partition
    from poprun_py.planning.temporary_partitions import is_abandoned, permanent_name, temporary_name

    now, host = look(store), socket.gethostname()
    left = tuple(
        each
        for each in now.partitions
        # Nobody can remove what belongs to another user.
        if each.owner == now.user
        and is_abandoned(each, now.attachments, host, create_seconds=now.pod.create_seconds)
    )
    living = tuple(each for each in now.partitions if each not in left)
    name = temporary_name(host) if config.remove_partition else permanent_name(host)
    return decide_partition(config, environ, replace(now, partitions=living), new_name=name), left


def ask(config: LaunchConfig, environ: Mapping[str, str]) -> PartitionDecision | None:
    """Return what a launch would do with which partition; None where no pod is configured.

    A pod that cannot be asked refuses.
    """
    try:
        store = open_pod(config, environ)
        if store is None:
            return None
        with contextlib.closing(store):
            return decide_now(store, config, environ)[0]
    except (StartError, PodError) as error:
        from poprun_py.planning.partition_decision import refusal

        return refusal(config.pod or "", str(error))
