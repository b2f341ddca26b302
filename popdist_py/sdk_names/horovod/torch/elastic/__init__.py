"""Raises ImportError, because elastic training is not available."""

raise ImportError(
    f"{__name__} is not available in popdist_py: start the job with "
    "poprun-py --max-restarts N, and save checkpoints",
    name=__name__,
)
