"""Where the value of an option was given, so that a message can speak in the words of that place.

Values only. Who merges what the places say: layers.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poprun_py.options.option_types import option_name

COMMAND_LINE = "command line"
ENVIRONMENT = "the environment"
PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an option was given: ``num-replicas = 8 in pyproject.toml``.

    ``place`` is the file, or one of the names above. There the value follows ``name`` and
    ``between``; ``after`` tells the place where the spelling alone does not.
    """

    place: str
    name: str
    between: str = " "
    after: str = ""

    @property
    def named(self) -> str:
        """The option as it was written: ``--host``, ``POPRUN_HOST``, ``host in pyproject.toml``."""
        return f"{self.name}{self.after}"

    @property
    def source(self) -> str:
        """The place in a word or two: the file, the variable, or ``command line``."""
        return self.name if self.place == ENVIRONMENT else self.place

    def shown(self, value: Any) -> str:
        """Return the option with its value, as both were written."""
        return f"{self.name}{self.between}{value}{self.after}"


def variable_name(field: str) -> str:
    """Return the environment variable of an option: ``num_ilds`` -> ``POPRUN_NUM_ILDS``."""
    return f"POPRUN_{field.upper()}"


def typed(field: str) -> Origin:
    """Return the origin of an option of the command line."""
    return Origin(COMMAND_LINE, option_name(field))


def in_variable(name: str) -> Origin:
    """Return the origin of an option that the environment variable ``name`` gives."""
    return Origin(ENVIRONMENT, name, "=")


def in_file(key: str, path: str) -> Origin:
    """Return the origin of an option that a file gives under ``key``."""
    return Origin(path, key, " = ", f" in {path}")


def from_python(field: str) -> Origin:
    """Return the origin of an argument of LaunchConfig."""
    return Origin(PYTHON, field, "=")


def as_default(field: str, reason: str = "the default") -> Origin:
    """Return the origin of a value that nobody gave, and the ``reason`` for it."""
    return Origin("default", field.replace("_", "-"), " = ", f" ({reason})")
