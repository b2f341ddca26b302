"""The package ``poptorch.options``, the settings that control how a program's models run.

The package contains the class Options and its groups, and functions that read options from text.
Nothing here depends on models or data sets. Models and data sets read the values that they need.
May call: placement, tracing, calls, enums, old_spellings, logger, errors, and the library's ipu,
context, environment, popart and popdist_functions.
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
