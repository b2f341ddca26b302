"""The options --install-names and --remove-names, which change this Python environment."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from popdist_py import __version__
from popdist_py.installed_names import InstallError, install, remove
from poprun_py.errors import UsageError
from poprun_py.options.command_line import NAMES_CHANGES
from poprun_py.terminal import print_out


def change_names(option: str, *, is_alone: bool) -> None:
    """Install or remove packages such as ``poptorch``, and print what was done.

    Args:
        option: One of ``NAMES_CHANGES``.
        is_alone: Whether the command line has neither another option nor a program.

    Raises:
        UsageError: The option is not alone, the library is not installed in this environment, or
            the packages cannot be written or removed.
    """
    if not is_alone:
        raise UsageError(
            f"{option} cannot be used with a program or with other options, because {option} only "
            f"changes the Python environment; give {option} alone"
        )
    site = Path(sysconfig.get_path("purelib"))
    is_installed = option == NAMES_CHANGES[0]
    try:
        lines = install(site, __version__) if is_installed else remove(site)
    except InstallError as error:
        raise UsageError(f"{option}: {error}") from None
    print_out("\n".join(lines))
