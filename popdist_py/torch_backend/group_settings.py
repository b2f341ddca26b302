"""How the processes of a group communicate: our variables, and those that gloo knows.

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from popdist_py.environment import CollectiveSettings

__all__ = ["settings_of_group"]


def settings_of_group(environ: Mapping[str, str], timeout: timedelta) -> CollectiveSettings:
    """Return the settings of a group of torch.distributed.

    Args:
        environ: the variables; gloo's interface counts where ours names no network.
        timeout: of every call of the group.

    Raises:
        WireError: a value is not accepted.
    """
    settings = CollectiveSettings.from_environ(environ)
    # gloo accepts several interfaces, of which it uses the first for its first connection.
    interface = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    network = settings.network or interface or None
    return replace(settings, hang_timeout=timeout.total_seconds(), network=network)
