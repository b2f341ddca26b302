"""``poprun-py report RUN``: a run as a page for a browser.

What the page shows: poprun_py/pages/run_page.py. Nothing here draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from poprun_py.command_name import command_name
from poprun_py.errors import UsageError
from poprun_py.recording.page_file import page_text, write_page
from poprun_py.runs.run_files import DEFAULT_PARENT, find_run
from poprun_py.terminal import print_out, print_warning

__all__ = ["REPORT", "main"]

_STDOUT = "-"
_EXAMPLES = """
\b
Examples:
  poprun-py --output-dir runs -n 2 train.py     a job; its page is written at its end
  poprun-py report latest                       write the page of the newest run again
  poprun-py report --open latest                and show it
  poprun-py report -o today.html runs/20260131-120000-1a2b3c
"""


@click.command(
    "report",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXAMPLES,
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write the page; - is standard output.  [default: report.html in RUN]",
)
@click.option(
    "--output-dir",
    metavar="DIR",
    default=DEFAULT_PARENT,
    show_default=True,
    help="Where runs are that are given by name.",
)
@click.option("--open", "is_opened", is_flag=True, help="Show the page in the browser.")
@click.argument("run")
def REPORT(*, run: str, output: str | None, output_dir: str, is_opened: bool) -> None:
    """Write RUN as a page: throughput, loss, step times, who was slow, memory, placement, causes.

    RUN is the folder of a run, or the name of one in --output-dir; latest is the newest. It may
    still be running. Every job with --output-dir writes its page itself when it ends. The page is
    one file that needs no network: send it to a colleague, or keep it with the results.
    """
    files = find_run(run, output_dir)
    if output == _STDOUT:
        if is_opened:
            raise UsageError("--open shows a file: give --output a path, or leave it out")
        print_out(page_text(files, Path()))
        return
    path = None if output is None else _file(output)
    try:
        written = write_page(files, path).resolve()
    except OSError as error:
        raise UsageError(
            f"--output {path or files.page}: {error.strerror}; name a file that can be written"
        ) from None
    print_out(str(written))
    if is_opened:
        _open(written)


def _file(output: str) -> Path:
    """Return where the user wants the page.

    Raises:
        UsageError: it cannot be there.
    """
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"--output {output!r}: expected the path of a file in a folder that is there"
        )
    return path


def _open(page: Path) -> None:
    """Show the page; where there is no browser, its path has been said."""
    import webbrowser

    if not webbrowser.open(page.as_uri()):
        print_warning("no browser can be started here; open the page yourself")


def main(words: Sequence[str]) -> int:
    """Do what ``words`` ask for and return the exit code.

    Raises:
        UsageError: they are no words of this command, or there is no such run.
    """
    try:
        REPORT.main(list(words), prog_name=f"{command_name()} report", standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(
            f"{error.format_message().rstrip('.')}; see {command_name()} report --help"
        ) from None
    except click.Abort:
        return 130
    return 0
