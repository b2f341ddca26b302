"""The class DeviceContext, which enters the context managers for a model's forward pass.

A DeviceContext is used in each call of a model, in the first forward pass (which is traced), and in
the comparison of replica back ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from popdist_py.poptorch.execution.random_streams import host_stream_kept
from popdist_py.poptorch.execution.torch_modes import WithoutValueReads
from popdist_py.poptorch.tracing import current_forward
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["DeviceContext", "Mode"]

# A function that returns a context manager for one forward pass of a model.
Mode = Callable[[], AbstractContextManager[Any]]

# Every call of a model needs a ``ForwardPhase``, which tells whether the forward pass trains and
# whether it is traced. ``ForwardPhase`` objects are cached, because creating a frozen dataclass
# takes longer than a cache lookup.
_phase = cache(current_forward.ForwardPhase)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceContext:
    """The context managers inside which a model's forward pass runs.

    Attributes:
        state: The object that stores the device's tensors of the model.
        training: Whether autograd records the forward pass.
        is_random: Whether the model or its weight update draws random numbers.
        modes: Functions that return further context managers, in the order of entering them.
    """

    state: DeviceState
    training: bool
    is_random: bool = False
    modes: tuple[Mode, ...] = ()

    def enter(self, *, tracing: bool = False) -> ExitStack:
        """Enter all context managers, and return an ``ExitStack`` to leave them.

        Args:
            tracing: Whether the first forward pass runs, which is traced to compile the model.
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
