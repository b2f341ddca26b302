"""The connections of this process, as every psutil that the project permits tells them."""

from __future__ import annotations

from typing import Any

import psutil

__all__ = ["connections"]


def connections(kind: str = "inet") -> list[Any]:
    """Return what psutil knows of this process's sockets of this kind."""
    own = psutil.Process()
    # psutil before 6 has the older name alone.
    return (own.net_connections if hasattr(own, "net_connections") else own.connections)(kind)
