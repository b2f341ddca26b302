"""The class DeviceContext, which enters all contexts that a model's forward needs.

The contexts are needed in a call, in the first forward, and in the comparison of replica back ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from popdist_py.poptorch.execution.modes import WithoutValueReads
from popdist_py.poptorch.execution.random_streams import host_stream_kept
from popdist_py.poptorch.tracing import current_forward
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["DeviceContext", "Mode"]

# A function that returns a context for every forward of a model.
Mode = Callable[[], AbstractContextManager[Any]]

# Every call needs a ForwardPhase. Creating a frozen dataclass takes longer than a cache lookup.
_phase = cache(current_forward.ForwardPhase)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceContext:
    """The contexts of a model's forward.

    Attributes:
        state: The device's tensors.
        training: Whether autograd records the forward.
        is_random: Whether the model or its update draws random numbers.
        modes: Functions that return further contexts. The contexts are entered in this order.
    """

    state: DeviceState
    training: bool
    is_random: bool = False
    modes: tuple[Mode, ...] = ()

    def enter(self, *, tracing: bool = False) -> ExitStack:
        """Enter all contexts, and return an ``ExitStack`` that leaves them.

        Args:
            tracing: Whether this is the first forward, which compiles the model.
        """
        stack = ExitStack()
        try:
            stack.enter_context(torch.set_grad_enabled(self.training))
            stack.enter_context(host_stream_kept(self.is_random))
            stack.enter_context(self.state.swapped_in())
            stack.enter_context(current_forward.entered(_phase(self.training, tracing)))
            stack.enter_context(WithoutValueReads())
            for mode in self.modes:
                stack.enter_context(mode())
        except BaseException:
            stack.close()
            raise
        return stack
