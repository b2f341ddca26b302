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

# During the time of a lease, this number of renewals is sent. Five of them may fail before the
# lease ends.
_RENEWALS_PER_LEASE: Final = 6


class Renewal:
    """Renews the lease of each attachment until its IPUs are detached or the process ends.

    A lease ends if it is not renewed, for example because the network failed. After the end of a
    lease, this class attaches the same IPUs again. If another process holds the IPUs, or the
    partition was removed, a warning is logged and the job continues.

    Args:
        renew: A function that renews the leases with the given ids within a time-out. The function
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
        # The key of a lease is the id of its first attachment, because the holder knows this id. If
        # the IPUs are attached again, the lease contains a new attachment with another id.
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

        These are the ids that the holder knows.

        This method does not take the lock, because forked processes also call it. In a forked
        process, the lock may be held by a thread that exists only in the parent.
        """
        return frozenset(self._held)

    def forget(self, attachment: Attachment) -> Attachment:
        """Stop the renewal of an attachment's lease.

        The result is the attachment with the id that the server knows.
        """
        with self._lock:
            lease = self._held.pop(attachment.id, None)
        return attachment if lease is None else lease.attachment

    def end(self) -> tuple[Attachment, ...]:
        """Stop the thread. Return the attachments for which the thread renewed the leases."""
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
                "the pod's server no longer has IPUs %s of the partition %s for this job: the "
                "partition was removed, or the lease was not renewed in time; the job continues "
                "(%s)",
                ipu_list(lost.ipus), lost.partition, error,
            )  # fmt: skip
            return
        with self._lock:
            # If the holder has detached the IPUs in the meantime, the new lease is not renewed, so
            # that it ends.
            if own_id in self._held:
                self._held[own_id] = again
