"""Raises ImportError, because Horovod on Spark is not available."""

raise ImportError(
    f"{__name__} is not available in popdist_py: start the program with poprun-py, or start a "
    "function with poprun_py.launch",
    name=__name__,
)
