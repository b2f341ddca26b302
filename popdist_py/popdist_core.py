"""The names of PopDist's native module, for programs that import from it."""

from __future__ import annotations

from popdist_py.popdist_functions import getInstanceIndex, getNumInstances, getNumTotalReplicas

__all__ = ["getInstanceIndex", "getNumInstances", "getNumTotalReplicas"]
