"""The exception classes for pods, with the error codes that a pod's server sends.

The message of each error is one line. The message names the given value, the accepted values, and a
remedy.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import ClassVar


class PodError(Exception):
    """The base class of all errors of pods.

    If the pod's storage cannot be read or written, the error is ``PodError`` itself, not a
    subclass.

    ``code`` is the name of the error class in a server's answers.
    """

    code: ClassVar[str] = "error"


class InvalidRequestError(PodError):
    """A value, or a combination of values, breaks a rule."""

    code = "invalid-request"


class UnknownNameError(PodError):
    """No pod, partition, allocation, cluster or agent has this name."""

    code = "unknown-name"


class NameTakenError(PodError):
    """Another partition, allocation, cluster or agent has this name."""

    code = "name-taken"


class NotEnoughIpusError(PodError):
    """The pod or partition has too few free or connected IPUs for a request."""

    code = "not-enough-ipus"


class InUseError(PodError):
    """The partition, cluster or other object to change is in use, or its IPUs are in use."""

    code = "in-use"


class NotAllowedError(PodError):
    """The object belongs to another user, or the token is wrong."""

    code = "not-allowed"


class UnreachableError(PodError):
    """The pod's server cannot be reached, or does not answer as expected."""

    code = "unreachable"


class DamagedError(PodError):
    """The pod's file or database cannot be read."""

    code = "damaged"


_CLASSES: tuple[type[PodError], ...] = (PodError, *PodError.__subclasses__())
ERRORS = {each.code: each for each in _CLASSES}
# A message lists at most this number of names. A POD256, for example, has 64 agents.
_MAX_LISTED = 16


def check_known(kind: str, name: str, known: Collection[str], place: str = "") -> None:
    """Check that an object with this name exists.

    Args:
        kind: The kind of the object, such as ``cluster``, for the error message.
        name: The name to check.
        known: The names of all existing objects of this kind.
        place: The pod or folder that was searched, such as ``in pod lab``.

    Raises:
        UnknownNameError: ``known`` does not contain ``name``.
    """
    if name not in known:
        missing = f"there is no {kind} {name!r} {place}".rstrip()
        listed = [*itertools.islice(known, _MAX_LISTED)]
        if len(known) > _MAX_LISTED:
            listed.append("...")
        raise UnknownNameError(f"{missing}; existing {kind}s: {', '.join(listed) or 'none'}")
