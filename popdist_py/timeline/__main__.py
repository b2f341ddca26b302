"""The command ``python -m popdist_py.timeline FOLDER... [-o FILE]``, which merges files of spans.

The command is for a job that has ended without a trace, for example because its launcher was
killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from popdist_py.atomic_file import holds_another_kind
from popdist_py.errors import counted
from popdist_py.timeline.folder import TRACE_BEGINNINGS
from popdist_py.timeline.merging import merge_files, recorded_instances


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="FOLDER...",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("timeline.json.gz"),
    show_default=True,
    help="The file for the trace. The trace is compressed if the name ends with .gz. An existing "
    "trace is replaced; a file of another kind is an error.",
)
def main(folders: tuple[Path, ...], output: Path) -> None:
    """Merge the spans of a job's attempts, which are in the folders runs/NAME/attempt-N/spans."""
    if holds_another_kind(output, TRACE_BEGINNINGS):
        raise click.UsageError(
            f"--output {output}: this existing file is not a timeline: give another file, or "
            "remove this file"
        )
    has_replaced = output.is_file()
    try:
        merged = merge_files(recorded_instances(folders), output)
    except OSError as error:
        sys.exit(f"the trace {output} cannot be written: {error.strerror}")
    for trouble in merged.troubles:
        click.echo(trouble, err=True)
    replaced = " (replaced)" if has_replaced else ""
    click.echo(f"{merged.path}{replaced}: {counted(merged.num_spans, 'span', ',')}")


if __name__ == "__main__":
    main(prog_name="python -m popdist_py.timeline")
