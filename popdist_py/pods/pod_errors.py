"""What a pod refuses: one tree, each with the code by which it travels. Nothing else lives here.

PodError                     anything that a pod refuses, or that is wrong with it
|-- InvalidRequestError      a value or a combination that breaks a rule
|-- UnknownNameError         no partition, allocation, cluster or agent of this name
|-- NameTakenError           there is one of this name already
|-- NotEnoughIpusError       fewer IPUs are free, or belong together, than are asked for
|-- InUseError               somebody holds what is to be changed, reset, removed or attached
|-- NotAllowedError          it belongs to another user, or the token is wrong
|-- UnreachableError         the server does not answer
`-- DamagedError             the pod's file or database cannot be read

Messages are one line: what was given, what is accepted, what to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ERRORS",
    "DamagedError",
    "InUseError",
    "InvalidRequestError",
    "NameTakenError",
    "NotAllowedError",
    "NotEnoughIpusError",
    "PodError",
    "UnknownNameError",
    "UnreachableError",
]


class PodError(Exception):
    """Anything that a pod refuses, or that is wrong with it; ``code`` is its name on the wire."""

    code: ClassVar[str] = "error"


class InvalidRequestError(PodError):
    """A value or a combination that breaks a rule."""

    code = "invalid-request"


class UnknownNameError(PodError):
    """There is no partition, allocation, cluster or agent of this name."""

    code = "unknown-name"


class NameTakenError(PodError):
    """There is a partition, allocation, cluster or agent of this name already."""

    code = "name-taken"


class NotEnoughIpusError(PodError):
    """Fewer IPUs are free, or belong together, than are asked for."""

    code = "not-enough-ipus"


class InUseError(PodError):
    """Somebody holds what is to be changed, reset, removed or attached."""

    code = "in-use"


class NotAllowedError(PodError):
    """It belongs to another user, or the token is wrong."""

    code = "not-allowed"


class UnreachableError(PodError):
    """The server does not answer."""

    code = "unreachable"


class DamagedError(PodError):
    """The pod's file or database cannot be read."""

    code = "damaged"


ERRORS: dict[str, type[PodError]] = {
    each.code: each
    for each in (
        *(PodError, InvalidRequestError, UnknownNameError, NameTakenError, NotEnoughIpusError),
        *(InUseError, NotAllowedError, UnreachableError, DamagedError),
    )
}
