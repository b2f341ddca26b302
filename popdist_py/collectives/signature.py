"""The signature of a collective call, which the instances compare before they exchange data.

Pure values: nothing here communicates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from popdist_py.errors import CollectiveMismatchError

__all__ = ["Signature", "mismatch"]


@dataclass(frozen=True, slots=True)
class Signature:
    """One collective call, equal on all instances.

    Attributes:
        call: the collective, for example ``all_reduce``.
        detail: its operation or root.
        dtype: name of the element type; empty where no array takes part.
        shape: shape of the array.
        name: the user's name of the call, or empty.
    """

    call: str
    detail: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    name: str = ""

    @property
    def code(self) -> int:
        """A number of 63 bits, above 0, equal in all processes for equal signatures."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 1) or 1

    def __str__(self) -> str:
        arguments = [f"name={self.name!r}"] if self.name else []
        arguments += [self.detail] if self.detail else []
        arguments += [f"shape={self.shape}", f"dtype={self.dtype}"] if self.dtype else []
        return f"{self.call}({', '.join(arguments)})"


def mismatch(calls: Sequence[str]) -> CollectiveMismatchError:
    """Return the error for ``calls``, the descriptions by instance, which differ."""
    callers: dict[str, list[int]] = {}
    for instance, call in enumerate(calls):
        callers.setdefault(call, []).append(instance)
    parts = [f"{_instances(instances)} called {call}" for call, instances in callers.items()]
    return CollectiveMismatchError(f"{'; '.join(parts)}: all instances must make the same call")


def _instances(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"instance {indices[0]}"
    return f"instances {', '.join(map(str, indices))}"
