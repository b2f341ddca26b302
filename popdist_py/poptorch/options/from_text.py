"""Functions that read option values from files, JSON objects and environment variables.

Lines of files and keys of JSON objects name setters, and ``apply_lines`` and ``apply_json`` call
these setters. The environment variable ``POPLAR_ENGINE_OPTIONS`` contains engine options. The
module ``from_text`` does not contain the names of options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import EnumMeta
from pathlib import Path
from typing import Any

from popdist_py.poptorch import enums
from popdist_py.poptorch.errors import ConfigFileError, Error
from popdist_py.poptorch.logger import logger

__all__ = ["apply_json", "apply_lines", "engine_environment", "engine_options"]


def apply_lines(options: Any, path: Path, names: Mapping[str, Any]) -> None:
    """Call a method of ``options`` for each line of a file of setter calls.

    Blank lines and lines that start with ``#`` are skipped.

    Args:
        options: The object whose methods the lines of the file call.
        path: The file of setter calls, one call on each line.
        names: The names that the arguments of the calls may use, such as the package ``poptorch``.

    Raises:
        ConfigFileError: A line is not valid Python.
    """
    lines = [line.strip() for line in path.read_text().splitlines()]
    calls = [line for line in lines if line and not line.startswith("#")]
    namespace = {**names, "options": options}
    for number, line in enumerate(calls, start=1):
        try:
            code = compile(f"options.{line}", path.name, "exec")
        except SyntaxError as error:
            raise ConfigFileError(
                f"{type(error).__name__} at line {number} of {path.name}: {error.msg}\n> {line}"
            ) from error
        exec(code, namespace)


def apply_json(options: Any, text: str) -> None:
    """Call the setters of ``options`` that are named in a JSON object.

    Args:
        options: The ``Options`` object whose setters are called.
        text: A JSON object. Each key is the dotted name of a setter, and each value is the argument
            of the setter, or the list of its arguments.
    """
    for accessor, value in json.loads(text).items():
        target = options
        for name in accessor.split("."):
            target = getattr(target, name)
        arguments = value if isinstance(value, list) else [value]
        target(*(_argument(argument) for argument in arguments))


def _argument(value: Any) -> Any:
    """Return the enumeration member for text such as "Enum.Member", and other values unchanged."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    name, member = value.split(".")
    kind = getattr(enums, name, None)
    return kind[member] if isinstance(kind, EnumMeta) and kind.__members__ else value


def engine_environment() -> dict[str, Any]:
    """Return the engine options that ``POPLAR_ENGINE_OPTIONS`` sets.

    Raises:
        Error: The text of ``POPLAR_ENGINE_OPTIONS`` is not a JSON object.
    """
    text = os.environ.get("POPLAR_ENGINE_OPTIONS") or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Error(
            f"POPLAR_ENGINE_OPTIONS={text!r} is not valid: expected a JSON object of engine options"
        )
    return found


def engine_options(wanted: Mapping[str, str]) -> dict[str, str]:
    """Return ``wanted``, updated with the engine options from ``POPLAR_ENGINE_OPTIONS``."""
    overriding = engine_environment()
    merged = dict(wanted)
    for name, value in overriding.items():
        if name in merged and merged[name] != value:
            logger.warning(
                "The engine option %s=%s is overridden by POPLAR_ENGINE_OPTIONS, which sets the "
                "value %s",
                name,
                merged[name],
                value,
            )
        merged[name] = value
    return merged
