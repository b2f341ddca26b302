"""Refuses Horovod's MXNet API, and says what to do instead."""

raise ImportError(
    f"{__name__} is not available here: write the model in PyTorch, and use horovod.torch",
    name=__name__,
)
