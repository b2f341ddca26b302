"""The exceptions for failed sends and receives, with their error messages."""

from __future__ import annotations

from popdist_py.collectives.waiting import WaitLimits
from popdist_py.errors import PopdistError, counted
from popdist_py.torch_backend.membership.errors import (
    GroupClosedError,
    MismatchError,
    RankLostError,
    as_torch_error,
)
from popdist_py.torch_backend.messages.message_work import MessageWork

__all__ = ["MessageErrors", "contents"]


class MessageErrors:
    """Makes the exceptions for failed sends, receives and waits of this rank.

    Args:
        rank: The rank of this process.
        limits: The time limits for all waits of the group, and the names of its ranks.
    """

    def __init__(self, rank: int, limits: WaitLimits) -> None:
        self._rank = rank
        self._limits = limits

    def late(self, work: MessageWork, seconds: float) -> RankLostError:
        """Return the error for a wait that reached its time-out.

        ``WaitLimits.late_error`` does not fit, because a wait for a message may have a time-out of
        its own. In addition, a send waits for a receive of the other rank, and not for the same
        call.
        """
        return RankLostError(
            f"{self._name()} has waited {seconds:g} s to {self._text(work)}. The other rank must "
            f"make the matching {'receive' if work.verb == 'send' else 'send'} call, or the group "
            "needs a longer timeout"
        )

    def silent(self, work: MessageWork, rank: int) -> PopdistError:
        """Return the error for a send or receive if the host of its other rank does not answer."""
        return as_torch_error(self._limits.host_error(rank, self._text(work), is_silent=True))

    def lost(self, work: MessageWork, rank: int, *, has_left: bool) -> RankLostError:
        """Return the error for a send or receive if its other rank has left the group or ended."""
        what = "has left the group" if has_left else "has ended or lost its connection"
        return RankLostError(f"{self._name(rank)} {what} before {self._could(work)}")

    def left(self, work: MessageWork, reason: str) -> GroupClosedError:
        """Return the error for a send or receive that was incomplete when this rank left."""
        if reason:
            return GroupClosedError(f"{reason} before {self._could(work)}")
        return GroupClosedError(
            f"{self._name()} has left the group before it could {self._text(work)}. Before "
            "destroy_process_group(), call wait() on the result of each isend() and irecv()"
        )

    def closed(self) -> GroupClosedError:
        """Return the error for a call that is made after this rank has left the group."""
        return GroupClosedError(
            f"{self._name()} has left the group: make a new group with init_process_group or "
            "new_group"
        )

    def mismatch(self, work: MessageWork, source: int, to: int, theirs: str) -> MismatchError:
        """Return the error for a message whose size or dtype differs from that of its receive.

        Args:
            work: The send or the receive of this rank.
            source: The rank of the sender.
            to: The rank of the receiver.
            theirs: The number of elements and the dtype of the other rank's tensor.
        """
        own = contents(work.count, work.dtype)
        sent, received = (own, theirs) if work.verb == "send" else (theirs, own)
        return MismatchError(
            f"{self._name(source)} sent {sent} with tag {work.tag}, but {self._name(to)} expects "
            f"{received}: the two tensors must have the same dtype and number of elements"
        )

    def _name(self, rank: int | None = None) -> str:
        """Return the name of a rank; None stands for this rank."""
        return self._limits.names.of(self._rank if rank is None else rank)

    def _could(self, work: MessageWork) -> str:
        return f"{self._name()} could {self._text(work)}"

    def _text(self, work: MessageWork) -> str:
        """Return a description, such as "send 4 elements of float32 with tag 0 to rank 1"."""
        peer = "any rank" if work.peer is None else self._name(work.peer)
        way = "to" if work.verb == "send" else "from"
        sent = contents(work.count, work.dtype)
        return f"{work.verb} {sent} with tag {work.tag} {way} {peer}"


def contents(count: int, dtype: str) -> str:
    """Return a description of the contents of a tensor, such as "4 elements of float32"."""
    return f"{counted(count, 'element')} of {dtype}"
