"""The current partitions: the IPUs of this machine, and one partition for each running job.

Reads /proc, and queries the launchers of running jobs and the pod of this machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from popdist_py.pods.errors import PodError
from popdist_py.pods.values import Attachment
from poprun_py import process_info
from poprun_py.errors import StartError
from poprun_py.machines.leases import user_name
from poprun_py.pod_tools.gc_partitions import Holder, Partition, free_partition
from poprun_py.running.supervise.inspection import running_jobs
from poprun_py.texts import printable


def survey() -> tuple[list[Partition], list[int]]:
    """Return the partitions, the free one first, and the launchers that do not answer."""
    host = os.uname().nodename
    partitions, silent = [replace(free_partition(host), holders=_holders_of_ids())], []
    for launcher, holdings in running_jobs().items():
        try:
            if holdings is None or holdings["num_ipus"]:
                partitions.append(_partition_of(launcher, holdings, host))
        except (LookupError, TypeError, ValueError):
            # Nor does what another version answers, or anybody's socket in /tmp.
            silent.append(launcher)
    return partitions, silent


def _holders_of_ids() -> tuple[Holder, ...]:
    """Return the programs that hold devices of this machine by their ids.

    Raises:
        StartError: the pod of this machine cannot be read.
    """
    from popdist_py.pods.machine import existing_machine

    try:
        store = existing_machine(os.environ)
        if store is None:
            return ()
        with contextlib.closing(store):
            return tuple(program_of(each) for each in store.attachments())
    except PodError as error:
        raise StartError(str(error)) from None


def program_of(attachment: Attachment) -> Holder:
    """Return the process that attached to IPUs of a pod."""
    holder = attachment.holder
    return Holder(
        pid=holder.pid,
        instance=None,
        host=printable(holder.host),
        ipus=attachment.ipus,
        command=printable(holder.program),
        user=printable(holder.user),
        seconds=max(0.0, time.time() - attachment.since),
    )


def _partition_of(launcher: int, holdings: Any, host: str) -> Partition:
    """Return the partition of a job; the launcher's host is ``host``.

    Raises:
        LookupError, TypeError, ValueError: it is no answer, or not one of this version.
    """
    return Partition(
        name=printable(str(holdings["partition"] or f"job-{launcher}")),
        # IPUs are handed out in powers of two.
        num_ipus=1 << (int(holdings["num_ipus"]) - 1).bit_length(),
        host=host,
        holders=holders_of(holdings, host),
        launcher=launcher,
    )


def holders_of(holdings: Any, host: str) -> tuple[Holder, ...]:
    """Return the instances of a job with their IPUs, numbered within it; ``host`` is this one.

    Raises:
        LookupError, TypeError, ValueError: it is no answer, or not one of this version.
    """
    holders = (
        Holder(
            pid=int(each["pid"]),
            instance=int(each["index"]),
            host=printable(str(each["host"])),
            ipus=tuple(each["ipus"]),
        )
        for each in holdings["instances"]
    )
    return tuple(_with_process(h) if h.host == host else h for h in holders)


def _with_process(holder: Holder) -> Holder:
    """Add what /proc says of a process of this host, if it is still there."""
    words = process_info.read_file(holder.pid, "cmdline")
    stat, uid = process_info.read_stat(holder.pid), process_info.owner(holder.pid)
    if words is None or stat is None or uid is None:
        return holder
    ticks = stat.start_ticks / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    return replace(
        holder,
        command=_command(words.decode(errors="replace").split("\0")),
        user=user_name(str(uid)),
        seconds=max(0.0, seconds),
    )


def _command(words: list[str]) -> str:
    """Return a command line in short: without folders, and without the empty last word."""
    words = [word for word in words if word]
    words = [Path(word).name if "/" in word else word for word in words[:2]]
    return printable(" ".join(words))
