"""Options from environment variables: POPRUN_NUM_INSTANCES is --num-instances.

Pure: an environment in, a layer of options and warnings out. The names that launcher and wrapper
use between them stand here too, so that no option can take one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poprun_py.errors import UsageError, nearest
from poprun_py.options.launch_config import options
from poprun_py.options.option_origins import Origin, in_variable, variable_name
from poprun_py.options.option_types import Option, option_name

_PREFIX = "POPRUN_"
# What launcher and wrapper tell each other, and what the launcher tells an instance of its run.
INTERNAL_VARIABLES = frozenset(
    {
        "POPRUN_CONTROL",
        "POPRUN_CPUS",
        # The folder in which launchers keep their leases of cores, or none.
        "POPRUN_LEASES",
        "POPRUN_MEMORY_NODES",
        "POPRUN_RUN_ID",
        "POPRUN_STDIN",
        "POPRUN_STDIN_READER",
        "POPRUN_TOKEN",
    }
)
# Where pods lie, and the token of a server: read by the library too (popdist_py/pods/finding.py).
POD_VARIABLES = frozenset({"POPRUN_PODS", "POPRUN_POD_TOKEN_FILE"})
_NAMED_WHERE_WANTED = ("from_plan", "stacks", "status")
# One plan and one running job are named where they are wanted.
_TYPED_ONLY = {variable_name(field): option_name(field) for field in _NAMED_WHERE_WANTED}
# Options by variable.
OPTION_VARIABLES = {
    name: field for field in options() if (name := variable_name(field)) not in _TYPED_ONLY
}
# PopRun's own variable for the same thing as -v.
_LOG_LEVEL = "POPRUN_LOG_LEVEL"
_VERBOSITY = {"TRACE": 2, "DEBUG": 2, "INFO": 1, "WARN": 0, "ERR": 0, "ERROR": 0, "CRITICAL": 0,
              "OFF": 0}  # fmt: skip


def is_option_variable(name: str) -> bool:
    """Tell whether an environment variable is an option of a launch."""
    return name in OPTION_VARIABLES or name == _LOG_LEVEL


def variables_layer(environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the options that variables of ``environ`` give; an empty variable counts as unset.

    An option that may be repeated has one value on each line.

    Returns:
        The layer, and a warning for each ``POPRUN_`` variable that is no option.

    Raises:
        UsageError: a value is not accepted.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    warnings = []
    for name in sorted(n for n in environ if n.startswith(_PREFIX) and environ[n]):
        text = environ[name]
        if name in OPTION_VARIABLES:
            field = OPTION_VARIABLES[name]
            values[field] = _read(options()[field], name, text)
            origins[field] = in_variable(name)
        elif name == _LOG_LEVEL:
            if not environ.get("POPRUN_VERBOSITY"):
                values["verbosity"] = _log_level(text)
                origins["verbosity"] = in_variable(name)
        elif name not in INTERNAL_VARIABLES | POD_VARIABLES:
            warnings.append(f"{name} is no option of poprun-py{_hint(name)}")
    return {**values, "origins": origins}, tuple(warnings)


def _hint(name: str) -> str:
    if name in _TYPED_ONLY:
        return f"; give {_TYPED_ONLY[name]} on the command line"
    known = [each.removeprefix(_PREFIX) for each in OPTION_VARIABLES]
    return nearest(name.removeprefix(_PREFIX), known).replace("mean ", f"mean {_PREFIX}")


def _read(opt: Option, name: str, text: str) -> Any:
    if opt.repeatable:
        # A value may hold what Unicode also counts as the end of a line.
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
