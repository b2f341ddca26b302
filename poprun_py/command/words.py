"""How the commands beside the launch read their words: click's grammar, our errors, their help."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from popdist_py.atomic_file import write_whole
from poprun_py.console import command_name
from poprun_py.errors import UsageError, nearest
from poprun_py.past_runs.run_files import DEFAULT_PARENT
from poprun_py.terminal import print_out

HELP = click.Option(["-h", "--help"], is_flag=True, help="Show this help.")
OUTPUT_DIR = click.Option(
    ["--output-dir", "parent"],
    metavar="DIR",
    default=DEFAULT_PARENT,
    show_default=True,
    help="Where runs are that are given by name.",
)
_MOST_COLUMNS = 100
_PIPE_COLUMNS = 200


def read_words(command: click.Command, words: Sequence[str]) -> dict[str, Any] | None:
    """Return what the words of a command give, or print its help and return None.

    Raises:
        UsageError: an unknown option, a missing value, or one that is not accepted.
    """
    name = f"{command_name()} {command.name}"
    try:
        if {"-h", "--help"} & set(words):
            width = min(shutil.get_terminal_size((100, 24)).columns, _MOST_COLUMNS)
            context = click.Context(command, info_name=name, max_content_width=width)
            print_out(command.get_help(context))
            return None
        return dict(command.make_context(name, list(words)).params)
    except click.NoSuchOption as error:
        names = [each for param in command.params for each in param.opts]
        hint = nearest(error.option_name, (each for each in names if each.startswith("--")))
        raise UsageError(
            f"unknown option {error.option_name}{hint or f'; {name} --help lists all'}"
        ) from None
    except click.UsageError as error:
        said = error.format_message().rstrip(".")
        raise UsageError(f"{said}; {name} --help tells what is accepted") from None


def page_width() -> int:
    """Return how wide a table may be: a pipe gets whole lines, a terminal what fits."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS


def print_json(document: dict[str, Any]) -> None:
    """Print a document for programs."""
    print_out(json.dumps(document, indent=2))


def check_page_name(path: str | None, option: str = "--output") -> None:
    """Refuse a file that is no page, or that cannot be written.

    Raises:
        UsageError: its name does not end in .html, or its folder is not there.
    """
    if path is None:
        return
    if not path.endswith(".html"):
        raise UsageError(f"{option} {path}: a page is written; expected a name that ends in .html")
    if not Path(path).parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {Path(path).parent}")


def save_page(path: Path, text: str, option: str = "--output") -> None:
    """Write a page whole.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
