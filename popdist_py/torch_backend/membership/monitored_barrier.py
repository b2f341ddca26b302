"""A barrier whose error names the missing ranks, as gloo's monitored barrier does.

The barrier uses the group's key-value store and not its collectives. Therefore the barrier also
finds ranks that hang in a collective.
"""

from __future__ import annotations

from popdist_py.torch_backend.membership.errors import RankLostError
from popdist_py.torch_backend.membership.group_store import GroupStore

__all__ = ["MonitoredBarrier"]

# Rank 0 decides whether a barrier has failed. The other ranks wait for the decision of rank 0 until
# this number of seconds after the time limit.
_GRACE_SECONDS = 5.0


class MonitoredBarrier:
    """The monitored barriers of one group.

    Args:
        store: The store of the group.
    """

    def __init__(self, store: GroupStore) -> None:
        self._store = store
        self._count = 0

    def wait(self, seconds: float, *, wait_all_ranks: bool) -> None:
        """Return once all ranks of the group have called this method.

        Args:
            seconds: The longest time for which rank 0 waits for the other ranks.
            wait_all_ranks: Whether the error names all missing ranks, or only the first missing
                rank.

        Raises:
            RankLostError: A rank ended or did not call this method in time. All ranks that called
                the method raise the error.
        """
        store, self._count = self._store, self._count + 1
        prefix = f"monitored_barrier/{self._count}"
        if store.rank != 0:
            store.put(f"{prefix}/{store.rank}", True)
            self._await_verdict(f"{prefix}/verdict", seconds)
            return
        verdict = self._missing(prefix, seconds, wait_all_ranks=wait_all_ranks)
        store.put(f"{prefix}/verdict", verdict)
        if verdict:
            raise RankLostError(verdict)

    def _missing(self, prefix: str, seconds: float, *, wait_all_ranks: bool) -> str:
        """Return an error message that names the missing ranks; "" if no rank is missing."""
        store = self._store
        keys = {rank: f"{prefix}/{rank}" for rank in range(1, store.size)}
        try:
            missing = store.wait(keys, "monitored_barrier", seconds)
        except RankLostError as error:
            return str(error)
        if not missing:
            return ""
        named = store.names.of(*(missing if wait_all_ranks else missing[:1]))
        return _failed(named, seconds)

    def _await_verdict(self, key: str, seconds: float) -> None:
        store = self._store
        if store.wait({0: key}, "monitored_barrier", seconds + _GRACE_SECONDS):
            raise RankLostError(_failed(store.names.of(0), seconds))
        verdict = store.take({0: key}, "monitored_barrier")[0]
        if verdict:
            # The message begins with the wording of gloo's error, because programs may search for
            # this wording. The message ends with the error message of rank 0.
            own, root = _at_start(store.names.of(store.rank)), store.names.of(0)
            raise RankLostError(
                f"{own} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from {root}: {verdict}"
            )


def _failed(ranks: str, seconds: float) -> str:
    return f"{_at_start(ranks)} failed to pass monitoredBarrier in {seconds * 1e3:.0f} ms"


def _at_start(ranks: str) -> str:
    return f"{ranks[0].upper()}{ranks[1:]}"
