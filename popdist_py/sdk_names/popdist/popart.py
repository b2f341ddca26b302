"""Raises ModuleNotFoundError, because PopDist's functions for PopART sessions are not available."""

raise ModuleNotFoundError(
    f"{__name__} needs sessions of PopART, which this package does not emulate: write the model in "
    "PyTorch, and use poptorch with popdist.poptorch.Options",
    name=__name__,
)
