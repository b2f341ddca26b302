"""The work object of one send or receive, and the bytes of its tensor."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from popdist_py.public_collectives.leaf_arrays import bytes_of

__all__ = ["MessageWork", "Progress"]


class Progress(Protocol):
    """An object that completes sends and receives (``dist.Work`` objects)."""

    def wait(self, work: MessageWork, seconds: float | None) -> None:
        """Return once the work is complete. After ``seconds``, make the work fail."""

    def look(self) -> None:
        """Complete the sends and receives that can be completed without waiting."""


class MessageWork(dist.Work):
    """A send or a receive that this rank started.

    Only the object ``progress`` changes the state of the send or receive.

    Args:
        progress: The object that completes the work.
        verb: "send" or "receive".
        tensor: The tensor to send, or to receive into.
        peer: The rank at the other end; None for any rank.
        tag: The tag of the message.

    Attributes:
        data: The bytes of the tensor or of a contiguous copy.
        count: The number of elements of the tensor.
        dtype: The name of the tensor's dtype.

    Raises:
        ValueError: The tensor is not a dense CPU tensor.
    """

    def __init__(
        self, progress: Progress, verb: str, tensor: torch.Tensor, peer: int | None, tag: int
    ) -> None:
        super().__init__()
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(
                f"cannot {verb} a tensor of layout {tensor.layout} on device {tensor.device}: the "
                "back end popdist supports only dense CPU tensors. Call tensor.to_dense() and "
                "tensor.cpu()"
            )
        self.verb, self.peer, self.tag = verb, peer, tag
        self.count = tensor.numel()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.is_done = False
        self.error: BaseException | None = None
        self._progress = progress
        self._tensor = tensor.detach()
        self._contiguous = self._tensor
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            plain = self._tensor.resolve_conj().resolve_neg()
            # ``device`` is passed because the program may have changed torch's default device.
            self._contiguous = (
                plain.contiguous()
                if verb == "send"
                else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            )
        self.data = bytes_of(self._contiguous).data
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    @property
    def address(self) -> int:
        """The memory address of ``data``."""
        return self._contiguous.data_ptr()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the work as complete; copy received bytes to the tensor, unless they are in it."""
        if error is None and self.verb == "receive" and self._contiguous is not self._tensor:
            self._tensor.copy_(self._contiguous)
        self.error, self.is_done = error, True

    def tell(self) -> None:
        """Complete the future of this work, if any; the future's callbacks may send and receive."""
        if self._future is not None and not self._future.done():
            if self.error is not None:
                self._future.set_exception(self.error)  # type: ignore[arg-type]
            else:
                self._future.set_result([self._tensor])

    # --- The interface of torch.distributed.Work ----------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the work is complete.

        Once a send is complete, the program may change its tensor. Once a receive is complete, its
        tensor contains the message.

        Args:
            timeout: The time-out of this wait; None or 0 means the time-out of the group.

        Raises:
            MismatchError: The tensors of sender and receiver differ in dtype or number of elements.
            RankLostError: The other rank has ended, or did not make the matching call in time.
            GroupClosedError: This rank has left the group.
        """
        if not self.is_done:
            self._progress.wait(self, timeout.total_seconds() if timeout else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Tell whether the send or receive is complete, so that ``wait`` would not block."""
        if not self.is_done:
            self._progress.look()
        return self.is_done

    def is_success(self) -> bool:
        """Tell whether the send or receive is complete without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the send or receive; None if it has not failed."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Return a list that contains the tensor."""
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future whose value is a list that contains the tensor."""
        if self._future is None:
            self._future = torch.futures.Future()
        if self.is_done:
            self.tell()
        return self._future

    def _source_rank(self) -> int:
        """Return the rank of the sender in the group."""
        assert self.peer is not None
        return self.peer

    source_rank = _source_rank
