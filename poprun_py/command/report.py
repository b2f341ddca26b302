"""The subcommand ``poprun-py report``, which writes an HTML page about a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from poprun_py.command.click_commands import HELP, parse_words
from poprun_py.command.named_runs import OUTPUT_DIR, run_named
from poprun_py.errors import UsageError
from poprun_py.options.written_files import PAGE_BEGINNINGS, require_same_kind
from poprun_py.past_runs.pages.run_page import page_text, write_page
from poprun_py.terminal import print_out, print_warning

_STDOUT: Final = "-"
_HELP: Final = """Write an HTML page about RUN: throughput, loss, step times, slow instances,
memory, placement, and causes of failures.

RUN is the folder of a run, or the name of a run in --output-dir. The name latest means the newest
run. The job of RUN may still be running. A job with --output-dir writes this page itself when the
job ends. The page is one HTML file that needs no network, so you can send it to a colleague.

\b
Examples:
  poprun-py --output-dir runs -n 2 train.py     run a job, and write its page at the end
  poprun-py report latest                       write the page of the newest run again
  poprun-py report --open latest                write the page, and show the page
  poprun-py report -o today.html runs/20260131-120000-1a2b3c
"""
REPORT: Final = click.Command(
    "report",
    help=_HELP,
    add_help_option=False,
    params=[
        click.Argument(["run"], metavar="RUN"),
        click.Option(
            ["-o", "--output"],
            metavar="FILE",
            help="Write the page to this file. - means standard output. By default, the page is"
            " report.html in the folder of RUN.",
        ),
        OUTPUT_DIR,
        click.Option(
            ["--open", "is_opened"], is_flag=True, help="Show the page in the web browser."
        ),
        HELP,
    ],
)


def main(words: Sequence[str]) -> int:
    """Run ``poprun-py report`` with the arguments ``words`` and return the exit code.

    Raises:
        UsageError: An argument is not accepted, the run does not exist, or the page cannot be
            written.
    """
    values = parse_words(REPORT, words)
    if values is None:
        return 0
    output = values["output"]
    files = run_named(values["run"], values["parent"])
    if output == _STDOUT:
        if values["is_opened"]:
            raise UsageError(
                "--open needs the page in a file, but --output - prints the page to standard "
                "output; give --output a path, or omit --output"
            )
        print_out(page_text(files, Path()))
        return 0
    path = None if output is None else _path(output)
    try:
        written = write_page(files, path).resolve()
    except OSError as error:
        raise UsageError(
            f"--output {path or files.page}: the page cannot be written ({error.strerror}); give "
            "the path of a file that can be written"
        ) from None
    print_out(str(written))
    if values["is_opened"]:
        _open(written)
    return 0


def _path(output: str) -> Path:
    """Check the value of --output, and return it as a path."""
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--output {output!r}: expected the path of a file in an existing folder")
    require_same_kind(path, "--output", "page", PAGE_BEGINNINGS)
    return path


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.as_uri()):
        print_warning("no browser could be started; open the printed path in a browser")
