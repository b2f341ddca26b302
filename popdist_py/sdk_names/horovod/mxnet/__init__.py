"""Raises ImportError, because Horovod's MXNet API is not available."""

raise ImportError(
    f"{__name__} is not available in popdist_py: write the model in PyTorch, and use horovod.torch",
    name=__name__,
)
