"""The names of partitions that launches make for themselves, and whose launch is dead.

A launch without a named partition makes one and removes it at its end. One that was killed leaves
it behind; the name tells the process, so that the next launch sees that it is gone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from pathlib import Path

from popdist_py.pods.values import Attachment, Partition

_NAME = re.compile(r"poprun_(?P<host>[A-Za-z0-9-]+)_(?P<pid>[0-9]+)_(?P<started>[0-9]+)")
# A partition's name has at most 64 characters. Its other parts need up to 32 of them.
_MOST_HOST, _DIGEST = 32, 10
_HOST = re.compile(rf"[A-Za-z0-9-]{{1,{_MOST_HOST}}}")
# What a launch may take from the moment its partition is ready to the moment it holds the IPUs,
# together with the difference of the clocks of two hosts.
_GRACE_SECONDS = 600.0
_STARTED_FIELD = 19  # of /proc/PID/stat, counted after the name of the program


def own_name(host: str) -> str:
    """Return the name of the partition that this process makes for one launch."""
    return f"poprun_{_host(host)}_{os.getpid()}_{_started(os.getpid()) or 0}"


def kept_name(host: str) -> str:
    """Return the name of one that this process makes and does not remove: it counts as named."""
    return own_name(host).replace("poprun_", "kept_", 1)


def is_own(name: str) -> bool:
    """Tell whether a launch made a partition for itself."""
    return _NAME.fullmatch(name) is not None


def is_left_behind(
    partition: Partition,
    attachments: Collection[Attachment],
    host: str,
    *,
    now: float | None = None,
    create_seconds: float = 0.0,
) -> bool:
    """Tell whether the launch that made a partition for itself is dead.

    Nobody holds its IPUs. A launch of this host is dead when its process is gone, or is this one,
    which is at a launch now that has made none; one of another host when the partition has been
    ready for so long that a living launch would hold it.

    Args:
        partition: which one.
        attachments: of the whole pod.
        host: the name of this host.
        now: seconds since the epoch.
        create_seconds: how long the pod takes to make a partition.
    """
    match = _NAME.fullmatch(partition.name)
    if match is None or any(each.partition == partition.name for each in attachments):
        return False
    if match["host"] == _host(host):
        pid = int(match["pid"])
        return pid == os.getpid() or _started(pid) != int(match["started"])
    age = (time.time() if now is None else now) - partition.created
    return age > create_seconds + _GRACE_SECONDS


def _host(name: str) -> str:
    """Return the part of a partition's name that stands for a host; no two hosts have the same.

    A host name that is too long, or contains characters that a partition's name may not, is changed
    and ends in a digest of the whole name.
    """
    if _HOST.fullmatch(name):
        return name
    import hashlib  # imported here because few hosts have such a name

    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', name)[: _MOST_HOST - _DIGEST - 1]}-{digest}"


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[_STARTED_FIELD])
