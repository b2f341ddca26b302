"""The groups of options ``Options.Precision``, ``Options.Distributed`` and ``Options.Jit``.

The other groups of options are in ``session.py``, ``training_options.py``, ``tensor_locations.py``
and ``emulator_options.py``.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch

from popdist_py.poptorch import enums, old_spellings
from popdist_py.poptorch.options.session import _PopartOptions, _SessionGroup
from popdist_py.poptorch.options.store import OptionStore

__all__ = ["_DistributedOptions", "_JitOptions", "_PrecisionOptions"]


class _PrecisionOptions(_SessionGroup):
    """Options for number formats and rounding."""

    _place = "Options.Precision"

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__(popart, half_float_casting=enums.HalfFloatCastingBehavior.Default)

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Choose whether divisions by zero, invalid operations and overflows raise Error."""
        assert isinstance(enabled, bool), (
            f"enableFloatingPointExceptions({enabled!r}) is not valid: expected a bool"
        )
        self.checkIsFrozen()
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    @property
    def floating_point_exceptions(self) -> bool:
        """Whether divisions by zero, invalid operations and overflows on the device raise Error."""
        return bool(
            self._popart.session_value("enableFloatingPointChecks")
        ) or self._popart.is_engine_option_on(
            "debug.floatPointOpException", "debug.nanOverflowException"
        )

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round float16 results up or down at random, so that the mean rounding error is zero."""
        assert isinstance(enabled, bool), (
            f"enableStochasticRounding({enabled!r}) is not valid: expected a bool"
        )
        self.checkIsFrozen()
        self._popart.set("enableStochasticRounding", enabled)
        return self

    @property
    def stochastic_rounding(self) -> bool:
        """Whether float16 results are rounded at random."""
        return bool(self._popart.session_value("enableStochasticRounding"))

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Set the number format of partial sums in matrix products and convolutions.

        The number format of partial sums affects only the emulated memory and time. The model's
        results do not depend on the format of partial sums, because the emulation always computes
        partial sums in float32.

        Raises:
            ValueError: ``dtype`` is neither torch.float nor torch.half.
        """
        names = {torch.float32: "float", torch.float16: "half"}
        if dtype not in names:
            raise ValueError(
                f"setPartialsType({dtype}) is not supported: expected torch.float or torch.half"
            )
        self.checkIsFrozen()
        self._popart.set("partialsTypeMatMuls", names[dtype])
        self._popart.update("convolutionOptions", {"partialsType": names[dtype]})
        return self

    def halfFloatCasting(self, half_float_casting: Any) -> _PrecisionOptions:
        """Log that ``halfFloatCasting`` is deprecated, and do nothing else.

        The types of operations on float16 and float32 tensors follow torch's rules.
        """
        old_spellings.say("Options.Precision", "halfFloatCasting")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Log that ``runningStatisticsAlwaysFloat`` is deprecated, and do nothing else.

        The running statistics of batch norms keep the number format (such as float16) that the
        model chooses.

        Raises:
            ValueError: ``value`` is not a bool.
        """
        if not isinstance(value, bool):
            raise ValueError(
                f"runningStatisticsAlwaysFloat({value!r}) is not valid: expected a bool"
            )
        old_spellings.say("Options.Precision", "runningStatisticsAlwaysFloat")
        return self


class _DistributedOptions(OptionStore):
    """The group ``Options.Distributed``, with the index of this process and the process count.

    Args:
        process_id: The index of this process, from 0; by default the rank that Open MPI assigns.
        num_processes: The number of processes in the job; by default the number that Open MPI
            reports.
    """

    _place = "Options.Distributed"

    def __init__(self, process_id: int | None = None, num_processes: int | None = None) -> None:
        if process_id is None:
            process_id = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        if num_processes is None:
            num_processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        super().__init__(
            num_distributed_processes=num_processes,
            distributed_process_id=process_id,
            ipuof_configs={},
        )
        self._declare(_gcd_mappings={})

    def disable(self) -> _DistributedOptions:
        """Treat this process as the job's only process, even if Open MPI has started several."""
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read this process's index and the number of processes from two environment variables.

        Args:
            var_num_processes: The name of the environment variable that contains the number of
                processes.
            var_process_id: The name of the environment variable that contains the index of this
                process.
        """
        return self.configureProcessId(
            int(os.environ.get(var_process_id, "0")), int(os.environ.get(var_num_processes, "1"))
        )

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Set the index of this process, from 0, and the number of processes in the job."""
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        """The index of this process in the job, from 0."""
        return cast(int, self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """The number of processes in the job."""
        return cast(int, self._values["num_distributed_processes"])


class _JitOptions(OptionStore):
    """Deprecated options for the tracing of models (``Options.Jit``)."""

    _place = "Options.Jit"

    def __init__(self) -> None:
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Log that ``traceModel`` is deprecated, and do nothing else.

        Raises:
            ValueError: ``trace_model`` is True.
        """
        old_spellings.say("Options.Jit", "traceModel")
        if trace_model:
            raise ValueError(
                "traceModel(True) is not supported, because PopTorch removed this kind of "
                "tracing: remove the call, or pass False"
            )
        return self
