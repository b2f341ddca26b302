"""The place where some programs look for PopDist's functions: its native module."""

from __future__ import annotations

from popdist_py.names import getInstanceIndex, getNumInstances, getNumTotalReplicas

__all__ = ["getInstanceIndex", "getNumInstances", "getNumTotalReplicas"]
