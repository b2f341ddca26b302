"""The name of PopDist's native module, from which some programs import. No logic lives here."""

from __future__ import annotations

from popdist_py.popdist_functions import getInstanceIndex, getNumInstances, getNumTotalReplicas

__all__ = ["getInstanceIndex", "getNumInstances", "getNumTotalReplicas"]
