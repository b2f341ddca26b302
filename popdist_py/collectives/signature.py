"""The signature of a collective call, which the instances compare before they exchange data.

This module does not communicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from popdist_py.errors import CollectiveMismatchError, counted, plural

__all__ = ["INSTANCES", "Names", "Signature", "misfit", "mismatch"]

# An error message lists at most this number of differing leaves, because a single mistake may
# change hundreds of a model's weights.
_MAX_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class Signature:
    """The description of one collective call, which must be equal on all instances.

    Attributes:
        call: The collective, for example ``all_reduce``.
        detail: The reduce operation or the root instance; empty for calls that have neither.
        dtype: Name of the element type; empty for calls without an array.
        shape: Shape of the array.
        name: The name that the user gave the call, or empty.
        leaves: If the call exchanges a container, the path and the kind of each leaf, in the order
            of the exchange.
    """

    call: str
    detail: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    name: str = ""
    leaves: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> int:
        """A positive 63-bit hash; equal signatures have the same hash in every process."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 1) or 1

    def __str__(self) -> str:
        arguments = [f"name={self.name!r}"] if self.name else []
        arguments += [self.detail] if self.detail else []
        arguments += [f"shape={self.shape}", f"dtype={self.dtype}"] if self.dtype else []
        return f"{self.call}({', '.join(arguments)})"

    @property
    def description(self) -> str:
        """The text that ``mismatch`` compares: a line for the call and a line for each leaf."""
        lines = (f"{path}\t{kind}".replace("\n", " ") for path, kind in self.leaves)
        return "\n".join((str(self), *lines))


@dataclass(frozen=True)
class Names:
    """The names that error messages use for the members of a group.

    Attributes:
        noun: The word for a member, "instance" or "rank".
        numbers: The number that messages show for each member. If this is None, messages show the
            member's index in the group.
        time_limit: The name of the setting that limits the duration of a wait.
        shows_index: Whether messages also state a member's index if it differs from the number.
    """

    noun: str = "instance"
    numbers: tuple[int, ...] | None = None
    time_limit: str = "POPDIST_HANG_TIMEOUT"
    shows_index: bool = True

    def of(self, *indices: int) -> str:
        """Return the names of members, such as "ranks 4 (rank 1 of the group), 5"."""
        return f"{plural(self.noun, len(indices))} {', '.join(map(self._number, indices))}"

    def _number(self, index: int) -> str:
        number = index if self.numbers is None else self.numbers[index]
        if number == index or not self.shows_index:
            return str(number)
        return f"{number} ({self.noun} {index} of the group)"


INSTANCES = Names()


def mismatch(
    descriptions: Sequence[str], instances: Sequence[int], names: Names = INSTANCES
) -> CollectiveMismatchError:
    """Return the error for collective calls that differ between the instances.

    Args:
        descriptions: For each instance, the description of its call.
        instances: For each description, the group index of the instance that made the call.
        names: Names of the members of the group.
    """
    calls, leaves = [], []
    for description in descriptions:
        call, *lines = description.split("\n")
        calls.append(call)
        leaves.append(dict(line.split("\t", 1) for line in lines if "\t" in line))
    if len(set(calls)) == 1 and any(other != leaves[0] for other in leaves):
        text = f"{calls[0]}: the {names.noun}s differ in {_differences(leaves, instances, names)}"
    else:
        callers = _by_value(calls, instances, names)
        text = "; ".join(f"{who} called {call}" for call, who in callers.items())
    return CollectiveMismatchError(f"{text}: all {names.noun}s must make the same call")


def misfit(
    call: object, names: Names, sender: int, sent: int, receiver: int, expected: int
) -> CollectiveMismatchError:
    """Return the error for a block of data that does not have the size of the receiver's buffer.

    Args:
        call: The collective call, for error messages.
        names: Names of the instances.
        sender: Index of the instance that sends the block.
        sent: Size of the block in bytes.
        receiver: Index of the instance that receives the block.
        expected: Size of the receiver's buffer in bytes.
    """
    return CollectiveMismatchError(
        f"{call}: {names.of(sender)} sends {counted(sent, 'byte')} to {names.of(receiver)}, "
        f"which expects {counted(expected, 'byte')}"
    )


def _differences(leaves: Sequence[dict[str, str]], instances: Sequence[int], names: Names) -> str:
    """Return a text that lists the first differing leaves, with their kind on each instance."""
    paths = dict.fromkeys(path for of_instance in leaves for path in of_instance)
    parts = []
    for path in paths:
        found = [of_instance.get(path, "missing") for of_instance in leaves]
        kinds = _by_value(found, instances, names)
        if len(kinds) > 1:
            parts.append(f"{path} ({'; '.join(f'{who}: {kind}' for kind, who in kinds.items())})")
    hidden = len(parts) - _MAX_DIFFERENCES
    return ", ".join(parts[:_MAX_DIFFERENCES]) + (f", and {hidden} more" if hidden > 0 else "")


def _by_value(values: Sequence[str], instances: Sequence[int], names: Names) -> dict[str, str]:
    """Return a dict from each distinct value to the names of the instances that have it."""
    found: dict[str, list[int]] = {}
    for value, instance in zip(values, instances, strict=True):
        found.setdefault(value, []).append(instance)
    return {value: names.of(*indices) for value, indices in found.items()}
