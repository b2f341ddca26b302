"""Origins of option values (where each value was given), and merging of several sources.

The sources are the command line, environment variables, files, and Python. The values of a source
are a mapping of keyword arguments of LaunchConfig, with the origin of each value under the key
``origins``.
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
    """The place where the value of an option was given, and the option's spelling for messages.

    Attributes:
        source: The name of a file, or ``COMMAND_LINE``, ``ENVIRONMENT`` or ``PYTHON``.
        name: The option's name as the source spells it.
        separator: The text between the name and the value.
        suffix: The text after the value, such as ``in pyproject.toml``; empty if the spelling of
            the name shows the source.
    """

    source: str
    name: str
    separator: str = " "
    suffix: str = ""

    @property
    def named(self) -> str:
        """The option's name as the user wrote it: ``--host`` or ``host in pyproject.toml``."""
        return f"{self.name}{self.suffix}"

    @property
    def label(self) -> str:
        """The name of the source; for an environment variable, the name of the variable."""
        return self.name if self.source == ENVIRONMENT else self.source

    def shown(self, value: Any) -> str:
        """Return the option and its value as the user wrote them."""
        return f"{self.name}{self.separator}{value}{self.suffix}"


def in_variable(name: str) -> Origin:
    """Return the origin of an option that the environment variable ``name`` sets."""
    return Origin(ENVIRONMENT, name, "=")


def in_file(key: str, path: str) -> Origin:
    """Return the origin of an option that the file ``path`` sets with ``key``."""
    return Origin(path, key, " = ", f" in {path}")


def from_python(field: str) -> Origin:
    """Return the origin of an option that is given as a keyword argument of Python."""
    return Origin(PYTHON, field, "=")


def as_default(field: str, reason: str = "the default") -> Origin:
    """Return the origin of a value that was not given; ``reason`` explains the value."""
    return Origin("default", field.replace("_", "-"), " = ", f" ({reason})")


def from_command_line(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command line with their origins; an empty program is left out."""
    given = {name: value for name, value in values.items() if name != "program" or value}
    origins = {name: Origin(COMMAND_LINE, option_name(name)) for name in given if name in OPTIONS}
    return {**given, "origins": origins}


def merge(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of LaunchConfig that several sources give together.

    For each option, the last source that gives the option takes precedence. The lists of several
    sources are not joined. If two sources give options that exclude each other, only the option of
    the later source is kept.
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
