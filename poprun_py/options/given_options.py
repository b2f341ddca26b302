"""The options that a user gave, with their values as text and the sources of the values.

No module of this package prints these texts; the values of secret options are never in them.
"""

from __future__ import annotations

import shlex
from typing import Any

from poprun_py.display.formatting import ranges_text
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_origins import COMMAND_LINE
from poprun_py.options.option_types import FLAG


def typed_values(config: LaunchConfig, name: str) -> list[str]:
    """Return the values of an option as a user types them on the command line.

    If the values of an option are secret variables, only the names of the variables are returned.
    """
    declared, value = OPTIONS[name], getattr(config, name)
    values = value if declared.repeatable else [value]
    return [each.partition("=")[0] if declared.secret else _typed(each) for each in values]


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ranges_text(value)
    # The value "all" (all instances) of an option is stored as None.
    return "all" if value is None else str(value)


def lines_by_source(config: LaunchConfig, *, typed: bool) -> tuple[str, ...]:
    """Return a line for each source of options, with the options and values that it gave.

    The verbosity is left out, because a user who reads the lines has asked for them.

    Args:
        config: The options of a launch.
        typed: Whether to return the line for the command line, or those for all other sources.
    """
    found: dict[str, list[str]] = {}
    for name, origin in config.origins.items():
        if name == "verbosity" or (origin.source == COMMAND_LINE) != typed:
            continue
        shown = found.setdefault("the command line" if typed else origin.source, [])
        if typed and OPTIONS[name].type is FLAG:
            shown.append(origin.name)
        else:
            values = map(shlex.quote, typed_values(config, name))
            shown += [f"{origin.name}{origin.separator}{value}" for value in values]
    return tuple(f"options from {source}: {', '.join(given)}" for source, given in found.items())
