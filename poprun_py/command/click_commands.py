"""Parsing, help and errors of the commands that use click, such as ``poprun-py report``."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import click

from poprun_py.errors import UsageError, nearest
from poprun_py.terminal import command_name, exit_code_of, exit_with, prepare_streams, print_out
from poprun_py.versions import version_text

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)

_HELP_WIDTH = 100
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": _HELP_WIDTH}
# Options that several subcommands of poprun-py share.
HELP = click.Option(["-h", "--help"], is_flag=True, help="Show this help.")
FORMAT = click.Option(
    ["--format", "form"],
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format of the result.",
)


class PrintedHelp(click.Command):
    """A base class for click commands that print their help with ``print_out``.

    A subclass must list this class before click's class among its base classes. If stdout cannot be
    written, ``print_out`` raises UnwritableError, but click's own ``echo`` would raise a plain
    OSError.
    """

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return click's --help option, changed to print with ``print_out``."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _print_help
        return option


def _print_help(context: click.Context, _: click.Parameter, value: Any) -> None:
    if value and not context.resilient_parsing:
        print_out(context.get_help())
        context.exit()


def version_option(*names: str) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds an option such as --version to a click command."""
    return click.option(
        *names,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_version,
        help="Show the version.",
    )


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        print_out(version_text("text"))
        context.exit()


def run_process(command: click.Command) -> NoReturn:
    """Run a click command with this process's arguments, and exit with the command's exit code."""
    prepare_streams()
    exit_with(run(command, sys.argv[1:]))


def run(command: click.Command, words: Sequence[str]) -> int:
    """Run a click command with the arguments ``words``, and return the command's exit code.

    The command's callback must return an exit code, or None for exit code 0.
    """

    def answer() -> int:
        with usage_errors():
            code = command.main(list(words), prog_name=command.name, standalone_mode=False)
        return code if isinstance(code, int) else 0

    return exit_code_of(answer)


def parse_words(command: click.Command, words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a subcommand's parameters.

    If ``words`` contain --help, print the help and return None.

    Raises:
        UsageError: An option is unknown, or a value is missing or not accepted.
    """
    name = f"{command_name()} {command.name}"
    if {"-h", "--help"} & set(words):
        width = min(shutil.get_terminal_size((100, 24)).columns, _HELP_WIDTH)
        context = click.Context(command, info_name=name, max_content_width=width)
        print_out(command.get_help(context))
        return None
    with usage_errors(name):
        return dict(command.make_context(name, list(words)).params)


@contextlib.contextmanager
def usage_errors(command: str = "") -> Iterator[None]:
    """Convert click's errors in the ``with`` block to UsageErrors with messages of one line.

    Args:
        command: The words of the command whose help a message names, if click does not know it.

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
        hint = (
            nearest(error.option_name, names)
            or f"; {_help_command(error.ctx, command)} lists all options"
        )
        raise UsageError(f"unknown option {error.option_name}{hint}") from None
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        raise UsageError(
            f"{message}; {_help_command(error.ctx, command)} explains all options"
        ) from None
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None


def _help_command(context: click.Context | None, command: str) -> str:
    return f"{context.command_path if context else command or command_name()} --help"
