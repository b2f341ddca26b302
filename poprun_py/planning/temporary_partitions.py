"""Names of temporary partitions, and detection of partitions whose launch is dead.

A launch that finds no partition creates a temporary one and removes it after the job. A launch that
is killed leaves its partition in the pod. The name contains the host and the process, so the next
launch can tell that the partition is abandoned.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection

from popdist_py.pods.model import Attachment, Partition
from poprun_py.process_info import start_ticks

_NAME = re.compile(r"poprun_(?P<host>[A-Za-z0-9-]+)_(?P<pid>[0-9]+)_(?P<started>[0-9]+)")
# A partition's name has at most 64 characters. Up to 32 of them are needed for its other parts.
_MOST_HOST, _DIGEST = 32, 10
_HOST = re.compile(rf"[A-Za-z0-9-]{{1,{_MOST_HOST}}}")
# The longest time between the moment when a partition is ready and the moment when its launch holds
# the IPUs. It includes the difference between the clocks of two hosts.
_GRACE_SECONDS = 600.0


def temporary_name(host: str) -> str:
    """Return the name for a temporary partition of a launch in this process."""
    return f"poprun_{_host(host)}_{os.getpid()}_{start_ticks(os.getpid()) or 0}"


def permanent_name(host: str) -> str:
    """Return the name for a partition that this process creates and does not remove.

    Later launches treat it as a partition that a user created.
    """
    return temporary_name(host).replace("poprun_", "kept_", 1)


def is_temporary(name: str) -> bool:
    """Tell whether ``name`` is the name of a temporary partition."""
    return _NAME.fullmatch(name) is not None


def is_abandoned(
    partition: Partition,
    attachments: Collection[Attachment],
    host: str,
    *,
    now: float | None = None,
    create_seconds: float = 0.0,
) -> bool:
    """Tell whether ``partition`` is temporary and its launch is dead.

    A partition with attached IPUs is never abandoned. A launch of this host is dead if its process
    has ended. It is also dead if its process is this one, because the launch that calls this
    function has not created a partition yet. A launch of another host is taken for dead if its
    partition has been ready for longer than a launch needs to attach the IPUs.

    ``attachments`` are all attachments of the pod, ``host`` is the name of this host, and
    ``create_seconds`` is the time that the pod needs to create a partition.
    """
    match = _NAME.fullmatch(partition.name)
    if match is None or any(each.partition == partition.name for each in attachments):
        return False
    if match["host"] == _host(host):
        pid = int(match["pid"])
        return pid == os.getpid() or start_ticks(pid) != int(match["started"])
    age = (time.time() if now is None else now) - partition.created
    return age > create_seconds + _GRACE_SECONDS


def _host(name: str) -> str:
    """Return the part of a partition's name that identifies a host.

    A host name that is too long or has characters that partition names may not contain is changed.
    It then ends with a digest of the whole name, so that no two hosts share a part.
    """
    if _HOST.fullmatch(name):
        return name
    import hashlib  # imported here because few hosts need it

    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', name)[: _MOST_HOST - _DIGEST - 1]}-{digest}"
