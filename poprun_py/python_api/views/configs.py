"""A configuration for people: the command that asks for the same, and a table of what was given."""

from __future__ import annotations

from poprun_py.options.launch_config import LaunchConfig, options
from poprun_py.options.option_types import option_name
from poprun_py.planning.views.command_text import launch_command
from poprun_py.python_api.views.frame import block, framed, heading, note, table


def config_text(config: LaunchConfig) -> str:
    """Return the command line that asks for the same; of --env the names only."""
    return launch_command(config)


def config_html(config: LaunchConfig) -> str:
    """Return the command, and the options that were given, each with the place that gave it."""
    rows = [
        (option_name(name), _value(config, name), config.origin(name).source)
        for name, opt in options().items()
        if config.is_given(name) and opt.saved
    ]
    return framed(
        heading("LaunchConfig"),
        block(launch_command(config)),
        table(("option", "value", "given in"), rows) if rows else note("every option: its default"),
    )


def _value(config: LaunchConfig, name: str) -> str:
    value = getattr(config, name)
    if options()[name].secret:
        # The names of variables, never their values.
        return ", ".join(each.partition("=")[0] for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "all" if value is None else str(value)
