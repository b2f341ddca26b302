"""Where a model's forward runs: on the device's tensors, in the model's modes.

The one list of the contexts that every forward needs, whoever runs it: a call, the first forward,
or the choice of a replica back end.
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

# Makes a context that every forward of a model runs in.
Mode = Callable[[], AbstractContextManager[Any]]

# Every call needs one, and making a frozen value takes longer than looking it up.
_phase = cache(current_forward.Phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceContext:
    """What surrounds a forward.

    Attributes:
        state: the device's tensors.
        training: whether autograd records.
        is_random: whether the model or its update draws random numbers.
        modes: further contexts, outermost first.
    """

    state: DeviceState
    training: bool
    is_random: bool = False
    modes: tuple[Mode, ...] = ()

    def enter(self, *, tracing: bool = False) -> ExitStack:
        """Return the context, entered: ``with context.enter(): ...`` leaves it.

        Args:
            tracing: whether this is the first forward, the one that compiles the model.
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
