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
        environ: The environment variables. If no variable of this library names a network,
            GLOO_SOCKET_IFNAME names it.
        timeout: The time-out of every call of the group.

    Raises:
        WireError: An environment variable has an invalid value.
    """
    settings = CollectiveSettings.from_environ(environ)
    # GLOO_SOCKET_IFNAME may name several interfaces. gloo makes its first connection over the first
    # interface, so this library uses the first interface, too.
    interface = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    network = settings.network or interface or None
    return replace(settings, hang_timeout=timeout.total_seconds(), network=network)
