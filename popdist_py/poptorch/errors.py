"""The exceptions of the PopTorch API, with their spelling and attributes.

Nothing else lives here. Wrong argument *types* are reported by AssertionError, as PopTorch does.
"""

from __future__ import annotations

__all__ = ["ConfigFileError", "Error", "RecoverableError", "UnrecoverableError"]


class Error(Exception):
    """What PopTorch reports on its own behalf.

    Attributes:
        message: the text without the type.
        type: kind of error; ``poptorch_py_error`` when raised by this Python layer.
        location: where in the stack below it arose; empty when raised by this Python layer.
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
    """An error that a reset would cure.

    Attributes:
        recovery_action: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET.
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
    """An error that ends the use of the device."""


class ConfigFileError(Exception):
    """A line of an options file that cannot be understood; the message shows where."""
