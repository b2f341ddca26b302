"""Origins of option values: the command line, an environment variable, a file, or Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from poprun_py.options.option_types import option_name

# The options from one source. Maps fields of LaunchConfig to the value and its origin.
Source: TypeAlias = dict[str, tuple[Any, "Origin"]]

COMMAND_LINE = "command line"
ENVIRONMENT = "the environment"
PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where the value of an option was given, and the option's spelling for messages.

    Attributes:
        source: The name of a file, or ``COMMAND_LINE``, ``ENVIRONMENT`` or ``PYTHON``.
        name: The option's name as the source spells it.
        separator: The text that messages show between the option's name and its value.
        suffix: The text that messages show after the value, such as ``in pyproject.toml``.
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
        """The name of the source; for an environment variable, the name of that variable."""
        return self.name if self.source == ENVIRONMENT else self.source

    def shown(self, value: Any) -> str:
        """Return the option and its value as the user wrote them."""
        return f"{self.name}{self.separator}{value}{self.suffix}"


def from_python(field: str) -> Origin:
    """Return the origin of an option that is given as a keyword argument of Python."""
    return Origin(PYTHON, field, "=")


def from_command_line(values: Mapping[str, Any]) -> Source:
    """Return a command line's values with their origins; an empty program is left out."""
    return {
        name: (value, Origin(COMMAND_LINE, option_name(name)))
        for name, value in values.items()
        if name != "program" or value
    }
