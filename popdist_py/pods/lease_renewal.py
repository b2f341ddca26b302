"""A thread that renews the leases of attached IPUs at a pod's server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from popdist_py.pods.model import Attachment
from popdist_py.pods.pod_api import Lease
from popdist_py.pods.pod_errors import PodError, UnreachableError

__all__ = ["Renewal"]

# Five renewals may be lost before the server takes a holder for dead.
_RENEWALS_PER_LEASE: Final = 6


class Renewal:
    """Renews what it is given to keep, until told to forget it, or the process ends.

    Where the server took the holder for dead (its network was cut, or the process stopped, for
    longer than a lease) the same IPUs are attached again; if somebody else has them by then, or
    their partition was removed, the job goes on and a warning is logged.

    Args:
        renew: renews ids for a number of seconds, and returns those that are gone.
        attach_again: attaches the IPUs of an attachment that is gone.
    """

    def __init__(
        self,
        renew: Callable[[tuple[str, ...], float], tuple[str, ...]],
        attach_again: Callable[[Attachment], Lease],
    ) -> None:
        self._renew = renew
        self._attach_again = attach_again
        self._lock = threading.Lock()
        # By the id that the holder knows: what is attached again has another one.
        self._held: dict[str, Lease] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease) -> None:
        """Renew an attachment from now on."""
        with self._lock:
            self._held[lease.attachment.id] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pod-renewal", daemon=True)
                self._thread.start()

    def kept_ids(self) -> frozenset[str]:
        """Return the ids of the renewed attachments, as the holder knows them.

        It does not take the lock, because it is also called in a forked process. There, the lock
        may be held by a thread that exists only in the parent.
        """
        return frozenset(self._held)

    def forget(self, attachment: Attachment) -> Attachment:
        """Stop renewing an attachment, and return it as the server knows it."""
        with self._lock:
            lease = self._held.pop(attachment.id, None)
        return attachment if lease is None else lease.attachment

    def end(self) -> tuple[Attachment, ...]:
        """Stop renewing, and return what was kept."""
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
            return  # the server is gone, or starts: the job goes on, and so does this
        for own_id, lease in held.items():
            if lease.attachment.id in gone:
                self._take_back(own_id, lease)

    def _take_back(self, own_id: str, lease: Lease) -> None:
        lost = lease.attachment
        with self._lock:
            if own_id not in self._held:
                return  # detached meanwhile
        try:
            again = self._attach_again(lost)
        except UnreachableError:
            return  # tried again with the next renewal
        except PodError as error:
            with self._lock:
                self._held.pop(own_id, None)
            logging.getLogger("popdist").warning(
                "the pod's server no longer has IPUs %s of the partition %s for this job: the "
                "partition was removed, or nothing was heard of the job for too long; the job goes "
                "on (%s)",
                _listed(lost.ipus), lost.partition, error,
            )  # fmt: skip
            return
        with self._lock:
            # One that was detached meanwhile is not renewed: the server frees it.
            if own_id in self._held:
                self._held[own_id] = again


def _listed(ipus: tuple[int, ...]) -> str:
    return ", ".join(map(str, ipus[:8])) + (", ..." if len(ipus) > 8 else "")
