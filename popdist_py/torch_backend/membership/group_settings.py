"""The settings of a group, from environment variables of this library and of gloo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from popdist_py.environment import CollectiveSettings

__all__ = ["settings_of_group"]


def settings_of_group(environ: Mapping[str, str], timeout: timedelta) -> CollectiveSettings:
    """Return the settings of a group of torch.distributed.

    Args:
        environ: The environment variables. GLOO_SOCKET_IFNAME is used if no variable of this
            library names a network.
        timeout: The time-out of every call of the group.

    Raises:
        WireError: A value is not accepted.
    """
    settings = CollectiveSettings.from_environ(environ)
    # The variable may name several interfaces. gloo uses the first one for its first connection.
    interface = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    network = settings.network or interface or None
    return replace(settings, hang_timeout=timeout.total_seconds(), network=network)
