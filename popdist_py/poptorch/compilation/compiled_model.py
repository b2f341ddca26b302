"""The results of a compilation: an ``Executable`` to store, and a ``Compiled`` model on the device.

The module ``compiler`` makes an ``Executable``, and the module ``program_builder`` makes a
``Compiled`` object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.poptorch.execution.device_loop import Program
from popdist_py.poptorch.execution.random_streams import RandomStreams
from popdist_py.poptorch.on_ipu.published_figures import IpuRows
from popdist_py.poptorch.tracing.first_forward import FirstForward
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["Compiled", "Executable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Executable:
    """The result of compiling a model, without references to tensors, so that it can be stored.

    Attributes:
        first_forward: The facts about the model that were found when its first forward pass was
            traced, such as the buffers that the forward pass changes.
        replica_execution: The value of the option ``replicaExecution``, which is "auto" or selects
            a replica back end (the code that runs the replicas).
        widen_integers: Whether the model's integers of fewer than 64 bits are converted to 64 bits,
            because torch requires indices of 64 bits.
        mixed_precision: Whether the forward pass multiplies float16 tensors with float16 or float32
            tensors.
        back_end: The name of the chosen replica back end; None until a back end has been chosen.
        model_graph: The forward pass as a graph for the device model, which estimates time and
            memory on an IPU; None if no graph was requested or no graph can be made from the
            forward pass.
    """

    first_forward: FirstForward
    replica_execution: str
    widen_integers: bool
    mixed_precision: bool
    back_end: str | None = None
    model_graph: ModelGraph | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A compiled model on the device.

    The object in ``ipu_rows`` writes the model's calls to the timeline, if the options of the model
    name a device.
    """

    executable: Executable
    state: DeviceState
    program: Program
    streams: RandomStreams
    ipu_rows: IpuRows | None = None

    def changed_tensors(self) -> list[torch.Tensor]:
        """Return the tensors on the device that the model's calls change."""
        first, state, training = self.executable.first_forward, self.state, self.program.training
        changed: list[torch.Tensor] = [state.buffers[name] for name in first.modified_buffers]
        changed += [state.parameters[name] for name in first.modified_parameters]
        if training is not None:
            changed += training.optimizer.parameters
        return changed

    def download_changed(self) -> Callable[[], None]:
        """Return a function that copies to the host the tensors that the model's calls change."""
        return partial(self.state.download, frozenset(map(id, self.changed_tensors())))

    def check_weights(self) -> None:
        """Check that all weights on the device belong to the same training step.

        Raises:
            Error: An instance was lost during a weight update.
        """
        if self.program.training is not None:
            self.program.training.optimizer.check_whole()
