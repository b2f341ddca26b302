"""Raises ModuleNotFoundError, because PopDist's functions for PopART sessions are not available."""

raise ModuleNotFoundError(
    f"{__name__} is for sessions of PopART, which are not emulated: write the model in PyTorch and "
    "use poptorch with popdist.poptorch.Options",
    name=__name__,
)
