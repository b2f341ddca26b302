"""Which pod is meant: the one that is named, the only one of this machine, or none.

Nothing here keeps or changes a pod.
"""

from __future__ import annotations

from collections.abc import Mapping

from popdist_py.pods.store import PodStore

__all__ = ["find_pod"]


def find_pod(
    where: str | None, environ: Mapping[str, str], *, timeout: float = 120.0
) -> PodStore | None:
    """Open the pod that is meant; None where none is configured.

    Args:
        where: ``none``; the name of a pod of this machine; its folder; ``http://HOST:PORT`` of a
            server; ``server`` for the one of IPUOF_VIPU_API_HOST and _PORT (or
            VIPU_CLI_API_HOST), by default localhost:8090. None for POPRUN_POD, and without that
            the only pod of this machine.
        environ: the variables of this process.
        timeout: limit of every request to a server, in seconds.

    Raises:
        PodError: it cannot be opened; several are there and none is named.
    """
    raise NotImplementedError
