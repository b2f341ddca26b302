"""Options: what a program says about how its model runs; ``poptorch.options`` is this face of it.

Here live the options, their groups, and reading them from text. No model or data set: whoever
needs a value is given it. May use the placement's strategies and the values of a call.
"""

from popdist_py.poptorch.options.options import (
    ConfigFileError,
    Options,
    TensorLocationSettings,
    _DistributedOptions,
    _EmulatorOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
)

__all__ = [
    "ConfigFileError",
    "Options",
    "TensorLocationSettings",
    "_DistributedOptions",
    "_EmulatorOptions",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]
