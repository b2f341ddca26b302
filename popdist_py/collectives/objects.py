"""Collectives of Python objects: pickles that travel as bytes of any length.

How bytes travel is the communicator's matter. In place of an object that cannot be pickled, the
reason travels. Unpickling runs what a pickle names. Between hosts it may have come over MPI, whose
sockets take what anybody says: there each is signed with the secret of the job, and one that no
instance of the job has made is refused.
"""

from __future__ import annotations

import hmac
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.signature import Signature
from popdist_py.environment import job_secret
from popdist_py.errors import ForgedObjectError
from popdist_py.value_tree import leaves

__all__ = ["ObjectCalls"]

# Arrays inside of an object are copied once, by protocol 5; the default protocol copies them twice.
_PROTOCOL = 5
_HASH, _SIGNATURE_BYTES = "sha256", 32


class _MovesBytes(Protocol):
    """What a communicator offers, so that objects can travel."""

    @property
    def instance_index(self) -> int: ...

    @property
    def instances(self) -> Sequence[int]: ...

    def _gather_bytes(
        self, data: Array, signature: Signature, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes of every instance, which differ in length; None but at ``root``."""

    def _broadcast_bytes(self, data: Array, signature: Signature, root: int) -> Array:
        """Return the bytes of the instance ``root``."""


@dataclass(frozen=True)
class _Unpicklable:
    """Travels in place of an object; ``reason`` names the part that cannot be pickled."""

    reason: str


class ObjectCalls:
    """The part of ``popdist_py.collectives.Communicator`` that takes objects."""

    def all_gather_object(self: _MovesBytes, value: object, name: str = "") -> list[Any]:
        """Return the value of every instance, in instance order."""
        call = Signature("all_gather_object", name=name)
        rows = self._gather_bytes(_pickled(value, name), call)
        assert rows is not None
        return _loaded(rows, self.instances, call)

    def gather_object(
        self: _MovesBytes, value: object, root: int = 0, name: str = ""
    ) -> list[Any] | None:
        """Return the value of every instance at instance ``root``, and None elsewhere."""
        call = Signature("gather_object", f"root={root}", name=name)
        data = _pickled(value, name)
        rows = self._gather_bytes(data, call, root)
        if rows is None:
            _loaded([data], [self.instances[self.instance_index]], call)  # as the root sees it
            return None
        return _loaded(rows, self.instances, call)

    def broadcast_object(self: _MovesBytes, value: object, root: int = 0, name: str = "") -> Any:
        """Return the value of instance ``root``."""
        call = Signature("broadcast_object", f"root={root}", name=name)
        is_root = self.instances[self.instance_index] == root
        data = _pickled(value, name) if is_root else np.empty(0, np.uint8)
        return _loaded([self._broadcast_bytes(data, call, root)], [root], call)[0]


def _pickled(value: object, name: str) -> Array:
    try:
        data = pickle.dumps(value, _PROTOCOL)
    except Exception as error:  # the classes of the objects decide what is raised
        data = pickle.dumps(_Unpicklable(_reason(value, name or "obj", error)))
    if secret := job_secret(os.environ):
        data = hmac.digest(secret, data, _HASH) + data
    return np.frombuffer(data, np.uint8)


def _reason(value: object, name: str, error: Exception) -> str:
    """Say which leaf of ``value`` cannot be pickled."""
    try:
        parts = leaves(value, name)
    except Exception:  # such as a RecursionError: too deep, or it contains itself
        parts = []
    for path, leaf in parts:
        try:
            pickle.dumps(leaf, _PROTOCOL)
        except Exception as leaf_error:
            return f"{path} is a {type(leaf).__name__} that cannot be pickled: {leaf_error}"
    return f"{name} is a {type(value).__name__} that cannot be pickled: {error}"


def _loaded(rows: Sequence[Array], instances: Sequence[int], call: Signature) -> list[Any]:
    """Return the objects that these instances sent.

    Raises:
        TypeError: one of them could not pickle its object.
        ForgedObjectError: what has come was not made by this job.
    """
    values = [
        pickle.loads(_vouched(row.data, instance, call))
        for row, instance in zip(rows, instances, strict=True)
    ]
    for instance, value in zip(instances, values, strict=True):
        if isinstance(value, _Unpicklable):
            raise TypeError(f"{call}: on instance {instance}, {value.reason}")
    return values


def _vouched(data: memoryview, instance: int, call: Signature) -> memoryview:
    """Return a pickle that an instance of this job has made.

    Raises:
        ForgedObjectError: it has not.
    """
    secret = job_secret(os.environ)
    if not secret:
        return data
    signature, data = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, data, _HASH)):
        raise ForgedObjectError(
            f"{call}: what came in the place of instance {instance}'s object was not sent by this "
            "job, and was not loaded: somebody else writes to its connections"
        )
    return data
