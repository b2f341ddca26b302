"""The options ``--page`` and ``--beside`` of ``python -m popdist_py.ipu``: checks and given values.

The package ``popdist_py.ipu.page`` makes the page. The module ``command`` defines the options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from popdist_py.atomic_file import holds_another_kind
from popdist_py.ipu.page import Planned, SavedReports, read_saved_reports, write_plan_page
from popdist_py.ipu.reports import execution_page, memory_page
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.on_ipu.model_factories import InputSpec
from popdist_py.poptorch.on_ipu.poptorch_advice import in_poptorch_terms

__all__ = ["WantedPage", "given_options", "planned_run", "wanted_page"]

_PAGE_BEGINNING: Final = b"<!DOCTYPE html>"
# Options that do not describe a run.
_OTHER_OPTIONS: Final = ("model", "page", "beside", "as_json", "find", "ipus")


@dataclass(frozen=True, slots=True)
class WantedPage:
    """The file of a page that the user wants, and the reports to compare with, if given."""

    path: Path
    beside: SavedReports | None

    def write(self, planned: Planned) -> None:
        """Write the page of a planned run.

        Raises:
            OSError: The file cannot be written.
        """
        problem = planned.memory.problem
        if problem is not None:
            memory = replace(planned.memory, problem=in_poptorch_terms(problem))
            planned = replace(planned, memory=memory)
        write_plan_page(self.path, planned, self.beside)


def wanted_page(path: Path | None, beside: Path | None) -> WantedPage | None:
    """Check the values of ``--page`` and ``--beside`` before anything is computed.

    Returns:
        The wanted page; None if the user wants no page.

    Raises:
        click.UsageError: The page cannot be written to the file, or the other file is not a report.
    """
    if path is None:
        if beside is not None:
            raise click.UsageError(
                "--beside needs a page on which it compares reports: add --page FILE.html"
            )
        return None
    if path.is_dir():
        raise click.UsageError(
            f"--page {path} is a folder: give the name of a file, such as {path / 'page.html'}"
        )
    if not path.parent.is_dir():
        raise click.UsageError(
            f"--page {path} cannot be written: the folder {path.parent} does not exist"
        )
    if holds_another_kind(path, (_PAGE_BEGINNING,)):
        raise click.UsageError(
            f"--page {path} would overwrite a file that is not a page of this command: name "
            f"another file, or remove {path}"
        )
    if beside is None:
        return WantedPage(path, None)
    try:
        return WantedPage(path, read_saved_reports(beside))
    except OSError as error:
        raise click.UsageError(
            f"cannot read the file {beside} of --beside: {error.strerror}"
        ) from error
    except ValueError as error:
        raise click.UsageError(f"cannot use the file {beside} of --beside: {error}") from error


def planned_run(run: Run, context: click.Context) -> Planned:
    """Return a run with its reports, and with the words of the command line."""
    return Planned(
        name=str(context.params["model"]),
        run=run,
        memory=memory_page(run),
        execution=execution_page(run),
        options=given_options(context),
    )


def given_options(context: click.Context) -> dict[str, str]:
    """Return the options of a command line that describe the run, with their values as texts."""
    given = {}
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name in _OTHER_OPTIONS or source is not click.core.ParameterSource.COMMANDLINE:
            continue
        given[option.opts[0]] = _text(context.params[name])
    return given


def _text(value: Any) -> str:
    if isinstance(value, InputSpec):
        shape = "x".join(map(str, value.shape))
        return f"{shape}:{value.type}"
    if isinstance(value, tuple):
        # The values of --set are pairs of a name and a value.
        return ",".join(
            "=".join(each) if isinstance(each, tuple) else _text(each) for each in value
        )
    return "yes" if value is True else str(value)
