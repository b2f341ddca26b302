"""The package ``poptorch.options``, the settings that control how a program's models run.

The package ``options`` contains the class ``Options``, its groups of options, and functions that
read options from text. Nothing here (in the package ``options``) depends on models or data sets.
Models and data loaders read the option values that they need. May call: placement, tracing, calls,
enums, old_spellings, logger, errors, and the library's ipu, context, environment, popart and
popdist_functions.
"""

from popdist_py.poptorch.errors import ConfigFileError
from popdist_py.poptorch.options.emulator_options import _EmulatorOptions
from popdist_py.poptorch.options.groups import _DistributedOptions, _JitOptions, _PrecisionOptions
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.session import _PopartOptions
from popdist_py.poptorch.options.tensor_locations import (
    TensorLocationSettings,
    _TensorLocationOptions,
)
from popdist_py.poptorch.options.training_options import _TrainingOptions

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
