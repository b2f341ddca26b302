"""Raises ModuleNotFoundError, because PopDist's functions for TensorFlow are not available."""

raise ModuleNotFoundError(
    f"{__name__} is for TensorFlow on IPUs, which is not emulated: write the model in PyTorch and "
    "use poptorch with popdist.poptorch.Options",
    name=__name__,
)
