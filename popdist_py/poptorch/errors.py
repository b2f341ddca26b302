"""The exceptions of the PopTorch API, with PopTorch's names and attributes.

As in Graphcore's PopTorch, an argument of a wrong type raises AssertionError instead of ``Error``.
"""

from __future__ import annotations

__all__ = ["ConfigFileError", "Error", "RecoverableError", "UnrecoverableError"]


class Error(Exception):
    """An error that PopTorch itself reports, in contrast to an error of torch or of the program.

    Attributes:
        message: The text of the error, without the text of the attribute ``type``.
        type: The kind of the error. Errors from Python code have the type ``poptorch_py_error``.
        location: The place in lower software layers where the error occurred; empty for errors from
            Python code.
    """

    def __init__(
        self, message: str = "", type: str = "poptorch_py_error", location: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.location = location

    def __str__(self) -> str:
        where = f"\nError raised in:\n{self.location}" if self.location else ""
        return f"'{self.type}': {self.message}{where}"


class RecoverableError(Error):
    """An error that a reset of the device would correct.

    Attributes:
        recovery_action: The necessary reset: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET.
    """

    def __init__(
        self,
        message: str = "",
        type: str = "poptorch_py_error",
        location: str = "",
        recovery_action: str = "IPU_RESET",
    ) -> None:
        super().__init__(message, type, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """An error after which the device cannot be used."""


class ConfigFileError(Exception):
    """An error for an invalid line of an options file; the message contains the line."""
