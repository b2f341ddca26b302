"""Collectives of Python objects, which the instances exchange as pickles.

The communicator exchanges the pickles as arrays of bytes. If an object cannot be pickled, the
instance sends the reason instead. Unpickling data can run arbitrary code. The pickles may pass
between hosts through MPI, and other programs can connect to the sockets of MPI. So every pickle is
signed with the secret of the job, if the job has one. A pickle with a wrong signature is refused.
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

# Pickle protocol 5 copies the arrays in an object once; the default protocol copies them twice.
_PROTOCOL = 5
_HASH, _SIGNATURE_BYTES = "sha256", 32


class _MovesBytes(Protocol):
    """The members of a communicator that ``ObjectCalls`` uses to exchange pickles."""

    @property
    def instance_index(self) -> int: ...

    @property
    def instances(self) -> Sequence[int]: ...

    def _gather_bytes(
        self, data: Array, signature: Signature, root: int | None = None
    ) -> list[Array] | None:
        """Return the ``data`` of every instance; if ``root`` is given, return None elsewhere."""

    def _broadcast_bytes(self, data: Array, signature: Signature, root: int) -> Array:
        """Return the ``data`` of the instance ``root``."""


@dataclass(frozen=True)
class _Unpicklable:
    """The value that an instance sends in place of an object that cannot be pickled.

    ``reason`` names the part of the object that cannot be pickled.
    """

    reason: str


class ObjectCalls:
    """The methods of ``popdist_py.collectives.Communicator`` for Python objects."""

    def all_gather_object(self: _MovesBytes, value: object, name: str = "") -> list[Any]:
        """Return the ``value`` of every instance, in instance order."""
        call = Signature("all_gather_object", name=name)
        rows = self._gather_bytes(_pickled(value, name), call)
        assert rows is not None
        return _loaded(rows, self.instances, call)

    def gather_object(
        self: _MovesBytes, value: object, root: int = 0, name: str = ""
    ) -> list[Any] | None:
        """Return the ``value`` of every instance on ``root``, and None on the other instances."""
        call = Signature("gather_object", f"root={root}", name=name)
        data = _pickled(value, name)
        rows = self._gather_bytes(data, call, root)
        if rows is None:
            # If this instance's object cannot be pickled, raise the same error as on the root.
            _loaded([data], [self.instances[self.instance_index]], call)
            return None
        return _loaded(rows, self.instances, call)

    def broadcast_object(self: _MovesBytes, value: object, root: int = 0, name: str = "") -> Any:
        """Return the ``value`` of instance ``root``."""
        call = Signature("broadcast_object", f"root={root}", name=name)
        is_root = self.instances[self.instance_index] == root
        data = _pickled(value, name) if is_root else np.empty(0, np.uint8)
        return _loaded([self._broadcast_bytes(data, call, root)], [root], call)[0]


def _pickled(value: object, name: str) -> Array:
    try:
        data = pickle.dumps(value, _PROTOCOL)
    except Exception as error:  # the object's own methods may raise any error
        data = pickle.dumps(_Unpicklable(_reason(value, name or "obj", error)))
    if secret := job_secret(os.environ):
        data = hmac.digest(secret, data, _HASH) + data
    return np.frombuffer(data, np.uint8)


def _reason(value: object, name: str, error: Exception) -> str:
    """Return an error text that names the leaf of ``value`` that cannot be pickled."""
    try:
        parts = leaves(value, name)
    except Exception:  # for example a RecursionError, if the value is nested too deeply
        parts = []
    for path, leaf in parts:
        try:
            pickle.dumps(leaf, _PROTOCOL)
        except Exception as leaf_error:
            return f"{path} is a {type(leaf).__name__} that cannot be pickled: {leaf_error}"
    return f"{name} is a {type(value).__name__} that cannot be pickled: {error}"


def _loaded(rows: Sequence[Array], instances: Sequence[int], call: Signature) -> list[Any]:
    """Unpickle ``rows``, which ``instances`` sent, and return the objects.

    Raises:
        TypeError: An instance could not pickle its object.
        ForgedObjectError: A pickle was not made by an instance of this job.
    """
    values = [
        pickle.loads(_verified(row.data, instance, call))
        for row, instance in zip(rows, instances, strict=True)
    ]
    for instance, value in zip(instances, values, strict=True):
        if isinstance(value, _Unpicklable):
            raise TypeError(f"{call}: on instance {instance}, {value.reason}")
    return values


def _verified(data: memoryview, instance: int, call: Signature) -> memoryview:
    """Check the signature of a pickle, and return the pickle without its signature.

    Raises:
        ForgedObjectError: The signature is wrong, so no instance of this job made the pickle.
    """
    secret = job_secret(os.environ)
    if not secret:
        return data
    signature, data = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, data, _HASH)):
        raise ForgedObjectError(
            f"{call}: the object that was received for instance {instance} was not sent by this "
            "job, so it was not unpickled. Another program writes to the job's connections"
        )
    return data
