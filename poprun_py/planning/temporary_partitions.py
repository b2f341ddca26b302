"""Names of temporary partitions, and detection of temporary partitions that were left behind.

A launch that finds no partition in the pod creates a temporary partition, and removes it after the
job. A launch that is killed leaves its partition in the pod. The name of a temporary partition
contains the host and the process of its launch. The next launch can therefore detect that the
process has ended, and that the partition is abandoned.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection

from popdist_py.pods.model import Attachment, Partition
from poprun_py.process_info import start_ticks

_NAME = re.compile(r"poprun_(?P<host>[A-Za-z0-9-]+)_(?P<pid>[0-9]+)_(?P<started>[0-9]+)")
# The maximum number of characters of a host name in a partition's name, and the number of
# characters of the digest at the end of a shortened host name. A partition's name has at most 64
# characters, of which the prefix, the process ID and the start time need up to 32.
_MOST_HOST, _DIGEST = 32, 10
_HOST = re.compile(rf"[A-Za-z0-9-]{{1,{_MOST_HOST}}}")
# The longest time that a launch needs to attach the IPUs of its partition after the partition is
# ready, including a difference between the clocks of two hosts.
_GRACE_SECONDS = 600.0


def temporary_name(host: str) -> str:
    """Return the name of the temporary partition that a launch in this process creates."""
    return f"poprun_{_host(host)}_{os.getpid()}_{start_ticks(os.getpid()) or 0}"


def permanent_name(host: str) -> str:
    """Return the name of a partition that this process creates and does not remove.

    Later launches treat a partition with this name as one that a user created.
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
    """Tell whether ``partition`` is temporary and its launch ended without removing it.

    A partition with attached IPUs is not abandoned. If the launch ran on this host, the partition
    is abandoned if the process of the launch has ended. A partition whose name contains the ID of
    the calling process is also abandoned, because the calling process has not created a partition
    yet. If the launch ran on another host, the partition is assumed to be abandoned once it has
    been ready for longer than a launch needs to attach the IPUs.

    Args:
        partition: A partition of the pod.
        attachments: All attachments of the pod.
        host: The name of this host.
        now: The present time, in seconds since 1970; None for the time of the system clock.
        create_seconds: The seconds that the pod needs to create a partition.
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

    A host name is changed if it is too long, or has characters that partition names may not
    contain. The changed name ends with a digest of the whole host name, so that the names of two
    hosts stay different.
    """
    if _HOST.fullmatch(name):
        return name
    import hashlib  # hashlib is imported only here, because the names of most hosts need no digest.

    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', name)[: _MOST_HOST - _DIGEST - 1]}-{digest}"
