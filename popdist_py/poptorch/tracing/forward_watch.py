"""The class ForwardWatch, a TorchFunctionMode that passes each torch call to several recorders.

The recorders store losses, blocks of operations, the memory of results, and marks for overlapped
input and output. The module ``forward_watch`` does not depend on how a recorder handles a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol

import torch
from torch.overrides import TorchFunctionMode

from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.current_forward import current_watch, watched_by
from popdist_py.poptorch.tracing.losses import Losses
from popdist_py.poptorch.tracing.overlapped_io import OverlapMarks
from popdist_py.poptorch.tracing.recorded_operations import Observer

__all__ = ["ForwardWatch", "WatchPart"]

_HOOKING: Final = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
)


class WatchPart(Protocol):
    """The interface of recorders, which are called before and after each torch function."""

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a call of a torch function, or raise an error to prevent the call."""

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a call of a torch function and the result of the call."""


class ForwardWatch(TorchFunctionMode):
    """A torch function mode that records the forward pass inside ``with watch.following():``.

    Args:
        losses: The recorder of the losses of a training model.
        blocks: The recorder of the operations and of the blocks that contain them.
        overlap: The recorder of the tensors that the program marks for overlapped input and output.
        results: A recorder of the results of torch's functions.
        observer: The torch dispatch mode that records the operations inside torch's functions.

    Attributes:
        needs_python: Whether Python code of the forward method has to run in every forward pass.
    """

    def __init__(
        self,
        *,
        losses: Losses | None = None,
        blocks: BlockRecorder | None = None,
        overlap: OverlapMarks | None = None,
        results: WatchPart | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__()
        self.losses = losses
        self.blocks = blocks
        self.overlap = overlap
        self.observer = observer
        self.needs_python = False
        parts = (blocks, overlap, losses, results)
        self._parts: list[WatchPart] = [part for part in parts if part is not None]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record the forward pass that runs inside the ``with`` block."""
        outer = current_watch()
        if self.losses is None and outer is not None:
            # Operators such as identity_loss record a loss only in the innermost ``ForwardWatch``.
            self.losses = outer.losses
        with ExitStack() as stack:
            stack.enter_context(watched_by(self))
            if self.overlap is not None:
                stack.enter_context(self.overlap.following_outputs())
            if self.blocks is not None:
                stack.enter_context(self.blocks.following_modules())
            stack.enter_context(self)
            if self.observer is not None:
                stack.enter_context(self.observer)
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, and call all recorders before and after the function."""
        kwargs = kwargs or {}
        # A hook on a gradient is Python code that must run in each backward pass, so Python is
        # needed.
        if func in _HOOKING:
            self.needs_python = True
        for part in self._parts:
            part.before(func, args, kwargs)
        result = func(*args, **kwargs)
        for part in self._parts:
            part.after(func, args, kwargs, result)
        return result
