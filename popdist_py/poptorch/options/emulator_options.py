"""The group of options ``Options.Emulator``, for the emulation and the emulated IPU."""

from __future__ import annotations

import os
import sys
from typing import Any, Final, Literal

from popdist_py.environment import DETERMINISTIC
from popdist_py.ipu.specification import IPU
from popdist_py.poptorch.options.device_choice import (
    ASSUMED_IPU,
    DeviceEnvironment,
    MemoryMode,
    ipu_of,
    mode_of,
)
from popdist_py.poptorch.options.store import OptionStore

__all__ = ["EXECUTIONS", "_EmulatorOptions"]

# The accepted arguments of the setter ``replicaExecution``. The function ``backends.register()``
# adds the names of other back ends to ``EXECUTIONS``.
EXECUTIONS: Final = ["auto", "loop", "fused"]


class _EmulatorOptions(OptionStore):
    """Options for the emulation and the emulated device; PopTorch does not have this group.

    Raises:
        ValueError: An environment variable contains an unknown device or memory mode.
    """

    # The value of ``_environment`` for option objects that an older version of this library
    # pickled.
    _environment = DeviceEnvironment()

    def __init__(self) -> None:
        super().__init__(
            replica_execution="auto",
            double_precision=False,
            deterministic_reduction=os.environ.get(DETERMINISTIC) == "1",
        )
        self._declare(_environment=DeviceEnvironment.of(os.environ, sys.modules))

    def replicaExecution(self, how: str) -> _EmulatorOptions:
        """Choose how the replicas (copies of the model) of this process are computed.

        Args:
            how: ``loop`` computes the replicas one after the other, and its results are the
                reference. ``fused`` computes all replicas together in one vectorised pass. ``auto``
                chooses ``loop`` or ``fused`` by a fixed rule, whose result depends on the model. If
                a back end (code that computes replicas, for example on a GPU) is registered, its
                name selects this back end.

        Raises:
            ValueError: ``how`` is not one of the accepted names.
        """
        if how not in EXECUTIONS:
            *others, last = map(repr, EXECUTIONS)
            raise ValueError(
                f"replicaExecution({how!r}) names an unknown kind of execution: expected "
                f"{', '.join(others)} or {last}"
            )
        self.set(replica_execution=how)
        return self

    def doublePrecision(self, enabled: bool = True) -> _EmulatorOptions:
        """Compute with float64 tensors in float64, instead of in float32 as an IPU does."""
        self.set(double_precision=enabled)
        return self

    def deterministicReduction(self, enabled: bool = True) -> _EmulatorOptions:
        """Sum the replicas' gradients in one fixed order, for any number of instances.

        With ``deterministicReduction``, the results of a job with R replicas have the same bits for
        any number of instances and threads. With ``deterministicReduction``, the model computes on
        one thread. The environment variable ``POPDIST_DETERMINISTIC=1`` switches
        ``deterministicReduction`` on by default.
        """
        self.set(deterministic_reduction=enabled)
        return self

    def device(self, ipu: Literal["mk1", "mk2", "bow"] | IPU) -> _EmulatorOptions:
        """Choose the IPU whose memory, cycles and latencies are emulated.

        If a program does not call ``device()``, the launcher's option ``--ipu-model`` or the
        environment variable ``POPDIST_IPU`` chooses the IPU. Without ``--ipu-model`` and
        ``POPDIST_IPU``, the setter ``useIpuModel`` or the environment variable
        ``POPTORCH_IPU_MODEL`` chooses the IPU. By default, a program that imports ``poptorch``
        emulates an Mk2 if ``poprun`` or ``python -m popdist_py`` started the program. For programs
        that start differently or do not import ``poptorch``, no IPU is chosen by default.

        If no IPU is chosen, this library reports the times of the host. If no IPU is chosen, a
        model that is too large for the memory of an Mk2 causes a warning.

        Args:
            ipu: The name of an IPU, or a :class:`popdist_py.ipu.specification.IPU`.

        Raises:
            ValueError: ``ipu`` is neither the name of an IPU nor an IPU object.
        """
        self.createOrSet(device=ipu_of(f"Emulator.device({ipu!r})", ipu))
        return self

    def memory(self, mode: MemoryMode) -> _EmulatorOptions:
        """Choose the reaction to a compiled model that does not fit into the memory of the IPU.

        The environment variable ``POPDIST_IPU_MEMORY`` sets the default. The default without
        ``POPDIST_IPU_MEMORY`` depends on the choice of the IPU. The default is ``enforce`` if the
        user has chosen an IPU, and ``warn`` otherwise.

        Args:
            mode: ``enforce`` raises an error if a model does not fit into the IPU's memory, as
                hardware does, and logs a warning if the model is close to the limit. ``warn`` logs
                a warning if a model does not fit into the IPU's memory. ``off`` does not compare
                the model with the IPU's memory.

        Raises:
            ValueError: ``mode`` is not ``enforce``, ``warn`` or ``off``.
        """
        self.createOrSet(memory=mode_of(f"Emulator.memory({mode!r})", mode))
        return self

    def _use_model(self, use_model: bool) -> None:
        """Store the argument of ``Options.useIpuModel``, which calls this method."""
        self.createOrSet(uses_ipu_model=use_model)

    @property
    def is_ipu_model(self) -> bool:
        """Whether the program uses the software model of an IPU instead of a device."""
        uses_model: bool | None = self._values.get("uses_ipu_model")
        return self._environment.uses_model if uses_model is None else uses_model

    @property
    def device_named(self) -> IPU | None:
        """The IPU that the program, the launcher or the environment chooses, or else None."""
        own: IPU | None = self._values.get("device")
        return own or self._environment.named(uses_model=self._values.get("uses_ipu_model"))

    @property
    def ipu(self) -> IPU:
        """The IPU whose memory and time are emulated; an Mk2 if no IPU is chosen."""
        return self.device_named or ASSUMED_IPU

    @property
    def memory_mode(self) -> MemoryMode:
        """The reaction (``enforce``, ``warn`` or ``off``) to a model that needs too much memory."""
        default: MemoryMode = "warn" if self.device_named is None else "enforce"
        mode: MemoryMode = self._values.get("memory") or self._environment.memory or default
        return mode

    @property
    def asks_model(self) -> bool:
        """Whether the compilation of a model estimates the memory or the time that an IPU needs."""
        return self.memory_mode != "off" or self.device_named is not None

    def _description(self) -> tuple[Any, ...]:
        """Return the values of ``Options.Emulator``, the chosen IPU and the memory mode."""
        return (*super()._description(), self.device_named, self.memory_mode)
