"""The errors of pods; each class has the code that a pod's server sends.

PodError                     the base class; itself for a pod's storage that failed
|-- InvalidRequestError      a value or a combination that breaks a rule
|-- UnknownNameError         no partition, allocation, cluster or agent has this name
|-- NameTakenError           the name is in use
|-- NotEnoughIpusError       too few IPUs are free or connected
|-- InUseError               the object or its IPUs are in use
|-- NotAllowedError          the object belongs to another user, or the token is wrong
|-- UnreachableError         the server does not answer
`-- DamagedError             the pod's file or database cannot be read

A message is one line with what was given, what is accepted, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class PodError(Exception):
    """The base class of all errors of pods; ``code`` is its name in the server's answers."""

    code: ClassVar[str] = "error"


class InvalidRequestError(PodError):
    """A value or a combination that breaks a rule."""

    code = "invalid-request"


class UnknownNameError(PodError):
    """No partition, allocation, cluster or agent has this name."""

    code = "unknown-name"


class NameTakenError(PodError):
    """Another partition, allocation, cluster or agent has this name."""

    code = "name-taken"


class NotEnoughIpusError(PodError):
    """Too few IPUs for a request are free or connected."""

    code = "not-enough-ipus"


class InUseError(PodError):
    """The object to change, or its IPUs, are in use."""

    code = "in-use"


class NotAllowedError(PodError):
    """The object belongs to another user, or the token is wrong."""

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
