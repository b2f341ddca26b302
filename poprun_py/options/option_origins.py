"""Where the value of each option was given, and the merging of values from several sources.

The sources are the command line, environment variables, files, and Python. Each source gives a
mapping of keyword arguments of LaunchConfig, which has the origin of each value under ``origins``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poprun_py.options.declared_options import EXCLUSIVE, OPTIONS
from poprun_py.options.option_types import option_name

COMMAND_LINE = "command line"
ENVIRONMENT = "the environment"
PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the value of an option was given, so that a message can spell it as the user did.

    Attributes:
        source: A file, or one of the constants of this module.
        name: The option as the source spells it.
        separator: The text between the name and the value.
        suffix: The text after the value. It names the source where the spelling does not tell it.
    """

    source: str
    name: str
    separator: str = " "
    suffix: str = ""

    @property
    def named(self) -> str:
        """The option as it was written: ``--host``, ``POPRUN_HOST``, ``host in pyproject.toml``."""
        return f"{self.name}{self.suffix}"

    @property
    def label(self) -> str:
        """The file, the variable, or the constant of the source."""
        return self.name if self.source == ENVIRONMENT else self.source

    def shown(self, value: Any) -> str:
        """Return the option and its value as they were written."""
        return f"{self.name}{self.separator}{value}{self.suffix}"


def in_variable(name: str) -> Origin:
    """Return the origin of an option that the environment variable ``name`` gives."""
    return Origin(ENVIRONMENT, name, "=")


def in_file(key: str, path: str) -> Origin:
    """Return the origin of an option that a file gives under ``key``."""
    return Origin(path, key, " = ", f" in {path}")


def from_python(field: str) -> Origin:
    """Return the origin of a keyword argument."""
    return Origin(PYTHON, field, "=")


def as_default(field: str, reason: str = "the default") -> Origin:
    """Return the origin of a value that was not given, and the reason for the value."""
    return Origin("default", field.replace("_", "-"), " = ", f" ({reason})")


def from_command_line(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command line with their origins, and without an empty program."""
    given = {name: value for name, value in values.items() if name != "program" or value}
    origins = {name: Origin(COMMAND_LINE, option_name(name)) for name in given if name in OPTIONS}
    return {**given, "origins": origins}


def merge(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of LaunchConfig that several sources give together.

    A later source takes precedence, option by option. It also replaces an earlier option that
    excludes one of its own. A list is replaced as a whole.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for source in sources:
        for pair in EXCLUSIVE:
            if any(name in source for name in pair):
                for name in pair:
                    values.pop(name, None)
                    origins.pop(name, None)
        values.update(source)
        origins.update(source.get("origins", {}))
    return {**values, "origins": origins}
