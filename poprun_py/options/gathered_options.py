"""Where options come from besides the command line: variables, --import-config, pyproject.toml.

Looks for the files and reads them; what they say is parsed and merged in options/.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poprun_py.options.config_files import parse_config, parse_project_file, read_text_file
from poprun_py.options.environment_variables import variables_layer
from poprun_py.options.launch_config import LaunchConfig, is_decided_by_plan, options
from poprun_py.options.layers import merged, places, typed_layer
from poprun_py.options.metrics_destinations import read_destinations
from poprun_py.options.option_types import AUTO, FILE_OR_AUTO, PATH, option_name

_PROJECT_FILE = "pyproject.toml"
# What asks a job that runs, and the options that count beside it.
_BESIDE = {
    "stacks": ("stacks", "verbosity"),
    "status": ("status", "status_format", "verbosity"),
    "print_leases": ("print_leases", "verbosity"),
}
# The value of --import-config that leaves out every file.
_NO_FILE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredOptions:
    """The configuration, what is questionable about its places, and what the log says of them."""

    config: LaunchConfig
    warnings: tuple[str, ...] = ()
    log: tuple[str, ...] = ()


def gather_options(
    values: Mapping[str, Any], environ: Mapping[str, str], folder: Path | None = None
) -> GatheredOptions:
    """Merge all places of options: the command line, variables, the file, pyproject.toml.

    Args:
        values: what was typed, by field name.
        environ: the launcher's environment.
        folder: where the search for pyproject.toml begins; the working folder by default.

    Raises:
        UsageError: a value is not accepted, values contradict one another, or a file cannot be
            read.
    """
    typed = typed_layer(values)
    asking = next((name for name in _BESIDE if values.get(name) is not None), None)
    if asking is not None:
        # It asks a job that runs: nothing else matters, and nothing may be in the way.
        idle = [option_name(name) for name in typed["origins"] if name not in _BESIDE[asking]]
        verb = "have" if len(idle) > 1 else "has"
        whom = "about jobs that run" if asking == "print_leases" else "a job that runs"
        asks = f"{option_name(asking)} asks {whom} already"
        why = f"{', '.join(idle)} {verb} no effect: {asks}"
        return GatheredOptions(config=merged(typed), warnings=(why,) if idle else ())
    variables, warnings = variables_layer(environ)
    if values.get("from_plan") is not None:
        return _beside_plan(typed, variables, warnings)
    path = values.get("import_config") or variables.get("import_config")
    files: list[Mapping[str, Any]] = []
    if path != _NO_FILE:
        project, of_another = _project_layer(folder or Path.cwd())
        files += [project] if project is not None else []
        warnings += of_another
    if path not in (None, _NO_FILE):
        option = "--import-config" if "import_config" in values else "POPRUN_IMPORT_CONFIG"
        files.append(parse_config(read_text_file(path, option), path))
    config = merged(*files, variables, typed)
    return GatheredOptions(config=config, warnings=warnings, log=_log(config))


def _beside_plan(
    typed: Mapping[str, Any], variables: Mapping[str, Any], warnings: tuple[str, ...]
) -> GatheredOptions:
    """Return what may stand beside --from-plan; the plan has decided everything else."""
    without = [name for name in options() if name in variables and is_decided_by_plan(name)]
    left = {name: value for name, value in variables.items() if name not in without}
    origins = {n: o for n, o in variables["origins"].items() if n not in without}
    config = merged({**left, "origins": origins}, typed)
    ignored = [variables["origins"][name].name for name in without]
    if ignored:
        verb = "have" if len(ignored) > 1 else "has"
        warnings += (f"{', '.join(ignored)} {verb} no effect: the plan of --from-plan decides",)
    return GatheredOptions(config=config, warnings=warnings, log=_log(config))


def _log(config: LaunchConfig) -> tuple[str, ...]:
    """Return a line for each place; names only, since values may be secret."""
    return tuple(f"options from {place}: {', '.join(n)}" for place, n in places(config).items())


def _project_layer(folder: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the options of the nearest pyproject.toml that has some, from ``folder`` upward.

    The search ends at the top of a repository.

    Returns:
        The layer, None if there is none, and a warning for a file that is not trusted.
    """
    for place in (folder, *folder.parents):
        path = place / _PROJECT_FILE
        layer = None
        # A file that cannot be read need not be about us.
        with contextlib.suppress(OSError):
            # To read a pipe would wait for whoever writes it.
            if path.is_file():
                text = path.read_text(encoding="utf-8-sig", errors="replace")
                layer = parse_project_file(text, _PROJECT_FILE if place == folder else str(path))
        if layer is not None and place != folder and _anyone_may_write(path):
            return None, (
                f"{path} is not read: it belongs to another user, in a folder where everyone may "
                "write; name the file to use: --import-config FILE",
            )
        if layer is not None:
            return layer if place == folder else _beside_file(layer, place), ()
        if (place / ".git").exists():
            break
    return None, ()


def _beside_file(layer: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return a layer whose paths are relative to ``place``, where its file is.

    A program's bare name, such as mpirun's, is looked for on PATH.
    """
    declared = options()
    found: dict[str, Any] = {
        name: str(place / value)
        for name, value in layer.items()
        if name in declared
        and (declared[name].kind is PATH or (declared[name].kind is FILE_OR_AUTO and value != AUTO))
        and (name != "mpi" or "/" in value)
    }
    if "metrics_to" in layer:
        destinations = read_destinations(layer["metrics_to"])
        found["metrics_to"] = tuple(str(each.beside(place)) for each in destinations)
    return {**layer, **found}


def _anyone_may_write(path: Path) -> bool:
    """Tell whether somebody else may have put a file into a folder such as /tmp.

    Options name programs to run: those of a stranger must not be found from a folder below.
    """
    is_shared = path.parent.stat().st_mode & 0o002
    return bool(is_shared) and path.stat().st_uid not in (0, os.geteuid())
