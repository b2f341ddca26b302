"""One send or receive: its tensor as bytes, and what its caller waits for.

Nothing here knows how messages travel.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from popdist_py.public_collectives.leaf_arrays import bytes_of

__all__ = ["MessageWork", "Progress"]


class Progress(Protocol):
    """What completes the works."""

    def wait(self, work: MessageWork, seconds: float | None) -> None:
        """Return once the work is complete, or fails because it took so long."""

    def look(self) -> None:
        """Complete what can be completed at once."""


class MessageWork(dist.Work):
    """A send or a receive of a rank; changed only by what completes it.

    Args:
        progress: what completes it.
        verb: "send" or "receive".
        tensor: to send, or to receive into.
        peer: rank at the other end; None: any.
        tag: of the message.

    Attributes:
        data: bytes of the tensor, or of a contiguous copy.
        count: elements of the tensor.
        dtype: name of the tensor's.

    Raises:
        ValueError: the tensor is not a dense one in the memory of the host.
    """

    def __init__(
        self, progress: Progress, verb: str, tensor: torch.Tensor, peer: int | None, tag: int
    ) -> None:
        super().__init__()
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(
                f"a {tensor.layout} tensor on {tensor.device}: popdist sends and receives dense "
                "tensors on the CPU; pass one"
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
            # The device is given because the program may have set another default device.
            self._contiguous = (
                plain.contiguous()
                if verb == "send"
                else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            )
        self.data = bytes_of(self._contiguous).data
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    @property
    def address(self) -> int:
        """Address of the bytes."""
        return self._contiguous.data_ptr()

    def finish(self, error: BaseException | None = None) -> None:
        """Note the end, and put what was received into the tensor."""
        if error is None and self.verb == "receive" and self._contiguous is not self._tensor:
            self._tensor.copy_(self._contiguous)
        self.error, self.is_done = error, True

    def tell(self) -> None:
        """Complete the future, if somebody has one; its callbacks may send and receive."""
        if self._future is not None and not self._future.done():
            if self.error is not None:
                self._future.set_exception(self.error)  # type: ignore[arg-type]
            else:
                self._future.set_result([self._tensor])

    # --- What torch.distributed calls ---------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once a send's tensor may be changed, or a receive's is filled.

        Args:
            timeout: of this wait; None or none at all: that of the group.

        Raises:
            MismatchError: the tensors of sender and receiver differ.
            RankLostError: the other rank has ended, or nothing came in time.
            GroupClosedError: this rank has left the group.
        """
        if not self.is_done:
            self._progress.wait(self, timeout.total_seconds() if timeout else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Tell whether ``wait`` would return at once."""
        if not self.is_done:
            self._progress.look()
        return self.is_done

    def is_success(self) -> bool:
        """Tell whether the call is complete without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error, if the call has failed."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensor, in a list."""
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return what is complete with the call, and holds its tensor."""
        if self._future is None:
            self._future = torch.futures.Future()
        if self.is_done:
            self.tell()
        return self._future

    def _source_rank(self) -> int:
        """Return the rank, in the group, that the message came from."""
        assert self.peer is not None
        return self.peer

    source_rank = _source_rank
