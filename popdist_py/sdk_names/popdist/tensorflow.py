"""Raises ModuleNotFoundError, because PopDist's functions for TensorFlow are not available."""

raise ModuleNotFoundError(
    f"{__name__} needs TensorFlow on IPUs, which this package does not emulate: write the model in "
    "PyTorch, and use poptorch with popdist.poptorch.Options",
    name=__name__,
)
