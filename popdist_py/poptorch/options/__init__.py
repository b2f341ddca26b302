"""Options: what a program says about how its model runs; ``poptorch.options`` is this face of it.

Here are the options, their groups, and reading them from text.
Nothing here knows models or data sets: whoever needs a value is given it. May call: placement,
tracing, calls, enums, old_spellings, logger, errors, and the library's ipu, context, environment,
popart and popdist_functions.
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
