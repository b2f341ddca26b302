"""The class ReportCommand: a click command with groups of options in its help, and exit codes.

A ``ReportCommand`` never ends with a traceback of this library, because Python's exit code for a
traceback is 1. The exit code 1 of ``python -m popdist_py.ipu`` means that a model does not fit.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

__all__ = ["ReportCommand"]

_CANNOT_TELL = 2
# The exit codes of a process that the signals SIGINT and SIGPIPE end, as shells count them.
_INTERRUPTED, _BROKEN_PIPE = 130, 141


class ReportCommand(click.Command):
    """A click command whose help shows groups of options, and whose process has fixed exit codes.

    A wrong command line, and an estimate that fails, have the exit code 2. If the reader of the
    output has ended, as in ``| head``, the exit code is 141 and nothing is printed. ``Ctrl-C`` has
    the exit code 130.

    Args:
        *args: The positional arguments of ``click.Command``.
        groups: The options of each group, by the title of the group. The help shows options outside
            all groups last.
        **settings: The keyword arguments of ``click.Command``.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section of options for each group into the help."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        title_of = {name: title for title, names in self._groups.items() for name in names}
        for title in (*self._groups, "Other options"):
            records = [
                record
                for option in options
                if title_of.get(option.opts[-1], "Other options") == title
                and (record := option.get_help_record(ctx)) is not None
            ]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def main(  # type: ignore[override]  # it never returns, also outside click's standalone mode
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **_: Any
    ) -> NoReturn:
        """Run the command with the arguments ``args``, and exit.

        Args:
            args: The words of the command line without the command's name; None for the arguments
                of this process.
            prog_name: The name of the command in its help and in error messages.
        """
        if isinstance(sys.stdout, io.TextIOWrapper):
            # The names of files and modules may have characters that the output's encoding lacks.
            sys.stdout.reconfigure(errors="backslashreplace")
        words = list(sys.argv[1:] if args is None else args)
        sys.exit(self._exit_code(prog_name or self.name or "", words))

    def _exit_code(self, name: str, words: list[str]) -> int:
        try:
            code = self._run(name, words)
            if sys.stdout is not None:
                sys.stdout.flush()
        except KeyboardInterrupt:
            return _INTERRUPTED
        except OSError as error:
            # Standard output becomes /dev/null, so that Python's flush at the exit does not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return _BROKEN_PIPE
            with contextlib.suppress(OSError):
                what = error.filename or "cannot write standard output"
                click.echo(f"Error: {what}: {error.strerror}", err=True)
            return _CANNOT_TELL
        return code

    def _run(self, name: str, words: list[str]) -> int:
        """Run the command, print its errors, and return its exit code.

        Raises:
            OSError: Standard output cannot be written.
            KeyboardInterrupt: The user has interrupted the command.
        """
        try:
            with self.make_context(name, words) as context:
                self.invoke(context)
        except click.exceptions.Exit as error:
            return error.exit_code
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except OSError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            click.echo(
                f"Error: the estimate failed with {type(error).__name__}: {error} ({place}). This "
                "failure is a bug in popdist_py: report the bug with this command line",
                err=True,
            )
            return _CANNOT_TELL
        return 0
