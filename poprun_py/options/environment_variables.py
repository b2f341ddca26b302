"""Options that environment variables set: POPRUN_NUM_INSTANCES sets --num-instances.

The module also has the names of environment variables that the launcher uses for other purposes.
The variable of an option must not have one of these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poprun_py.errors import UsageError, nearest
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.option_origins import Origin, in_variable
from poprun_py.options.option_types import Option, option_name

_PREFIX = "POPRUN_"
# Variables that the launcher passes to its wrappers and instances.
INTERNAL_VARIABLES = frozenset(
    {
        "POPRUN_CONTROL",
        "POPRUN_CPUS",
        # The variable for the folder with the leases of CPUs; the value ``none`` turns leases off.
        "POPRUN_LEASES",
        "POPRUN_MEMORY_NODES",
        "POPRUN_RUN_ID",
        "POPRUN_STDIN",
        "POPRUN_STDIN_READER",
        "POPRUN_TOKEN",
    }
)
# The two variables for the folder of the pods and for the token file of a pod server. The library
# popdist_py reads these variables as well (popdist_py/pods/find_pod.py).
POD_VARIABLES = frozenset({"POPRUN_PODS", "POPRUN_POD_TOKEN_FILE"})


def variable_name(field: str) -> str:
    """Return the environment variable that sets an option: ``num_ilds`` -> ``POPRUN_NUM_ILDS``."""
    return f"{_PREFIX}{field.upper()}"


# No environment variables set these options, because each option names a single plan or running
# job.
_NO_VARIABLE = ("from_plan", "stacks", "status")
_WITHOUT_VARIABLE = {variable_name(field): option_name(field) for field in _NO_VARIABLE}
# A mapping of environment variables to the field names of the options that they set.
OPTION_VARIABLES = {
    name: field for field in OPTIONS if (name := variable_name(field)) not in _WITHOUT_VARIABLE
}
# PopRun's environment variable for the verbosity.
_LOG_LEVEL = "POPRUN_LOG_LEVEL"
_VERBOSITY = {"TRACE": 2, "DEBUG": 2, "INFO": 1, "WARN": 0, "ERR": 0, "ERROR": 0, "CRITICAL": 0,
              "OFF": 0}  # fmt: skip


def is_option_variable(name: str) -> bool:
    """Tell whether an environment variable sets an option of a launch."""
    return name in OPTION_VARIABLES or name == _LOG_LEVEL


def from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the options that environment variables set; an empty variable counts as not set.

    The variable of a repeatable option has one value per line.

    Returns:
        The values with their origins, and a warning for each unknown ``POPRUN_`` variable.

    Raises:
        UsageError: A value is not accepted.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    warnings = []
    for name in sorted(n for n in environ if n.startswith(_PREFIX) and environ[n]):
        text = environ[name]
        if name in OPTION_VARIABLES:
            field = OPTION_VARIABLES[name]
            values[field] = _read(OPTIONS[field], name, text)
            origins[field] = in_variable(name)
        elif name == _LOG_LEVEL:
            if not environ.get("POPRUN_VERBOSITY"):
                values["verbosity"] = _log_level(text)
                origins["verbosity"] = in_variable(name)
        elif name not in INTERNAL_VARIABLES | POD_VARIABLES:
            warnings.append(f"{name} is not an option of poprun-py{_hint(name)}")
    return {**values, "origins": origins}, tuple(warnings)


def _hint(name: str) -> str:
    if name in _WITHOUT_VARIABLE:
        return f"; give {_WITHOUT_VARIABLE[name]} on the command line"
    known = [each.removeprefix(_PREFIX) for each in OPTION_VARIABLES]
    return nearest(name.removeprefix(_PREFIX), known).replace("mean ", f"mean {_PREFIX}")


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
