"""The lookup of runs by name for the subcommands, and the folder of the option output_dir.

The option ``--output-dir`` of a subcommand goes first. If it is not given, the subcommand follows
POPRUN_OUTPUT_DIR and pyproject.toml, as a launch does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click

from poprun_py.past_runs.run_files import DEFAULT_PARENT, RunFiles, find_run, run_in

OUTPUT_DIR: Final = click.Option(
    ["--output-dir", "parent"],
    metavar="DIR",
    help="Folder that contains the runs that are given by name. By default, this is the output_dir"
    f" option from POPRUN_OUTPUT_DIR or pyproject.toml, else {DEFAULT_PARENT}.",
)
_TYPED: Final = "--output-dir"


def output_dir_option() -> tuple[str | None, str]:
    """Return the folder of the option output_dir, or None, and the name by which the user set it.

    Raises:
        UsageError: An option in an environment variable or in pyproject.toml is not accepted.
    """
    from poprun_py.options.gathered_options import gather_options

    config = gather_options({}, os.environ).config
    return config.output_dir, config.named("output_dir")


def run_named(name: str, parent: str | None) -> RunFiles:
    """Return the files of a run that the user gave by its folder or by its name.

    Args:
        name: The path of the run's folder, or the run's name.
        parent: The value of the subcommand's option --output-dir; None if it is not given.

    Raises:
        UsageError: The run does not exist, or its name cannot be looked up, because an option in an
            environment variable or in pyproject.toml is not accepted.
    """
    if parent is not None:
        return find_run(name, parent, _TYPED)
    # A wrong value in an environment variable does not matter for a run that is given by its path.
    if name and (run := run_in(Path(name))) is not None:
        return run
    folder, source = output_dir_option()
    return (
        find_run(name, DEFAULT_PARENT, _TYPED) if folder is None else find_run(name, folder, source)
    )
