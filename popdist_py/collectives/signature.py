"""What a collective call is: the value that the instances compare before they exchange data.

Pure: no communication happens here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from popdist_py.errors import CollectiveMismatchError

__all__ = ["Signature", "mismatch"]


@dataclass(frozen=True, slots=True)
class Signature:
    """One call as all instances must make it.

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
        words = [f"name={self.name!r}"] if self.name else []
        words += [self.detail] if self.detail else []
        words += [f"shape={self.shape}", f"dtype={self.dtype}"] if self.dtype else []
        return f"{self.call}({', '.join(words)})"


def mismatch(calls: Sequence[str]) -> CollectiveMismatchError:
    """Return the error for ``calls``, the descriptions by instance, of which some differ."""
    groups: dict[str, list[int]] = {}
    for instance, call in enumerate(calls):
        groups.setdefault(call, []).append(instance)
    sides = "; ".join(f"{_instances(members)} called {call}" for call, members in groups.items())
    return CollectiveMismatchError(f"{sides}: all instances must make the same call")


def _instances(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"instance {members[0]}"
    return f"instances {', '.join(map(str, members))}"
