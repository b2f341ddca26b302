"""A thread that renews the leases of attached IPUs at a pod's server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from popdist_py.pods.model.partition_rules import ipu_list
from popdist_py.pods.model.pod_errors import PodError, UnreachableError
from popdist_py.pods.model.pod_parts import Attachment
from popdist_py.pods.server.pod_api import Lease

# The number of renewals that are sent during the time of one lease. A lease ends only after more
# than five renewals have failed.
_RENEWALS_PER_LEASE: Final = 6


class Renewal:
    """Renews the lease of each attachment until its IPUs are detached or the process ends.

    A lease ends if it is not renewed, for example because the network failed. After the end of a
    lease, this class attaches the same IPUs again. If this fails, because another process holds the
    IPUs or the partition was removed, a warning is logged and the job continues.

    Args:
        renew: A function that renews the leases with the given ids within a time-out. ``renew``
            returns the ids of the leases that have ended.
        attach_again: A function that attaches the IPUs of an attachment again after its lease has
            ended.
    """

    def __init__(
        self,
        renew: Callable[[tuple[str, ...], float], tuple[str, ...]],
        attach_again: Callable[[Attachment], Lease],
    ) -> None:
        self._renew = renew
        self._attach_again = attach_again
        self._lock = threading.Lock()
        # Each key is the id of a lease's first attachment, which is the id that the holder knows.
        # If the IPUs were attached again, the lease contains a new attachment with another id.
        self._held: dict[str, Lease] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease) -> None:
        """Start to renew a lease."""
        with self._lock:
            self._held[lease.attachment.id] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pod-renewal", daemon=True)
                self._thread.start()

    def kept_ids(self) -> frozenset[str]:
        """Return the ids of the attachments whose leases are renewed.

        The ids are those that the holder got when it attached the IPUs.

        This method does not acquire ``_lock``, because forked processes also call this method. In a
        forked process, the lock may be held by a thread that exists only in the parent.
        """
        return frozenset(self._held)

    def forget(self, attachment: Attachment) -> Attachment:
        """Stop the renewal of an attachment's lease.

        The result has the id that the server knows. This id differs from ``attachment.id`` if the
        IPUs were attached again.
        """
        with self._lock:
            lease = self._held.pop(attachment.id, None)
        return attachment if lease is None else lease.attachment

    def end(self) -> tuple[Attachment, ...]:
        """Stop the thread, and return the attachments whose leases the thread renewed."""
        self._ended.set()
        with self._lock:
            left = tuple(lease.attachment for lease in self._held.values())
            self._held.clear()
        return left

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._held:
                    self._thread = None
                    return
                seconds = min(lease.seconds for lease in self._held.values())
            period = seconds / _RENEWALS_PER_LEASE
            if self._ended.wait(period):
                return
            with self._lock:
                held = dict(self._held)
            if held:
                self._renew_once(held, period)

    def _renew_once(self, held: dict[str, Lease], period: float) -> None:
        ids = tuple(lease.attachment.id for lease in held.values())
        try:
            gone = set(self._renew(ids, max(1.0, 2 * period)))
        except PodError:
            return  # the job continues without a server, and the leases are renewed later
        for own_id, lease in held.items():
            if lease.attachment.id in gone:
                self._take_back(own_id, lease)

    def _take_back(self, own_id: str, lease: Lease) -> None:
        lost = lease.attachment
        with self._lock:
            if own_id not in self._held:
                return  # the holder has detached these IPUs in the meantime
        try:
            again = self._attach_again(lost)
        except UnreachableError:
            return  # the next renewal tries again to attach the IPUs
        except PodError as error:
            with self._lock:
                self._held.pop(own_id, None)
            logging.getLogger("popdist").warning(
                "this job has lost its lease of the IPUs %s of partition %s, because the partition "
                "was removed or the lease was not renewed in time; the job continues, but other "
                "jobs may use these IPUs (%s)",
                ipu_list(lost.ipus), lost.partition, error,
            )  # fmt: skip
            return
        with self._lock:
            # If the holder has detached the IPUs in the meantime, the new lease is not renewed and
            # thus ends.
            if own_id in self._held:
                self._held[own_id] = again
