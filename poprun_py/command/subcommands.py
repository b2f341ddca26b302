"""Options, parsing and output that the subcommands report, compare and scale share."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from popdist_py.atomic_file import write_whole
from poprun_py.command.click_errors import usage_errors
from poprun_py.errors import UsageError
from poprun_py.past_runs.run_files import DEFAULT_PARENT
from poprun_py.terminal import can_print, command_name, print_error, print_out, wants_colour

if TYPE_CHECKING:
    from poprun_py.past_runs.comparison import Comparison

HELP = click.Option(["-h", "--help"], is_flag=True, help="Show this help.")
OUTPUT_DIR = click.Option(
    ["--output-dir", "parent"],
    metavar="DIR",
    default=DEFAULT_PARENT,
    show_default=True,
    help="The folder of the runs that are given by name.",
)
FORMAT = click.Option(
    ["--format", "form"],
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="The form of the printed result.",
)
_HELP_WIDTH = 100
_PIPE_WIDTH = 200


def parse_words(command: click.Command, words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a command's parameters. With --help, print the help and return None.

    Raises:
        UsageError: An option is unknown, or a value is missing or not accepted.
    """
    name = f"{command_name()} {command.name}"
    if {"-h", "--help"} & set(words):
        width = min(shutil.get_terminal_size((100, 24)).columns, _HELP_WIDTH)
        context = click.Context(command, info_name=name, max_content_width=width)
        print_out(command.get_help(context))
        return None
    with usage_errors():
        return dict(command.make_context(name, list(words)).params)


def print_comparison(
    comparison: Comparison, form: str, text_lines: Callable[..., list[str]]
) -> None:
    """Print a comparison as JSON, or as the lines that ``text_lines`` returns."""
    if form == "json":
        print_out(json.dumps(comparison.to_json(), indent=2))
        return
    # Tables for a pipe may be wider than a terminal.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    lines = text_lines(comparison, width=width, colour=wants_colour(), blocks=can_print("█▏"))
    print_out("\n".join(lines))


def check_page_name(path: str | None, option: str = "--output") -> None:
    """Check the path of a page; None is accepted.

    Raises:
        UsageError: The name does not end in .html, or the folder does not exist.
    """
    if path is None:
        return
    if not path.endswith(".html"):
        raise UsageError(
            f"{option} {path}: expected a name that ends in .html, because a page is written"
        )
    if not Path(path).parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {Path(path).parent} does not exist")


def save_page(path: Path, text: str, option: str = "--output") -> None:
    """Write a page atomically, which replaces an existing file, and print its path.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    print_error(f"{command_name()}: the page is {path}")
