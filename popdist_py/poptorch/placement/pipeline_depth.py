"""How many micro-batches a pipeline needs: as many as it has stages."""

from __future__ import annotations

from popdist_py.poptorch.calls.batching import Batching
from popdist_py.poptorch.errors import Error

__all__ = ["check_pipeline_depth"]


def check_pipeline_depth(stages: int, batching: Batching, *, training: bool) -> None:
    """Check that a call has enough micro-batches to fill a pipeline of ``stages`` stages.

    Raises:
        Error: it has fewer (PopTorch asks for as many as there are stages).
    """
    if stages == 1:
        return
    if training and batching.gradient_accumulation < stages:
        raise Error(
            f"The pipeline has {stages} stages (forward and backward): "
            f"Training.gradientAccumulation is {batching.gradient_accumulation} and must be at "
            "least that number"
        )
    if not training and batching.device_iterations < stages:
        raise Error(
            f"The pipeline has {stages} stages: deviceIterations is "
            f"{batching.device_iterations} and must be at least that number"
        )
