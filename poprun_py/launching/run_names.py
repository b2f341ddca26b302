"""The choice of a new run's name: --run-name, the user's ``POPRUN_RUN_ID``, or a generated name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from popdist_py.environment import RUN_ID, is_popdist_environment
from poprun_py.errors import UsageError, shortened
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_origins import ENVIRONMENT
from poprun_py.options.run_labels import LATEST, is_folder_name


@dataclass(frozen=True, slots=True)
class RunName:
    """The name that a run shall have.

    Attributes:
        text: The name.
        is_for_new_run: Whether the launch must not continue an earlier run with this name.
    """

    text: str
    is_for_new_run: bool = False


def choose_run_name(config: LaunchConfig, environ: Mapping[str, str]) -> RunName:
    """Return the name for a run with these options and environment variables.

    An instance of a job inherits the ``POPRUN_RUN_NAME`` of its job. A launch inside an instance
    does not use this variable, because the launch is another run.

    Raises:
        UsageError: The value of ``POPRUN_RUN_ID`` cannot be the name of a folder, or both
            ``POPRUN_RUN_ID`` and --run-name are given.
    """
    name, is_inside = config.run_name, is_popdist_environment(environ)
    if name is None or (is_inside and config.origin("run_name").source == ENVIRONMENT):
        return RunName(new_run_id(environ))
    if environ.get(RUN_ID) and not is_inside:
        raise UsageError(
            f"{config.shown('run_name')} and {RUN_ID}={shortened(environ[RUN_ID])} cannot be used "
            f"together; give only --run-name to start a new run, or only {RUN_ID} to continue a run"
        )
    return RunName(name, is_for_new_run=True)


def chosen_by_user(config: LaunchConfig, environ: Mapping[str, str]) -> str:
    """Return the name that the user chose for a run; empty if there is none, or it is refused."""
    is_given = config.run_name is not None or environ.get(RUN_ID)
    if not is_given or is_popdist_environment(environ):
        return ""
    try:
        return choose_run_name(config, environ).text
    except UsageError:
        return ""  # the launch reports the error later


def new_run_id(environ: Mapping[str, str]) -> str:
    """Return the name of a new run: the user's ``POPRUN_RUN_ID``, or a generated name.

    A generated name begins with the time in UTC, so that the names of runs sort by time. Inside an
    instance of another job, ``POPRUN_RUN_ID`` is the name of the other job's run and is not used.

    Raises:
        UsageError: The value of ``POPRUN_RUN_ID`` cannot be the name of a folder.
    """
    given = environ.get(RUN_ID, "")
    if not given or is_popdist_environment(environ):
        return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"
    if not is_folder_name(given):
        raise UsageError(
            f"{RUN_ID}={shortened(repr(given))}: expected a folder name other than {LATEST!r}, "
            "with at most 128 letters, digits, '.', '_' and '-', of which the first is a letter or "
            "digit"
        )
    return given
