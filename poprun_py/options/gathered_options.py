"""Merging of options from files, environment variables and the command line.

The sources of options are pyproject.toml, the file of --import-config, environment variables, and
the command line. A later source in this list takes precedence over an earlier source.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from poprun_py.errors import UsageError, nearest
from poprun_py.options.config_files import parse_config, parse_project_file, read_text_file
from poprun_py.options.declared_options import (
    OPTION_VARIABLES,
    OPTIONS,
    VARIABLE_PREFIX,
    WITHOUT_VARIABLE,
    is_decided_by_plan,
    variable_name,
)
from poprun_py.options.launch_config import LaunchConfig, merged_config
from poprun_py.options.option_origins import (
    ENVIRONMENT,
    Origin,
    Source,
    from_command_line,
)
from poprun_py.options.option_types import (
    AUTO,
    FILE_OR_AUTO,
    PATH,
    Option,
    option_name,
    read_destinations,
)

_PROJECT_FILE = "pyproject.toml"
# Maps each option that only queries running jobs to the options that influence the query.
_QUERIES = {
    "stacks": ("stacks", "verbosity"),
    "status": ("status", "status_format", "verbosity"),
    "print_leases": ("print_leases", "verbosity"),
    "add_host": ("add_host", "verbosity"),
}
# If --import-config has the value ``none``, no configuration file is read.
_NO_FILE = "none"
# Environment variables that the launcher passes to its wrappers and instances.
INTERNAL_VARIABLES = frozenset(
    {
        "POPRUN_CONTROL",
        "POPRUN_CPUS",
        # POPRUN_LEASES names the folder of CPU leases; the value ``none`` turns leases off.
        "POPRUN_LEASES",
        "POPRUN_MEMORY_NODES",
        "POPRUN_PREPARED",
        "POPRUN_RUN_ID",
        "POPRUN_STDIN",
        "POPRUN_STDIN_READER",
        "POPRUN_TOKEN",
    }
)
# The environment variables for the folder of the pods and for the token file of a pod server. The
# library popdist_py reads these two environment variables as well (popdist_py/pods/find_pod.py).
POD_VARIABLES = frozenset({"POPRUN_PODS", "POPRUN_POD_TOKEN_FILE"})
# PopRun's environment variable for the verbosity.
_LOG_LEVEL = "POPRUN_LOG_LEVEL"
_VERBOSITY = {"TRACE": 2, "DEBUG": 2, "INFO": 1, "WARN": 0, "ERR": 0, "ERROR": 0, "CRITICAL": 0,
              "OFF": 0}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredOptions:
    """A LaunchConfig, with warnings about the sources of its options."""

    config: LaunchConfig
    warnings: tuple[str, ...] = ()


def gather_options(values: Mapping[str, Any], environ: Mapping[str, str]) -> GatheredOptions:
    """Merge options from the command line, environment variables and configuration files.

    ``values`` maps field names to the option values that the command line gives.

    Raises:
        UsageError: A value is not accepted, values contradict one another, or a file cannot be
            read.
    """
    typed = from_command_line(values)
    query = next((name for name in _QUERIES if values.get(name) is not None), None)
    if query is not None:
        # A query of running jobs does not read configuration files and environment variables,
        # because an invalid value in them must not prevent the query.
        idle = [option_name(n) for n in typed if n in OPTIONS and n not in _QUERIES[query]]
        jobs = "running jobs" if query == "print_leases" else "a running job"
        warnings = _no_effect(idle, f"{option_name(query)} only queries {jobs}")
        return GatheredOptions(config=merged_config(typed), warnings=warnings)
    variables, warnings = from_environment(environ)
    if values.get("from_plan") is not None:
        left = {name: given for name, given in variables.items() if not is_decided_by_plan(name)}
        ignored = [variables[name][1].name for name in OPTIONS if name in variables.keys() - left]
        warnings += _no_effect(ignored, "the plan of --from-plan takes precedence")
        config = merged_config(left, typed)
        return GatheredOptions(config=config, warnings=warnings)
    imported = typed.get("import_config") or variables.get("import_config")
    path: Any = imported[0] if imported is not None else None
    files: list[Source] = []
    if path != _NO_FILE:
        project, untrusted = _project_values(Path.cwd())
        files.append(project)
        warnings += untrusted
    if imported is not None and path != _NO_FILE:
        files.append(parse_config(read_text_file(path, imported[1].name), path))
    config = merged_config(*files, variables, typed)
    return GatheredOptions(config=config, warnings=warnings)


def with_variables(config: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
    """Return a configuration of Python code with the values of two environment variables.

    POPRUN_SHARE_CORES and POPRUN_WAIT_FOR_RESOURCES decide what a job does beside other jobs, so
    they apply to every job of a user. If ``config`` gives one of these options, both variables are
    ignored.

    Raises:
        UsageError: A value is not accepted, or both variables are set.
    """
    names = ("share_cores", "wait_for_resources")
    if any(map(config.is_given, names)):
        return config
    variables = [variable_name(name) for name in names]
    values, _ = from_environment({name: environ[name] for name in variables if name in environ})
    if not values:
        return config
    given = {name: value for name, (value, _) in values.items()}
    origins = {name: origin for name, (_, origin) in values.items()}
    return replace(config, **given, origins={**config.origins, **origins})


def _no_effect(names: Sequence[str], reason: str) -> tuple[str, ...]:
    verb = "have" if len(names) > 1 else "has"
    return (f"{', '.join(names)} {verb} no effect: {reason}",) if names else ()


def _project_values(folder: Path) -> tuple[Source, tuple[str, ...]]:
    """Return the options of the nearest pyproject.toml that has the table of poprun-py.

    The search starts in ``folder``, continues in its parents, and ends at the top of a repository.

    Returns:
        The option values, and a tuple with a warning if pyproject.toml is not trusted.
    """
    for place in (folder, *folder.parents):
        path = place / _PROJECT_FILE
        values = None
        # An unreadable pyproject.toml is not an error, because it may belong to another project.
        with contextlib.suppress(OSError):
            # is_file is False for a named pipe, whose reading would block the launcher.
            if path.is_file():
                text = path.read_text(encoding="utf-8-sig", errors="replace")
                values = parse_project_file(text, _PROJECT_FILE if place == folder else str(path))
        if values is not None and place != folder and _may_be_of_another_user(path):
            return {}, (
                f"{path} is not read, because it belongs to another user and is in a folder where "
                "every user may write; to use the file, give --import-config FILE",
            )
        if values is not None:
            return values if place == folder else _relative_to(place, values), ()
        if (place / ".git").exists():
            break
    return {}, ()


def _relative_to(folder: Path, values: Source) -> Source:
    """Return the option values of a file in ``folder``, with relative paths joined to ``folder``.

    The name of a program without a slash, such as mpirun, is not changed, because the program is
    searched for on PATH.
    """
    found = dict(values)
    for name, (value, origin) in values.items():
        type_ = OPTIONS[name].type if name in OPTIONS else None
        is_path = type_ is PATH or (type_ is FILE_OR_AUTO and value != AUTO)
        if is_path and (name != "mpi" or "/" in value):
            found[name] = str(folder / value), origin
        elif name == "metrics_to":
            destinations = read_destinations(value)
            found[name] = tuple(str(each.beside(folder)) for each in destinations), origin
    return found


def _may_be_of_another_user(path: Path) -> bool:
    """Tell whether another user may have put a file into a shared folder such as /tmp.

    A configuration file of an untrusted user must not be used, because options name programs to
    run.
    """
    is_shared = path.parent.stat().st_mode & 0o002
    return bool(is_shared) and path.stat().st_uid not in (0, os.geteuid())


# --- environment variables -----------------------------------------------------------------------


def is_option_variable(name: str) -> bool:
    """Tell whether an environment variable sets an option of a launch."""
    return name in OPTION_VARIABLES or name == _LOG_LEVEL


def from_environment(environ: Mapping[str, str]) -> tuple[Source, tuple[str, ...]]:
    """Return the options that environment variables set; an empty variable counts as not set.

    The environment variable of a repeatable option has one value per line.

    Returns:
        The values with their origins, and a warning for each unknown ``POPRUN_`` variable.

    Raises:
        UsageError: A value is not accepted.
    """
    values: Source = {}
    warnings = []
    for name in sorted(n for n in environ if n.startswith(VARIABLE_PREFIX) and environ[n]):
        text, origin = environ[name], Origin(ENVIRONMENT, name, "=")
        if name in OPTION_VARIABLES:
            field = OPTION_VARIABLES[name]
            values[field] = _read(OPTIONS[field], name, text), origin
        elif name == _LOG_LEVEL:
            if not environ.get("POPRUN_VERBOSITY"):
                values["verbosity"] = _log_level(text), origin
        elif name not in INTERNAL_VARIABLES | POD_VARIABLES:
            warnings.append(f"{name} is not an option of poprun-py{_hint(name)}")
    return values, tuple(warnings)


def _hint(variable: str) -> str:
    name = variable.removeprefix(VARIABLE_PREFIX)
    if name.lower() in WITHOUT_VARIABLE:
        return f"; give {option_name(name.lower())} on the command line"
    known = [each.removeprefix(VARIABLE_PREFIX) for each in OPTION_VARIABLES]
    return nearest(name, known).replace("mean ", f"mean {VARIABLE_PREFIX}")


def _read(opt: Option, name: str, text: str) -> Any:
    if opt.repeatable:
        # str.splitlines is not used, because it also splits a text at line boundaries of Unicode
        # other than the newline.
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        return tuple(opt.read(name, line) for line in lines if line)
    return opt.read(name, text)


def _log_level(text: str) -> int:
    if text.upper() not in _VERBOSITY:
        raise UsageError(
            f"{_LOG_LEVEL} {text!r}: expected one of {', '.join(_VERBOSITY)}"
            f"{nearest(text, _VERBOSITY)}"
        )
    return _VERBOSITY[text.upper()]
