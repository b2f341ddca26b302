"""A search for environment variables of the Poplar SDK that do nothing on emulated IPUs.

Programs and scripts for real IPUs set environment variables that do nothing here. Some of the
environment variables belong to the SDK's version of TensorFlow. The module
``variables_without_effect`` only reads environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from popdist_py.poptorch.options import from_text
from popdist_py.poptorch.options.engine_options import engine_option, unknown
from popdist_py.poptorch.options.option_effects import Effect, Option

__all__ = ["idle_variables"]

_ENGINE: Final = "POPLAR_ENGINE_OPTIONS"
_NO_LOG: Final = "use POPTORCH_LOG_LEVEL to set the log level"
_NO_TENSORFLOW: Final = "popdist_py supports only PyTorch models"
# For each environment variable that does nothing, the reason as text for a warning. An environment
# variable with an empty text changes only the speed or the memory of real IPUs.
_IDLE: Final = {
    "IPUOF_CONFIG_PATH": "use IPUOF_VIPU_API_PARTITION_ID to name a partition",
    "POPART_CACHE_DIR": "use POPTORCH_CACHE_DIR to cache executables",
    "POPART_LOG_LEVEL": _NO_LOG,
    "POPLAR_LOG_LEVEL": _NO_LOG,
    "POPLAR_RUNTIME_OPTIONS": "",
    "POPLIBS_LOG_LEVEL": _NO_LOG,
    "TF_POPLAR_FLAGS": f"{_NO_TENSORFLOW}; use POPTORCH_CACHE_DIR to cache executables",
}
# The environment variables that the launcher sets in every instance, unless the user has set the
# variables, and their values.
_SET_BY_LAUNCHER: Final = {"IPUOF_LOG_LEVEL": "WARN"}
_ACTING: Final = frozenset(
    {
        "IPUOF_VIPU_API_GCD_ID",
        "IPUOF_VIPU_API_HOST",
        "IPUOF_VIPU_API_PARTITION_ID",
        "IPUOF_VIPU_API_PORT",
        "IPUOF_VIPU_API_TIMEOUT",
    }
)
_PREFIXES: Final = ("IPUOF_", "TF_POPLAR_")


def idle_variables(environ: Mapping[str, str]) -> Iterator[Option]:
    """Yield an ``Option`` for each environment variable and engine option without effect.

    Args:
        environ: The environment variables of the process.

    Raises:
        Error: The text of ``POPLAR_ENGINE_OPTIONS`` is not a JSON object.
    """
    for name in from_text.engine_environment():
        row = engine_option(name)
        if row.is_idle:
            yield replace(row, name=f"{name} of {_ENGINE}")
    known = {*_IDLE, *_SET_BY_LAUNCHER, *_ACTING}
    for name, value in sorted(environ.items()):
        if not value:
            continue  # An empty environment variable counts as not set.
        if name in _IDLE:
            yield _row(name, _IDLE[name])
        elif name in _SET_BY_LAUNCHER:
            if value != _SET_BY_LAUNCHER[name]:
                yield _row(name, _NO_LOG)
        elif name.startswith(_PREFIXES) and name not in known:
            yield _row(name, unknown("variable", name, known))
        elif name == "TF_CPP_VMODULE" and "poplar" in value:
            yield _row(name, _NO_TENSORFLOW)


def _row(name: str, why: str) -> Option:
    return Option(name, Effect.NOTHING if why else Effect.HARDWARE, why)
