"""The errors of messages, in words: who could not send or receive what, and why.

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable

from popdist_py.collectives.signature import Names
from popdist_py.torch_backend.membership.errors import (
    GroupClosedError,
    MismatchError,
    RankLostError,
)
from popdist_py.torch_backend.messages.message_work import MessageWork

__all__ = ["MessageErrors"]


class MessageErrors:
    """The errors of one rank.

    Args:
        rank: of this process.
        names: returns the ranks as the program knows them.
    """

    def __init__(self, rank: int, names: Callable[[], Names]) -> None:
        self._rank = rank
        self._names = names

    def late(self, work: MessageWork, seconds: float) -> RankLostError:
        """Return the error of a wait that took too long."""
        return RankLostError(
            f"{self._name()} has waited {seconds:g} s to {self._text(work)}: let the other rank "
            "call its counterpart, or raise the timeout of the group"
        )

    def lost(self, work: MessageWork, rank: int, *, has_left: bool) -> RankLostError:
        """Return the error of a work whose other rank has left the group, or has ended."""
        what = "has left the group" if has_left else "has ended, or cannot be reached,"
        return RankLostError(f"{self._name(rank)} {what} before {self._could(work)}")

    def left(self, work: MessageWork, reason: str) -> GroupClosedError:
        """Return the error of a work that was not complete when this rank left the group."""
        if reason:
            return GroupClosedError(f"{reason} before {self._could(work)}")
        return GroupClosedError(
            f"{self._name()} has left the group before it could {self._text(work)}: wait for "
            "what isend and irecv return before destroy_process_group"
        )

    def closed(self) -> GroupClosedError:
        """Return the error of a call after this rank has left the group."""
        return GroupClosedError(f"{self._name()} has left the group: make a new one to send")

    def mismatch(self, work: MessageWork, source: int, to: int, theirs: str) -> MismatchError:
        """Return the error of a message that does not fit its receive.

        Args:
            work: that of this rank.
            source: rank that sends.
            to: rank that receives.
            theirs: what the other one of them passes.
        """
        own = f"{work.count} x {work.dtype}"
        sent, received = (own, theirs) if work.verb == "send" else (theirs, own)
        return MismatchError(
            f"{self._name(source)} sent {sent} with tag {work.tag}, {self._name(to)} receives "
            f"{received}: pass tensors of one dtype and number of elements"
        )

    def _name(self, rank: int | None = None) -> str:
        """Return a rank, or this one, as the program knows it."""
        return self._names().of(self._rank if rank is None else rank)

    def _could(self, work: MessageWork) -> str:
        return f"{self._name()} could {self._text(work)}"

    def _text(self, work: MessageWork) -> str:
        """Return what a work does, after "to"."""
        peer = "any rank" if work.peer is None else self._name(work.peer)
        way = "to" if work.verb == "send" else "from"
        return f"{work.verb} {work.count} x {work.dtype} with tag {work.tag} {way} {peer}"
