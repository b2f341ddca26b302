"""Conversion of click's errors into UsageErrors of one line, for all commands except the launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from poprun_py.errors import UsageError, nearest
from poprun_py.terminal import command_name


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Convert the errors of a click command that runs inside ``with`` to UsageErrors.

    Raises:
        UsageError: The command line is wrong. The message suggests a similar option, or the command
            that prints the help.
        KeyboardInterrupt: The user has interrupted the command.
    """
    try:
        yield
    except click.NoSuchOption as error:
        params = error.ctx.command.get_params(error.ctx) if error.ctx else []
        names = (name for param in params for name in param.opts if name.startswith("--"))
        hint = nearest(error.option_name, names) or f"; {_help_command(error.ctx)} lists all"
        raise UsageError(f"unknown option {error.option_name}{hint}") from None
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        raise UsageError(f"{message}; {_help_command(error.ctx)} explains all options") from None
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None


def _help_command(context: click.Context | None) -> str:
    return f"{context.command_path if context else command_name()} --help"
