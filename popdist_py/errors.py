"""The exceptions of popdist_py, and singular and plural forms for messages.

PopdistError                    any error that this library reports
|-- WireError                   the launcher's variables are incomplete or inconsistent
|-- NotInitialisedError         a collective was called before popdist_py.init()
|-- ForkedProcessError          a forked child of an instance made a collective call
|-- CollectiveMismatchError     the instances' shapes, dtypes, operations or names differ
|-- ForgedObjectError           a received object was not sent by an instance of the job
`-- InstanceLostError           another instance ended inside a collective
"""

from __future__ import annotations

import sys


class PopdistError(Exception):
    """Any error that popdist_py itself reports."""


class WireError(PopdistError):
    """The environment variables set by the launcher are incomplete or inconsistent."""


class NotInitialisedError(PopdistError):
    """A collective was called before ``popdist_py.init()`` in a job of several instances."""


class ForkedProcessError(PopdistError):
    """A forked child process of an instance, such as a loader's worker, called a collective."""


class CollectiveMismatchError(PopdistError):
    """The instances called one collective with different shapes, dtypes, operations or names."""


class ForgedObjectError(PopdistError):
    """An object was received that was not sent by an instance of this job."""


class InstanceLostError(PopdistError):
    """Another instance of the job ended while this one waited for it in a collective."""


def require_package(module: str, needed_by: str, packages: str = "") -> None:
    """Raise an error that names the command to install a Python package, if the package is missing.

    Args:
        module: The name of the package's module.
        needed_by: The part of this library that imports the module.
        packages: The names of the packages for pip; empty if it is the name of the module.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    from importlib.util import find_spec

    if module not in sys.modules and find_spec(module) is None:
        raise ModuleNotFoundError(
            f"{needed_by} needs the package {module}, which is not installed: "
            f"pip install {packages or module}",
            name=module,
        )


def plural(noun: str, count: float) -> str:
    """Return a noun in singular or plural, such as ``CPU`` for 1 and ``CPUs`` for 2."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def counted(count: float, noun: str, form: str = "") -> str:
    """Return a count and its noun, such as ``3 IPUs``; ``form`` formats the count."""
    return f"{count:{form}} {plural(noun, count)}"


def are(count: float) -> str:
    """Return ``is`` for 1, and ``are`` for other counts."""
    return "is" if count == 1 else "are"
