"""A search for environment variables of the Poplar SDK that do nothing on emulated IPUs.

Programs and scripts for hardware set these variables. Some of the variables belong to the SDK's
TensorFlow. This module only reads environment variables.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from popdist_py.poptorch.options import engine_options, from_text

__all__ = ["idle_variables"]

_ENGINE: Final = "POPLAR_ENGINE_OPTIONS"
_NO_LOG: Final = "POPTORCH_LOG_LEVEL sets the level of the log here"
_NO_TENSORFLOW: Final = "models are written in PyTorch here"
# For each variable, the reason why it does nothing, as text for a warning. The text is empty if the
# variable changes only the speed or memory of hardware.
_IDLE: Final = {
    "IPUOF_CONFIG_PATH": "IPUOF_VIPU_API_PARTITION_ID names a partition here",
    "POPART_CACHE_DIR": "POPTORCH_CACHE_DIR keeps executables here",
    "POPART_LOG_LEVEL": _NO_LOG,
    "POPLAR_LOG_LEVEL": _NO_LOG,
    "POPLAR_RUNTIME_OPTIONS": "",
    "POPLIBS_LOG_LEVEL": _NO_LOG,
    "TF_POPLAR_FLAGS": f"{_NO_TENSORFLOW}; POPTORCH_CACHE_DIR keeps executables here",
}
# The launcher sets these variables for every instance, unless the user has set them.
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


def idle_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each environment variable and engine option without effect, and the reason.

    Args:
        environ: The environment variables of the process.

    Raises:
        Error: POPLAR_ENGINE_OPTIONS is not a JSON object.
    """
    for name in from_text.engine_environment():
        if name not in engine_options.ACTING:
            yield f"{name} of {_ENGINE}", unknown_key(name)
    known = {*_IDLE, *_SET_BY_LAUNCHER, *_ACTING}
    for name, value in sorted(environ.items()):
        if not value:
            continue  # an empty variable counts as unset
        if name in _IDLE:
            yield name, _IDLE[name]
        elif name in _SET_BY_LAUNCHER:
            if value != _SET_BY_LAUNCHER[name]:
                yield name, _NO_LOG
        elif name.startswith(_PREFIXES) and name not in known:
            yield name, _unknown("variable", name, known)
        elif name == "TF_CPP_VMODULE" and "poplar" in value:
            yield name, _NO_TENSORFLOW


def unknown_key(name: str) -> str:
    """Return a warning text if the engine option ``name`` is unknown, else an empty text.

    The text suggests the known engine option with the most similar name.
    """
    known = engine_options.ACTING | engine_options.IDLE
    return "" if name in known else _unknown("key", name, known)


def _unknown(kind: str, name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"an unknown {kind}" + (f": did you mean {close[0]}?" if close else "")
